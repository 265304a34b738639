"""Loaders of images with classes: a folder per class, a table, PASCAL VOC's lists, ``train/`` and
``test/`` of folders. They import no torch, and raise the errors that ``datasets`` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mclclip.eval.datasets import SUFFIXES, read_rows
from mclclip.eval.metrics import IntArray
from mclclip.files import below


@dataclass(frozen=True)
class LabelledImages:
    """Images with their classes; ``labels`` [N] are rows of ``class_names`` [K]."""

    images: list[Path]
    labels: IntArray
    class_names: list[str]


@dataclass(frozen=True)
class SeveralLabels:
    """Images that each show any number of classes.

    ``truth`` int8 [N, K]: 1 where image n shows class k, -1 where it does not, and 0 where the data
    set does not judge it. ``class_names`` [K].
    """

    images: list[Path]
    truth: NDArray[np.int8]
    class_names: list[str]


def readable(label: str) -> str:
    """A label as words: underscores as spaces."""
    return label.replace("_", " ")


def labels_of(root: Path, table: str | None = None) -> list[str]:
    """The labels of a benchmark, sorted: its folders, with or without images, or those of the
    table ``root/table``, or of the files CLASS_test.txt where that is a folder (PASCAL VOC's).

    FileNotFoundError for a missing folder or table, ValueError where there is no class.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}: zero-shot evaluation needs images")
    if table and (root / table).is_dir():
        labels: Iterable[str] = _voc_files(root / table)
    elif table:
        labels = {label for _, label in _table_rows(root, table)}
    else:
        labels = _class_folders(root)
    if not labels:
        wanted = (
            "a row per image, such as 1.jpg,cat" if table else "a folder per class, such as cat/"
        )
        raise ValueError(f"{root / (table or '')} has no images: wanted {wanted}")
    return sorted(labels)


def read_labelled(root: Path, names: Mapping[str, str], table: str | None = None) -> LabelledImages:
    """A folder per class under ``root``, or the images of the table ``root/table``: a CSV (or .tsv)
    with the columns filepath, from ``root`` on, and label.

    ``names``: label -> class name, of every label at least; the classes are those of ``names``, in
    its order. ValueError where there is no image, and where an image has two labels.
    """
    if table and (root / table).is_dir():
        raise ValueError(f"{root / table} is a folder: the files in it want metric=map_11_point")
    pairs = _table_rows(root, table) if table else _images_in(root)
    times = Counter(path for path, _ in pairs)
    if twice := next((path for path, count in times.items() if count > 1), None):
        raise ValueError(
            f"{root / (table or '')} has {twice} more than once: several labels of an image want "
            "metric=map_11_point"
        )
    return _labelled(pairs, names, root / (table or ""))


def read_several_labels(root: Path, names: Mapping[str, str], table: str) -> SeveralLabels:
    """Images with several labels each, from ``root/table``.

    It is a CSV (or .tsv) with the columns filepath and label and a row for each label of an image;
    or PASCAL VOC's folder ``ImageSets/Main``, with a file CLASS_test.txt per class. Its lines are
    the name of an image in ``JPEGImages/`` and 1, -1, or 0 (too difficult: not judged).
    ``names``: label -> class name. ValueError for lines of another form.
    """
    if (root / table).is_dir():
        columns = {label: _voc_rows(path) for label, path in _voc_files(root / table).items()}
        rows = {name: row for row, name in enumerate(next(iter(columns.values())))}
        images = [below(root, f"JPEGImages/{name}.jpg", f"{root / table}") for name in rows]
        truth = np.zeros((len(rows), len(names)), dtype=np.int8)
        for column, label in enumerate(names):
            found = columns.get(label, dict.fromkeys(rows, -1))
            if found.keys() != rows.keys():
                raise ValueError(f"the files in {root / table} list different images: {label!r}")
            truth[:, column] = [found[name] for name in rows]
        return SeveralLabels(images, truth, list(names.values()))
    pairs = _table_rows(root, table)
    files = {path: row for row, path in enumerate(dict.fromkeys(path for path, _ in pairs))}
    truth = np.full((len(files), len(names)), -1, dtype=np.int8)
    columns_of = {label: column for column, label in enumerate(names)}
    for path, label in pairs:
        truth[files[path], columns_of[label]] = 1
    return SeveralLabels(list(files), truth, list(names.values()))


def _voc_files(folder: Path) -> dict[str, Path]:
    """Class -> file ``CLASS_test.txt``, in order; ValueError where there is none."""
    found = {path.name.removesuffix("_test.txt"): path for path in folder.glob("?*_test.txt")}
    if not found:
        raise ValueError(f"{folder} has no files CLASS_test.txt, as in PASCAL VOC's ImageSets/Main")
    return dict(sorted(found.items()))


def _voc_rows(path: Path) -> dict[str, int]:
    """Image -> 1, 0 or -1."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        name, *rest = line.split() or [""]
        if rest not in (["1"], ["0"], ["-1"]):
            raise ValueError(f"{path} line {number} is not an image and 1, 0 or -1: {line!r}")
        found[name] = int(rest[0])
    return found


def read_split(root: Path) -> tuple[LabelledImages, LabelledImages]:
    """``root/train`` and ``root/test``, each with a folder per class, under the same classes.

    The classes are those that have images to learn from. FileNotFoundError where a folder is
    missing; ValueError for fewer than two classes, or a class that only ``test`` has.
    """
    train, test = Path(root) / "train", Path(root) / "test"
    for folder in (train, test):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no folder {folder}: wanted train/ and test/ with a folder per class, "
                "such as train/cat/1.jpg"
            )
    known, asked = _images_in(train), _images_in(test)
    names = {label: readable(label) for label in sorted({label for _, label in known})}
    if len(names) < 2:
        raise ValueError(f"{train} has images of {len(names)} classes: wanted at least 2 folders")
    if strangers := sorted({label for _, label in asked} - names.keys()):
        raise ValueError(
            f"{test} has {len(strangers)} classes that {train} lacks, such as {strangers[0]!r}"
        )
    return _labelled(known, names, train), _labelled(asked, names, test)


def _class_folders(root: Path) -> dict[str, Path]:
    folders = [path for path in Path(root).iterdir() if path.is_dir()]
    return {path.name: path for path in sorted(folders) if not path.name.startswith(".")}


def _images_in(root: Path) -> list[tuple[Path, str]]:
    return [
        (path, label)
        for label, folder in _class_folders(root).items()
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in SUFFIXES
    ]


def _table_rows(root: Path, table: str) -> list[tuple[Path, str]]:
    found = []
    for line, (file, label) in read_rows(root / table, ("filepath", "label"), "table of labels"):
        if not file or not label.strip():
            raise ValueError(
                f"line {line} of {root / table} has no filepath or no label: complete it"
            )
        found.append((below(root, file, f"{root / table} line {line}"), label.strip()))
    return found


def _labelled(
    pairs: Sequence[tuple[Path, str]], names: Mapping[str, str], where: Path
) -> LabelledImages:
    if not pairs:
        raise ValueError(f"{where} has no images")
    row = {label: number for number, label in enumerate(names)}
    labels = np.array([row[label] for _, label in pairs], dtype=np.int64)
    return LabelledImages([path for path, _ in pairs], labels, list(names.values()))
