"""The output of the frozen image blocks for every sample, on disk (``embed --trunk-cache``).

Trainings and embeddings start from these rows, which are the same in every epoch and stage::

    ARTIFACT/  checksums.npy    int64 [N]: the CRC-32 of each row; -1 where a sample has none
    FOLDER/    00007.npy ...    rows [n, ...] with their checksums and notes (`data.row_store`)

A sample's row is read alone, as a range of bytes of its file, and compared with its checksum.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mclclip.data.arrays import npy_header, open_npy
from mclclip.data.remote import StoredFile
from mclclip.data.row_store import rows_path
from mclclip.data.sample_index import SampleIndex
from mclclip.ranks import collectives
from mclclip.run.artifacts import Artifact, Layout, Manifest

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
    """The rows of a finished cache. It pickles without its checksums, which each process maps.

    artifact    its directory, which holds the checksums
    folder      where the files of rows lie
    shape       of a row: what one image is when it enters block ``num_blocks``
    dtype       float16 or float32
    trunk       digest of the blocks that made them
    """

    artifact: Path
    folder: Path
    shape: tuple[int, ...]
    dtype: str
    num_blocks: int
    trunk: str

    @classmethod
    def open(cls, layout: Layout, folder: str | None, index: SampleIndex) -> TrunkRows:
        """The rows of a run, which lie in ``folder`` (None: in the run directory), after a
        comparison of each file's size.

        Raises FileNotFoundError where there are none or a file is missing, and RuntimeError where
        they are of other samples, a file has another size, or the checksums are damaged.
        """
        artifact = layout.trunk_cache
        manifest = index.manifest_of(artifact, KIND)
        manifest.check(artifact, CHECKSUMS)
        identity = Artifact(artifact, KIND, manifest.config, manifest.inputs).identity
        rows = cls(
            artifact,
            layout.trunk_rows(folder, identity),
            tuple(manifest.counts["shape"]),
            str(manifest.dtype),
            int(manifest.config["blocks"]),
            manifest.inputs["trunk"],
        )
        elsewhere, remedy = written_elsewhere(manifest, artifact, rows.folder), _AGAIN
        if elsewhere is not None:
            remedy = f"they were written to {elsewhere}: name trunk_cache.folder, or {_AGAIN}"
        for number, shard in enumerate(index.shards):
            path, num_rows = rows_path(rows.folder, number), shard.stop - shard.start
            header = _header_bytes((num_rows, *rows.shape), rows.dtype)
            wanted = header + num_rows * rows.bytes_per_row
            try:
                size = os.path.getsize(path)
            except FileNotFoundError:
                raise FileNotFoundError(f"there is no {path}: {remedy}") from None
            if size != wanted:
                raise RuntimeError(
                    f"{path} is damaged (it has {size:,} bytes, {wanted:,} were written): {_AGAIN}"
                )
        return rows

    @classmethod
    def open_together(cls, layout: Layout, folder: str | None, index: SampleIndex) -> TrunkRows:
        """``open`` on one rank for all, which all of them call; they raise its errors.

        Raises FileNotFoundError where a rank's machine does not have the checksums.
        """
        rows = collectives.on_main(lambda: cls.open(layout, folder, index))
        collectives.together(lambda: rows.checksums)
        return rows

    @cached_property
    def checksums(self) -> Integers:
        """int64 [N], memory-mapped: the CRC-32 of each row; -1 where a sample has none."""
        return open_npy(self.artifact / CHECKSUMS, VERB)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "checksums"}

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

    def files(self, num_shards: int) -> list[StoredFile]:
        """The files of rows, by shard of the index."""
        return [StoredFile(str(rows_path(self.folder, number))) for number in range(num_shards)]

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


def recorded_folder(artifact: Path, folder: Path) -> str | None:
    """The folder of rows as a manifest records it; None: in the artifact's directory."""
    return None if folder.is_relative_to(artifact) else str(folder.resolve())


def written_elsewhere(manifest: Manifest, artifact: Path, folder: Path) -> str | None:
    """Where the rows were written, if that is not ``folder``."""
    written: str | None = manifest.counts["rows"]
    return None if recorded_folder(artifact, folder) == written else written or str(artifact)


@lru_cache(maxsize=1024)
def _header_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return len(npy_header(shape, dtype))
