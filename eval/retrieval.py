"""Image-text retrieval, R@k in both directions, under named protocols.

Source of the protocols: Karpathy and Fei-Fei (CVPR 2015) for the test splits; Long-CLIP (ECCV 2024)
for COCO val2017 with the first five captions and for the whole of Flickr30k, which MCL reports.
Ties count against the model; where there are any, the optimistic figure is reported too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.eval.datasets import CAPTION_RULES, ImageTexts, read_captions
from mclclip.eval.features import Extractor, over_ranks
from mclclip.eval.metrics import IntArray, hits_at
from mclclip.eval.outcomes import Outcomes, image_items
from mclclip.eval.ranking import CHUNK_BYTES, rank_queries
from mclclip.eval.results import Figure, Level, figure
from mclclip.eval.stored import read_captions_of_shards
from mclclip.ranks.collectives import together

READS_TEXT = True  # whether images are compared with texts

log = logging.getLogger("mclclip")

KS = (1, 5, 10)


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    captions: str,
    images: str = ".",
    protocol: str = "table",
    split: str | None = None,
    prompt: str = "",
    shard_captions: str = "txt",
    ks: Sequence[int] = KS,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[Figure]:
    """R@k of image_to_text and text_to_image, in percent, each over its own queries.

    ``captions``: the file or folder of captions (see ``read_captions``); ``images``: the folder
    that its file names start from; both below ``root``. ``captions`` may also be a folder of
    ``.tar`` shards, with ``shard_captions`` (``txt`` or ``json:FIELD``) in each sample. ``prompt``
    is put before every caption. Captions that the tokenizer cuts are counted and told.
    An image is right at k where any of its captions is among the first k, a caption where its
    image is. Images without a caption are candidates but no queries. ``R@k_optimistic`` (ties for
    the model) appears in a direction that has ties. Ranks divide the queries; figures do not depend
    on their number. Raises the errors of ``read_captions``.
    """
    root = Path(root)
    data = together(lambda: _read(root / captions, root / images, protocol, split, shard_captions))
    texts = [prompt + caption for caption in data.captions]
    settings = {
        "name": protocol,
        "prompt": prompt,
        "precision": extractor.precision,
        "ties": "against the model",
        "num_images": len(data.images),
        "num_captions": len(data.captions),
        "captions_per_image": CAPTION_RULES[protocol].captions_per_image or "all",
        **_cut(extractor, texts),
    }
    image_features = extractor.images(data.images)
    text_features = extractor.texts(texts)
    asked = np.unique(data.caption_image)  # images that have a caption
    every = np.arange(len(data.images))
    sides = {
        "image_to_text": (image_features[asked], asked, text_features, data.caption_image),
        "text_to_image": (text_features, data.caption_image, image_features, every),
    }
    names = image_items(data.images, root / images)
    owners = [names[row] for row in data.caption_image]
    numbered = [f"{owner}#{row}" for row, owner in enumerate(owners)]
    items = {
        "image_to_text": ([names[row] for row in asked], None),
        "text_to_image": (numbered, owners),
    }
    figures = []
    for direction, side in sides.items():
        ranks = rank_queries(*side, context=extractor.context, chunk_bytes=chunk_bytes)
        found = {"num_candidates": len(side[2]), "direction": direction}
        figures += _recalls(*ranks, *items[direction], ks, settings | found)
    return figures


def _read(
    captions: Path, images: Path, protocol: str, split: str | None, shard_captions: str
) -> ImageTexts:
    """The images and captions, in shards or outside."""
    if not (captions.is_dir() and any(captions.glob("*.tar"))):
        return read_captions(captions, images, protocol, split=split)
    if protocol != "table" or split:
        raise ValueError(f"{captions} holds shards, which have no split: leave out protocol, split")
    return read_captions_of_shards(captions, shard_captions)


def _cut(extractor: Extractor, texts: Sequence[str]) -> dict[str, Any]:
    """The context length of the tokenizer, where it has one, and how many texts it cuts.

    A text is cut where it fills the context even without its last word. This misses one that only
    loses a part of its last word.
    """
    tokenizer = extractor.encoder.tokenizer
    length = getattr(tokenizer, "context_length", None)
    if not length:
        return {}

    def count(own: slice) -> int:
        kept = [text.rpartition(" ")[0] for text in texts[own]]
        parts = (kept[start : start + 4096] for start in range(0, len(kept), 4096))
        nothing = tokenizer([""])[0]
        # SigLIP's tokenizers end every text with the token that they pad with.
        last = -2 if (nothing == nothing[-1]).all() else -1
        return sum(int((tokenizer(part)[:, last] != nothing[-1]).sum()) for part in parts)

    cut = sum(over_ranks(extractor.context, len(texts), count, "counting tokens"))
    if cut and extractor.context.is_main:
        log.warning(
            "%d of %d captions are longer than the %d tokens that the encoder reads: what follows "
            "is cut off",
            *(cut, len(texts), length),
        )
    return {"context_length": int(length), "captions_cut": cut}


def _recalls(
    ranks: IntArray,
    optimistic: IntArray,
    items: Sequence[str],
    units: Sequence[str] | None,
    ks: Sequence[int],
    protocol: dict[str, Any],
) -> list[Figure]:
    """The recalls of one direction, from the ranks of its queries ``items``."""
    direction, tied = protocol["direction"], int(np.count_nonzero(ranks != optimistic))
    protocol |= {"trials": "captions" if units else "images", "tied_queries": tied}
    figures = []
    for (suffix, of), k in product({"": ranks, "_optimistic": optimistic}.items(), ks):
        if tied or not suffix:
            level: Level = "detail" if suffix else "headline" if k == min(ks) else "table"
            found = Outcomes(items, hits_at(of, k), units=units)
            figures.append(figure(f"{direction}/R@{k}{suffix}", found, protocol, level=level))
    return figures
