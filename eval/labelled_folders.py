"""Images with classes: a folder per class, a table, or ``train/`` and ``test/`` of folders."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mclclip.eval.metrics import IntArray

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class LabelledImages:
    """Images with their classes; ``labels`` [N] are rows of ``class_names`` [K]."""

    images: list[Path]
    labels: IntArray
    class_names: list[str]


def readable(label: str) -> str:
    """A label as words: underscores as spaces."""
    return label.replace("_", " ")


def folder_labels(root: Path) -> list[str]:
    """The names of the class folders under ``root``, sorted, with or without images."""
    return list(_class_folders(root))


def table_labels(path: Path) -> list[str]:
    """The labels of a table of images (``read_table``), sorted."""
    return sorted({label for _, label in _table_rows(path)})


def read_folders(root: Path, names: Mapping[str, str]) -> LabelledImages:
    """A folder per class under ``root``; ``names``: label -> class name, of every label at least.

    The classes are those of ``names``, in its order. ValueError where there is no image.
    """
    return _labelled(_images_in(_class_folders(root)), names, str(root))


def _class_folders(root: Path) -> dict[str, Path]:
    return {
        path.name: path
        for path in sorted(Path(root).iterdir())
        if path.is_dir() and not path.name.startswith(".")
    }


def _images_in(folders: dict[str, Path]) -> list[tuple[Path, str]]:
    return [
        (path, label)
        for label, folder in folders.items()
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in SUFFIXES
    ]


def read_table(path: Path, root: Path, names: Mapping[str, str]) -> LabelledImages:
    """A CSV (or .tsv) with the columns filepath (below ``root``) and label; ``names`` as above."""
    pairs = [(Path(root) / file, label) for file, label in _table_rows(path)]
    return _labelled(pairs, names, str(path))


def _table_rows(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise FileNotFoundError(f"no table of labels at {path}")
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        if missing := [n for n in ("filepath", "label") if n not in (rows.fieldnames or [])]:
            raise ValueError(f"{path} has the columns {rows.fieldnames}, missing {missing}")
        found = [(row["filepath"], (row["label"] or "").strip()) for row in rows]
    if empty := [number for number, row in enumerate(found, 2) if not all(row)]:
        raise ValueError(f"line {empty[0]} of {path} has no filepath or no label: complete it")
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
                f"no folder {folder}: wanted train/ and test/ with a folder per class"
            )
    known = _images_in(_class_folders(train))
    names = {label: readable(label) for label in sorted({label for _, label in known})}
    if len(names) < 2:
        raise ValueError(f"{train} has images of {len(names)} classes: wanted at least 2 folders")
    asked = _images_in(_class_folders(test))
    if strangers := sorted({label for _, label in asked} - names.keys()):
        raise ValueError(
            f"{test} has {len(strangers)} classes that {train} lacks, such as {strangers[0]!r}"
        )
    return _labelled(known, names, str(train)), _labelled(asked, names, str(test))


def _labelled(
    pairs: Sequence[tuple[Path, str]], names: Mapping[str, str], where: str
) -> LabelledImages:
    if not pairs:
        raise ValueError(f"{where} has no images")
    row = {label: number for number, label in enumerate(names)}
    labels = np.array([row[label] for _, label in pairs], dtype=np.int64)
    return LabelledImages([path for path, _ in pairs], labels, list(names.values()))
