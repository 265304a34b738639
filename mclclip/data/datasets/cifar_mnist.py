"""CIFAR-MNIST: four channels, an image of CIFAR-10 and a digit of MNIST in the fourth.

MCL section 5 after Chen et al., "Intriguing properties of contrastive losses" (2021): the two are
put together at random, so that the classes are independent features. The digit has a border of two
empty pixels on each side (28 -> 32); the papers do not say how they scale it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mclclip.data.datasets.readers import read_cifar10, read_mnist
from mclclip.data.datasets.sources import (
    Pixels,
    Sources,
    Splits,
    array_sample,
    in_random_order,
)
from mclclip.data.shard_writer import PackedSample


def build(sources: Sources, seed: int) -> Splits:
    """Arrays [32, 32, 4] from ``--source cifar10=FOLDER`` and ``mnist=FOLDER``; attributes cifar
    (name) and mnist (0 to 9).

    Images of CIFAR's train part get digits of MNIST's train part, test of test. Every digit is used
    equally often, give or take one, each time in another random order.
    """
    cifar, mnist = sources.folder("cifar10"), sources.folder("mnist")

    def samples(split: str) -> Iterator[PackedSample]:
        digits = random_digits(*read_mnist(mnist, split), seed)
        images = in_random_order(read_cifar10(cifar, split), seed)
        for number, (pixels, name) in enumerate(images):
            digit, label = next(digits)
            four = np.dstack([pixels, np.pad(digit, 2)])
            yield array_sample(number, four, {"cifar": name, "mnist": label})

    return {split: samples(split) for split in ("train", "test")}


def random_digits(digits: Pixels, labels: Pixels, seed: int) -> Iterator[tuple[Pixels, int]]:
    """Yields digits and labels for ever: all in a random order, then all in another order, ..."""
    random = np.random.default_rng([seed, len(digits)])
    while True:
        for row in random.permutation(len(digits)):
            yield digits[row], int(labels[row])
