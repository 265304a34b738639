"""Images with classes: a folder per class, a table, or ``train/`` and ``test/`` of folders."""

from __future__ import annotations

import csv
from collections.abc import Sequence
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


def read_classes(path: Path) -> dict[str, str]:
    """A file of classes, one a line: ``LABEL`` or ``LABEL<TAB>class name``; label -> name.

    Without a name the label is it, underscores as spaces. ValueError for a label that stands twice.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file of classes at {path}")
    names: dict[str, str] = {}
    for line in Path(path).read_text(encoding="utf-8-sig").splitlines():
        label, tab, name = line.strip().partition("\t")
        if not label:
            continue
        if label in names:
            raise ValueError(f"{path} names the class {label!r} twice")
        names[label] = name.strip() if tab else _readable(label)
    return names


def _readable(label: str) -> str:
    return label.replace("_", " ")


def read_folders(root: Path, classes: Path | None = None) -> LabelledImages:
    """A folder per class under ``root``; names from the folders or from a file of classes."""
    folders = _class_folders(root)
    names = read_classes(classes) if classes else {label: _readable(label) for label in folders}
    return _labelled(_images_in(folders), names, str(root))


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


def read_table(path: Path, root: Path, classes: Path | None = None) -> LabelledImages:
    """A CSV (or .tsv) with the columns filepath (below ``root``) and label."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        if missing := [n for n in ("filepath", "label") if n not in (rows.fieldnames or [])]:
            raise ValueError(f"{path} has the columns {rows.fieldnames}, missing {missing}")
        pairs = [(Path(root) / row["filepath"], row["label"].strip()) for row in rows]
    labels = sorted({label for _, label in pairs})
    names = read_classes(classes) if classes else {label: _readable(label) for label in labels}
    return _labelled(pairs, names, str(path))


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
    names = {label: _readable(label) for label in sorted({label for _, label in known})}
    if len(names) < 2:
        raise ValueError(f"{train} has images of {len(names)} classes: wanted at least 2 folders")
    asked = _images_in(_class_folders(test))
    return _labelled(known, names, str(train)), _labelled(asked, names, str(test), f"{train} lacks")


def _labelled(
    pairs: Sequence[tuple[Path, str]],
    names: dict[str, str],
    where: str,
    stranger: str = "the file of classes does not name",
) -> LabelledImages:
    if not pairs:
        raise ValueError(f"{where} has no images")
    if strangers := sorted({label for _, label in pairs} - names.keys()):
        raise ValueError(
            f"{where} has {len(strangers)} classes that {stranger}, such as {strangers[0]!r}"
        )
    row = {label: number for number, label in enumerate(names)}
    labels = np.array([row[label] for _, label in pairs], dtype=np.int64)
    return LabelledImages([path for path, _ in pairs], labels, list(names.values()))
