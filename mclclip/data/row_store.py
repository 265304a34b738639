"""Rows of numbers on disk, in one file per shard of the index: embeddings, and image rows.

    00007.npy   rows [n, ...] in index order; rows of samples that could not be used are zeros
    00007.json  the note: size and digest of the rows, and the samples that could not be used

The note is written last and marks the shard as done, so that a killed pass goes on at the first
shard without a note. For every sample that could not be used, the note has a mark of its bytes, so
that a shard that is repaired later is read again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mclclip.data.arrays import (
    ROWS_PER_BLOCK,
    BlockLayout,
    Floats,
    open_npy,
    write_npy_parts,
)
from mclclip.data.remote import StoredFile
from mclclip.data.sample_index import EXCLUDED, SampleIndex
from mclclip.data.shard_reader import ShardReader
from mclclip.run.artifacts import Manifest, RunPaths, is_finished, verb_of
from mclclip.util import files
from mclclip.util.files import Record
from mclclip.util.search import normalize_rows

Integers = npt.NDArray[np.int64]
IMAGE_ROWS = "image_rows"
RowBatch = tuple[np.ndarray, Mapping[int, str]]
"""Rows [b, ...] in index order, and {sample id: reason} of those that could not be used."""


def rows_path(directory: Path, number: int) -> Path:
    """Returns the file with the rows of shard ``number``, such as 00007.npy."""
    return Path(directory) / f"{number:05d}.npy"


# --- writing, shard by shard -----------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """The note on a shard's rows."""

    record: Record
    bad: dict[int, dict[str, str]]
    """The samples without a row, by their ids: why, and a mark of their bytes when they were read
    (`SampleIndex.mark_bad`)."""

    @property
    def reasons(self) -> dict[int, str]:
        """Why samples have no row, by sample id."""
        return {sample_id: entry["reason"] for sample_id, entry in self.bad.items()}


def write_shard(
    directory: Path,
    number: int,
    batches: Iterable[RowBatch],
    index: SampleIndex,
    *,
    num_rows: int,
    dtype: npt.DTypeLike,
    empty: tuple[int, ...] = (),
) -> dict[int, str]:
    """Writes the rows of a shard batch by batch, then the note.

    Returns why samples have no row, by sample id. ``empty`` is the shape of a row for a shard
    without rows.
    """
    path = rows_path(directory, number)
    reasons: dict[int, str] = {}
    following = iter(batches)
    first = next(following, None)
    shape = (num_rows, *(empty if first is None else first[0].shape[1:]))
    with write_npy_parts(path, shape, dtype) as append:
        for rows, bad in chain([] if first is None else [first], following):
            append(rows)
            reasons |= bad
    record = asdict(files.record_of(path))
    note = {"shard": number, "record": record, "bad": index.mark_bad(reasons)}
    files.write_json(path.with_suffix(".json"), note)
    return reasons


def read_note(directory: Path, number: int) -> Note | None:
    """Reads the note of a shard; None if it cannot be read or the rows have another size."""
    rows = rows_path(directory, number)
    path = rows.with_suffix(".json")
    try:
        fields = files.read_json(path)
        bad = {int(sample_id): entry for sample_id, entry in fields["bad"].items()}
        note = Note(Record(**fields["record"]), bad)
        fits = fields["shard"] == number and rows.stat().st_size == note.record.size_bytes
        return note if fits else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # then the shard is written again


def find_done_shards(
    directory: Path, index: SampleIndex, mine: Sequence[int], excluded: Collection[int] = ()
) -> tuple[dict[int, str], list[int]]:
    """Finds which shards among ``mine`` are written, and which are still to be written.

    Returns {sample id: reason} of the samples without a row in the former, and the numbers of the
    latter. A shard is written again if a sample without a row may have one now (`num_restored`).
    """
    reasons: dict[int, str] = {}
    missing = []
    for number in mine:
        note = read_note(directory, number)
        if note is None or _count_restored(note, index, excluded):
            missing.append(number)
        else:
            reasons |= note.reasons
    return reasons, missing


def read_notes(directory: Path, num_shards: int) -> dict[str, Note]:
    """Reads the notes on all shards, by the names of the files of rows, such as '00007.npy'.

    Raises RuntimeError if one is missing.
    """
    notes = {}
    for number in range(num_shards):
        note, path = read_note(directory, number), rows_path(directory, number)
        if note is None:
            raise RuntimeError(
                f"{path} is not what was written: run 'mclclip embed' again, which makes it again"
            )
        notes[path.name] = note
    return notes


def num_restored(directory: Path, index: SampleIndex, excluded: Collection[int] = ()) -> int:
    """Counts the samples without a row that may have one now.

    Their bytes have changed since, or ``data.exclude`` does not list them any more (``excluded``
    are the ids that it lists now).
    """
    notes = (read_note(directory, number) for number in range(len(index.shards)))
    return sum(_count_restored(note, index, excluded) for note in notes if note is not None)


def _count_restored(note: Note, index: SampleIndex, excluded: Collection[int]) -> int:
    still_bad = index.still_bad(note.bad)
    lifted = {i for i, reason in note.reasons.items() if reason == EXCLUDED}.difference(excluded)
    return sum(i not in still_bad or i in lifted for i in note.bad)


def left_out(directory: Path, num_shards: int) -> Integers:
    """Returns the sorted ids of the samples whose rows are zeros, since they could not be used.

    Shards without a note do not count. Raises RuntimeError for a damaged note.
    """
    ids: list[int] = []
    for number in range(num_shards):
        if (note := read_note(directory, number)) is not None:
            ids += note.reasons
        elif (path := rows_path(directory, number).with_suffix(".json")).exists():
            raise RuntimeError(f"{path} is damaged: run 'mclclip embed --force' to make it again")
    return np.sort(np.asarray(ids, np.int64))


# --- reading, across shards ------------------------------------------------------------------


class RowStore:
    """The rows [N, D] of several .npy files, one after another, indexed as one array.

    A file is memory-mapped only while it is read, since every mapping holds a file handle, and
    there may be more files than handles. ``verb`` wrote the files, such as 'embed'. Raises
    RuntimeError if a file cannot be read.

    num_rows      number of rows of each file
    file_layouts  shape and type of the rows of each file
    starts        int64 [files + 1], the number of each file's first row
    """

    directory: Path
    manifest: Manifest
    name: str

    def __init__(self, paths: Sequence[Path], verb: str = "embed") -> None:
        self._paths, self._verb = list(paths), verb
        self.num_rows: list[int] = []
        self.file_layouts: list[BlockLayout] = []
        for path in paths:
            rows = open_npy(path, verb)
            self.num_rows.append(len(rows))
            self.file_layouts.append((rows.shape[1:], rows.dtype))
        self.starts: Integers = np.cumsum([0, *self.num_rows])

    @classmethod
    def open(cls, directory: Path, manifest: Manifest, name: str = "") -> RowStore:
        """Opens the rows of a finished artifact, which has a file for each shard.

        ``name`` names them in messages and results, such as 'stage_1'. Raises FileNotFoundError for
        a missing file, and RuntimeError if a file has another size than when it was written.
        """
        numbers = range(int(manifest.counts["shards"]))
        paths, verb = [rows_path(directory, n) for n in numbers], verb_of(manifest.kind)
        manifest.check(directory)
        store = cls(paths, verb)
        store.directory, store.manifest, store.name = directory, manifest, name
        return store

    def left_out(self) -> Integers:
        """Returns the sorted ids of the samples whose rows are zeros (`left_out`)."""
        return left_out(self.directory, len(self._paths))

    def row_shapes(self) -> set[tuple[int, ...]]:
        """Returns the different shapes of rows, in the files that have rows."""
        filled = zip(self.file_layouts, self.num_rows, strict=True)
        return {shape for (shape, _), num_rows in filled if num_rows}

    def read(self, file: int, rows: slice | Integers) -> Floats:
        """Reads rows of one file; those of a slice stay memory-mapped."""
        return open_npy(self._paths[file], self._verb)[rows]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, rows: slice | Integers, /) -> Floats:
        """Reads the rows of a slice without a step, or of sorted numbers."""
        parts = [*(self._cut(rows) if isinstance(rows, slice) else self._rows_of(rows))]
        if len(parts) == 1:
            return parts[0]
        if parts:
            return np.concatenate(parts)
        shape, dtype = self.file_layouts[0] if self.file_layouts else ((), np.dtype(np.float32))
        return np.zeros((0, *shape), dtype)

    def _cut(self, cut: slice) -> Iterator[Floats]:
        start, stop, _ = cut.indices(len(self))
        file = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self.starts[file]), int(min(stop, self.starts[file + 1]))
            if start < end:
                yield self.read(file, slice(start - first, end - first))
            start, file = max(start, end), file + 1

    def _rows_of(self, ids: Integers) -> Iterator[Floats]:
        for file in np.unique(numbers := np.searchsorted(self.starts, ids, side="right") - 1):
            yield self.read(int(file), ids[numbers == file] - self.starts[file])


class StoredRows:
    """The stored output of a frozen part of the model, read row by row.

    ``directory`` has a file for each shard of the index, ``00007.npy`` [rows, ...], float16 or
    float32, with a row for each sample. Of the ``kind`` 'text_embeddings' it has a row for each
    caption, those of a sample after each other. Each row is read as a range of bytes, which is
    faster than through a mapping.

    without   why samples have no row, by sample id

    Raises FileNotFoundError if there is no such artifact, and RuntimeError if it is of another
    index or a file has another size. It pickles without open files.
    """

    def __init__(self, directory: Path, index: SampleIndex, kind: str = "text_embeddings") -> None:
        self.directory, self.index, self.kind = Path(directory), index, kind
        self.without: dict[int, str] = {}
        numbers = range(len(index.shards))
        if is_finished(self.directory) or not self.directory.is_dir():
            index.manifest_of(self.directory, kind).check(self.directory)
        if kind != "text_embeddings":
            notes = [read_note(self.directory, number) for number in numbers]
            self.without = {i: r for note in notes if note for i, r in note.reasons.items()}
        paths = [str(rows_path(self.directory, number)) for number in numbers]
        self._reader = ShardReader([StoredFile(path) for path in paths])
        self._layouts: dict[int, tuple[int, BlockLayout]] = {}

    @classmethod
    def of_images(cls, layout: RunPaths, index: SampleIndex, whole: bool) -> StoredRows:
        """Opens the rows that are read instead of images.

        They are the outputs of the tower's frozen blocks, or, if the ``whole`` tower is frozen, the
        embeddings of stage 0.
        """
        if whole:
            return cls(layout.embeddings(0), index, "embeddings")
        return cls(layout.image_rows, index, IMAGE_ROWS)

    def get(self, sample_id: int, caption_number: int = 0) -> np.ndarray:
        """Reads the row of a sample, or of one of its captions.

        Raises FileNotFoundError for a shard without rows, RuntimeError for a file that does not fit
        the index.
        """
        shard = int(self.index.shard_of[sample_id])
        row = sample_id - (first := self.index.shards[shard].start)
        if self.kind == "text_embeddings":
            assert 0 <= caption_number < self.index.num_captions[sample_id], sample_id
            # The index's caption_start would take an array [N + 1] in every worker.
            row = int(self.index.num_captions[first:sample_id].sum()) + caption_number
        header, (shape, dtype) = self._layout(shard)
        size = int(np.prod(shape)) * dtype.itemsize
        data = self._reader.read(shard, header + row * size, size)
        return np.frombuffer(bytearray(data), dtype).reshape(shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self._layout(0)[1][0]

    def _layout(self, shard: int) -> tuple[int, BlockLayout]:
        """Returns the offset of the first row in a shard's file, and shape and type of a row."""
        if shard in self._layouts:
            return self._layouts[shard]
        path, here = rows_path(self.directory, shard), self.index.shards[shard]
        array, num_rows = open_npy(path, verb_of(self.kind)), here.stop - here.start
        if self.kind == "text_embeddings":
            num_rows = int(self.index.num_captions[here.start : here.stop].sum())
        fits = array.ndim > 1 and len(array) == num_rows
        if not fits or array.dtype not in (np.float16, np.float32):
            raise RuntimeError(
                f"{path} holds {array.dtype} {list(array.shape)}, the index wants float16 or "
                f"float32 [{num_rows}, ...]: run 'mclclip {verb_of(self.kind)} --force' after "
                "'mclclip index'"
            )
        self._layouts[shard] = array.offset, (array.shape[1:], array.dtype)
        return self._layouts[shard]


class RowBlocks(Sequence[Floats]):
    """The rows of a store in blocks of at most ``rows_per_block``, never across two files."""

    def __init__(self, rows: RowStore, rows_per_block: int = ROWS_PER_BLOCK) -> None:
        self.rows = rows
        self._cuts = [
            (file, slice(first, min(first + rows_per_block, num_rows)))
            for file, num_rows in enumerate(rows.num_rows)
            for first in range(0, num_rows, rows_per_block)
        ]

    def layouts(self) -> list[BlockLayout]:
        """Returns shape and type of each block, without reading it."""
        layouts = [(cut, *self.rows.file_layouts[file]) for file, cut in self._cuts]
        return [((cut.stop - cut.start, *shape), dtype) for cut, shape, dtype in layouts]

    def __len__(self) -> int:
        return len(self._cuts)

    def __getitem__(self, number: int) -> Floats:  # type: ignore[override]  # nobody slices
        return self.read(*self._cuts[number])

    def read(self, file: int, cut: slice) -> Floats:
        """Reads a block: some rows of one file."""
        return self.rows.read(file, cut)


class MeanBlocks(RowBlocks):
    """Blocks of float32 rows [n, D]: the mean of a sample's image and text embedding, unit length.

    ``images`` has one row per sample; ``texts`` has as many files, with one row per caption. The
    first caption of a sample is used; a sample without a caption keeps its image embedding.
    ``num_captions`` [N] are those of all samples. Means are computed when a block is read. Raises
    ValueError if images and texts have different widths, and RuntimeError if the number of texts is
    not that of captions.
    """

    def __init__(
        self,
        images: RowStore,
        texts: RowStore,
        num_captions: npt.NDArray[np.integer],
        rows_per_block: int = ROWS_PER_BLOCK,
    ) -> None:
        super().__init__(images, rows_per_block)
        self._texts, self._num_captions = texts, np.split(num_captions, images.starts[1:-1])
        num_texts = [int(captions.sum()) for captions in self._num_captions]
        if texts.num_rows != num_texts:
            raise RuntimeError(
                f"text embeddings have {len(texts):,} rows, the index has {sum(num_texts):,} "
                "captions (compared per shard): run 'mclclip embed --stage 0 --text --force' after "
                "'mclclip index'"
            )
        if len(shapes := images.row_shapes() | texts.row_shapes()) > 1:
            raise ValueError(
                f"cluster.feature=mean: image and text embeddings have the widths {sorted(shapes)}:"
                " wanted one; embed with embed.feature=projected"
            )

    def layouts(self) -> list[BlockLayout]:
        """Returns shape and type of each block, without reading it."""
        return [(shape, np.dtype(np.float32)) for shape, _ in super().layouts()]

    def read(self, file: int, cut: slice) -> Floats:
        """Computes a block: the means of some samples of one file."""
        rows = normalize_rows(super().read(file, cut))
        captions = self._num_captions[file]
        first = int(captions[: cut.start].sum())
        here = captions[cut]
        with_caption = here > 0
        if with_caption.any():
            texts = self._texts.read(file, slice(first, first + int(here.sum())))
            first_captions = np.cumsum(here) - here
            rows[with_caption] += normalize_rows(texts[first_captions[with_caption]])
        return normalize_rows(rows)
