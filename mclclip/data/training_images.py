"""Counts the images of a benchmark on which a run is trained, since they make its result too good.

An image counts if its bytes are those of a sample that a training of the run draws, or become these
where ``mclclip pack`` stores large pictures smaller. The index has the size of every image, so that
only training images of an equal size are read: those of the rarest sizes, up to ``MOST_READ``. For
other sizes (all arrays have the same) only samples of an equal key are compared. So a benchmark
made of a training source, or of a copy of its shards, is always found; a few images of millions,
with other keys, may be missed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mclclip.data.decode import MAX_IMAGE_PIXELS, DecodeError, shrink
from mclclip.data.labels import SampleWeights
from mclclip.data.options import DataConfig, PlanConfig
from mclclip.data.sample_index import KIND, SampleIndex
from mclclip.data.shard_reader import ShardReader
from mclclip.run.artifacts import HasRunDir, RunPaths, is_finished, read_manifest
from mclclip.util.files import digest_keys

log = logging.getLogger("mclclip")

Integers = npt.NDArray[np.int64]
MOST_READ = 4096
"""Most training images that are read for one benchmark."""
_TOGETHER = 256  # images that are read in parallel
_counts: dict[
    str, int
] = {}  # the results of `TrainingImages.count`, by the digest of its arguments


class Readable(Protocol):
    """An image file, or a part of another file. ``str()`` returns its name."""

    def read_bytes(self) -> bytes:
        """Reads its bytes; OSError if that fails."""
        ...


class Trained(HasRunDir, Protocol):
    """A run's configuration, as far as it is read here."""

    @property
    def data(self) -> DataConfig:
        """Options of the data."""

    @property
    def trainings(self) -> Mapping[str, Any]:
        """The options of each training, by its name ('base', 'train')."""


@dataclass(frozen=True)
class TrainingImages:
    """The images that the trainings of a run draw.

    directory  of the index
    plans      the plan of each training, by its name ('base', 'train')
    """

    directory: Path
    plans: Mapping[str, PlanConfig]
    options: DataConfig = DataConfig()

    @classmethod
    def of(cls, config: Trained) -> TrainingImages | None:
        """Returns the images of a run; None if it trains nothing or has no index yet."""
        directory = RunPaths.of(config).index
        if not config.trainings or not is_finished(directory):
            return None
        plans = {name: training.plan for name, training in config.trainings.items()}
        return cls(directory, plans, config.data)

    @cached_property
    def _index(self) -> SampleIndex:
        return SampleIndex.open(self.directory)

    def count(self, images: Sequence[Readable]) -> int:
        """Counts the ``images`` that a training draws; 0 and a warning if none can be read.

        The result is kept in memory for the next encoder. Raises ValueError for weights that do not
        fit the index.
        """
        of_index = read_manifest(self.directory, KIND).digest
        weights = {name: source.weight for name, source in self.options.sources.items()}
        name = of_index + str(self.plans) + str(weights) + digest_keys(map(str, images))
        if name not in _counts:
            try:
                _counts[name] = self._count(images)
            except OSError as error:
                log.warning("whether images of a benchmark are trained on is not known: %s", error)
                _counts[name] = 0
        return _counts[name]

    def _count(self, images: Sequence[Readable]) -> int:
        index = self._index
        forms = [(number, _size(image), b"") for number, image in enumerate(images)]
        forms += self._packed_forms(images)
        keys = [getattr(images[n], "key", None) or path_of(images[n]).stem for n, *_ in forms]
        sizes = np.array([size for _, size, _ in forms], np.int64)
        rows = self._candidates(keys, sizes)
        fits = np.isin(sizes, index.image_size[rows])
        compared = [form for form, has_size in zip(forms, fits, strict=True) if has_size]
        digests = [(n, digest or _digest(images[n].read_bytes())) for n, _, digest in compared]
        reader = ShardReader([s.stored for s in index.shards], self.options)
        columns = (index.shard_of[rows], index.image_offset[rows], index.image_size[rows])
        ranges = list(zip(*(column.tolist() for column in columns), strict=True))
        trained = set()
        for start in range(0, len(ranges), _TOGETHER):
            some = ranges[start : start + _TOGETHER]
            reader.prefetch(some)
            trained |= {_digest(reader.read(*stored)) for stored in some}
        return len({number for number, digest in digests if digest in trained})

    def _packed_forms(self, images: Sequence[Readable]) -> Iterator[tuple[int, int, bytes]]:
        """Yields number, size and digest of each image that ``mclclip pack`` would have stored
        smaller, in this form."""
        folders = {f for shard in self._index.shards for f in [*Path(shard.path).parents][:2]}
        sizes = set[int]()
        for folder in folders:
            with suppress(ValueError, OSError):  # a manifest.json of another program
                packed = read_manifest(folder, "shards")
                sizes |= {packed.config["size"]} - {0}
        for (number, image), side in product(enumerate(images), sizes):
            with suppress(DecodeError):
                if small := shrink(image.read_bytes(), MAX_IMAGE_PIXELS, side):
                    yield number, len(small), _digest(small)

    def _candidates(self, keys: Sequence[str], sizes: Integers) -> Integers:
        """Returns the sorted rows of the training images that are compared with images of these
        ``keys`` and ``sizes``."""
        of_all = self._index.image_size
        rows = np.flatnonzero(np.isin(of_all, sizes)).astype(np.int64)
        drawn = np.zeros(len(rows), bool)  # True if some training draws the row
        for name, plan in self.plans.items():
            weights = SampleWeights.open(self._index, self.options, plan, f"{name}.plan")
            drawn |= True if weights is None else weights.units(rows) > 0
        rows = rows[drawn]
        different, number, counts = np.unique(of_all[rows], return_inverse=True, return_counts=True)
        order = np.argsort(counts, kind="stable")
        rare = np.zeros(len(different), bool)
        rare[order[np.cumsum(counts[order]) <= MOST_READ]] = True
        frequent = rows[~rare[number]]
        # Of frequent sizes, samples of an equal key are compared: a file's name without its suffix.
        is_frequent = np.isin(sizes, different[~rare])
        others = {key for key, is_one in zip(keys, is_frequent, strict=True) if is_one}
        same = [key.partition("/")[2] in others for key in self._index.keys(frequent)]
        frequent = frequent[np.array(same, bool)][: MOST_READ - int(counts[rare].sum())]
        return np.sort(np.concatenate([rows[rare[number]], frequent]))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def path_of(image: Readable) -> Path:
    """Returns the file of an image, or the file that it is a part of."""
    return Path(str(getattr(image, "path", image)))


def _size(image: Readable) -> int:
    """Returns the number of bytes of an image, or of the whole picture that it is a part of."""
    size = getattr(image, "size", None)
    return size if isinstance(size, int) else path_of(image).stat().st_size
