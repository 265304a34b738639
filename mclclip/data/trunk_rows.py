"""Keeps the output of the frozen image blocks for every sample on disk (``embed --trunk-cache``).

Trainings and embeddings start from these rows, which are the same in every epoch and stage::

    ARTIFACT/  checksums.npy    int64 [N]: the CRC-32 of each row; -1 where a sample has none
    FOLDER/    00007.npy        rows [n, ...] of shard 7 in index order; zeros where there is none
               00007.crc32.npy  int64 [n]: its part of checksums.npy
               00007.json       the note on the shard (`data.embeddings`), written last

A row is compared with its checksum whenever it is read. Files of rows have no digests beside that:
of terabytes these would be a gigabyte themselves, and for one row a whole block would be read.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mclclip.data.arrays import npy_header, open_npy, save_npy, write_npy_parts
from mclclip.data.embeddings import rows_path, write_note
from mclclip.data.remote import Place
from mclclip.data.sample_index import SampleIndex
from mclclip.files import Record
from mclclip.ranks import collectives
from mclclip.run.artifacts import Artifact, Manifest
from mclclip.run.layout import Layout

Integers = npt.NDArray[np.int64]
KIND, CHECKSUMS = "trunk_cache", "checksums.npy"
VERB = "embed --stage 0 --trunk-cache"
_AGAIN = f"run 'mclclip {VERB} --force' to make it again"


class StartsLater(Protocol):
    """A model that can start from its trunk's output (`models.model.Model`)."""

    first_block: int

    def trunk_digest(self, num_trunk_blocks: int) -> str:
        """Digest of all that the trunk's output depends on beside the images."""
        ...


@dataclass(frozen=True, eq=False)
class TrunkRows:
    """The rows of a finished cache; pickles as its ``arguments``.

    artifact    its directory, which holds the checksums
    folder      where the files of rows lie
    shape       of a row: what one image is when it enters block ``num_blocks``
    dtype       float16 or float32
    trunk       digest of the blocks that made them
    checksums   int64 [N], memory-mapped
    """

    artifact: Path
    folder: Path
    shape: tuple[int, ...]
    dtype: str
    num_blocks: int
    trunk: str
    checksums: Integers

    @classmethod
    def open(cls, layout: Layout, folder: str | None, index: SampleIndex) -> TrunkRows:
        """The rows of a run, which lie in ``folder`` (None: in the run directory), after a look at
        the size of each file.

        Raises FileNotFoundError where there are none or a file is missing, and RuntimeError where
        they are of other samples, a file has another size, or the checksums are damaged.
        """
        artifact = layout.trunk_cache
        manifest = index.manifest_of(artifact, KIND)
        manifest.check(artifact, CHECKSUMS)
        identity = Artifact(artifact, KIND, manifest.config, manifest.inputs).identity
        found = cls.mapped(
            artifact,
            layout.trunk_rows(folder, identity),
            tuple(manifest.counts["shape"]),
            str(manifest.dtype),
            int(manifest.config["blocks"]),
            manifest.inputs["trunk"],
        )
        elsewhere, remedy = written_elsewhere(manifest, artifact, found.folder), _AGAIN
        if elsewhere is not None:
            remedy = f"they were written to {elsewhere}: name trunk_cache.folder, or {_AGAIN}"
        for number, shard in enumerate(index.shards):
            found._check_size(number, shard.stop - shard.start, remedy)
        return found

    @classmethod
    def mapped(
        cls,
        artifact: Path,
        folder: Path,
        shape: tuple[int, ...],
        dtype: str,
        num_blocks: int,
        trunk: str,
    ) -> TrunkRows:
        """Maps what ``open`` has compared on one rank. Raises FileNotFoundError where this machine
        does not have the checksums."""
        checksums = open_npy(artifact / CHECKSUMS, VERB)
        return cls(artifact, folder, shape, dtype, num_blocks, trunk, checksums)

    @classmethod
    def open_together(cls, layout: Layout, folder: str | None, index: SampleIndex) -> TrunkRows:
        """``open`` on one rank, ``mapped`` on all; all of them call it, and raise its errors."""
        given = collectives.on_main(lambda: cls.open(layout, folder, index).arguments)
        return collectives.together(lambda: cls.mapped(*given))

    @property
    def arguments(self) -> tuple[Path, Path, tuple[int, ...], str, int, str]:
        """Arguments of ``mapped``, by which another process opens the same rows."""
        return self.artifact, self.folder, self.shape, self.dtype, self.num_blocks, self.trunk

    def __reduce__(self) -> tuple[Callable[..., TrunkRows], tuple[Any, ...]]:
        return TrunkRows.mapped, self.arguments

    def start(self, model: StartsLater) -> None:
        """Has ``model`` start from these rows; RuntimeError where another trunk made them."""
        if model.trunk_digest(self.num_blocks) != self.trunk:
            raise RuntimeError(
                f"{self.artifact} was made by other weights than the first {self.num_blocks} "
                f"blocks of this model, or from other pixels: {_AGAIN}"
            )
        model.first_block = self.num_blocks

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def places(self, num_shards: int) -> list[Place]:
        """The files of rows, by shard of the index."""
        return [Place(str(rows_path(self.folder, number))) for number in range(num_shards)]

    def offsets(self, row: Integers, shard_sizes: Integers) -> Integers:
        """Where the rows with these numbers in their shards begin, in bytes [n]."""
        headers = [_header_bytes((int(n), *self.shape), self.dtype) for n in shard_sizes.tolist()]
        return np.asarray(headers, np.int64) + row * self.bytes_per_row

    def decoded(self, stored: bytes) -> Tensor:
        """The bytes of a row -> the row, in the number format that it has on disk."""
        kind = torch.float16 if self.dtype == "float16" else torch.float32
        return torch.frombuffer(bytearray(stored), dtype=kind).reshape(self.shape)

    def damaged(self, key: str, shard: int) -> RuntimeError:
        """The error of a row that is not what was written."""
        path = rows_path(self.folder, shard)
        return RuntimeError(f"{path} is damaged at the row of sample {key}: {_AGAIN}")

    def _check_size(self, number: int, num_rows: int, remedy: str) -> None:
        path = rows_path(self.folder, number)
        wanted = _header_bytes((num_rows, *self.shape), self.dtype) + num_rows * self.bytes_per_row
        try:
            size = os.path.getsize(path)
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no {path}: {remedy}") from None
        if size != wanted:
            raise RuntimeError(
                f"{path} is damaged (it has {size:,} bytes, {wanted:,} were written): {_AGAIN}"
            )


def where(artifact: Path, folder: Path) -> str | None:
    """Where rows lie, as a manifest tells it; None: in the artifact's directory."""
    return None if folder.is_relative_to(artifact) else str(folder.resolve())


def written_elsewhere(manifest: Manifest, artifact: Path, folder: Path) -> str | None:
    """Where the rows were written, if that is not ``folder``."""
    written: str | None = manifest.counts["rows"]
    return None if where(artifact, folder) == written else written or str(artifact)


@lru_cache(maxsize=1024)
def _header_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return len(npy_header(shape, dtype))


def _sums_path(folder: Path, number: int) -> Path:
    return rows_path(folder, number).with_suffix(".crc32.npy")


def write_rows(
    folder: Path,
    number: int,
    shape: tuple[int, ...],
    dtype: str,
    batches: Iterable[tuple[npt.NDArray[Any], dict[int, str]]],
    index: SampleIndex,
) -> dict[int, str]:
    """Writes the rows of a shard, in ``batches`` of rows [b, *shape] in index order, each with the
    reasons of samples that have none; then the note. Returns all reasons by sample id.

    Raises ValueError where a value is not finite in ``dtype``, and for more or fewer rows than the
    shard has samples.
    """
    shard, path = index.shards[number], rows_path(folder, number)
    reasons: dict[int, str] = {}
    sums: list[int] = []
    with write_npy_parts(path, (shard.stop - shard.start, *shape), dtype) as append:
        for rows, bad in batches:
            rows = _stored(rows, dtype)
            reasons |= bad
            first = shard.start + len(sums)
            lost = {sample_id - first for sample_id in bad}
            sums += [-1 if n in lost else zlib.crc32(row.data) for n, row in enumerate(rows)]
            append(rows)
    save_npy(_sums_path(folder, number), np.asarray(sums, np.int64))
    write_note(folder, number, Record(path.stat().st_size, digests=""), reasons, index)
    return reasons


def _stored(rows: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):  # told below
        stored = np.ascontiguousarray(rows, dtype=dtype)
    if not np.isfinite(stored).all():
        largest = float(np.abs(rows).max())
        raise ValueError(
            f"the trunk's output has values (up to {largest:.3g}) that {dtype} does not hold: set "
            "trunk_cache.dtype=float32, or look at the encoder if they are not numbers"
        )
    return stored


def damaged_shards(
    folder: Path, index: SampleIndex, checksums: Integers, threads: int
) -> Iterator[int]:
    """Yields the shards whose file of rows is missing, or does not have these checksums."""

    def is_damaged(number: int) -> bool:
        shard = index.shards[number]
        try:
            rows = np.load(rows_path(folder, number), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return True
        wanted = checksums[shard.start : shard.stop]
        return len(rows) != len(wanted) or any(
            crc32 != -1 and zlib.crc32(np.ascontiguousarray(row).data) != crc32
            for row, crc32 in zip(rows, wanted.tolist(), strict=True)
        )

    with ThreadPoolExecutor(threads) as pool:
        numbers = range(len(index.shards))
        found = pool.map(is_damaged, numbers)
        yield from (n for n, damaged in zip(numbers, found, strict=True) if damaged)


def join_checksums(artifact: Path, folder: Path, index: SampleIndex) -> None:
    """Writes the checksums of all shards as one file."""
    with write_npy_parts(artifact / CHECKSUMS, (len(index),), np.int64) as append:
        for number in range(len(index.shards)):
            append(open_npy(_sums_path(folder, number), VERB))
