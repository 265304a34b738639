"""STL-digits: copies of one random MNIST digit on top of an STL-10 image (IFM, section 2).

The paper gives neither the number nor the places of the copies. Here a picture of 96 pixels is cut
into 3 x 3 cells of 32. In ``copies`` of these, drawn at random, the digit lies at a random place.
It is drawn in white, and is as opaque as MNIST's pixels are bright.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mclclip.data.datasets.cifar_mnist import random_digits, read_mnist
from mclclip.data.datasets.sources import Pixels, Sources, Splits, png_sample
from mclclip.data.datasets.stl10 import read_stl10
from mclclip.data.shard_writer import PackedSample

_CELLS, _CELL, _DIGIT = 3, 32, 28


def build(sources: Sources, seed: int, *, copies: int = 9) -> Splits:
    """Pastes digits of ``--source mnist=FOLDER`` on the labelled images of ``stl10=FOLDER``.

    Attributes are stl10 (name) and mnist (0 to 9). Train images get train digits, and test images
    test digits.
    """
    if not 1 <= copies <= _CELLS**2:
        raise ValueError(f"copies is {copies}: wanted 1 to {_CELLS**2}")
    stl10, mnist = sources.folder("stl10"), sources.folder("mnist")

    def samples(split: str) -> Iterator[PackedSample]:
        digits = random_digits(*read_mnist(mnist, split), seed)
        for number, (pixels, name) in enumerate(read_stl10(stl10, split)):
            digit, label = next(digits)
            pasted = paste(pixels, digit, copies, np.random.default_rng([seed, label, number]))
            yield png_sample(number, pasted, {"stl10": name, "mnist": label})

    return {split: samples(split) for split in ("train", "test")}


def paste(image: Pixels, digit: Pixels, copies: int, random: np.random.Generator) -> Pixels:
    """Pastes ``copies`` of a digit uint8 [28, 28] on an image uint8 [96, 96, 3]."""
    ink = np.zeros(image.shape[:2], np.float32)
    for cell in random.permutation(_CELLS**2)[:copies]:
        top, left = random.integers(0, _CELL - _DIGIT + 1, 2) + _CELL * np.array(
            divmod(int(cell), _CELLS)
        )
        ink[top : top + _DIGIT, left : left + _DIGIT] = digit / np.float32(255)
    covered = image * (1 - ink[..., None]) + 255 * ink[..., None]
    return np.asarray(np.rint(covered), np.uint8)
