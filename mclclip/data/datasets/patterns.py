"""The demo's rendered pictures with captions (`data.patterns`), and minimal pairs of them."""

from __future__ import annotations

from collections.abc import Iterator

from mclclip.data import patterns
from mclclip.data.datasets.sources import Sources, Splits, jpeg, minimal_pairs
from mclclip.data.shard_writer import PackedSample


def build(
    sources: Sources, seed: int, *, num_samples: int = 12_000, num_pairs: int = 200
) -> Splits:
    """Renders pictures of 32 pixels: ``shards`` for training, and in ``pairs`` ``num_pairs``
    minimal pairs of each attribute, in MMVP-VLM's layout."""

    def statements() -> Iterator[tuple[str, bytes, str]]:
        for attribute in patterns.ATTRIBUTES:
            for pair in patterns.minimal_pairs(attribute, num_pairs, seed):
                for pattern in pair:
                    yield attribute, jpeg(pattern.image), pattern.caption

    return {"shards": draw_samples(num_samples, seed), "pairs": minimal_pairs(statements())}


def draw_samples(count: int, seed: int) -> Iterator[PackedSample]:
    """Yields the first ``count`` training pictures of a seed."""
    for number, pattern in enumerate(patterns.patterns(count, seed)):
        image, about = jpeg(pattern.image), dict(pattern.values)
        yield PackedSample(f"{number:09d}", image, "jpg", [pattern.caption], about)
