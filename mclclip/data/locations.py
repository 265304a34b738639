"""Where the bytes of samples lie: in the shards of their index, or in those of ``mclclip reshard``.

That verb copies samples into shards in the order of a stage's groups, so that those of a batch lie
close together. Ids, keys, labels and batches are those of the index in either form; only the places
of bytes differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mclclip.data.arrays import open_npy
from mclclip.data.groups import GroupedIndex
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.remote import Look, Place
from mclclip.data.sample_index import SAMPLES, SampleIndex
from mclclip.data.shard_reader import Range
from mclclip.files import read_json
from mclclip.run.artifacts import read_manifest

Integers = npt.NDArray[np.int64]
KIND = "resharded"
GROUPS, OFFSETS, SIZES = "grouped_index", "offsets.npy", "shard_sizes.json"


def shard_name(number: int) -> str:
    """The file of a shard that ``reshard`` writes."""
    return f"{number:05d}.tar"


@dataclass(frozen=True, eq=False)
class Resharded:
    """Copies of samples in shards in the order of a stage's groups; pickles as its path.

    grouped  the samples by group; that at position p is in shard p // samples_per_shard
    labels   int64 [N], pseudo labels of all samples, memory-mapped
    offsets  int64 [M, 2] by position: where image and captions begin in their shard; negative
             where a sample was not copied
    """

    directory: Path
    labels_directory: Path
    samples_per_shard: int
    shard_sizes: tuple[int, ...]
    grouped: GroupedIndex
    labels: Integers
    offsets: Integers

    @classmethod
    def open(cls, directory: Path, labels_directory: Path, index: SampleIndex) -> Resharded:
        """The finished copies in ``directory``, which were made by the pseudo labels in
        ``labels_directory``.

        Raises FileNotFoundError where they are not there, or a shard is missing, and RuntimeError
        where they are of other samples or labels, or a shard has another size.
        """
        manifest = read_manifest(directory, KIND)
        _, _, digest = read_pseudo_labels(labels_directory, index)
        if manifest.inputs != {"index": index.digest, "pseudo_labels": digest}:
            raise RuntimeError(
                f"{directory} holds copies by other pseudo labels, or of other samples, than those "
                "of now: run 'mclclip reshard --force'"
            )
        manifest.check(directory)
        found = cls._map(directory, labels_directory, int(manifest.config["samples_per_shard"]))
        for place in found.places:
            path = Path(place.path)
            if not path.exists() or path.stat().st_size != place.look.size:
                kind = RuntimeError if path.exists() else FileNotFoundError
                raise kind(
                    f"{path} is missing or has another size than the {place.look.size:,} bytes "
                    "that 'mclclip reshard' wrote: run it again with --force"
                )
        return found

    @classmethod
    def _map(cls, directory: Path, labels_directory: Path, samples_per_shard: int) -> Resharded:
        labels = open_npy(labels_directory / "pseudo_labels.npy", "cluster").reshape(-1)
        offsets = open_npy(directory / OFFSETS, "reshard")
        sizes = tuple(read_json(directory / SIZES))
        grouped = GroupedIndex.mapped(directory / GROUPS)
        given = directory, labels_directory, samples_per_shard
        return cls(*given, sizes, grouped, labels, offsets)

    @property
    def places(self) -> list[Place]:
        """Where each shard is read."""
        paths = [str(self.directory / shard_name(n)) for n in range(len(self.shard_sizes))]
        return [Place(p, Look(n, "")) for p, n in zip(paths, self.shard_sizes, strict=True)]

    def find(self, sample_ids: Integers) -> tuple[Integers, Integers]:
        """The shard's number int64 [n] (-1: not copied), and the offsets int64 [n, 2] in it."""
        position = self.grouped.positions(sample_ids, np.asarray(self.labels[sample_ids]))
        offsets = np.asarray(self.offsets[np.maximum(position, 0)])
        copied = (position >= 0) & (offsets[:, 0] >= 0)
        return np.where(copied, position // self.samples_per_shard, -1), offsets

    def __reduce__(self) -> tuple[Callable[..., Resharded], tuple[Any, ...]]:
        return Resharded._map, (self.directory, self.labels_directory, self.samples_per_shard)


class Locations:
    """Byte ranges of the image and of the member with the captions, by sample_id.

    ``places`` are the shards by number: those of the index, then those of ``resharded``, which is
    asked first. Samples without captions have an empty range for them.
    """

    def __init__(self, index: SampleIndex, resharded: Resharded | None = None) -> None:
        self.index, self.resharded = index, resharded
        self.places = [shard.place for shard in index.shards]
        if resharded is not None:
            self.places += resharded.places

    def of(self, sample_ids: Integers) -> list[tuple[Range, Range]]:
        """Image and captions of each sample.

        Raises RuntimeError, one line, for a row of the index that no shard could have.
        """
        index = self.index
        shard = np.asarray(index.shard_of[sample_ids], dtype=np.int64)
        starts = np.stack([index.image_offset[sample_ids], index.text_offset[sample_ids]], axis=1)
        sizes = np.stack([index.image_size[sample_ids], index.text_size[sample_ids]], axis=1)
        self._check(sample_ids, shard, starts, sizes)
        if self.resharded is not None:
            number, offsets = self.resharded.find(sample_ids)
            shard = np.where(number >= 0, len(index.shards) + number, shard)
            starts = np.where(number[:, None] >= 0, offsets, starts)
        table = np.concatenate([shard[:, None], starts, sizes], axis=1).tolist()
        return [((s, image, m), (s, text, n)) for s, image, text, m, n in table]

    def _check(self, ids: Integers, shard: Integers, starts: Integers, sizes: Integers) -> None:
        wrong = (shard < 0) | (shard >= len(self.index.shards))
        wrong |= (np.minimum(starts, sizes) < 0).any(axis=1)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise RuntimeError(
                f"{self.index.directory / SAMPLES} is damaged: row {ids[row]} says shard "
                f"{shard[row]}, offsets {starts[row].tolist()} and sizes {sizes[row].tolist()}; "
                "take the folder away and run 'mclclip index' again"
            )
