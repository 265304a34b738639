"""The demo's rendered pictures (`data.patterns`) without captions, for encoders of images alone.

They have seven independent attributes. The background fills the picture, and an encoder trained by
SimCLR recognizes count and shape worse than an untrained network (docs/pages/evidence/remedies.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from mclclip.data.datasets.sources import Sources, Splits, png_sample
from mclclip.data.patterns import patterns
from mclclip.data.shard_writer import PackedSample


def build(sources: Sources, seed: int, *, num_train: int = 12_000, num_test: int = 3_000) -> Splits:
    """Renders pictures of 32 pixels; attributes background, colour, position, texture, size, count
    and shape, all independent in both splits.

    Raises ValueError for fewer than one picture in a split.
    """
    if min(num_train, num_test) < 1:
        raise ValueError(f"num_train is {num_train} and num_test {num_test}: wanted at least 1")

    def samples(number: int, key: int) -> Iterator[PackedSample]:
        for place, pattern in enumerate(patterns(number, key)):
            yield png_sample(place, pattern.image, pattern.values)

    # Each split has its own key, so that no picture is in both.
    return {"train": samples(num_train, 2 * seed), "test": samples(num_test, 2 * seed + 1)}
