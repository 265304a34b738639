"""Reads images with captions, in one language or several, in the layouts of many data sets.

Tables, documents and folders of texts are read as ``mclclip pack`` reads them; only the layout of
Crossmodal-3600, whose captions lie in objects by their language, is read here. ``images`` says
which errors are raised.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas

from mclclip.data.findings import Findings
from mclclip.data.shard_scan import parse_captions
from mclclip.data.shard_writer import packed_from, with_file
from mclclip.data.table_formats import LINES
from mclclip.data.tables import Row, find_pictures_of, open_table, usable_rows
from mclclip.data.text_tables import refuse_misread
from mclclip.data.training_images import Readable
from mclclip.eval.images import read_lines, read_range, read_shards
from mclclip.eval.metrics import IntArray
from mclclip.util.files import Roots, below

ProtocolName = Literal[
    "coco_val2017_5k_first5",
    "karpathy_coco5k",
    "karpathy_flickr1k",
    "flickr30k_all_31k",
    "xm3600_first",
    "table",
]


@dataclass(frozen=True)
class CaptionRule:
    """The demands of a named protocol of retrieval on its data.

    split                     the value of the column split; None: all rows
    captions_per_image        only the first so many captions of an image are used; None: all
    num_images, num_captions  the numbers that the data must have; None: any
    """

    split: str | None = None
    captions_per_image: int | None = None
    num_images: int | None = None
    num_captions: int | None = None


CAPTION_RULES: Mapping[ProtocolName, CaptionRule] = {
    "coco_val2017_5k_first5": CaptionRule(None, 5, 5000, 25_000),
    "karpathy_coco5k": CaptionRule("test", None, 5000, 25_010),
    "karpathy_flickr1k": CaptionRule("test", None, 1000, 5000),
    "flickr30k_all_31k": CaptionRule(None, None, 31_783, 158_915),
    "xm3600_first": CaptionRule(None, 1, 3600, 3600),
    "table": CaptionRule(),
}
assert set(CAPTION_RULES) == set(get_args(ProtocolName))


@dataclass(frozen=True)
class ImageTexts:
    """Images (files, or byte ranges of shards) and C captions; ``caption_image`` [C] is the number
    of each caption's image."""

    images: Sequence[Any]
    captions: list[str]
    caption_image: IntArray


def read_captions(
    path: Path, images: Path, protocol: ProtocolName = "table", *, split: str | None = None
) -> ImageTexts:
    """Reads the images and captions of a named protocol, and checks their numbers.

    ``path`` is a table or a folder of texts, as ``open_table`` takes them for the pictures in the
    folder ``images``, perhaps with a column split. ``split`` replaces that of the protocol. All
    images that a table names are candidates, with or without a caption; of a folder of texts those
    that have one.
    """
    path, images = Path(path), Path(images)
    split = split or CAPTION_RULES[protocol].split
    rows = _read_rows(path, images, "split" if split else None, split)
    part = f" in the split {split!r}" if split else ""
    texts = [(row.path, row.captions) for row in rows if row.captions or not path.is_dir()]
    return _join(images, texts, protocol, path, part)


def read_languages(
    path: Path,
    images: Path,
    protocol: ProtocolName = "table",
    languages: Sequence[str] | None = None,
) -> dict[str, ImageTexts]:
    """Reads images and captions by language; each language is as ``read_captions`` returns it.

    ``path`` is a table with a column language, or a .jsonl as of Crossmodal-3600. ``languages`` are
    some of those in the file (None: all). All images of the file are candidates in every language.
    Raises the errors of ``read_captions``.
    """
    path, images = Path(path), Path(images)
    lines = read_lines(path) if path.suffix in LINES else []
    if any(isinstance(line, dict) and _KEY in line for _, line in lines):
        entries = [*map(_entry_of_crossmodal, lines)]
    else:
        rows = _read_rows(path, images, "language")
        entries = [(row.path, {str(row.metadata["language"]): row.captions}) for row in rows]
    available = sorted({language for _, texts in entries for language in texts})
    requested = available if languages is None else languages
    unknown = [repr(name) for name in requested if name not in available]
    if unknown or not requested:
        where = f"in {unknown[0]}" if unknown else "in any of the languages asked for"
        raise ValueError(
            f"{path} has no captions {where}: its languages are {', '.join(available) or 'none'}"
        )
    return {
        name: _join(
            images, [(file, texts.get(name, [])) for file, texts in entries], protocol, path,
            f" in {name!r}",
        )
        for name in requested
    }  # fmt: skip


def read_captions_of_shards(
    directory: Path, captions: str, *, first_only: bool = False
) -> ImageTexts:
    """Reads the images and all their captions from ``directory/*.tar``. ``captions`` says where the
    captions are: 'txt', 'lines' or 'json:FIELD'. Raises the errors of ``read_shards``."""
    stored, table = read_shards(directory, captions, first_only=first_only)
    images, texts, owners = [], [], []
    ranges = zip(table["text_offset"].to_pylist(), table["text_size"].to_pylist(), strict=True)
    for row, (image, (offset, size)) in enumerate(zip(stored, ranges, strict=True)):
        member = read_range(image.path, offset, size)
        images.append(replace(image, name=with_file(image.key, packed_from(member))))
        captions_of_image = parse_captions(member, captions)
        texts += captions_of_image
        owners += [row] * len(captions_of_image)
    return ImageTexts(images, texts, np.array(owners, dtype=np.int64))


def read_captioned(
    root: Path,
    *,
    captions: str = "txt",
    images: str = ".",
    max_samples: int | None = None,
    first_only: bool = False,
    **_: Any,
) -> tuple[Sequence[Readable], list[str]]:
    """Reads at most ``max_samples`` images below ``root`` that have a caption, with the first one.

    ``captions``: ``txt``, ``lines`` or ``json:FIELD`` of the samples in ``root/*.tar``; or a file
    or folder below ``root``, whose names start from the folder ``images`` (see `read_captions`).
    With ``first_only`` only the first shard is read, to find mistakes.
    """
    data = (
        read_captions_of_shards(root, captions, first_only=first_only)
        if captions in ("txt", "lines") or captions.startswith("json:")
        else read_captions(root / captions, root / images)
    )
    rows, first = np.unique(data.caption_image, return_index=True)
    pictures = [data.images[row] for row in rows[:max_samples]]
    return pictures, [data.captions[row] for row in first[:max_samples]]


def _read_rows(path: Path, images: Path, column: str | None, value: str | None = None) -> list[Row]:
    """Reads the rows of a table or of a folder of texts as ``mclclip pack`` reads them; of those in
    a table with ``column`` only the ones with this ``value`` (None: all, and each must have one).

    Raises ValueError if anything might be read otherwise than meant: figures of a part of a
    benchmark are none of it.
    """
    everywhere = [Path("/")]  # links are followed
    table = open_table(images, path, allow_roots=everywhere)
    findings = Findings()
    needed = {"title": table.caption_columns, column: column is None or column in table.columns}
    if missing := [what for what, there in needed.items() if not there]:
        raise ValueError(
            f"{path} has the columns {table.columns}, missing {missing}: name them as in "
            "'filepath,title,split'"
        )
    if table.holds_images:
        raise ValueError(f"{path} holds images: pack it, and give the folder of its shards")
    rows = [*usable_rows(table, findings)]
    refuse_misread(path, findings)
    if column:
        lacking = [row.where for row in rows if not row.metadata.get(column)]
        if lacking and value is None:
            raise ValueError(f"{path}: {lacking[0]} has no {column}")
        rows = [row for row in rows if value in (None, row.metadata.get(column))]
    return find_pictures_of(
        rows, table, Roots(*everywhere), lambda what, _: ValueError(f"{what}: give it as images")
    )


def _join(
    root: Path,
    texts: Iterable[tuple[str, Sequence[str]]],
    protocol: ProtocolName,
    path: Path,
    part: str,
) -> ImageTexts:
    """Makes images and captions of names of files below ``root``, each with some captions. Names of
    one path are one image.

    Raises ValueError if the protocol demands other numbers, and for a file outside of ``root``. For
    its message, ``path`` is the file that has the names, and ``part`` what was read of it, for
    example " in the split 'test'".
    """
    rule = CAPTION_RULES[protocol]
    pairs = pandas.DataFrame([*texts], columns=["file", "caption"]).explode("caption")
    pairs["image"], names = pandas.factorize(pairs["file"].map(os.path.normpath))
    images = [below(root, name, str(path)) for name in names]
    pairs = pairs.dropna().groupby("image").head(rule.captions_per_image or len(pairs))
    numbers, published = (len(images), len(pairs)), (rule.num_images, rule.num_captions)
    if 0 in numbers:
        raise ValueError(f"{path} has no captions{part}")
    if published not in (numbers, (None, None)):
        raise ValueError(
            f"{path} has {numbers[0]} images and {numbers[1]} captions{part}, {protocol} has "
            f"{published[0]} and {published[1]}: use the protocol 'table' for other data"
        )
    return ImageTexts(images, pairs["caption"].tolist(), pairs["image"].to_numpy(np.int64))


_KEY = "image/key"


def _entry_of_crossmodal(line: tuple[str, Any]) -> tuple[str, dict[str, list[str]]]:
    """Returns the file and the captions by language of a line of Crossmodal-3600.

    It has ``image/key``, the name of a .jpg without its suffix, and for each language an object
    whose ``caption`` is a list of captions.
    """
    where, row = line
    key = row.get(_KEY) if isinstance(row, dict) else None
    if not isinstance(key, str):
        raise ValueError(f"{where} has no {_KEY}, as Crossmodal-3600's have")
    texts: dict[str, list[str]] = {}
    for language, value in row.items():
        if isinstance(value, dict):
            captions = value.get("caption")
            if not isinstance(captions, list) or not all(isinstance(c, str) for c in captions):
                raise ValueError(f"{where} has no list caption in {language!r}")
            texts[language] = captions
    return f"{key}.jpg", texts
