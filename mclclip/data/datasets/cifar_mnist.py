"""CIFAR-MNIST: an image of CIFAR-10 with a digit of MNIST in a fourth channel.

MCL uses it in section 5, after Chen et al., "Intriguing properties of contrastive losses" (2021).
Image and digit are paired at random, so that their classes are independent features. The digit has
a border of two empty pixels on each side (28 -> 32); the papers do not say how they scale it.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mclclip.data.datasets.cifar10 import read_cifar10
from mclclip.data.datasets.sources import (
    Pixels,
    Sources,
    Splits,
    array_sample,
    in_random_order,
)
from mclclip.data.shard_writer import PackedSample

_MAX_IDX_BYTES = 1 << 30
_DIGITS_FOR_TRAINING = 8_000  # of the 10,000 test digits, if the 60,000 others are absent


def build(sources: Sources, seed: int, *, digits: int | None = None) -> Splits:
    """Makes arrays [32, 32, 4] of ``--source cifar10=FOLDER`` and ``mnist=FOLDER``.

    Attributes are cifar (name) and mnist (0 to 9). Images of CIFAR's train part get digits of
    MNIST's train part, and test images test digits. All digits are used in a random order, then all
    again in another order, and so on.

    ``digits`` uses only so many digits, of the train part, for the images of both splits. A probe
    of the digit then says nothing about digits that were not trained on. Raises ValueError if it is
    0, or more than there are.
    """
    cifar, mnist = sources.folder("cifar10"), sources.folder("mnist")

    def samples(split: str) -> Iterator[PackedSample]:
        shapes, labels = read_mnist(mnist, split if digits is None else "train")
        if digits is not None:
            if not 1 <= digits <= len(shapes):
                raise ValueError(
                    f"--digits {digits}: wanted 1 to {len(shapes)} of those in {mnist}"
                )
            some = np.random.default_rng([seed, digits]).permutation(len(shapes))[:digits]
            shapes, labels = shapes[some], labels[some]
        pairs = random_digits(shapes, labels, seed)
        images = in_random_order(read_cifar10(cifar, split), seed)
        for number, (pixels, name) in enumerate(images):
            digit, label = next(pairs)
            four = np.dstack([pixels, np.pad(digit, 2)])
            yield array_sample(number, four, {"cifar": name, "mnist": label})

    return {split: samples(split) for split in ("train", "test")}


def random_digits(digits: Pixels, labels: Pixels, seed: int) -> Iterator[tuple[Pixels, int]]:
    """Yields digits and labels for ever: all in a random order, then all in another order, ..."""
    random = np.random.default_rng([seed, len(digits)])
    while True:
        for row in random.permutation(len(digits)):
            yield digits[row], int(labels[row])


def read_mnist(folder: Path, split: str) -> tuple[Pixels, Pixels]:
    """Reads digits uint8 [n, 28, 28] and their labels uint8 [n] of ``train`` or ``test``.

    They are in idx files, compressed or not, in ``folder/MNIST/raw``, ``folder/raw`` or ``folder``.
    If there are only the 10,000 test digits, the first 8,000 are for training and the others for
    testing (in proportion if there are fewer).
    """
    digits, labels = (_idx(folder, stem) for stem in ("t10k-images-idx3", "t10k-labels-idx1"))
    whole = _idx(folder, "train-images-idx3")
    if whole is not None and split == "train":
        digits, labels = whole, _idx(folder, "train-labels-idx1")
    if digits is None or labels is None:
        raise FileNotFoundError(
            f"no {split} digits of MNIST in {folder}: wanted t10k-images-idx3-ubyte and "
            "t10k-labels-idx1-ubyte (or train-*), with .gz or without, there or in MNIST/raw"
        )
    if digits.shape != (len(labels), 28, 28) or labels.shape != (len(digits),):
        raise ValueError(
            f"MNIST in {folder} has digits {digits.shape} and labels {labels.shape}: wanted "
            "[n, 28, 28] and [n]"
        )
    if whole is None:
        cut = len(digits) * _DIGITS_FOR_TRAINING // 10_000
        part = slice(cut) if split == "train" else slice(cut, None)
        digits, labels = digits[part], labels[part]
    if not len(digits) or labels.max() > 9:
        fault = f"a label {labels.max()}" if len(digits) else f"no {split} digit"
        raise ValueError(f"MNIST in {folder} has {fault}: wanted digits with labels from 0 to 9")
    return digits, labels


def _idx(folder: Path, stem: str) -> Pixels | None:
    for base in (folder / "MNIST" / "raw", folder / "raw", folder):
        for ending, opened in (("-ubyte", open), ("-ubyte.gz", gzip.open)):
            path = base / (stem + ending)
            if path.is_file():
                try:
                    with opened(path, "rb") as file:
                        return _read_idx(file)  # type: ignore[arg-type]
                except (OSError, EOFError, struct.error, ValueError) as error:
                    raise ValueError(f"{path} is no idx file: {error}") from error
    return None


def _read_idx(file: BinaryIO) -> Pixels:
    """Reads an idx file. It has the bytes 0, 0, 8, the number of dimensions, sizes and values."""
    zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
    if zeros or kind != 8 or not 1 <= dimensions <= 3:
        raise ValueError("its first bytes are not those of unsigned bytes in 1 to 3 dimensions")
    shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
    num_values = int(np.prod(shape, dtype=object))
    data = file.read(num_values + 1) if num_values <= _MAX_IDX_BYTES else b""
    if len(data) != num_values:
        raise ValueError(f"its header tells of {num_values:,} values, and it does not end there")
    return np.frombuffer(data, np.uint8).reshape(shape)
