"""STL-10 (Coates et al., 2011): 96 pixels, 10 classes, and 100,000 images without a class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mclclip.data.datasets.sources import Pixels, Sources, Splits, png_sample
from mclclip.data.shard_writer import PackedSample

CLASSES = "airplane bird car cat deer dog horse monkey ship truck".split()


def build(sources: Sources, seed: int) -> Splits:
    """Reads the images of ``--source stl10=FOLDER`` and makes PNGs.

    Attribute class; the split ``unlabeled`` has none.
    """
    folder = sources.folder("stl10")

    def samples(split: str) -> Iterator[PackedSample]:
        for number, (pixels, name) in enumerate(read_stl10(folder, split)):
            yield png_sample(number, pixels, {} if name is None else {"class": name})

    return {split: samples(split) for split in ("train", "test", "unlabeled")}


def read_stl10(folder: Path, split: str) -> Iterator[tuple[Pixels, str | None]]:
    """Yields pixels uint8 [96, 96, 3] and class name of every image of a split.

    The splits are ``train``, ``test`` and ``unlabeled``, whose images have no class. They are in
    ``stl10_binary`` (in ``folder``, or ``folder`` itself); ``unlabeled_X.bin`` may be absent.
    Raises FileNotFoundError for other missing files, ValueError for files of a wrong size.
    """
    inner = folder / "stl10_binary"
    folder = inner if inner.is_dir() else folder
    images = folder / f"{split}_X.bin"
    if not images.is_file():
        if split == "unlabeled":
            return
        raise FileNotFoundError(f"no {images}: wanted the files of stl10_binary")
    each = 3 * 96 * 96
    number, rest = divmod(images.stat().st_size, each)
    if rest or not number:
        raise ValueError(f"{images} has {images.stat().st_size} bytes: wanted {each} per image")
    labels = None
    if split != "unlabeled":
        file = folder / f"{split}_y.bin"
        if not file.is_file():
            raise FileNotFoundError(f"no {file}: wanted the files of stl10_binary")
        labels = np.fromfile(file, np.uint8)
        fitting = int(np.isin(labels, range(1, 11)).sum())
        if not len(labels) == fitting == number:
            raise ValueError(
                f"{file} has {len(labels)} labels, of which {fitting} are 1 to 10: wanted that of "
                f"all {number} images of {images.name}"
            )
    pixels = np.memmap(images, np.uint8, mode="r", shape=(number, 3, 96, 96))
    for row in range(number):  # the file stores pixels column by column
        name = None if labels is None else CLASSES[int(labels[row]) - 1]
        yield np.asarray(pixels[row].transpose(2, 1, 0)), name
