"""Image-text retrieval, R@k in both directions, under named protocols.

Source of the protocols: Karpathy and Fei-Fei (CVPR 2015) for the test splits; Long-CLIP (ECCV 2024)
for COCO val2017 with the first five captions and for the whole of Flickr30k, which MCL reports;
Thapliyal et al. (EMNLP 2022) for Crossmodal-3600.
Ties count against the model; where there are any, the optimistic figure is reported too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mclclip.data.samples import tokenize
from mclclip.eval.captions import (
    CAPTION_RULES,
    ImageTexts,
    read_captions,
    read_captions_of_shards,
    read_languages,
)
from mclclip.eval.features import CHUNK_BYTES, Extractor, Features, over_ranks, rank_queries
from mclclip.eval.images import image_items, read_shards
from mclclip.eval.metrics import chance_at, hits_at
from mclclip.eval.outcomes import Outcomes, join_outcomes
from mclclip.eval.protocols import Evaluator
from mclclip.eval.results import Level, Measurement, figure
from mclclip.ranks.collectives import raise_on_every_rank

log = logging.getLogger("mclclip")

KS = (1, 5, 10)
Languages = Sequence[str] | Literal["all"] | None


def check(
    root: Path,
    *,
    captions: str,
    images: str = ".",
    protocol: str = "table",
    split: str | None = None,
    languages: Languages = None,
    shard_captions: str = "txt",
    **_: Any,
) -> None:
    """Raises the errors of ``evaluate`` that can be known without a look at every sample."""
    path = root / captions
    if _holds_shards(path):
        read_shards(path, shard_captions, first_only=True)
    elif path.is_dir() or path.suffix in (".csv", ".tsv"):
        _read(path, root / images, protocol, split, languages, shard_captions)


def _holds_shards(captions: Path) -> bool:
    return captions.is_dir() and any(captions.glob("*.tar"))


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    captions: str,
    images: str = ".",
    protocol: str = "table",
    split: str | None = None,
    languages: Languages = None,
    prompt: str = "",
    shard_captions: str = "txt",
    ks: Sequence[int] = KS,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[Measurement]:
    """R@k of image_to_text and text_to_image, in percent, each over its own queries.

    ``captions``: the file or folder of captions (see ``read_captions``); ``images``: the folder
    that its file names start from; both below ``root``. ``captions`` may also be a folder of
    ``.tar`` shards, with ``shard_captions`` (``txt`` or ``json:FIELD``) in each sample. ``prompt``
    is put before every caption. Captions that the tokenizer cuts are counted, with a warning.
    ``languages``: some or ``all`` of those of the captions' file (see ``read_languages``); each is
    a retrieval of its own, ``fr/image_to_text/R@1``, and the figures without a language are means
    over languages. ``protocol``: the name of a published test set, whose split and numbers are
    demanded, or ``table`` for other data; ``split`` overrides its split. ``ks``: the k of R@k.
    ``chunk_bytes``: memory of the cosines that are there at once.

    An image is right at k where any of its captions is among the first k, a caption where its
    image is. Images without a caption are candidates but no queries. ``R@k_optimistic`` (ties for
    the model) appears in a direction that has ties. Ranks divide the queries; figures do not depend
    on their number. Raises the errors of ``read_captions``.
    """
    root = Path(root)
    path, folder = root / captions, root / images
    sets = raise_on_every_rank(
        lambda: _read(path, folder, protocol, split, languages, shard_captions)
    )
    [first, *_] = sets.values()
    raise_on_every_rank(lambda: _check_images(first.images, path, folder))
    image_features = extractor.images(first.images)
    names = image_items(first.images, folder)
    figures = []
    for language, data in sets.items():
        texts = [prompt + caption for caption in data.captions]
        settings = {
            "name": protocol,
            **({"language": language} if language else {}),
            "prompt": prompt,
            "precision": extractor.precision,
            "ties": "against the model",
            "num_images": len(data.images),
            "num_captions": len(data.captions),
            "captions_per_image": CAPTION_RULES[protocol].captions_per_image or "all",
            **count_cut_captions(extractor, texts, language),
        }
        features = (image_features, extractor.texts(texts))
        figures.append(_recalls(extractor, data, names, features, ks, chunk_bytes, settings))
    return figures[0] if languages is None else _of_languages([*sets], figures)


def _recalls(
    extractor: Extractor,
    data: ImageTexts,
    names: Sequence[str],
    features: tuple[Features, Features],
    ks: Sequence[int],
    chunk_bytes: int,
    settings: dict[str, Any],
) -> list[Measurement]:
    """The recalls of both directions, from features of images, which have ``names``, and captions.

    The captions of an image are one unit of the outcomes.
    """
    image_features, text_features = features
    owners = data.caption_image
    captioned = np.unique(owners)  # images that have a caption
    units = [names[row] for row in owners]
    captions = [f"{name}#{row}" for row, name in enumerate(units)]
    every = np.arange(len(data.images))
    figures = []
    for direction, trials, queries, candidates, items, own_units in (
        ("image_to_text", "images", (image_features[captioned], captioned), (text_features, owners),
         [names[row] for row in captioned], None),
        ("text_to_image", "captions", (text_features, owners), (image_features, every),
         captions, units),
    ):  # fmt: skip
        ranks, optimistic = rank_queries(
            *queries, *candidates, context=extractor.context, chunk_bytes=chunk_bytes
        )
        tied = int(np.count_nonzero(ranks != optimistic))
        right = np.bincount(candidates[1], minlength=len(data.images))[queries[1]]
        protocol = settings | {
            "num_candidates": len(candidates[0]),
            "direction": direction,
            "trials": trials,
            "tied_queries": tied,
        }
        both = {"": ranks, "_optimistic": optimistic} if tied else {"": ranks}
        for (suffix, of), k in product(both.items(), ks):
            level: Level = "detail" if suffix else "headline" if k == min(ks) else "table"
            hits = Outcomes(items, hits_at(of, k), units=own_units)
            chance = {"chance": round(100 * chance_at(k, len(candidates[0]), right), 2)}
            name = f"{direction}/R@{k}{suffix}"
            figures.append(figure(name, hits, protocol | chance, level=level))
    return figures


def _of_languages(
    languages: Sequence[str], by_language: Sequence[list[Measurement]]
) -> list[Measurement]:
    """The means over languages, and each language's figures as details.

    An image is one resampling group, whatever the number of its languages.
    """
    figures = []
    by_metric = [{figure.metric: figure for figure in of_language} for of_language in by_language]
    for metric in dict.fromkeys(name for of_language in by_metric for name in of_language):
        # Optimistic figures are there only for ties; without them they are the others.
        alike = [of.get(metric) or of[metric.removesuffix("_optimistic")] for of in by_metric]
        protocol = {k: v for k, v in alike[0].protocol.items() if k not in ("language", "level")}
        for count in ("num_captions", "num_candidates", "tied_queries", "captions_cut"):
            if count in protocol:
                protocol[count] = [f.protocol[count] for f in alike]
        chances = [f.protocol["chance"] for f in alike]
        protocol["chance"] = round(sum(chances) / len(chances), 2)
        level: Level = (
            "detail" if metric.endswith("_optimistic") else alike[0].protocol.get("level", "table")
        )
        parts = {n: f.outcomes for n, f in zip(languages, alike, strict=True) if f.outcomes}
        figures.append(
            figure(metric, join_outcomes(parts), protocol | {"of": [*languages]}, level=level)
        )
    for language, of_language in zip(languages, by_language, strict=True):
        for f in of_language:
            protocol = f.protocol | {"level": "detail"}
            figures.append(replace(f, metric=f"{language}/{f.metric}", protocol=protocol))
    return figures


def _read(
    captions: Path,
    images: Path,
    protocol: str,
    split: str | None,
    languages: Languages,
    shard_captions: str,
) -> dict[str, ImageTexts]:
    """The images and captions, in shards or outside, by language ("" where none is asked for)."""
    in_shards = _holds_shards(captions)
    if languages is not None:
        if split:
            raise ValueError(f"languages of {captions} have no split: leave out split")
        if in_shards:
            raise ValueError(f"{captions} holds shards: languages are read from a table or .jsonl")
        requested = None if languages == "all" else languages
        return read_languages(captions, images, protocol, requested)
    if not in_shards:
        return {"": read_captions(captions, images, protocol, split=split)}
    if protocol != "table" or split:
        raise ValueError(f"{captions} holds shards, which have no split: leave out protocol, split")
    return {"": read_captions_of_shards(captions, shard_captions)}


def _check_images(images: Sequence[Any], captions: Path, folder: Path) -> None:
    """Raises FileNotFoundError if files are missing, before any is encoded."""
    absent = [path for path in images if isinstance(path, Path) and not path.exists()]
    if absent:
        some = ", ".join(path.name for path in absent[:3])
        raise FileNotFoundError(
            f"{len(absent)} of the {len(images)} images of {captions} are not in {folder}, such as "
            f"{some}: get them, or give their folder as the option images"
        )


def count_cut_captions(
    extractor: Extractor, texts: Sequence[str], language: str = ""
) -> dict[str, Any]:
    """The context length of the tokenizer, where it has one, and how many texts it cuts.

    A text is cut where it fills the context even without its last word. This misses one that only
    loses a part of its last word.
    """
    tokenizer = extractor.encoder.tokenizer
    length = getattr(tokenizer, "context_length", None)
    if not length:
        return {}

    def count(share: slice) -> int:
        shortened = [text.rpartition(" ")[0] for text in texts[share]]
        parts = (shortened[start : start + 4096] for start in range(0, len(shortened), 4096))
        nothing, full = tokenize(tokenizer, ["", "a " * 4 * length])
        # Tokenizers of SigLIP and of transformers pad with the token that ends a text, cut or not.
        last = -2 if full[-1] == nothing[-1] else -1
        return sum(int((tokenize(tokenizer, part)[:, last] != nothing[-1]).sum()) for part in parts)

    cut = sum(over_ranks(extractor.context, len(texts), count, "counting tokens"))
    if cut and extractor.context.is_main:
        log.warning(
            "%d of %d captions%s are longer than the %d tokens that the encoder reads: what "
            "follows is cut off",
            *(cut, len(texts), f" in {language!r}" if language else "", length),
        )
    return {"context_length": int(length), "captions_cut": cut}


EVALUATOR = Evaluator(
    evaluate,
    needs="images, and captions as a table, JSON or text files, or shards with both",
    reads_text=True,
    check=check,
)
