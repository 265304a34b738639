"""Rows of the trunk's cache as they are written: checksums, and samples without a row."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from mclclip.data import row_store
from tests.unit.data.test_samples import PER_SHARD, make_index


@pytest.mark.parametrize("size", [1, 2, 3, PER_SHARD])
def test_checksums_are_those_of_the_rows_wherever_batches_are_cut(
    tmp_path: Path, size: int
) -> None:
    index = make_index(tmp_path)
    rows = np.random.default_rng(0).standard_normal((len(index), 3, 2), np.float32)
    bad = {1: "truncated", 5: "broken", 8: "bomb", 9: "timeout", 21: "broken"}
    for number, shard in enumerate(index.shards):
        starts = range(shard.start, shard.stop, size)
        batches = [
            (rows[start:stop], {i: reason for i, reason in bad.items() if start <= i < stop})
            for start, stop in ((start, min(start + size, shard.stop)) for start in starts)
        ]
        found = row_store.write_shard(
            tmp_path, number, batches, index,
            num_rows=shard.stop - shard.start, dtype="float32", checksums=True,
        )  # fmt: skip
        assert found == {i: bad[i] for i in bad if shard.start <= i < shard.stop}
    row_store.join_checksums(tmp_path / "checksums.npy", tmp_path, index)
    checksums = np.load(tmp_path / "checksums.npy").tolist()
    assert checksums == [
        -1 if i in bad else zlib.crc32(row.tobytes()) for i, row in enumerate(rows)
    ]
    assert np.array_equal(np.load(tmp_path / "00001.npy"), rows[5:10])
