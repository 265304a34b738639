"""Embeddings on disk: for each shard of the index a file of rows, and a note on it.

    00007.npy    rows in index order; those of samples that could not be used are zeros
    00007.json   the record of that file, and the samples that could not be used

The note is written last and marks the shard as done. It names the bytes of every sample that could
not be used, so that a shard which has been repaired since is embedded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mclclip import files
from mclclip.data.arrays import Floats, NpyBlocks, save_npy
from mclclip.data.sample_index import SampleIndex
from mclclip.run.artifacts import Manifest, is_finished
from mclclip.run.layout import Layout


@dataclass(frozen=True)
class Note:
    """The record of a shard's rows; and by sample id, why a sample has none, and its bytes then
    (`SampleIndex.bytes_of`)."""

    record: files.Record
    reasons: dict[int, str]
    bytes_of: dict[int, str]

    def is_of(self, index: SampleIndex) -> bool:
        """Whether the samples that could not be used still have the bytes that they had."""
        return index.bytes_of([*self.bytes_of]) == self.bytes_of


def rows_path(directory: Path, number: int) -> Path:
    """The file with the rows of shard ``number``."""
    return Path(directory) / f"{number:05d}.npy"


def _note_path(directory: Path, number: int) -> Path:
    return Path(directory) / f"{number:05d}.json"


def write_shard(
    directory: Path,
    number: int,
    rows: np.ndarray,
    reasons: Mapping[int, str],
    index: SampleIndex,
) -> Note:
    """Writes the rows of a shard, then the note, which is returned."""
    path = rows_path(directory, number)
    save_npy(path, rows)
    return write_note(directory, number, files.record_of(path), reasons, index)


def write_note(
    directory: Path,
    number: int,
    record: files.Record,
    reasons: Mapping[int, str],
    index: SampleIndex,
) -> Note:
    """Writes and returns the note on a shard whose rows are on disk."""
    note = Note(record, dict(reasons), index.bytes_of(list(reasons)))
    bad = {str(i): {"reason": r, "bytes": note.bytes_of[i]} for i, r in note.reasons.items()}
    value = files.sealed({"shard": number, "record": asdict(note.record), "bad": bad})
    files.write_json(_note_path(directory, number), value)
    return note


def read_note(directory: Path, number: int) -> Note | None:
    """The note of a shard; None where it is not done, or rows or note are damaged."""
    path = _note_path(directory, number)
    try:
        found = files.unsealed(files.read_json(path), path)
        if found["shard"] != number:
            return None
        bad = {int(sample_id): entry for sample_id, entry in found["bad"].items()}
        record = files.Record(**found["record"])
        if rows_path(directory, number).stat().st_size != record.size_bytes:
            return None
        return Note(
            record,
            {sample_id: entry["reason"] for sample_id, entry in bad.items()},
            {sample_id: entry["bytes"] for sample_id, entry in bad.items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # then the shard is embedded


def shards_done(
    directory: Path, index: SampleIndex, mine: Sequence[int]
) -> tuple[dict[int, str], list[int]]:
    """Of the shards ``mine``: samples without a row, by reason, of those that are done and whose
    samples without one are what they were; and the numbers of the other shards."""
    reasons: dict[int, str] = {}
    missing = []
    for number in mine:
        note = read_note(directory, number)
        if note is None or not note.is_of(index):
            missing.append(number)
        else:
            reasons |= note.reasons
    return reasons, missing


def num_restored(directory: Path, index: SampleIndex) -> int:
    """Number of samples without a row whose bytes have changed since, so that they may have one."""
    return sum(
        index.bytes_of([sample_id])[sample_id] != was
        for number in range(len(index.shards))
        if (note := read_note(directory, number)) is not None
        for sample_id, was in note.bytes_of.items()
    )


def left_out(directory: Path, num_shards: int) -> npt.NDArray[np.int64]:
    """Sorted ids of the samples whose rows are zeros, because they could not be used.

    A shard without a note has none of them. Raises RuntimeError where a note is damaged.
    """
    ids: list[int] = []
    for number in range(num_shards):
        # Older versions wrote another file.
        older = Path(directory) / f"{number:05d}.bad.json"
        if (note := read_note(directory, number)) is not None:
            ids += note.reasons
        elif older.exists():
            ids += [int(sample_id) for sample_id in files.read_json(older)]
        elif _note_path(directory, number).exists():
            raise RuntimeError(
                f"{_note_path(directory, number)} is damaged: run 'mclclip embed --force' to make "
                "it again"
            )
    return np.sort(np.asarray(ids, np.int64))


class StoredRows:
    """All rows [N, D] of finished embeddings, cut or chosen like those of an array, across files.

    Nothing is held: files are mapped while they are read, and what is read is compared with the
    records of ``manifest`` (``NpyBlocks``). Raises FileNotFoundError for a missing file, and
    RuntimeError where one is damaged, or files have different widths.
    """

    def __init__(self, directory: Path, manifest: Manifest, num_files: int) -> None:
        paths = [rows_path(directory, number) for number in range(num_files)]
        if missing := next((path for path in paths if not path.exists()), None):
            raise FileNotFoundError(f"no {missing}: run 'mclclip embed --force' to make it again")
        self._blocks = NpyBlocks(paths, records=[manifest.record(path.name) for path in paths])
        self._starts = np.cumsum([0, *self._blocks.num_rows])
        if len(widths := {*self._blocks.row_shapes()}) != 1 or len(shape := min(widths)) != 1:
            raise RuntimeError(
                f"embeddings at {directory} have rows of the shapes {sorted(widths)}, wanted one "
                "width: run 'mclclip embed --force' to make them again"
            )
        self._dim = shape[0]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, rows: slice | npt.NDArray[np.int64], /) -> Floats:
        """The rows of a slice without a step, or of sorted numbers; in memory, or mapped."""
        parts = [*(self._cut(rows) if isinstance(rows, slice) else self._chosen(rows))]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros((0, self._dim), np.float32)

    def _cut(self, cut: slice) -> Iterator[Floats]:
        start, stop, _ = cut.indices(len(self))
        file = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self._starts[file]), int(min(stop, self._starts[file + 1]))
            if start < end:
                yield self._blocks.read(file, slice(start - first, end - first))
            start, file = max(start, end), file + 1

    def _chosen(self, ids: npt.NDArray[np.int64]) -> Iterator[Floats]:
        files = np.searchsorted(self._starts, ids, side="right") - 1
        for file in np.unique(files):
            own = ids[files == file] - self._starts[file]
            lowest = int(own[0])
            yield self._blocks.read(int(file), slice(lowest, int(own[-1]) + 1))[own - lowest]


@dataclass(frozen=True)
class Embedded:
    """Finished image embeddings with a row for each sample of an index, and the name that they have
    in messages and in what is written."""

    name: str
    directory: Path
    manifest: Manifest
    num_files: int

    @classmethod
    def of_stage(cls, layout: Layout, stage: int, index: SampleIndex) -> Embedded:
        """Those of a stage of a run.

        Raises FileNotFoundError where there are none, and RuntimeError where they are of another
        index.
        """
        directory = layout.embeddings(stage)
        if not is_finished(directory):
            raise FileNotFoundError(
                f"no finished embeddings at {directory}: run 'mclclip embed --stage {stage}' first"
            )
        manifest = index.manifest_of(directory, "embeddings")
        return cls.checked(f"stage_{stage}", directory, manifest, index)

    @classmethod
    def checked(
        cls, name: str, directory: Path, manifest: Manifest, index: SampleIndex
    ) -> Embedded:
        """Those in a directory, after a comparison of their number with the index.

        Keys are those of the index (an equal digest), but shards may be cut otherwise. Raises
        RuntimeError for another number of rows.
        """
        found = cls(name, directory, manifest, num_files(manifest, len(index.shards)))
        if (rows := len(found.rows())) != len(index):
            raise RuntimeError(
                f"embeddings at {directory} has {rows:,} rows, the index has {len(index):,}: run "
                "'mclclip embed --force' after 'mclclip index'"
            )
        return found

    def rows(self) -> StoredRows:
        """The embeddings, which are read while they are searched."""
        return StoredRows(self.directory, self.manifest, self.num_files)

    def left_out(self) -> npt.NDArray[np.int64]:
        """Sorted ids of the samples whose rows are zeros, because they could not be used."""
        return left_out(self.directory, self.num_files)


def num_files(manifest: Manifest, num_shards: int) -> int:
    """Number of files of rows of an artifact; older manifests leave it to the index."""
    return int(manifest.counts.get("shards", num_shards))
