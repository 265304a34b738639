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
from mclclip.data.remote import Place, RemoteOptions, shown_url
from mclclip.data.sample_index import SAMPLES, SampleIndex
from mclclip.data.shard_check import look_at
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
    places: list[Place]
    grouped: GroupedIndex
    labels: Integers
    offsets: Integers

    @classmethod
    def open(
        cls,
        directory: Path,
        labels_directory: Path,
        index: SampleIndex,
        url: str | None = None,
        remote: RemoteOptions | None = None,
    ) -> Resharded:
        """The finished copies in ``directory``, which were made by the pseudo labels in
        ``labels_directory``. Their shards are read there, or (``url``) where they were uploaded to.

        Raises FileNotFoundError where they are not there, or a shard is missing, RuntimeError where
        they are of other samples or labels, or a shard has another size, and OSError where a store
        does not answer.
        """
        manifest = read_manifest(directory, KIND)
        _, _, digest = read_pseudo_labels(labels_directory, index)
        if manifest.inputs != {"index": index.digest, "pseudo_labels": digest}:
            raise RuntimeError(
                f"{directory} holds copies by other pseudo labels, or of other samples, than those "
                "of now: run 'mclclip reshard --force'"
            )
        manifest.check(directory)
        base = str(directory) if url is None else url.rstrip("/")
        places = _look_at(base, read_json(directory / SIZES), remote)
        per_shard = int(manifest.config["samples_per_shard"])
        return cls._map(directory, labels_directory, per_shard, places)

    @classmethod
    def _map(
        cls, directory: Path, labels_directory: Path, samples_per_shard: int, places: list[Place]
    ) -> Resharded:
        labels = open_npy(labels_directory / "pseudo_labels.npy", "cluster").reshape(-1)
        offsets = open_npy(directory / OFFSETS, "reshard")
        given = directory, labels_directory, samples_per_shard, places
        return cls(*given, GroupedIndex.mapped(directory / GROUPS), labels, offsets)

    @property
    def shown(self) -> str:
        """Where the shards are read, without secrets of a url."""
        return shown_url(self.places[0].path.rpartition("/")[0])

    def find(self, sample_ids: Integers) -> tuple[Integers, Integers]:
        """The shard's number int64 [n] (-1: not copied), and the offsets int64 [n, 2] in it."""
        position = self.grouped.positions(sample_ids, np.asarray(self.labels[sample_ids]))
        offsets = np.asarray(self.offsets[np.maximum(position, 0)])
        copied = (position >= 0) & (offsets[:, 0] >= 0)
        return np.where(copied, position // self.samples_per_shard, -1), offsets

    def __reduce__(self) -> tuple[Callable[..., Resharded], tuple[Any, ...]]:
        given = self.directory, self.labels_directory, self.samples_per_shard, self.places
        return Resharded._map, given


def _look_at(base: str, sizes: list[int], remote: RemoteOptions | None) -> list[Place]:
    """Where each shard is read, after a look at its size now."""
    paths = [f"{base}/{shard_name(number)}" for number in range(len(sizes))]
    looks = look_at(paths, remote)
    for path, look, size in zip(paths, looks, sizes, strict=True):
        if look is None or look.size != size:
            kind = FileNotFoundError if look is None else RuntimeError
            raise kind(
                f"{shown_url(path)} is missing or has another size than the {size:,} bytes that "
                "'mclclip reshard' wrote: put it there, or run that again with --force"
            )
    return [Place(path, look) for path, look in zip(paths, looks, strict=True) if look is not None]


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
