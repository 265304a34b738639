"""Embeddings on disk: for each shard of the index a file of rows, and a note on it.

    00007.npy    rows in index order; those of samples that could not be used are zeros
    00007.json   the record of that file, and the samples that could not be used

The note is written last and marks the shard as done. It names the bytes of every sample that could
not be used, so that a shard which has been repaired since is embedded again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mclclip import files
from mclclip.data.arrays import save_npy
from mclclip.data.sample_index import SampleIndex


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
    note = Note(files.record_of(path), dict(reasons), index.bytes_of(list(reasons)))
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

    Raises RuntimeError where the note of a shard is missing or damaged.
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
