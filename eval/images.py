"""Reads the images of a benchmark: files that tables name, parts of files, members of tar shards;
and images with classes, as one set, or as parts to learn from and to be tested on.

All readers of data sets import no torch. They raise FileNotFoundError for a missing file and
ValueError for wrong content, in one line, and they refuse names that lead out of the benchmark's
folder. Links are followed.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mclclip.data.decode import IMAGE_EXTENSIONS, PICTURE_SUFFIXES
from mclclip.data.findings import Findings
from mclclip.data.index_tables import Shard, join_rows
from mclclip.data.options import DataConfig
from mclclip.data.remote import StoredFile
from mclclip.data.shard_scan import group_members, read_member, read_text_file, scan_shard
from mclclip.data.table_formats import KINDS
from mclclip.data.text_tables import csv_format, delimiter_of, refuse_misread
from mclclip.util.files import MAX_JSON_BYTES, below, parse_json, read_bounded

log = logging.getLogger("mclclip")
SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)


@dataclass(frozen=True)
class Region:
    """A part of an image file, which is encoded as an image.

    ``box`` is its left, top, right and bottom edge in pixels; pixels outside of the picture are
    black.
    """

    path: Path
    box: tuple[int, int, int, int]

    def read_bytes(self) -> bytes:
        """The bytes of the whole image file; OSError if it cannot be read."""
        return self.path.read_bytes()

    def __str__(self) -> str:
        return f"{self.path} cut to {self.box}"


@dataclass(frozen=True)
class StoredImage:
    """An image in the tar shard ``path``: its key, where its bytes lie, its name for a reader."""

    path: Path
    key: str
    offset: int
    size: int
    name: str = ""

    def read_bytes(self) -> bytes:
        """The bytes of the image file; OSError if the shard cannot be read."""
        return read_range(self.path, self.offset, self.size)

    def __str__(self) -> str:
        return f"{self.name or self.key} in {self.path}"


def image_items(images: Iterable[Any], root: Path) -> list[str]:
    """Names images for ``Outcomes.items``: files by their path below ``root``, images in shards by
    their key, others by ``str(image)``."""
    return [
        path.relative_to(root).as_posix()
        if isinstance(path, Path) and path.is_relative_to(root)
        else getattr(path, "key", str(path))
        for path in images
    ]


# --- tables and lines --------------------------------------------------------------------------


def read_rows(path: Path, columns: Sequence[str], what: str) -> list[tuple[str, list[str]]]:
    """Reads a table of text with a header, whatever its delimiter. Returns for every row its
    place, such as 'labels.csv line 3', and its cells in these ``columns``.

    ``what`` says in the FileNotFoundError what the file is, for example 'table of labels'.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {what} at {path}")
    if KINDS.get(path.suffix.lower(), "csv") != "csv":
        raise ValueError(f"{path} is no table of text: save the {what} as .csv")
    delimiter = delimiter_of(path)
    table = csv_format(path, delimiter)
    if missing := [name for name in columns if name not in table.columns]:
        raise ValueError(
            f"{path} has the columns {[*table.columns]}, missing {missing}: its first line must "
            f"name them, such as '{delimiter.join(columns)}'"
        )
    findings = Findings()
    rows = [*table.rows(findings)]
    refuse_misread(path, findings)
    return [(str(path.parent / line), [str(row[name]) for name in columns]) for line, row in rows]


def read_lines(
    path: Path, *, unique_keys: bool = False, max_bytes: int = MAX_JSON_BYTES
) -> list[tuple[str, Any]]:
    """Reads a file of JSON lines. Returns for every line that is not blank its place, such as
    'items.jsonl line 3', and its value. Raises ValueError if the file has more than ``max_bytes``.
    """
    lines = read_bounded(path, max_bytes).split(b"\n")
    numbered = [(f"{path} line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    return [(name, parse_json(line, name, unique_keys=unique_keys)) for name, line in numbered]


def refuse_absent(images: Sequence[Any], table: Path, folder: Path) -> None:
    """Raises FileNotFoundError if some of the ``images`` that ``table`` names are files that are
    not there. Images in shards are not looked for."""
    files = [image for image in images if isinstance(image, Path)]
    absent = [path.name for path in files if not os.path.isfile(path)]
    if absent:
        raise FileNotFoundError(
            f"{len(absent)} of the {len(images)} images of {table} are not in {folder}, such as "
            f"{', '.join(absent[:3])}: get them, or correct the names or the option that gives "
            "their folder"
        )


# --- shards ------------------------------------------------------------------------------------


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Reads at most ``size`` bytes of a file, from ``offset`` on; OSError if that fails."""
    with open(path, "rb") as file:
        return os.pread(file.fileno(), size, offset)


def read_shards(
    directory: Path,
    captions: str | None = None,
    attributes: Sequence[str] = (),
    *,
    first_only: bool = False,
) -> tuple[list[StoredImage], Any]:
    """Reads the images of ``directory/*.tar``, in order, and the index table of their samples.

    ``captions`` is 'txt', 'lines' or 'json:FIELD', or None if images need no caption. With
    ``first_only`` only the first shard is read, which is enough to find mistakes such as a wrong
    field. Raises FileNotFoundError if there is no shard, and ValueError for a damaged shard or a
    sample without a caption or one of the ``attributes``.
    """
    shards = sorted(Path(directory).glob("*.tar"))
    if not shards:
        raise FileNotFoundError(f"there is no shard in {directory}: wanted *.tar files")
    findings, scans = Findings(), []
    shards = shards[:1] if first_only else shards
    for path in shards:
        scan = scan_shard(StoredFile(str(path)), "", captions or "txt", attributes)
        findings.merge(scan.findings)
        scans.append(scan.rows)
    findings.settle_lines(sum(map(len, scans)))
    placed = [Shard(str(path), "", "", 0, 0, path.stat().st_size) for path in shards]
    table, _ = join_rows(None, scans, placed, 0, findings, DataConfig())
    allowed = ("other_member", *(() if captions else ("no_caption", "several_lines")))
    wrong = findings.without(allowed).to_json()
    if wrong or not len(table):
        got = ", ".join(f"{f['count']} {r}" for r, f in wrong.items()) or "no sample"
        needs = [*([f"a caption ({captions})"] if captions else []), *attributes]
        raise ValueError(
            f"{directory} holds {got}: an evaluation wants whole shards in which every "
            f"sample has {', '.join(needs)}. {'; '.join(findings.lines())}"
        )
    columns = (table[c].to_pylist() for c in ("key", "shard", "image_offset", "image_size"))
    images = [
        StoredImage(shards[shard], key.strip("/"), offset, size)
        for key, shard, offset, size in zip(*columns, strict=True)
    ]
    return images, table


# --- images with classes ----------------------------------------------------------------------

Part = Literal["train", "valid", "test"]
"""A part of a data set: the name of its folder, or its value in the column split of a table."""

Rows = list[tuple[Any, str, int]]
"""Images (files, or images in shards), each with a label, and 1 if the image shows it, -1 if not,
or 0 if the data set does not judge it. Without a row it is not shown."""

CLASS_NAMES = "classnames.txt"
"""The file beside shards, or in the folder above them, that names their classes: line k, from 0 on,
has the name of class k."""

_VOC_ENDINGS: Mapping[Part, str] = {
    "train": "_train.txt", "valid": "_val.txt", "test": "_test.txt",
}  # fmt: skip


@dataclass(frozen=True)
class LabelledImages:
    """Images [N] with their labels, which are numbers of ``class_names`` [K].

    ``labels`` is [N] if each image has one class. Otherwise it is int8 [N, K]: 1 if image n shows
    class k, -1 if it does not, 0 if the data set does not judge it.
    """

    images: list[Any]
    labels: NDArray[np.signedinteger[Any]]
    class_names: list[str]


def as_words(label: str) -> str:
    """Replaces underscores in a label by spaces: 'polar_bear' gives 'polar bear'."""
    return label.replace("_", " ")


def labels_of(root: Path, table: str | None = None, *, present: bool = False) -> list[str]:
    """The sorted labels of a benchmark; with ``present`` the images of a table must be there.

    With ``table`` they are those in the file ``root/table``, or, if that is a folder as of PASCAL
    VOC, the names CLASS of its files CLASS_test.txt. Otherwise they are the classes of the shards
    in ``root``, or its folders, even empty ones. Raises ValueError if there is no class.
    """
    if table:
        rows = _table_rows(root, table, several=True)
        labels = {label for _, label, _ in rows}
        if present:
            refuse_absent([*dict.fromkeys(image for image, *_ in rows)], root / table, root)
    elif shards := class_shards(root):
        numbers = {str(number) for number, _ in enumerate(class_names(root))}
        labels = numbers or {label for _, label, _ in _members(shards)}
    else:
        labels = {*_class_folders(root)}
    if not labels:
        layout = (
            "a row per image, such as 1.jpg,cat"
            if table
            else "a folder per class, such as cat/, or tar shards with jpg and cls"
        )
        raise ValueError(f"{root / (table or '')} has no images: wanted {layout}")
    return sorted(labels)


def read_labelled(
    root: Path, names: Mapping[str, str], table: str | None = None, *, several: bool = False
) -> LabelledImages:
    """Reads images with classes from one of these layouts:

    - a folder per class in ``root``;
    - tar shards in ``root`` with ``KEY.jpg`` and its class in ``KEY.cls``;
    - a CSV or .tsv ``root/table`` with the columns filepath (relative to ``root``) and label. With
      ``several``, an image can have several labels, each in a row;
    - with ``several``, a folder ``root/table`` as PASCAL VOC's ``ImageSets/Main``, with a file
      CLASS_test.txt per class. A line has the name of an image in ``JPEGImages/`` and 1, -1, or 0
      (too difficult, not judged).

    ``names`` maps every label to the name of its class; the classes are in its order. Raises
    ValueError if there is no image, for an image with two labels without ``several``, and for lines
    of another form, and FileNotFoundError for missing images of a table.
    """
    rows = _table_rows(root, table, several=several) if table else _images_in(root)
    labelled = _labelled(rows, names, root / (table or ""), several)
    if table:
        refuse_absent(labelled.images, root / table, root)
    return labelled


def read_parts(
    root: Path, table: str | None = None, *, several: bool = False
) -> dict[Part, LabelledImages]:
    """Reads the parts ``train``, ``test`` and, if there is one, ``valid``, with the same classes.

    The parts are folders of these names in ``root`` (``val`` for valid), each with a folder per
    class; or rows of the CSV ``root/table``, which has a column split beside filepath and label; or
    PASCAL VOC's files CLASS_train.txt, CLASS_val.txt and CLASS_test.txt in the folder
    ``root/table``. ``several`` is that of ``read_labelled``. The classes are those with images in
    train or valid. Raises FileNotFoundError for a missing folder and for missing images of a table,
    and ValueError for fewer than two classes, a class that only test has, a class of PASCAL VOC
    without the file of a part, or an image in two parts.
    """
    parts: tuple[Part, ...] = get_args(Part)
    where = root / (table or "")
    for folder in () if table else (root / "train", root / "test"):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no folder {folder}: wanted train/ and test/ with a folder per class, "
                "such as train/cat/1.jpg"
            )
    folders, real = {part: root / part for part in parts}, os.path.realpath
    if not folders["valid"].is_dir() and real(root / "val") != real(folders["test"]):
        folders["valid"] = root / "val"
    if table is None and real(folders["valid"]) == real(folders["test"]):
        raise ValueError(f"{folders['valid']} is the folder {folders['test']}: leave one out")
    rows: dict[Part, Rows] = {
        part: _table_rows(root, table, part, several=several)
        if table
        else _images_in(folders[part])
        for part in parts
    }
    times = Counter(image for of_part in rows.values() for image in {row[0] for row in of_part})
    if shared := [image for image, count in times.items() if count > 1]:
        raise ValueError(
            f"{where} has {len(shared):,} images in more than one of train, valid and test, such "
            f"as {min(shared)}: leave each in one"
        )
    labels = {part: {label for _, label, _ in of_part} for part, of_part in rows.items()}
    names = _names_to_learn(labels["train"] | labels["valid"], labels["test"], where)
    labelled = {
        part: _labelled(rows[part], names, f"{part} of {where}", several)
        for part in parts
        if rows[part] or part != "valid"
    }
    if table:
        refuse_absent([image for of in labelled.values() for image in of.images], where, root)
    return labelled


def _names_to_learn(learnt: set[str], tested: set[str], where: Path) -> dict[str, str]:
    """Maps each label of ``learnt`` to the name of its class. Raises ValueError for fewer than two,
    and unless ``tested`` are some of them."""
    strangers = sorted(tested - learnt)
    if len(learnt) < 2 or not tested or strangers:
        extra = f", such as {strangers[0]!r}, which train lacks" if strangers else ""
        raise ValueError(
            f"{where} has images of {len(learnt)} classes in train and of {len(tested)} in "
            f"test{extra}: wanted at least 2 in train, and some of these in test"
        )
    return {label: as_words(label) for label in sorted(learnt)}


def _voc_rows(root: Path, table: str, part: Part) -> Rows:
    """Reads a part of PASCAL VOC; no rows if no class has a file of it. Raises ValueError if no
    class has a file of any part, and for files that do not all judge the same images."""
    folder, rows, listed = root / table, Rows(), set[frozenset[str]]()
    endings = tuple(_VOC_ENDINGS.values())
    files = sorted(path for path in folder.glob("?*_*.txt") if path.name.endswith(endings))
    if not files:
        raise ValueError(f"{folder} has no files CLASS_test.txt, as in PASCAL VOC's ImageSets/Main")
    labels = dict.fromkeys(path.name.rpartition("_")[0] for path in files)
    paths = {label: folder / f"{label}{_VOC_ENDINGS[part]}" for label in labels}
    if not {*paths.values()} & {*files}:
        return rows
    for label, path in paths.items():
        text = read_text_file(path) if path in files else ""
        lines = [line.split() for line in text.splitlines()]
        signs = {line[0]: line[1:] for line in lines if line}
        for name, sign in signs.items():
            if sign not in (["1"], ["0"], ["-1"]):
                raise ValueError(f"{path}: {name!r} has {sign}, wanted 1, 0 or -1")
            rows.append((below(root, f"JPEGImages/{name}.jpg", f"{path}"), label, int(sign[0])))
        listed.add(frozenset(signs))
        if not signs or len(listed) > 1 or len(signs) < len(lines):
            raise ValueError(
                f"{path} is missing, or does not list the images that other files do, each once: "
                "every class wants a file of each part, with all its images"
            )
    return rows


def _class_folders(root: Path) -> dict[str, Path]:
    """The folders in ``root`` by name, sorted, without hidden ones."""
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return {path.name: path for path in sorted(folders) if not path.name.startswith(".")}


def class_shards(root: Path) -> list[Path]:
    """The tar shards in ``root``, or else in ``root/test``, in order. Those in ``root`` do not
    count if there are folders of classes."""
    has_classes = _class_folders(root).keys() - {"train", "valid", "val", "test"}
    places = [root] if has_classes else [root, root / "test"]
    return next((shards for place in places if (shards := sorted(place.glob("*.tar")))), [])


def class_names(root: Path) -> list[str]:
    """Reads the names of the classes of shards, by number; empty if there is no `CLASS_NAMES`."""
    path = next((p for p in (root / CLASS_NAMES, root.parent / CLASS_NAMES) if p.is_file()), None)
    lines = [] if path is None else read_text_file(path).splitlines()
    return [line.strip() for line in lines if line.strip()]


def _members(shards: Sequence[Path]) -> Rows:
    """Reads the images of shards, each with the class in its ``.cls``. Raises ValueError for
    samples that lack one of them."""
    findings, rows = Findings(), Rows()
    for path in shards:
        with open(path, "rb") as file:
            for key, group in group_members(file, str(path), "cls", findings).items():
                label = read_member(file, group.text).decode("utf-8", "replace").strip()
                if group.image is None or not label:
                    findings.add("no_image" if label else "no_label", group.full_key(key))
                else:
                    rows.append((StoredImage(path, f"{path.stem}/{key}", *group.image), label, 1))
    if lacking := findings.without(["other_member"]).lines():
        raise ValueError(
            f"{shards[0].parent}: {'; '.join(lacking)}. An evaluation of classes wants shards in "
            "which every sample has a picture and its class, such as 1.jpg and 1.cls"
        )
    return rows


def _images_in(root: Path) -> Rows:
    """Reads images from shards or from a folder per class; none if ``root`` is missing. Other files
    are counted in the log."""
    if shards := class_shards(root):
        return _members(shards)
    findings, rows = Findings(), Rows()
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.suffix.lower() in SUFFIXES and path.is_file():
            findings.add("no_class", path.name)
    for label, folder in _class_folders(root).items():
        for path in sorted(folder.iterdir()):
            if reason := _reason_to_skip(path):
                findings.add(reason, f"{label}/{path.name}")
            else:
                rows.append((path, label, 1))
    for line in findings.lines():
        log.warning("%s: %s", root, line)
    return rows


def _reason_to_skip(path: Path) -> str | None:
    """Says why an entry in the folder of a class is not read, for example 'hidden', one of
    `findings.REASONS`; None for an image."""
    suffix = path.suffix.lower()
    if path.name.startswith("."):
        return "hidden"
    if path.is_dir():
        return "sub_folder"
    if suffix not in SUFFIXES:
        return "unsupported_extension" if suffix[1:] in PICTURE_SUFFIXES else "other_file"
    return None


def _table_rows(root: Path, table: str, part: Part | None = None, *, several: bool = False) -> Rows:
    """Reads the rows of a table with labels, or those of its ``part``; with ``several`` also those
    of a folder as of PASCAL VOC (default: the part test). Raises ValueError for an image with
    several rows, unless ``several``."""
    path = root / table
    if path.is_dir():
        if not several:
            raise ValueError(f"{path} is a folder: the files in it want metric=map_11_point")
        return _voc_rows(root, table, part or "test")
    columns, parts = ("filepath", "label", *(["split"] if part else [])), get_args(Part)
    rows = Rows()
    for line, (file, label, *split) in read_rows(path, columns, "table of labels"):
        split = ["valid" if word.strip() == "val" else word.strip() for word in split]
        if not file or not label.strip() or (split and split[0] not in parts):
            wants = "a filepath and a label" + f", and a split of {', '.join(parts)}" * bool(split)
            raise ValueError(f"{line} is {[file, label, *split]}: wanted {wants}")
        if split in ([], [part]):
            rows.append((below(root, file, line), label.strip(), 1))
    times = Counter(image for image, _, _ in rows)
    if not several and (twice := [image for image, count in times.items() if count > 1]):
        labels = {label for image, label, _ in rows if image == twice[0]}
        remedy = "several labels of an image want metric=map_11_point"
        remedy = remedy if len(labels) > 1 else f"leave the row with the label {min(labels)!r} once"
        raise ValueError(f"{path} has {twice[0]} more than once: {remedy}")
    return rows


def _labelled(
    rows: Rows, names: Mapping[str, str], where: Path | str, several: bool
) -> LabelledImages:
    """Makes images with labels of rows. With ``several``, an image can be in several rows."""
    if not rows and not several:
        raise ValueError(f"{where} has no images")
    column = {label: number for number, label in enumerate(names)}
    images = [image for image, _, _ in rows]
    labels = np.array([column[label] for _, label, _ in rows], dtype=np.int64)
    if not several:
        return LabelledImages(images, labels, list(names.values()))
    place = {image: number for number, image in enumerate(dict.fromkeys(images))}
    truth = np.full((len(place), len(names)), -1, dtype=np.int8)
    truth[[place[image] for image in images], labels] = [judged for _, _, judged in rows]
    return LabelledImages(list(place), truth, list(names.values()))
