"""CIFAR pairs: two images of CIFAR-10 side by side, a picture that holds two objects.

Pictures with several objects are why MLCD gives a sample several labels (section 1). The two images
are drawn independently of each other. An encoder that takes the mean over all places need not know
which is left: a probe of both classes without their order tells what it sees.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mclclip.data.datasets.cifar10 import read_cifar10
from mclclip.data.datasets.sources import Pixels, Sources, Splits, in_random_order, png_sample
from mclclip.data.shard_writer import PackedSample

_GREY = 128


def build(sources: Sources, seed: int) -> Splits:
    """Reads the images of ``--source cifar10=FOLDER`` and makes PNGs of 64 x 64, each image once.

    Attributes are left and right, the classes of the two images, and pair, which names both in the
    order of the alphabet. The images lie in the middle of a grey square, since a CLIP's centre crop
    would cut a picture that is twice as wide as high.
    """
    folder = sources.folder("cifar10")

    def samples(split: str) -> Iterator[PackedSample]:
        images = in_random_order(read_cifar10(folder, split), seed)
        pairs = zip(images, images, strict=False)  # of an odd number the last one is left out
        for number, ((left, left_class), (right, right_class)) in enumerate(pairs):
            pair = " and ".join(sorted([left_class, right_class]))
            attributes = {"left": left_class, "right": right_class, "pair": pair}
            yield png_sample(number, side_by_side(left, right), attributes)

    return {split: samples(split) for split in ("train", "test")}


def side_by_side(left: Pixels, right: Pixels) -> Pixels:
    """Makes a picture [2 s, 2 s, 3] of two pictures [s, s, 3], with grey above and below."""
    both = np.concatenate([left, right], axis=1)
    grey = np.full((len(left) // 2, *both.shape[1:]), _GREY, np.uint8)
    return np.concatenate([grey, both, grey])
