"""CIFAR-10 (Krizhevsky, 2009): 32 pixels, 10 classes, 50,000 train and 10,000 test images."""

from __future__ import annotations

from collections.abc import Iterator

from mclclip.data.datasets.readers import read_cifar10
from mclclip.data.datasets.sources import Sources, Splits, png_sample
from mclclip.data.shard_writer import PackedSample


def build(sources: Sources, seed: int) -> Splits:
    """The images of ``--source cifar10=FOLDER`` as PNG; attribute class."""
    folder = sources.folder("cifar10")

    def samples(split: str) -> Iterator[PackedSample]:
        for number, (pixels, name) in enumerate(read_cifar10(folder, split)):
            yield png_sample(number, pixels, {"class": name})

    return {split: samples(split) for split in ("train", "test")}
