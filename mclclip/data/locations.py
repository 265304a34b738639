"""Where the bytes of samples lie: in the shards of their index, or in those of ``mclclip reshard``.

That verb copies samples into shards in the order of a stage's groups, so that those of a batch lie
close together. Ids, keys, labels and batches are those of the index in either form; only the places
of bytes differ. With a cache of the trunk (``data.trunk_rows``) its rows are read, not the images.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mclclip.data.arrays import open_npy
from mclclip.data.groups import GroupedIndex
from mclclip.data.index_tables import INDEX_AGAIN, SAMPLES
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.remote import Remote, RemoteOptions, StoredFile
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_reader import Range
from mclclip.data.trunk_rows import TrunkRows
from mclclip.files import clean, read_json
from mclclip.run.artifacts import read_manifest

Integers = npt.NDArray[np.int64]
KIND = "resharded"
GROUPS, MEMBERS, SIZES = "grouped_index", "members.npy", "shard_sizes.json"


def shard_name(number: int) -> str:
    """The file of a shard that ``reshard`` writes."""
    return f"{number:05d}.tar"


@dataclass(frozen=True, eq=False)
class Resharded:
    """Copies of samples in shards in the order of a stage's groups. It pickles without its arrays,
    which each process maps without comparing them again.
    """

    directory: Path
    labels_directory: Path
    samples_per_shard: int
    files: list[StoredFile]

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
        GroupedIndex.open(directory / GROUPS, "reshard")
        base = str(directory) if url is None else url.rstrip("/")
        sizes: list[int] = read_json(directory / SIZES)
        paths = [f"{base}/{shard_name(number)}" for number in range(len(sizes))]
        files: list[StoredFile] = []
        for path, stored, size in zip(paths, Remote(remote).stat(paths), sizes, strict=True):
            if stored is None or stored.size != size:
                kind = FileNotFoundError if stored is None else RuntimeError
                raise kind(
                    f"{clean(path)} is missing or has another size than the {size:,} bytes that "
                    "'mclclip reshard' wrote: put it there, or run that again with --force"
                )
            files.append(stored)
        per_shard = int(manifest.config["samples_per_shard"])
        return cls(directory, labels_directory, per_shard, files)

    @cached_property
    def grouped(self) -> GroupedIndex:
        """The samples by group; that at position p is in shard p // samples_per_shard."""
        return GroupedIndex.open(self.directory / GROUPS, "reshard", compare=False)

    @cached_property
    def labels(self) -> Integers:
        """int64 [N], pseudo labels of all samples, memory-mapped."""
        return open_npy(self.labels_directory / "pseudo_labels.npy", "cluster").reshape(-1)

    @cached_property
    def members(self) -> Integers:
        """int64 [M, 4] by position, memory-mapped: where image and captions begin in their shard,
        and the CRC-32 of each; the first number is negative where a sample was not copied."""
        return open_npy(self.directory / MEMBERS, "reshard")

    @property
    def source(self) -> str:
        """Where the shards are read, without secrets of a url."""
        return clean(self.files[0].path.rpartition("/")[0])

    def find(self, sample_ids: Integers) -> tuple[Integers, Integers]:
        """The shard's number int64 [n] (-1: not copied), and the rows int64 [n, 4] of members."""
        position = self.grouped.positions(sample_ids, np.asarray(self.labels[sample_ids]))
        members = np.asarray(self.members[np.maximum(position, 0)])
        copied = (position >= 0) & (members[:, 0] >= 0)
        return np.where(copied, position // self.samples_per_shard, -1), members

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class SampleRanges(NamedTuple):
    """Byte ranges of a sample's image and of the member with its captions, which is empty where
    there are none; and the CRC-32 of both where it is a copy. Where the trunk's output stands for
    the image, ``row_crc32`` is that of its row (-1: there is none)."""

    image: Range
    text: Range
    crc32: tuple[int, int] | None = None
    row_crc32: int | None = None


class Locations:
    """Where samples are read, by sample_id: in the shards of the index or, of those that were
    copied, in those of ``resharded``, whose numbers in ``files`` follow. With ``trunk`` its rows
    stand for images; its files are the last of ``files``."""

    def __init__(
        self,
        index: SampleIndex,
        resharded: Resharded | None = None,
        trunk: TrunkRows | None = None,
    ) -> None:
        self.index, self.resharded, self.trunk = index, resharded, trunk
        self.files = [shard.stored for shard in index.shards]
        if resharded is not None:
            self.files += resharded.files
        if trunk is not None:
            self.files += trunk.files(len(index.shards))

    def of(self, sample_ids: Integers) -> list[SampleRanges]:
        """Where each sample is read. Raises the error of ``of_index``."""
        found, shards = self.of_index(sample_ids), self.index.shards
        numbers = [old.text[0] for old in found]  # of shards in the index
        if self.resharded is not None:
            copies, members = self.resharded.find(sample_ids)
            rows = zip(copies.tolist(), members.tolist(), strict=True)
            for place, (copy, (image, text, *crc32)) in enumerate(rows):
                if copy >= 0:
                    old, shard = found[place], len(shards) + copy
                    image_range, text_range = (
                        (shard, image, old.image[2]),
                        (shard, text, old.text[2]),
                    )
                    found[place] = SampleRanges(image_range, text_range, (crc32[0], crc32[1]))
        if self.trunk is not None:
            starts = np.array([shards[number].start for number in numbers], np.int64)
            sizes = np.array([shards[number].stop for number in numbers], np.int64) - starts
            offsets = self.trunk.offsets(sample_ids - starts, sizes).tolist()
            sums = self.trunk.checksums[sample_ids].tolist()
            first = len(self.files) - len(shards)
            for place, number in enumerate(numbers):
                row = (first + number, offsets[place], self.trunk.bytes_per_row)
                found[place] = found[place]._replace(image=row, row_crc32=sums[place])
        return found

    def of_index(self, sample_ids: Integers) -> list[SampleRanges]:
        """Where each sample is in the shards of the index.

        Raises RuntimeError, one line, for a row of the index that no shard could have.
        """
        index = self.index
        shard = np.asarray(index.shard_of[sample_ids], dtype=np.int64)
        starts = np.stack([index.image_offset[sample_ids], index.text_offset[sample_ids]], axis=1)
        sizes = np.stack([index.image_size[sample_ids], index.text_size[sample_ids]], axis=1)
        wrong = (shard < 0) | (shard >= len(index.shards))
        wrong |= (np.minimum(starts, sizes) < 0).any(axis=1)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise RuntimeError(
                f"{index.directory / SAMPLES} is damaged: row {sample_ids[row]} says shard "
                f"{shard[row]}, offsets {starts[row].tolist()} and sizes {sizes[row].tolist()}; "
                f"{INDEX_AGAIN}"
            )
        table = np.concatenate([shard[:, None], starts, sizes], axis=1).tolist()
        return [SampleRanges((s, image, m), (s, text, n)) for s, image, text, m, n in table]
