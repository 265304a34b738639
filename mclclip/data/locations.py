"""A table of where samples lie: in the shards of their index, or in those of ``relocate``.

``mclclip relocate`` copies samples into new shards in the order of a stage's groups, so that the
samples of a batch lie close together, and writes a table that says where each sample is now. Ids,
keys, labels and batches stay those of the index; only the places of bytes differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mclclip.data.arrays import open_npy
from mclclip.data.remote import Remote, RemoteOptions, StoredFile
from mclclip.data.sample_index import SampleIndex
from mclclip.util.files import printable

Integers = npt.NDArray[np.int64]
PICTURE, CAPTION = 0, 1
"""The members of a sample; each is a row of its entry in the table."""
KIND, TABLE = "relocated", "locations.npy"


def shard_name(number: int) -> str:
    """Returns the name of a shard that ``relocate`` writes, such as '00007.tar'."""
    return f"{number:05d}.tar"


def copied_of(index: SampleIndex) -> dict[str, str]:
    """Returns digests, by name, of the samples of an index that ``relocate`` copies."""
    return {
        "index": index.digest,
        "pictures": index.pictures_digest,
        "captions": index.captions_digest,
    }


class Locations:
    """The places of every sample's picture, and of the member with its captions.

    files      the shards of the index, followed by those of ``relocate``
    directory  the folder of the table of ``relocate``; None: samples lie in the index's shards

    It pickles without the table; each process maps it.
    """

    def __init__(
        self, index: SampleIndex, copies: Sequence[StoredFile] = (), directory: Path | None = None
    ) -> None:
        self.index, self.directory = index, directory
        self.files = [*(shard.stored for shard in index.shards), *copies]

    @classmethod
    def open(
        cls,
        directory: Path,
        index: SampleIndex,
        url: str | None = None,
        remote: RemoteOptions | None = None,
    ) -> Locations:
        """Opens the table that ``relocate`` wrote to ``directory``.

        Its shards are read there, or at the ``url`` that they were uploaded to. Raises
        FileNotFoundError if the table or a shard is missing, RuntimeError if it is of another
        index, other pictures or captions, or a shard has another size, and OSError if a store does
        not answer.
        """
        manifest = index.manifest_of(directory, KIND)
        if not copied_of(index).items() <= manifest.inputs.items():
            raise RuntimeError(
                f"{directory} has copies of other pictures or captions than the index: run "
                "'mclclip relocate --force'"
            )
        manifest.check(directory, TABLE)
        base = str(directory) if url is None else url.rstrip("/")
        names = [shard_name(number) for number in range(int(manifest.counts["shards"]))]
        paths, copies = [f"{base}/{name}" for name in names], list[StoredFile]()
        for name, path, stored in zip(names, paths, Remote(remote).stat(paths), strict=True):
            size = manifest.records[name].size_bytes
            if stored is None or stored.size != size:
                kind = FileNotFoundError if stored is None else RuntimeError
                raise kind(
                    f"{printable(path)} is missing or has another size than the {size:,} bytes "
                    "that 'mclclip relocate' wrote: put it there, or run that again with --force"
                )
            copies.append(stored)
        return cls(index, copies, directory)

    @cached_property
    def table(self) -> Integers | None:
        """int64 [N, 2, 4], memory-mapped: the places of all samples, as ``of`` returns them."""
        return None if self.directory is None else open_npy(self.directory / TABLE, "relocate")

    @property
    def source(self) -> str:
        """The folder or url of the shards of ``relocate``, without secrets."""
        return printable(self.files[-1].path.rpartition("/")[0])

    def of(self, sample_ids: Integers) -> Integers:
        """Returns the places of samples, int64 [n, 2, 4].

        They are, for picture and captions of each sample: the number of the file, offset, size (0:
        no captions) and CRC-32 (-1: not computed).
        """
        if self.table is not None:
            return np.asarray(self.table[sample_ids])
        index, places = self.index, np.full((len(sample_ids), 2, 4), -1, np.int64)
        columns = (
            (index.shard_of, index.image_offset, index.image_size, index.image_crc32),
            (index.shard_of, index.text_offset, index.text_size, index.text_crc32),
        )
        for member, of_member in enumerate(columns):
            for number, column in enumerate(of_member):
                if column is not None:
                    places[:, member, number] = column[sample_ids]
        return places

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "table"}
