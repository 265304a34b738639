"""Where the bytes of samples lie: in the shards of their index, or in those of ``mclclip reshard``.

That verb copies samples into shards in the order of a stage's groups, so that those of a batch lie
close together. Ids, keys, labels and batches are those of the index in either form; only the places
of bytes differ.

``embed --trunk-cache`` writes the output of the frozen image blocks for every sample; with it these
rows are read, not the images. They are the same in every epoch and stage::

    ARTIFACT/  without_rows.npy  int64 [n]: sorted ids of the samples that have no row
    FOLDER/    00007.npy ...     rows [n, ...] with their notes (`data.row_store`)

A sample's row is read alone, as a range of bytes of its file. Text embeddings (`TextFeatures`)
stand for captions in a similar way.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mclclip.data.arrays import npy_header, open_npy
from mclclip.data.groups import GroupedIndex
from mclclip.data.index_tables import INDEX_AGAIN, SAMPLES
from mclclip.data.labels import read_pseudo_labels
from mclclip.data.remote import Remote, RemoteOptions, StoredFile
from mclclip.data.row_store import rows_path
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_reader import Range
from mclclip.ranks import collectives
from mclclip.run.artifacts import Artifact, Layout, Manifest, is_finished, read_manifest
from mclclip.util.files import check_size, clean

Integers = npt.NDArray[np.int64]
KIND = "resharded"
_OPEN_FILES = 64  # of text embeddings, in one process
GROUPS, MEMBERS = "grouped_index", "members.npy"


def shard_name(number: int) -> str:
    """The file of a shard that ``reshard`` writes."""
    return f"{number:05d}.tar"


@dataclass(frozen=True, eq=False)
class Resharded:
    """Copies of samples in shards in the order of a stage's groups. It pickles without its arrays,
    which each process maps."""

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
        manifest.check(directory, MEMBERS)
        GroupedIndex.open(directory / GROUPS, "reshard")
        base = str(directory) if url is None else url.rstrip("/")
        names = [shard_name(number) for number in range(int(manifest.counts["shards"]))]
        sizes = [manifest.records[name].size_bytes for name in names]
        paths = [f"{base}/{name}" for name in names]
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
        return GroupedIndex.open(self.directory / GROUPS, "reshard")

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


# --- the output of the frozen blocks -----------------------------------------------------------

TRUNK_CACHE, WITHOUT = "trunk_cache", "without_rows.npy"
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
    """The rows of a finished cache. It pickles without the ids of samples that have no row, which
    each process maps.

    artifact    its directory, which holds these ids
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
        they are of other samples, or a file has another size.
        """
        artifact = layout.trunk_cache
        manifest = index.manifest_of(artifact, TRUNK_CACHE)
        manifest.check(artifact, WITHOUT)
        identity = Artifact(artifact, TRUNK_CACHE, manifest.config, manifest.inputs).identity
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
            check_size(path, wanted, remedy)
        return rows

    @classmethod
    def open_together(cls, layout: Layout, folder: str | None, index: SampleIndex) -> TrunkRows:
        """``open`` on one rank for all, which all of them call; they raise its errors.

        Raises FileNotFoundError where a rank's machine does not have the artifact.
        """
        rows = collectives.on_main(lambda: cls.open(layout, folder, index))
        collectives.together(lambda: rows.without)
        return rows

    @cached_property
    def without(self) -> Integers:
        """int64 [n], memory-mapped: sorted ids of the samples that have no row."""
        return open_npy(self.artifact / WITHOUT, VERB)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "without"}

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

    def offsets(self, row: Integers, shard_sizes: Integers) -> Integers:
        """Where the rows with these numbers in their shards begin, in bytes [n]."""
        headers = [_header_bytes((int(n), *self.shape), self.dtype) for n in shard_sizes.tolist()]
        return np.asarray(headers, np.int64) + row * self.bytes_per_row

    def decoded(self, stored: bytes) -> Tensor:
        """The bytes of a row -> the row, in the number format that it has on disk."""
        kind = torch.float16 if self.dtype == "float16" else torch.float32
        return torch.frombuffer(bytearray(stored), dtype=kind).reshape(self.shape)

    def cut_short(self, shard: int) -> RuntimeError:
        """The error of a file that ends before a row does."""
        return RuntimeError(f"{rows_path(self.folder, shard)} has been cut short: {_AGAIN}")


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


# --- text embeddings ---------------------------------------------------------------------------


class TextFeatures:
    """Text embeddings on disk, one row per caption, looked up by (sample_id, caption number).

    ``directory`` holds one array per shard of the index, named by the shard's number: ``00007.npy``
    [captions in the shard, D] float16 or float32, rows in index order, all captions of a sample
    after each other (row = ``caption_start[sample_id] + caption_number``, counted from the shard's
    first caption). Arrays are memory-mapped when first needed, at most ``_OPEN_FILES`` at once.
    """

    def __init__(self, directory: str | os.PathLike[str], index: SampleIndex) -> None:
        self._directory = Path(directory)
        self._index = index
        self._arrays: OrderedDict[int, np.memmap[Any, Any]] = OrderedDict()
        if not self._directory.is_dir():
            raise FileNotFoundError(
                f"no text embeddings at {self._directory}: run 'mclclip embed --stage 0 --text' "
                "first"
            )
        if is_finished(self._directory):
            read_manifest(self._directory, "text_embeddings").check(self._directory)

    def get(self, sample_id: int, caption_number: int) -> Tensor:
        """The text embedding, float32 [D].

        Raises IndexError for a caption that the sample does not have, FileNotFoundError for a shard
        without text embeddings, ValueError for an array that does not fit the index.
        """
        if not 0 <= caption_number < (num := int(self._index.num_captions[sample_id])):
            raise IndexError(
                f"caption {caption_number} of sample {sample_id} was asked for, it has {num}"
            )
        shard = int(self._index.shard_of[sample_id])
        # Not by the index's caption_start, which would take an array [N + 1] in every worker.
        before = self._index.num_captions[self._index.shards[shard].start : sample_id]
        row = int(before.sum()) + caption_number
        return torch.from_numpy(self._array(shard)[row].astype(np.float32))

    def _array(self, shard: int) -> np.memmap[Any, Any]:
        if shard in self._arrays:
            self._arrays.move_to_end(shard)
            return self._arrays[shard]
        while len(self._arrays) >= _OPEN_FILES:
            self._arrays.popitem(last=False)
        path = rows_path(self._directory, shard)
        array = open_npy(path, "embed --text")
        here = self._index.shards[shard]
        wanted = int(self._index.num_captions[here.start : here.stop].sum())
        if array.ndim != 2 or len(array) != wanted or array.dtype not in (np.float16, np.float32):
            raise ValueError(
                f"{path} holds {array.dtype} {list(array.shape)}, the index wants float16 or "
                f"float32 [{wanted}, D]: run 'mclclip embed --stage 0 --text --force' "
                "after 'mclclip index'"
            )
        self._arrays[shard] = array
        return array

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array pickles as its content.
        return {**self.__dict__, "_arrays": OrderedDict()}


# --- all of them -------------------------------------------------------------------------------


class SampleRanges(NamedTuple):
    """Byte ranges of a sample's image and of the member with its captions, which is empty where
    there are none; and the CRC-32 of both where it is a copy. ``has_row`` is false where the
    trunk's output stands for images and the sample has none."""

    image: Range
    text: Range
    crc32: tuple[int, int] | None = None
    has_row: bool = True


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
            paths = (rows_path(trunk.folder, number) for number in range(len(index.shards)))
            self.files += [StoredFile(str(path)) for path in paths]

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
                    found[place] = SampleRanges(
                        (shard, image, old.image[2]), (shard, text, old.text[2]), tuple(crc32)
                    )
        if self.trunk is not None:
            starts = np.array([shards[number].start for number in numbers], np.int64)
            sizes = np.array([shards[number].stop for number in numbers], np.int64) - starts
            offsets = self.trunk.offsets(sample_ids - starts, sizes).tolist()
            has_row = np.isin(sample_ids, self.trunk.without, invert=True).tolist()
            first = len(self.files) - len(shards)
            for place, number in enumerate(numbers):
                row = (first + number, offsets[place], self.trunk.bytes_per_row)
                found[place] = found[place]._replace(image=row, has_row=has_row[place])
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
