"""Embeddings on disk, cut and chosen like one array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mclclip.data.row_store import RowStore, rows_path
from mclclip.files import records_of
from mclclip.run.artifacts import Manifest

SIZES = (4, 0, 1, 7, 3)


def write(directory: Path, rows: np.ndarray) -> Manifest:
    """Rows in files of ``SIZES``, and the manifest with their records."""
    ends = np.cumsum(SIZES)
    names = []
    for number, part in enumerate(np.split(rows, ends[:-1])):
        np.save(rows_path(directory, number), part)
        names.append(rows_path(directory, number).name)
    records = {name: vars(record) for name, record in records_of(directory, *names).items()}
    return Manifest("embeddings", {}, {}, {}, "", records=records)


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(sum(SIZES), 3)).astype(np.float16)


def test_they_are_cut_and_chosen_like_the_array(tmp_path: Path, rows: np.ndarray) -> None:
    stored = RowStore.open(tmp_path, write(tmp_path, rows), len(SIZES))
    assert len(stored) == 15
    for start in range(16):
        for stop in range(start, 18):
            assert np.array_equal(stored[start:stop], rows[start:stop])
    assert np.array_equal(stored[:], rows)
    for ids in ([0], [3, 4], [4], [0, 5, 11, 12, 14], [*range(15)], [2, 2, 13], []):
        chosen = np.array(ids, np.int64)
        assert np.array_equal(stored[chosen], rows[chosen])
    assert stored[np.zeros(0, np.int64)].shape == (0, 3)


def test_what_was_changed_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """Block by block: rows of an intact block of the same file are given out."""
    rows = np.random.default_rng(0).normal(size=(sum(SIZES), 120_000)).astype(np.float32)
    manifest = write(tmp_path, rows)
    path = rows_path(tmp_path, 3)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    stored = RowStore.open(tmp_path, manifest, len(SIZES))
    assert np.array_equal(stored[5:8], rows[5:8])
    for wanted in (slice(9, 12), np.array([0, 11])):
        with pytest.raises(RuntimeError, match="00003.npy is damaged.*mclclip embed --force"):
            stored[wanted]
    path.unlink()
    with pytest.raises(FileNotFoundError, match="no .*00003.npy: run 'mclclip embed --force'"):
        RowStore.open(tmp_path, manifest, len(SIZES))


def test_files_of_other_widths_are_refused(tmp_path: Path, rows: np.ndarray) -> None:
    write(tmp_path, rows)
    np.save(rows_path(tmp_path, 2), np.zeros((1, 5), np.float16))
    bare = Manifest("embeddings", {}, {}, {}, "")
    with pytest.raises(RuntimeError, match=r"rows of the shapes \[\(3,\), \(5,\)\], wanted one"):
        RowStore.open(tmp_path, bare, len(SIZES))
