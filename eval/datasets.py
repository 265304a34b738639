"""Loaders of the data sets that protocols use; they import no torch.

MMVP-VLM's minimal pairs, and images with captions (tables, COCO's and Karpathy's JSON, Flickr30k's
tokens). They raise FileNotFoundError for missing files and ValueError for wrong content, in one
line.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mclclip.eval.caption_layouts import (
    NamedTexts,
    caption_files,
    caption_lines,
    conversations,
    languages_of_lines,
)
from mclclip.eval.metrics import IntArray
from mclclip.files import Roots, below, read_json

MMVP_COLUMNS = ("Question ID", "Type", "Statement")
MMVP_FOLDERS = ("MLLM_VLM Images", "MLLM_VLM_Images")
MMVP_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
SUFFIXES = (*MMVP_SUFFIXES, ".bmp", ".tif", ".tiff")


# --- files -------------------------------------------------------------------------------------


def read_rows(path: Path, columns: Sequence[str], what: str) -> list[tuple[int, list[str]]]:
    """The line and the cells under ``columns`` of every row of a CSV (or .tsv) with a header.

    Blanks after a delimiter are ignored. ``what`` names the file in the FileNotFoundError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {what} at {path}")
    with open(path, newline="", encoding="utf-8-sig") as file:
        try:
            return _cells(path, file, columns)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} does not parse: {error}") from None


def _cells(path: Path, file: TextIO, columns: Sequence[str]) -> list[tuple[int, list[str]]]:
    delimiter = "\t" if path.suffix == ".tsv" else ","
    reader = csv.DictReader(file, delimiter=delimiter, skipinitialspace=True)
    reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
    if missing := [name for name in columns if name not in reader.fieldnames]:
        raise ValueError(
            f"{path} has the columns {reader.fieldnames}, missing {missing}: its first line "
            f"must name them, such as '{delimiter.join(columns)}'"
        )
    return [(reader.line_num, [row[name] or "" for name in columns]) for row in reader]


def roots_of(folder: Path, *others: Path) -> Roots:
    """Where the files of a benchmark's folder may lie: in it, in ``others``, and, where it is a
    snapshot in the Hub's cache, which consists of links, among the blobs beside all snapshots."""
    above = next((path for path in folder.resolve().parents if path.name == "snapshots"), None)
    return Roots(folder, *others, *([above.with_name("blobs")] if above else []))


def check_inside(paths: Iterable[Path], roots: Roots, folder: Path) -> None:
    """Raises ValueError for a path that leads out of ``roots``, those of ``folder``, by a link."""
    if outside := next((path for path in paths if roots.real_path(path) is None), None):
        raise ValueError(
            f"{outside} leads to {outside.resolve()}, which is not below {folder}: benchmarks "
            "are read from their own folder only, copy the images there"
        )


@dataclass(frozen=True)
class Region:
    """A part of an image file, which is encoded like an image of its own.

    box: left, top, right and bottom edge in pixels; what lies outside of the picture is black.
    """

    path: Path
    box: tuple[int, int, int, int]

    def read_bytes(self) -> bytes:
        """The bytes of the whole image; OSError where they cannot be read."""
        return self.path.read_bytes()

    def __str__(self) -> str:
        return f"{self.path} cut to {self.box}"


# --- minimal pairs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two images and two statements; statement i is true of image i. The odd id comes first."""

    type: str
    question_ids: tuple[int, int]
    statements: tuple[str, str]
    images: tuple[Path, Path]


@dataclass(frozen=True)
class _Question:
    line: int
    id: int
    type: str
    statement: str


def read_pairs(root: Path) -> list[Pair]:
    """The pairs of a folder in MMVP-VLM's layout, in file order.

    ``Questions.csv`` has the columns Question ID, Type, Statement; two consecutive rows are a pair,
    an odd id and then an even one, of one Type. Images lie at ``MLLM_VLM Images/<Type>/<Question
    ID>.jpg`` (or ``MLLM_VLM_Images``; jpeg, png and webp too). Raises ValueError for a Type or a
    link that leads out of ``root``; the links of the Hub's cache lead to its own files.
    """
    questions = _read_questions(Path(root) / "Questions.csv")
    folder = next((f for name in MMVP_FOLDERS if (f := Path(root) / name).is_dir()), None)
    if folder is None:
        raise FileNotFoundError(f"no folder {MMVP_FOLDERS[0]!r} (or with _) in {root}")
    types, roots = sorted({question.type for question in questions}), roots_of(Path(root))
    files = {kind: _images_of_type(roots, folder, kind) for kind in types}
    pairs = []
    for a, b in zip(questions[::2], questions[1::2], strict=True):
        where = f"Questions.csv lines {a.line} and {b.line} form a pair, but their"
        if a.type != b.type:
            raise ValueError(f"{where} Types are {a.type!r} and {b.type!r}")
        if a.id % 2 != 1 or b.id % 2 != 0:
            raise ValueError(
                f"{where} Question IDs are {a.id} and {b.id}: expected an odd one (image 1) and "
                f"then an even one (image 2), such as {a.id | 1} and {(a.id | 1) + 1}"
            )
        for number in (a.id, b.id):
            if str(number) not in files[a.type]:
                raise FileNotFoundError(
                    f"no image {folder / a.type / str(number)}.jpg (nor .jpeg, .png, .webp) for "
                    f"question {number}"
                )
        images = (files[a.type][str(a.id)], files[a.type][str(b.id)])
        pairs.append(Pair(a.type, (a.id, b.id), (a.statement, b.statement), images))
    return pairs


def _read_questions(path: Path) -> list[_Question]:
    questions, rows = [], read_rows(path, MMVP_COLUMNS, "questions of MMVP-VLM")
    if unfilled := [line for line, cells in rows if cells[0].strip() and not cells[2].strip()]:
        raise ValueError(
            f"{path} has no Statement in {len(unfilled)} of {len(rows)} rows, the first at line "
            f"{unfilled[0]}: write for each image what is true of it and not of the other image of "
            "its pair, and remove the pairs that have no such difference"
        )
    for line, cells in rows:
        number, kind, statement = (cell.strip() for cell in cells)
        if not number.isdecimal() or not kind or not statement:
            raise ValueError(
                f"{path} line {line}: got Question ID {number!r}, Type {kind!r}, Statement "
                f"{statement!r}; expected a whole number and two texts"
            )
        questions.append(_Question(line, int(number), kind, statement))
    if not questions or len(questions) % 2:
        raise ValueError(
            f"{path} has {len(questions)} questions, expected an even number above zero: "
            f"two consecutive rows form a pair"
        )
    first, times = Counter(question.id for question in questions).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{path} has the Question ID {first} more than once")
    return questions


def _images_of_type(roots: Roots, folder: Path, kind: str) -> dict[str, Path]:
    """Question ID -> image; where one has several files, the first of the suffixes wins."""
    places = [below(folder, name, "Questions.csv") for name in (kind, kind.replace(" ", "_"))]
    own = next((place for place in places if place.is_dir()), None)
    if own is None:
        raise FileNotFoundError(f"no folder {folder / kind} for the Type {kind!r}")
    files = [path for path in own.iterdir() if path.suffix.lower() in MMVP_SUFFIXES]
    check_inside(files, roots, folder.parent)
    files.sort(key=lambda path: MMVP_SUFFIXES.index(path.suffix.lower()), reverse=True)
    return {path.stem: path for path in files}


# --- images with captions ----------------------------------------------------------------------


@dataclass(frozen=True)
class CaptionRule:
    """Split, captions per image, and size that a named protocol of retrieval demands.

    ``captions_per_image``: only the first so many, in file order; None: all of them.
    ``num_images``, ``num_captions``: the size that the data must have; None: any.
    """

    split: str | None = None
    captions_per_image: int | None = None
    num_images: int | None = None
    num_captions: int | None = None


CAPTION_RULES = {
    "coco_val2017_5k_first5": CaptionRule(None, 5, 5000, 25_000),
    "karpathy_coco5k": CaptionRule("test", None, 5000, 25_010),
    "karpathy_flickr1k": CaptionRule("test", None, 1000, 5000),
    "flickr30k_all_31k": CaptionRule(None, None, 31_783, 158_915),
    "xm3600_first": CaptionRule(None, 1, 3600, 3600),
    "table": CaptionRule(),
}


@dataclass(frozen=True)
class ImageTexts:
    """Images (files, or places in shards) and captions; ``caption_image`` [C] is the row of each
    caption's image."""

    images: Sequence[Any]
    captions: list[str]
    caption_image: IntArray


def read_captions(
    path: Path, images: Path, protocol: str = "table", *, split: str | None = None
) -> ImageTexts:
    """The images and captions of a named protocol, after a check of their numbers.

    ``path``: .csv or .tsv with the columns filepath, title and perhaps split; .json, COCO's,
    Karpathy's or ShareGPT4V's; .jsonl or .jsonlines, DOCCI's; .token, Flickr30k's; or a folder with
    a .txt per image, Urban1k's. Files are named from the folder ``images``. ``split`` overrides the
    protocol's. COCO's images without a caption are kept as candidates.
    """
    path, rule = _opened(path, images, protocol)
    split = split or rule.split
    if path.is_dir():
        found = caption_files(path, Path(images))
    elif path.suffix in _CAPTION_READERS:
        found = _CAPTION_READERS[path.suffix](path, split)
    else:
        raise ValueError(
            f"{path}: captions come as {', '.join(_CAPTION_READERS)}, or as a folder of .txt files"
        )
    part = f" in the split {split!r}" if split else ""
    return _of_protocol(Path(images), found, protocol, path, part)


def read_languages(
    path: Path, images: Path, protocol: str = "table", languages: Sequence[str] | None = None
) -> dict[str, ImageTexts]:
    """The images and captions of several languages, each as ``read_captions`` returns them.

    ``path``: a .csv or .tsv with the columns filepath, title and language, or Crossmodal-3600's
    .jsonl. ``languages``: some of those in the file (default: all). The images of a file are
    candidates in every language. Raises the errors of ``read_captions``.
    """
    path, _ = _opened(path, images, protocol)
    if path.suffix not in _LANGUAGE_READERS:
        raise ValueError(f"{path}: captions by language come as {', '.join(_LANGUAGE_READERS)}")
    found = _LANGUAGE_READERS[path.suffix](path)
    chosen = found if languages is None else languages
    if not chosen:
        what = "has no captions in any language" if languages is None else "was asked for none"
        raise ValueError(f"{path} {what}: languages are {', '.join(found) or 'not there'}")
    if unknown := [name for name in chosen if name not in found]:
        raise ValueError(
            f"{path} has no captions in {unknown[0]!r}: its languages are {', '.join(found)}"
        )
    return {
        name: _of_protocol(Path(images), found[name], protocol, path, f" in {name!r}")
        for name in chosen
    }


def _opened(path: Path, images: Path, protocol: str) -> tuple[Path, CaptionRule]:
    if protocol not in CAPTION_RULES:
        raise ValueError(f"unknown protocol {protocol!r}: use one of {', '.join(CAPTION_RULES)}")
    for needed in (Path(path), Path(images)):
        if not needed.exists():
            raise FileNotFoundError(
                f"no {needed}: wanted a file or folder of captions, and a folder of images"
            )
    return Path(path), CAPTION_RULES[protocol]


def _of_protocol(
    images: Path, found: NamedTexts, protocol: str, path: Path, part: str
) -> ImageTexts:
    """The images and captions of ``part`` of a file, after a check of their numbers."""
    rule = CAPTION_RULES[protocol]
    data = _joined(images, *found, rule.captions_per_image or math.inf, str(path))
    got, wanted = (len(data.images), len(data.captions)), (rule.num_images, rule.num_captions)
    if 0 in got:
        raise ValueError(f"{path} has no captions{part}")
    if wanted not in (got, (None, None)):
        raise ValueError(
            f"{path} has {got[0]} images and {got[1]} captions{part}, {protocol} has "
            f"{wanted[0]} and {wanted[1]}: use the protocol 'table' for other data"
        )
    return data


def _joined(
    root: Path, names: Iterable[str], pairs: Iterable[tuple[str, str]], limit: float, where: str
) -> ImageTexts:
    """Joins (file, caption) pairs: equal files are one image, with at most ``limit`` captions.

    ``where``: the file that gives the names, for the error about one that leads out of ``root``.
    """
    rows = {name: row for row, name in enumerate(names)}
    seen: Counter[int] = Counter()
    owners, captions = [], []
    for name, caption in pairs:
        row = rows.setdefault(name, len(rows))
        seen[row] += 1
        if seen[row] <= limit:
            owners.append(row)
            captions.append(caption)
    images = [below(root, name, where) for name in rows]
    return ImageTexts(images, captions, np.array(owners, dtype=np.int64))


def _caption_table(path: Path, split: str | None) -> NamedTexts:
    rows = read_rows(
        path, ["filepath", "title", *(["split"] if split else [])], "table of captions"
    )
    return (), [(file, title) for _, (file, title, *where) in rows if where in ([], [split])]


def _caption_json(path: Path, split: str | None) -> NamedTexts:
    content = read_json(path)
    try:
        names, pairs = _named_texts(content, path, split)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} lacks a field of COCO's, Karpathy's or ShareGPT4V's layout, or has another "
            f"type there: {error!r}"
        ) from None
    texts = [*names, *(item for pair in pairs for item in pair)]
    if strange := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"{path} has {strange[0]!r} where a file name or a caption is wanted")
    return names, pairs


def _named_texts(content: Any, path: Path, split: str | None) -> NamedTexts:
    if isinstance(content, list):
        return conversations(content)
    keys = content.keys() if isinstance(content, dict) else set()
    if {"images", "annotations"} <= keys:
        names = {image["id"]: image["file_name"] for image in content["images"]}
        if strangers := {a["image_id"] for a in content["annotations"]} - names.keys():
            raise ValueError(
                f"{path} has captions of images it does not list, such as {min(strangers, key=str)}"
            )
        pairs = [(names[a["image_id"]], a["caption"]) for a in content["annotations"]]
        return dict.fromkeys(names.values()), pairs
    if "images" not in keys or not all("sentences" in image for image in content["images"]):
        raise ValueError(
            f"{path} holds neither COCO captions (images, annotations) nor Karpathy's split "
            f"(images with sentences)"
        )
    return (), [
        (str(Path(image.get("filepath", "")) / image["filename"]), sentence["raw"])
        for image in content["images"]
        if split is None or image["split"] == split
        for sentence in image["sentences"]
    ]


def _caption_tokens(path: Path, split: str | None) -> NamedTexts:
    """``results_20130124.token``: lines of ``FILE#NUMBER<TAB>caption``; it has no splits."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        head, tab, caption = line.partition("\t")
        if not tab or "#" not in head:
            raise ValueError(f"{path} line {number} is not FILE#NUMBER<TAB>caption: {line!r}")
        pairs.append((head.rpartition("#")[0], caption))
    return (), pairs


_CAPTION_READERS = {
    ".csv": _caption_table,
    ".tsv": _caption_table,
    ".json": _caption_json,
    ".jsonl": caption_lines,
    ".jsonlines": caption_lines,
    ".token": _caption_tokens,
}


def _languages_of_table(path: Path) -> dict[str, NamedTexts]:
    rows = read_rows(path, ["filepath", "title", "language"], "table of captions")
    names = [*dict.fromkeys(file for _, (file, _, _) in rows)]
    pairs: dict[str, list[tuple[str, str]]] = {}
    for _, (file, title, language) in rows:
        pairs.setdefault(language, []).append((file, title))
    return {language: (names, pairs[language]) for language in sorted(pairs)}


_LANGUAGE_READERS = {
    ".csv": _languages_of_table,
    ".tsv": _languages_of_table,
    ".jsonl": languages_of_lines,
}
