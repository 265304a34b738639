"""Small labelled sets as ``train/<class>/`` and ``test/<class>/``, for linear probe and kNN.

Each function fills a new folder ``out`` and returns it; ``out/train.csv`` (filepath, title: the
class's name) is what ``mclclip pack`` reads to train on the same pictures::

    pack.pack(out / "train.csv", out, shards)
"""

from __future__ import annotations

import csv
import shutil
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from mclclip.data import patterns

T = TypeVar("T")

CIFAR10_TARS = {"train": "cifar10_train_50000.tar.gz", "test": "cifar10_test_10000.tar.gz"}


def cifar10(data: Path, out: Path, per_class_train: int = 5000, per_class_test: int = 1000) -> Path:
    """The first images of each class of CIFAR-10 from ``data/cifar10``, its own train and test."""
    for part, count in (("train", per_class_train), ("test", per_class_test)):
        with tarfile.open(data / "cifar10" / CIFAR10_TARS[part]) as tar:
            classes = defaultdict(list)
            for member in sorted(tar.getmembers(), key=lambda member: member.name):
                if member.isfile():
                    classes[member.name.split("/")[-2]].append(member)
            first = [member for label in classes for member in _first(classes[label], count)]
            # In the order of the file: gzip cannot go back.
            for member in sorted(first, key=lambda member: member.offset):
                content = tar.extractfile(member)
                assert content is not None
                target = out / part / Path(*member.name.split("/")[-2:])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    return _with_table(out)


def caltech101(data: Path, out: Path, per_class_train: int = 10, per_class_test: int = 5) -> Path:
    """Images of each of 101 classes from ``data/caltech101``: the first to train, then to test."""
    for folder in sorted((data / "caltech101" / "101_ObjectCategories").iterdir()):
        images = _first(sorted(folder.glob("*.jpg")), per_class_train + per_class_test)
        for number, image in enumerate(images):
            part = "train" if number < per_class_train else "test"
            target = out / part / folder.name / image.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(image, target)
    return _with_table(out)


def rendered(
    out: Path,
    per_class_train: int = 100,
    per_class_test: int = 50,
    attribute: str = "colour",
    seed: int = 0,
) -> Path:
    """Rendered pictures of 32 pixels whose class is one attribute; the others are random."""
    values = patterns.ATTRIBUTES[attribute]
    for label, value in enumerate(values):
        for number in range(per_class_train + per_class_test):
            rng = np.random.default_rng([seed, label, number])
            picture = patterns.render(patterns.draw_values(rng) | {attribute: value}, rng)
            part = "train" if number < per_class_train else "test"
            target = out / part / value / f"{number:05d}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(target)
    return _with_table(out)


def _first(items: list[T], count: int) -> list[T]:
    if len(items) < count:
        raise ValueError(f"a class has {len(items)} images, wanted {count}: ask for fewer")
    return items[:count]


def _with_table(out: Path) -> Path:
    with open(out / "train.csv", "x", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("filepath", "title"))
        for image in sorted((out / "train").glob("*/*")):
            rows.writerow((image.relative_to(out), image.parent.name.replace("_", " ")))
    return out
