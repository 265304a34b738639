"""Image-text retrieval, R@k in both directions, under named protocols.

Source of the protocols: Karpathy and Fei-Fei (CVPR 2015) for the test splits; Long-CLIP (ECCV 2024)
for COCO val2017 with the first five captions and for the whole of Flickr30k, which MCL reports.
Ties count against the model; where there are any, the optimistic figure is reported too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mclclip.eval.datasets import CAPTION_RULES, read_captions
from mclclip.eval.features import Extractor
from mclclip.eval.metrics import hits_at
from mclclip.eval.ranking import CHUNK_BYTES, rank_queries
from mclclip.eval.results import Figure, proportion
from mclclip.ranks.collectives import together

READS_TEXT = True  # whether images are compared with texts

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
    ks: Sequence[int] = KS,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[Figure]:
    """R@k of image_to_text and text_to_image, in percent, each over its own queries.

    ``captions``: the file of captions (see ``read_captions``); ``images``: the folder that its file
    names start from; both below ``root``. ``prompt`` is put before every caption.
    An image is right at k where any of its captions is among the first k, a caption where its
    image is. Images without a caption are candidates but no queries. ``R@k_optimistic`` (ties for
    the model) appears in a direction that has ties. Ranks divide the queries; figures do not depend
    on their number. Raises the errors of ``read_captions``.
    """
    root = Path(root)
    data = together(lambda: read_captions(root / captions, root / images, protocol, split=split))
    settings = {
        "name": protocol,
        "prompt": prompt,
        "precision": extractor.precision,
        "ties": "against the model",
        "num_images": len(data.images),
        "num_captions": len(data.captions),
        "captions_per_image": CAPTION_RULES[protocol].captions_per_image or "all",
    }
    image_features = extractor.images(data.images)
    text_features = extractor.texts([prompt + caption for caption in data.captions])
    asked = np.unique(data.caption_image)  # images that have a caption
    every = np.arange(len(data.images))
    sides = {
        "image_to_text": (image_features[asked], asked, text_features, data.caption_image),
        "text_to_image": (text_features, data.caption_image, image_features, every),
    }
    figures = []
    for direction, side in sides.items():
        ranks, optimistic = rank_queries(*side, context=extractor.context, chunk_bytes=chunk_bytes)
        tied = int(np.count_nonzero(ranks != optimistic))
        shown = {"num_candidates": len(side[2]), "direction": direction, "tied_queries": tied}
        for suffix, of in {"": ranks, "_optimistic": optimistic}.items():
            figures += [
                proportion(f"{direction}/R@{k}{suffix}", hits_at(of, k), len(of), settings | shown)
                for k in ks
                if tied or not suffix
            ]
    return figures
