"""STL-10 (Coates et al., 2011): 96 pixels, 10 classes, and 100,000 images without a class."""

from __future__ import annotations

from collections.abc import Iterator

from mclclip.data.datasets.readers import read_stl10
from mclclip.data.datasets.sources import Sources, Splits, png_sample
from mclclip.data.shard_writer import PackedSample


def build(sources: Sources, seed: int) -> Splits:
    """The images of ``--source stl10=FOLDER`` as PNG; attribute class, which those of the split
    ``unlabeled`` lack."""
    folder = sources.folder("stl10")

    def samples(split: str) -> Iterator[PackedSample]:
        for number, (pixels, name) in enumerate(read_stl10(folder, split)):
            yield png_sample(number, pixels, {} if name is None else {"class": name})

    return {split: samples(split) for split in ("train", "test", "unlabeled")}
