"""Reads images with captions, in one language or several, in the layouts of many data sets.

A reader of a layout returns ``NamedTexts``: names of files that are candidates even without a
caption, and pairs (file, caption). ``_join`` turns these into images and captions. ``images`` says
which errors are raised.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from mclclip.data.findings import Findings
from mclclip.data.json_captions import (
    NamedTexts,
    captions_of_json,
    is_list_of_objects,
    objects_of,
)
from mclclip.data.shard_scan import is_caption, parse_captions, read_text_file
from mclclip.data.shard_writer import with_file
from mclclip.data.table_formats import IMAGE_COLUMNS, present_columns
from mclclip.data.tables import open_table
from mclclip.data.text_tables import refuse_misread
from mclclip.data.training_images import Readable
from mclclip.eval.images import read_lines, read_range, read_rows, read_shards
from mclclip.eval.metrics import IntArray
from mclclip.util.files import below, read_json

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

    ``path`` is a .csv, .tsv, .jsonl or .parquet with names of files, captions and perhaps a column
    split (``open_table``); a .json with a list of such rows, or as of COCO, Karpathy or ShareGPT4V;
    a .jsonl as of DOCCI; a .token as of Flickr30k; or a folder with a .txt per image, as of
    Urban1k. Names of files are relative to the folder ``images``. ``split`` replaces that of the
    protocol. COCO's images without a caption are kept as candidates.
    """
    path, images = Path(path), Path(images)
    split = split or CAPTION_RULES[protocol].split
    if path.is_dir():
        texts = _caption_files(path, images)
    elif path.suffix in _READERS:
        texts = _READERS[path.suffix](path, split)
    else:
        raise ValueError(
            f"{path}: captions come as {', '.join(_READERS)}, or as a folder of .txt files"
        )
    return _join(images, texts, protocol, path, f" in the split {split!r}" if split else "")


def read_languages(
    path: Path,
    images: Path,
    protocol: ProtocolName = "table",
    languages: Sequence[str] | None = None,
) -> dict[str, ImageTexts]:
    """Reads images and captions by language; each language is as ``read_captions`` returns it.

    ``path`` is a .csv or .tsv with the columns filepath, title and language, or a .jsonl as of
    Crossmodal-3600. ``languages`` are some of those in the file (None: all). All images of the file
    are candidates in every language. Raises the errors of ``read_captions``.
    """
    path, images = Path(path), Path(images)
    if path.suffix not in _LANGUAGE_READERS:
        raise ValueError(f"{path}: captions by language come as {', '.join(_LANGUAGE_READERS)}")
    names, pairs = _LANGUAGE_READERS[path.suffix](path)
    requested = sorted(pairs) if languages is None else languages
    unknown = [repr(name) for name in requested if name not in pairs]
    if unknown or not requested:
        available = ", ".join(sorted(pairs)) or "none"
        where = f"in {unknown[0]}" if unknown else "in any of the languages asked for"
        raise ValueError(f"{path} has no captions {where}: its languages are {available}")
    return {
        name: _join(images, (names, pairs[name]), protocol, path, f" in {name!r}")
        for name in requested
    }


def read_captions_of_shards(directory: Path, captions: str) -> ImageTexts:
    """Reads the images and all their captions from ``directory/*.tar``. ``captions`` says where the
    captions are: 'txt', 'lines' or 'json:FIELD'. Raises the errors of ``read_shards``."""
    stored, table = read_shards(directory, captions)
    images, texts, owners = [], [], []
    ranges = zip(table["text_offset"].to_pylist(), table["text_size"].to_pylist(), strict=True)
    for row, (image, (offset, size)) in enumerate(zip(stored, ranges, strict=True)):
        member = read_range(image.path, offset, size)
        images.append(replace(image, name=with_file(image.key, member)))
        captions_of_image = parse_captions(member, captions)
        texts += captions_of_image
        owners += [row] * len(captions_of_image)
    return ImageTexts(images, texts, np.array(owners, dtype=np.int64))


def read_captioned(
    root: Path, captions: str, images: str, max_samples: int | None
) -> tuple[Sequence[Readable], list[str]]:
    """Reads at most ``max_samples`` images below ``root`` that have a caption, with the first one.

    ``captions``: ``txt`` or ``json:FIELD`` of the samples in ``root/*.tar``; or a file or folder
    below ``root``, whose names start from the folder ``images`` (see `read_captions`).
    """
    data = (
        read_captions_of_shards(root, captions)
        if _are_in_shards(captions)
        else read_captions(root / captions, root / images)
    )
    rows, first = np.unique(data.caption_image, return_index=True)
    pictures = [data.images[row] for row in rows[:max_samples]]
    return pictures, [data.captions[row] for row in first[:max_samples]]


def check_captioned(root: Path, *, captions: str = "txt", images: str = ".", **_: Any) -> None:
    """Raises the errors of `read_captioned` that can be known without a look at every sample."""
    if _are_in_shards(captions):
        read_shards(root, captions, first_only=True)
    else:
        read_captions(root / captions, root / images)


def _are_in_shards(captions: str) -> bool:
    return captions == "txt" or captions.startswith("json:")


def _join(
    root: Path, texts: NamedTexts, protocol: ProtocolName, path: Path, part: str
) -> ImageTexts:
    """Makes images and captions of names of files below ``root``. Names of one path are one image.

    Raises ValueError if the protocol demands other numbers, and for a file outside of ``root``. For
    its message, ``path`` is the file that has the names, and ``part`` what was read of it, for
    example " in the split 'test'".
    """
    rule, (names, pairs) = CAPTION_RULES[protocol], texts
    rows = {name: row for row, name in enumerate(dict.fromkeys(map(os.path.normpath, names)))}
    counts: Counter[int] = Counter()
    owners, captions = [], []
    for name, caption in pairs:
        row = rows.setdefault(os.path.normpath(name) if name else name, len(rows))
        counts[row] += 1
        if counts[row] <= (rule.captions_per_image or math.inf):
            owners.append(row)
            captions.append(caption)
    images = [below(root, name, str(path)) for name in rows]
    numbers, published = (len(images), len(captions)), (rule.num_images, rule.num_captions)
    if 0 in numbers:
        raise ValueError(f"{path} has no captions{part}")
    if published not in (numbers, (None, None)):
        raise ValueError(
            f"{path} has {numbers[0]} images and {numbers[1]} captions{part}, {protocol} has "
            f"{published[0]} and {published[1]}: use the protocol 'table' for other data"
        )
    return ImageTexts(images, captions, np.array(owners, dtype=np.int64))


# --- layouts -----------------------------------------------------------------------------------


def _caption_files(folder: Path, images: Path) -> NamedTexts:
    """Reads a folder as of Urban1k: it has ``1.txt`` for the image ``1.jpg`` (or another suffix) in
    ``images``. Raises FileNotFoundError for a caption without an image."""
    names = {path.stem: path.name for path in sorted(images.iterdir()) if path.suffix != ".txt"}
    files = sorted(path for path in folder.iterdir() if path.suffix == ".txt")
    if strangers := [path for path in files if path.stem not in names]:
        raise FileNotFoundError(
            f"{len(strangers)} of {len(files)} captions have no image in {images}, such as "
            f"{strangers[0].name}: an image has the name of its caption"
        )
    texts = [read_text_file(path).strip() for path in files]
    pairs = zip(files, texts, strict=True)
    return (), [(names[path.stem], text) for path, text in pairs if is_caption(text)]


def _caption_table(path: Path, split: str | None) -> NamedTexts:
    """Reads the rows of ``split`` (None: all) of a table; ``open_table`` finds the columns."""
    table, findings = open_table(path), Findings()
    needed = {"title": table.caption_columns, "split": not split or "split" in table.columns}
    if missing := [what for what, there in needed.items() if not there]:
        raise ValueError(
            f"{path} has the columns {table.columns}, missing {missing}: its first line must name "
            "them, such as 'filepath,title,split'"
        )
    if table.holds_images:
        raise ValueError(f"{path} holds images: pack it, and give the folder of its shards")
    rows = [r for r in table.rows(findings) if not split or r.metadata.get("split") == split]
    refuse_misread(path, findings)
    if nameless := next((row.where for row in rows if not row.path), None):
        raise ValueError(f"{path}: {nameless} names no image")
    return (), [(row.path, text) for row in rows for text in row.captions if is_caption(text)]


def _caption_document(path: Path, split: str | None) -> NamedTexts:
    """Reads objects such as ``{image, caption}``, or the layouts of a .json."""
    if is_list_of_objects(objects_of(read_json(path, unique_keys=True))):
        return _caption_table(path, split)
    return captions_of_json(path, split)


def _caption_lines(path: Path, split: str | None) -> NamedTexts:
    """Reads a .jsonl as of DOCCI, with ``image_file``, ``description`` and perhaps ``split`` in
    each line; or any table whose columns have common names."""
    lines = read_lines(path)
    if lines and isinstance(lines[0][1], dict) and present_columns(lines[0][1], IMAGE_COLUMNS):
        return _caption_table(path, split)
    fields = ("image_file", "description", *(["split"] if split else []))
    pairs: list[tuple[str, str]] = []
    for line, row in lines:
        values: list[Any] = [row.get(f) for f in fields] if isinstance(row, dict) else [None]
        if not all(isinstance(value, str) for value in values):
            raise ValueError(f"{line} wants the texts {', '.join(fields)}")
        if not split or values[2] == split:
            pairs.append((values[0], values[1]))
    return (), pairs


_READERS: Mapping[str, Callable[[Path, str | None], NamedTexts]] = {
    ".csv": _caption_table,
    ".tsv": _caption_table,
    ".txt": _caption_table,
    ".token": _caption_table,  # Flickr30k's
    ".json": _caption_document,
    ".parquet": _caption_table,
    ".jsonl": _caption_lines,
    ".jsonlines": _caption_lines,
}


# --- layouts with several languages --------------------------------------------------------------

Languages = tuple[list[str], dict[str, list[tuple[str, str]]]]
"""Names of files that are candidates in every language, and the pairs (file, caption) of each
language."""


def _languages_of_table(path: Path) -> Languages:
    rows = read_rows(path, ["filepath", "title", "language"], "table of captions")
    pairs: dict[str, list[tuple[str, str]]] = {}
    for _, (file, title, language) in rows:
        pairs.setdefault(language, []).append((file, title))
    return [*dict.fromkeys(file for _, (file, _, _) in rows)], pairs


def _languages_of_lines(path: Path) -> Languages:
    """Reads a .jsonl as of Crossmodal-3600. A line has ``image/key``, the name of a .jpg without
    its suffix, and for each language an object whose ``caption`` is a list of captions."""
    names: list[str] = []
    pairs: dict[str, list[tuple[str, str]]] = {}
    for line, row in read_lines(path):
        key = row.get("image/key") if isinstance(row, dict) else None
        if not isinstance(key, str):
            raise ValueError(f"{line} has no image/key, as Crossmodal-3600's have")
        names.append(f"{key}.jpg")
        for language, value in row.items():
            if isinstance(value, dict):
                captions = value.get("caption")
                if not isinstance(captions, list) or not all(isinstance(c, str) for c in captions):
                    raise ValueError(f"{line} has no list caption in {language!r}")
                pairs.setdefault(language, []).extend((names[-1], text) for text in captions)
    return names, pairs


_LANGUAGE_READERS: Mapping[str, Callable[[Path], Languages]] = {
    ".csv": _languages_of_table,
    ".tsv": _languages_of_table,
    ".jsonl": _languages_of_lines,
}
