"""Images of a benchmark: files that tables name, parts of them, members of tar shards; and images
with classes, as one set or as the parts to learn from and to be tested on.

Loaders of data sets begin here: they import no torch, and raise FileNotFoundError for what is
missing and ValueError for wrong content, in one line. Names and links do not lead out of a folder.
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
from mclclip.data.text_tables import csv_format
from mclclip.util.files import MAX_JSON_BYTES, Roots, below, parse_json, read_bounded

log = logging.getLogger("mclclip")
SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)


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


@dataclass(frozen=True)
class StoredImage:
    """The byte range of an image in a shard."""

    path: Path
    key: str
    offset: int
    size: int

    def read_bytes(self) -> bytes:
        """The image member's bytes; OSError where the shard cannot be read."""
        return read_range(self.path, self.offset, self.size)

    def __str__(self) -> str:
        return f"{self.key} in {self.path}"


def image_items(images: Iterable[Any], root: Path) -> list[str]:
    """A name for each image in the outcomes: a file's path below ``root``, the key of an image in a
    shard, otherwise ``str(image)``."""
    return [
        path.relative_to(root).as_posix()
        if isinstance(path, Path) and path.is_relative_to(root)
        else getattr(path, "key", str(path))
        for path in images
    ]


# --- tables and lines --------------------------------------------------------------------------


def read_rows(path: Path, columns: Sequence[str], what: str) -> list[tuple[str, list[str]]]:
    """Every row of a CSV (or .tsv) with a header: ``PATH line 3``, and its cells under ``columns``.

    ``what`` names the file in the FileNotFoundError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {what} at {path}")
    delimiter = "\t" if path.suffix == ".tsv" else ","
    table = csv_format(path, delimiter)
    if missing := [name for name in columns if name not in table.columns]:
        raise ValueError(
            f"{path} has the columns {[*table.columns]}, missing {missing}: its first line must "
            f"name them, such as '{delimiter.join(columns)}'"
        )
    rows = table.rows(Findings())
    return [(str(path.parent / line), [str(row[name]) for name in columns]) for line, row in rows]


def read_lines(
    path: Path, *, unique_keys: bool = False, max_bytes: int = MAX_JSON_BYTES
) -> list[tuple[str, Any]]:
    """The name and the JSON value of every line of a file that is not blank; ValueError for a file
    of more than ``max_bytes``."""
    lines = read_bounded(path, max_bytes).split(b"\n")
    numbered = [(f"{path} line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    return [(name, parse_json(line, name, unique_keys=unique_keys)) for name, line in numbered]


# --- links -------------------------------------------------------------------------------------


def check_inside(paths: Iterable[Path], folder: Path, *others: Path) -> None:
    """Raises ValueError for a path that leads by a link out of a benchmark's ``folder`` and of
    ``others``.

    A snapshot in the Hub's cache consists of links to the blobs beside all snapshots, which are
    allowed.
    """
    above = next((path for path in folder.resolve().parents if path.name == "snapshots"), None)
    roots = Roots(folder, *others, *([above.with_name("blobs")] if above else []))
    if outside := next((path for path in paths if roots.real_path(path) is None), None):
        raise ValueError(
            f"{outside} leads to {outside.resolve()}, which is not below {folder}: benchmarks "
            "are read from their own folder only, copy the images there"
        )


# --- shards ------------------------------------------------------------------------------------


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Reads at most ``size`` bytes of a file from ``offset`` on. Raises OSError."""
    with open(path, "rb") as file:
        return os.pread(file.fileno(), size, offset)


def read_shards(
    directory: Path,
    captions: str | None = None,
    attributes: Sequence[str] = (),
    *,
    first_only: bool = False,
) -> tuple[list[StoredImage], Any]:
    """The images of ``directory/*.tar`` and the table of their samples, in order.

    ``captions``: ``txt`` or ``json:FIELD``, None for images that need none. ``first_only``: of the
    first shard, which shows mistakes such as a field that the samples do not have.
    FileNotFoundError where there is no shard; ValueError for samples without a caption or without a
    value of one of the ``attributes``, or for shards with damage.
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
    wrong = {r: f for r, f in findings.to_json().items() if r.partition(":")[0] not in allowed}
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
"""A part of a data set: the name of its folder, and its word in the column split of a table."""

Pairs = list[tuple[Any, str]]  # images (files, or parts of shards) with a label
CLASS_NAMES = "classnames.txt"
"""The file of shards of classes beside or above them: the name of class k on line k, from 0 on."""

_VOC_ENDINGS: Mapping[Part, str] = {
    "train": "_train.txt", "valid": "_val.txt", "test": "_test.txt",
}  # fmt: skip


@dataclass(frozen=True)
class LabelledImages:
    """Images with their classes, of ``class_names`` [K].

    ``labels`` [N] are rows of ``class_names``. Where an image shows any number of classes they are
    int8 [N, K]: 1 where image n shows class k, -1 where it does not, and 0 where the data set does
    not judge it.
    """

    images: list[Any]
    labels: NDArray[np.signedinteger[Any]]
    class_names: list[str]


def readable(label: str) -> str:
    """A label as words: underscores as spaces."""
    return label.replace("_", " ")


def labels_of(root: Path, table: str | None = None) -> list[str]:
    """The labels of a benchmark, sorted: its folders, with or without images, the numbers of the
    classes of its shards, or those of the table ``root/table``, or of the files CLASS_test.txt
    where that is a folder (PASCAL VOC's).

    FileNotFoundError for a missing folder or table, ValueError where there is no class.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}: zero-shot evaluation needs images")
    if table and (root / table).is_dir():
        labels: Iterable[str] = _voc_files(root / table, "test")
    elif table:
        labels = {label for _, label in _table_rows(root, table, several=True)}
    elif shards := class_shards(root):
        listed = class_names(root)
        labels = (
            map(str, range(len(listed))) if listed else {label for _, label in _members(shards)}
        )
    else:
        labels = _class_folders(root)
    labels = list(labels)
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
    """A folder per class under ``root``, or tar shards there with ``KEY.jpg`` and its class in
    ``KEY.cls``, or the images of the table ``root/table``: a CSV (or .tsv)
    with the columns filepath, from ``root`` on, and label.

    ``several``: images have several labels each, with a row of the table for each of them; or as in
    PASCAL VOC's folder ``ImageSets/Main``, with a file CLASS_test.txt per class. Its lines are the
    name of an image in ``JPEGImages/`` and 1, -1, or 0 (too difficult: not judged).
    ``names``: label -> class name, of every label at least; the classes are those of ``names``, in
    its order. ValueError where there is no image, where an image has two labels that may have one,
    and for lines of another form.
    """
    where = root / (table or "")
    if several and where.is_dir():
        return _voc_images(root, str(table), names, "test")
    pairs = _table_rows(root, table, several=several) if table else _images_in(root)
    return _labelled(pairs, names, where, several)


def read_parts(
    root: Path, table: str | None = None, *, several: bool = False
) -> dict[Part, LabelledImages]:
    """``train``, ``test`` and, where there is one, ``valid``, under the same classes, which are
    those that have images to learn from (train or valid).

    They are folders of these names below ``root``, each with a folder per class; or the rows of the
    CSV ``root/table`` by its column split, beside filepath and label; or PASCAL VOC's files
    CLASS_train.txt, CLASS_val.txt and CLASS_test.txt in the folder ``root/table``. ``several``:
    images have several labels, as in ``read_labelled``. FileNotFoundError where a folder is
    missing; ValueError for fewer than two classes, a class that only test has, a class of PASCAL
    VOC's without a file of a part, or an image in two parts.
    """
    parts: tuple[Part, ...] = get_args(Part)
    where = root / (table or "")
    if several and table and where.is_dir():
        files = {part: _voc_files(where, part, part == "valid") for part in parts}
        classes = {label for files_by_class in files.values() for label in files_by_class}
        names = _names_to_learn(classes, classes, where)
        lists = {part: _voc_images(root, table, names, part) for part in parts if files[part]}
        _check_apart([labelled.images for labelled in lists.values()], where)
        return lists
    for folder in () if table else (root / "train", root / "test"):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no folder {folder}: wanted train/ and test/ with a folder per class, "
                "such as train/cat/1.jpg"
            )
    rows: dict[Part, Pairs] = {
        part: _table_rows(root, table, part, several=several) if table else _images_in(root / part)
        for part in parts
    }
    _check_apart([[path for path, _ in pairs] for pairs in rows.values()], where)
    labels = {part: {label for _, label in pairs} for part, pairs in rows.items()}
    names = _names_to_learn(labels["train"] | labels["valid"], labels["test"], where)
    return {
        part: _labelled(rows[part], names, f"{part} of {where}", several)
        for part in parts
        if rows[part] or part != "valid"
    }


def _check_apart(parts: Iterable[Iterable[Path]], where: Path) -> None:
    """Raises ValueError where an image is in several parts."""
    times = Counter(path for images in parts for path in set(images))
    if shared := [path for path, count in times.items() if count > 1]:
        raise ValueError(
            f"{where} has {len(shared):,} images in more than one of train, valid and test, such "
            f"as {min(shared)}: leave each in one"
        )


def _names_to_learn(learnt: set[str], tested: set[str], where: Path) -> dict[str, str]:
    """Label -> class name of the classes ``learnt``, which must have all the ``tested`` ones."""
    if len(learnt) < 2:
        raise ValueError(f"train of {where} has images of {len(learnt)} classes: wanted at least 2")
    if not tested:
        raise ValueError(f"test of {where} has no images to test")
    if strangers := sorted(tested - learnt):
        raise ValueError(
            f"test of {where} has {len(strangers)} classes that train lacks, such as "
            f"{strangers[0]!r}"
        )
    return {label: readable(label) for label in sorted(learnt)}


def _voc_files(folder: Path, part: Part, optional: bool = False) -> dict[str, Path]:
    """Class -> its file of this part, in order; ValueError where there is none."""
    ending = _VOC_ENDINGS[part]
    files = {path.name.removesuffix(ending): path for path in folder.glob(f"?*{ending}")}
    if not files and not optional:
        raise ValueError(f"{folder} has no files CLASS{ending}, as in PASCAL VOC's ImageSets/Main")
    return dict(sorted(files.items()))


def _voc_images(root: Path, table: str, names: Mapping[str, str], part: Part) -> LabelledImages:
    folder = root / table
    columns = {label: _voc_rows(path) for label, path in _voc_files(folder, part).items()}
    rows = {name: row for row, name in enumerate(next(iter(columns.values())))}
    images = [below(root, f"JPEGImages/{name}.jpg", f"{folder}") for name in rows]
    truth = np.zeros((len(rows), len(names)), dtype=np.int8)
    for column, label in enumerate(names):
        if label not in columns:
            missing = f"{label}{_VOC_ENDINGS[part]}"
            raise ValueError(f"{folder} has no {missing}: every class wants a file of each part")
        if columns[label].keys() != rows.keys():
            raise ValueError(f"the files in {folder} list different images: {label!r}")
        truth[:, column] = [columns[label][name] for name in rows]
    return LabelledImages(images, truth, list(names.values()))


def _voc_rows(path: Path) -> dict[str, int]:
    """Image -> 1, 0 or -1."""
    rows = {}
    for number, line in enumerate(read_text_file(path).splitlines(), start=1):
        name, *rest = line.split() or [""]
        if rest not in (["1"], ["0"], ["-1"]):
            raise ValueError(f"{path} line {number} is not an image and 1, 0 or -1: {line!r}")
        if name in rows:
            raise ValueError(f"{path} line {number} has {name} once more: leave one line of it")
        rows[name] = int(rest[0])
    return rows


def _class_folders(root: Path) -> dict[str, Path]:
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return {path.name: path for path in sorted(folders) if not path.name.startswith(".")}


def class_shards(root: Path) -> list[Path]:
    """The tar shards in ``root``, or in ``root/test``, in order; none beside folders of classes."""
    places = (
        [root]
        if _class_folders(root).keys() - {"train", "valid", "test"}
        else [root, root / "test"]
    )
    return next((shards for place in places if (shards := sorted(place.glob("*.tar")))), [])


def class_names(root: Path) -> list[str]:
    """The names of the classes of shards, by number; empty where there is no `CLASS_NAMES`."""
    path = next((p for p in (root / CLASS_NAMES, root.parent / CLASS_NAMES) if p.is_file()), None)
    lines = [] if path is None else read_text_file(path).splitlines()
    return [line.strip() for line in lines if line.strip()]


def _members(shards: Sequence[Path]) -> Pairs:
    """The images of shards with the content of their ``.cls``; ValueError for samples that lack
    either, since an evaluation wants whole shards."""
    findings, pairs = Findings(), Pairs()
    for path in shards:
        with open(path, "rb") as file:
            for key, group in group_members(file, str(path), "cls", findings).items():
                label = read_member(file, group.text).decode("utf-8", "replace").strip()
                if group.image is None or not label:
                    findings.add("no_image" if label else "no_label", group.full_key(key))
                else:
                    pairs.append((StoredImage(path, f"{path.stem}/{key}", *group.image), label))
    if lacking := findings.without(["other_member"]).lines():
        raise ValueError(
            f"{shards[0].parent}: {'; '.join(lacking)}. An evaluation of classes wants shards in "
            "which every sample has a picture and its class, such as 1.jpg and 1.cls"
        )
    return pairs


def _images_in(root: Path) -> Pairs:
    """The images of a folder per class, or of shards; none where there is no such folder. What is
    not read is counted in the log."""
    if shards := class_shards(root):
        return _members(shards)
    findings, pairs = Findings(), Pairs()
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.suffix.lower() in SUFFIXES and path.is_file():
            findings.add("no_class", path.name)
    for label, folder in _class_folders(root).items():
        for path in sorted(folder.iterdir()):
            if reason := _why_not(path):
                findings.add(reason, f"{label}/{path.name}")
            else:
                pairs.append((path, label))
    for line in findings.lines():
        log.warning("%s: %s", root, line)
    return pairs


def _why_not(path: Path) -> str | None:
    """Why an entry in the folder of a class is no image, by a reason of `findings.REASONS`."""
    suffix = path.suffix.lower()
    if path.name.startswith("."):
        return "hidden"
    if path.is_dir():
        return "sub_folder"
    if suffix not in SUFFIXES:
        return "unsupported_extension" if suffix[1:] in PICTURE_SUFFIXES else "other_file"
    return None


def _table_rows(
    root: Path, table: str, part: Part | None = None, *, several: bool = False
) -> Pairs:
    """The rows of a table, or those of its ``part``; ValueError for an image that has several rows
    and may have one."""
    path = root / table
    if path.is_dir() and not several:
        raise ValueError(f"{path} is a folder: the files in it want metric=map_11_point")
    columns, parts = ("filepath", "label", *(["split"] if part else [])), get_args(Part)
    pairs: Pairs = []
    for line, (file, label, *split) in read_rows(path, columns, "table of labels"):
        if not file or not label.strip():
            raise ValueError(f"{line} has no filepath or no label: complete it")
        if split and split[0].strip() not in parts:
            splits = ", ".join(parts)
            raise ValueError(f"{line} has the split {split[0]!r}: wanted one of {splits}")
        if [word.strip() for word in split] in ([], [part]):
            pairs.append((below(root, file, line), label.strip()))
    times = Counter(image for image, _ in pairs)
    if not several and (twice := [image for image, count in times.items() if count > 1]):
        raise ValueError(
            f"{path} has {twice[0]} more than once: several labels of an image want "
            "metric=map_11_point"
        )
    return pairs


def _labelled(
    pairs: Pairs, names: Mapping[str, str], where: Path | str, several: bool
) -> LabelledImages:
    """Images from their labels; one with several labels has a pair for each of them."""
    if not pairs and not several:
        raise ValueError(f"{where} has no images")
    column = {label: number for number, label in enumerate(names)}
    if not several:
        labels = np.array([column[label] for _, label in pairs], dtype=np.int64)
        return LabelledImages([path for path, _ in pairs], labels, list(names.values()))
    rows = {path: row for row, path in enumerate(dict.fromkeys(path for path, _ in pairs))}
    truth = np.full((len(rows), len(names)), -1, dtype=np.int8)
    for path, label in pairs:
        truth[rows[path], column[label]] = 1
    return LabelledImages(list(rows), truth, list(names.values()))
