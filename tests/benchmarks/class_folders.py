"""Small labelled sets as ``train/<class>/`` and ``test/<class>/``, for linear probe and kNN.

Each function fills a new folder ``out`` and returns it; ``out/train.csv`` (filepath, title: the
class's name) is what ``mclclip pack`` reads to train on the same pictures::

    pack.pack(out, shards, captions=out / "train.csv")

Other images can be put aside as ``teacher/<class>/`` and ``teacher.csv``.
"""

from __future__ import annotations

import csv
import shutil
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from mclclip.data import patterns

T = TypeVar("T")

CIFAR10_TARS = {"train": "cifar10_train_50000.tar.gz", "test": "cifar10_test_10000.tar.gz"}


def cifar10(
    data: Path,
    out: Path,
    per_class_train: int = 5000,
    per_class_test: int = 1000,
    per_class_teacher: int = 0,
) -> Path:
    """The first images of each class of CIFAR-10 from ``data/cifar10``, its own train and test.

    The teacher's are the next ones of its train images.
    """
    for tar_of, parts in (
        ("train", {"train": per_class_train, "teacher": per_class_teacher}),
        ("test", {"test": per_class_test}),
    ):
        with tarfile.open(data / "cifar10" / CIFAR10_TARS[tar_of]) as tar:
            classes = defaultdict(list)
            for member in sorted(tar.getmembers(), key=lambda member: member.name):
                if member.isfile():
                    classes[member.name.split("/")[-2]].append(member)
            chosen = [pair for label in classes for pair in _share_out(classes[label], parts)]
            # In the order of the file: gzip cannot go back.
            for part, member in sorted(chosen, key=lambda pair: pair[1].offset):
                content = tar.extractfile(member)
                assert content is not None
                target = out / part / Path(*member.name.split("/")[-2:])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    return _with_table(out)


def caltech101(
    data: Path,
    out: Path,
    per_class_train: int = 10,
    per_class_test: int = 5,
    per_class_teacher: int = 0,
) -> Path:
    """Images of each of 101 classes from ``data/caltech101``: the first to train, then to test."""
    parts = {"train": per_class_train, "test": per_class_test, "teacher": per_class_teacher}
    for folder in sorted((data / "caltech101" / "101_ObjectCategories").iterdir()):
        for part, image in _share_out(sorted(folder.glob("*.jpg")), parts):
            target = out / part / folder.name / image.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(image, target)
    return _with_table(out)


def rendered(
    out: Path,
    per_class_train: int = 100,
    per_class_test: int = 50,
    per_class_teacher: int = 0,
    attribute: str = "colour",
    seed: int = 0,
) -> Path:
    """Rendered pictures of 32 pixels whose class is one attribute; the others are random."""
    values = patterns.ATTRIBUTES[attribute]
    parts = {"train": per_class_train, "test": per_class_test, "teacher": per_class_teacher}
    for label, value in enumerate(values):
        for part, number in _share_out(range(sum(parts.values())), parts):
            rng = np.random.default_rng([seed, label, number])
            picture = patterns.render(patterns.draw_values(rng) | {attribute: value}, rng)
            target = out / part / value / f"{number:05d}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(target)
    return _with_table(out)


def _share_out(items: Sequence[T], parts: Mapping[str, int]) -> Iterator[tuple[str, T]]:
    """(part, item): the first items to the first part, and so on."""
    wanted = sum(parts.values())
    if len(items) < wanted:
        raise ValueError(f"a class has {len(items)} images, wanted {wanted}: ask for fewer")
    names = (part for part, count in parts.items() for _ in range(count))
    return zip(names, items, strict=False)


def _with_table(out: Path) -> Path:
    for part in ("train", "teacher"):
        if not (out / part).is_dir():
            continue
        with open(out / f"{part}.csv", "x", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("filepath", "title"))
            for image in sorted((out / part).glob("*/*")):
                rows.writerow((image.relative_to(out), image.parent.name.replace("_", " ")))
    return out
