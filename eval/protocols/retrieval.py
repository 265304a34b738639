"""Image-text retrieval: R@k in both directions, under named protocols.

Source of the protocols: Karpathy and Fei-Fei (CVPR 2015) for the test splits; Long-CLIP (ECCV 2024)
for COCO val2017 with the first five captions and for the whole of Flickr30k, which MCL reports;
Thapliyal et al. (EMNLP 2022) for Crossmodal-3600.
Ties count against the model; if there are any, the figure with ties for the model is reported too.
With the protocol 'table' equal captions are one caption, which is right for each of their images;
published protocols tell captions apart by their place.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from pydantic.types import PositiveInt
from scipy.sparse import csr_array

from mclclip.data.samples import tokenize
from mclclip.eval.captions import (
    CAPTION_RULES,
    ImageTexts,
    ProtocolName,
    read_captions,
    read_captions_of_shards,
    read_languages,
)
from mclclip.eval.features import CHUNK_BYTES, Extractor, Features, over_ranks, rank_queries
from mclclip.eval.images import image_items, refuse_absent
from mclclip.eval.metrics import IntArray, chance_at
from mclclip.eval.outcomes import Outcomes, join_outcomes
from mclclip.eval.protocols import Evaluator
from mclclip.eval.results import Level, Measurement, figure
from mclclip.ranks.collectives import raise_on_every_rank

log = logging.getLogger("mclclip")

KS = (1, 5, 10)
Languages = Sequence[str] | Literal["all"] | None


def read(
    root: Path,
    *,
    captions: str,
    images: str = ".",
    protocol: ProtocolName = "table",
    split: str | None = None,
    languages: Languages = None,
    shard_captions: str = "txt",
    first_only: bool = False,
    **_: Any,
) -> dict[str, ImageTexts]:
    """Reads images and captions by language; the only language is "" if ``languages`` is None.
    Options are those of ``evaluate``; with ``first_only`` only the first shard is read."""
    path, folder = root / captions, root / images
    in_shards = path.is_dir() and any(path.glob("*.tar"))
    if languages is not None:
        if split or in_shards:
            raise ValueError(
                f"{path}: languages are read from a table or .jsonl, without split or shards"
            )
        requested = None if languages == "all" else languages
        return read_languages(path, folder, protocol, requested)
    if not in_shards:
        return {"": read_captions(path, folder, protocol, split=split)}
    if protocol != "table" or split:
        raise ValueError(f"{path} holds shards, which have no split: leave out protocol, split")
    return {"": read_captions_of_shards(path, shard_captions, first_only=first_only)}


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    captions: str,
    images: str = ".",
    protocol: ProtocolName = "table",
    split: str | None = None,
    languages: Languages = None,
    prompt: str = "",
    shard_captions: str = "txt",
    ks: Annotated[Sequence[PositiveInt], Field(min_length=1)] = KS,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[Measurement]:
    """R@k in percent of the directions image_to_text and text_to_image.

    An image is right at k if one of its captions is among the k nearest, a caption if its image is.
    Images without a caption are candidates only. Ties add ``R@k_optimistic``, for the model.

    captions        below ``root``: captions (``read_captions``), or a folder of .tar shards
    images          the folder, below ``root``, to which names of files are relative
    protocol        a published test set, whose split and numbers are demanded; 'table': any data
    split           replaces the split of the protocol
    languages       some or 'all' languages of the file (``read_languages``). Each is a retrieval of
                    its own, ``fr/image_to_text/R@1``; figures without a language are means
    prompt          is put before every caption
    shard_captions  where the captions of shards are: 'txt', 'lines' or 'json:FIELD'
    ks              the k of R@k
    chunk_bytes     memory for cosines

    Captions that the tokenizer cuts are counted, with a warning. Figures do not depend on the
    number of ranks. Raises the errors of ``read_captions``.
    """
    root = Path(root)
    path, folder = root / captions, root / images
    options: dict[str, Any] = {"captions": captions, "images": images, "protocol": protocol}
    options |= {"split": split, "languages": languages, "shard_captions": shard_captions}
    sets = raise_on_every_rank(lambda: read(root, **options))
    [first, *_] = sets.values()
    raise_on_every_rank(partial(refuse_absent, first.images, path, folder))
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
            "equal_captions": "one" if protocol == "table" else "each",
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
    """The figures of both directions, from the ``features`` of images and captions.

    ``names`` are those of the images. The captions of an image are one unit of the outcomes; one of
    several images belongs to the unit of the first.
    """
    searched, is_own = _distinct(data, settings["equal_captions"] == "one")
    image_features, text_features = features[0], features[1][searched]
    captioned = np.unique(data.caption_image)  # images that have a caption
    units = [names[row] for row in data.caption_image[searched]]
    captions = [f"{name}#{row}" for row, name in zip(searched, units, strict=True)]
    figures = []
    for direction, trials, queries, candidates, is_right, items, own_units in (
        ("image_to_text", "images", image_features[captioned], text_features,
         is_own.T.tocsr()[captioned], [names[row] for row in captioned], None),
        ("text_to_image", "captions", text_features, image_features, is_own, captions, units),
    ):  # fmt: skip
        ranks, optimistic = rank_queries(
            queries, candidates, is_right, context=extractor.context, chunk_bytes=chunk_bytes
        )
        tied = int(np.count_nonzero(ranks != optimistic))
        protocol = settings | {
            "num_candidates": len(candidates),
            "direction": direction,
            "trials": trials,
            "tied_queries": tied,
        }
        both = {"": ranks, "_optimistic": optimistic} if tied else {"": ranks}
        for (suffix, of), k in product(both.items(), ks):
            level: Level = "detail" if suffix else "headline" if k == min(ks) else "table"
            hits = Outcomes(items, of <= k, units=own_units)
            right = np.diff(is_right.indptr)  # right candidates of each query
            chance = {"chance": round(100 * chance_at(k, len(candidates), right), 2)}
            name = f"{direction}/R@{k}{suffix}"
            figures.append(figure(name, hits, protocol | chance, level=level))
    return figures


def _distinct(data: ImageTexts, merges: bool) -> tuple[IntArray, csr_array]:
    """Returns the rows of the captions that are searched, and whose each is: sparse bool [captions,
    images]. With ``merges`` the first of equal captions is searched, as one of all their images."""
    first: dict[str, int] = {}
    numbers = [first.setdefault(t, n) if merges else n for n, t in enumerate(data.captions)]
    searched, rows = np.unique(numbers, return_inverse=True)
    entries = (np.ones(len(rows), dtype=bool), (rows, data.caption_image))
    return searched, csr_array(entries, shape=(len(searched), len(data.images)))


def _of_languages(
    languages: Sequence[str], by_language: Sequence[list[Measurement]]
) -> list[Measurement]:
    """The means over languages, and as details the figures of each language.

    An image is one unit of the outcomes in all languages.
    """
    figures = []
    by_metric = [{figure.metric: figure for figure in of_language} for of_language in by_language]
    for metric in dict.fromkeys(name for of_language in by_metric for name in of_language):
        # A language without ties has no optimistic figure, which would equal the other one.
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


def check(root: Path, *, captions: str, images: str = ".", **options: Any) -> None:
    """Raises the errors of ``read``, which reads one shard, and FileNotFoundError for missing image
    files."""
    first, *_ = read(root, captions=captions, images=images, first_only=True, **options).values()
    refuse_absent(first.images, root / captions, root / images)


def count_cut_captions(
    extractor: Extractor, texts: Sequence[str], language: str = ""
) -> dict[str, Any]:
    """Counts the texts that the tokenizer cuts; returns this number and the context length for the
    protocol, or nothing if the tokenizer has no such length.

    A text counts as cut if it fills the context even without its last word. This misses texts that
    lose only a part of their last word.
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
