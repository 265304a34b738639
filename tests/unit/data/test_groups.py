"""Grouping block by block against one stable sort of all labels."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.data import groups
from mclclip.data.groups import GroupedIndex, LabelBlocks, StageGroups
from tests.batches import grouped_index, in_memory

stable = settings(max_examples=60, deadline=None, derandomize=True, database=None)
HUGE = (2**31, 2**31 - 1)  # label spaces from one group to nearly all that int64 holds
SPACES = ((), (1,), (7,), (3, 2, 2), (70_000,), (1000, 1000, 1000), HUGE)


@st.composite
def labelled(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...], np.ndarray]:
    """Labels in any space: few groups or nearly as many as samples, some outside, some left out."""
    radices = draw(st.sampled_from(SPACES))
    samples = draw(st.integers(0, 70))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    space = int(np.prod(np.array(radices, dtype=object), initial=1))
    names = random.integers(0, space, size=draw(st.sampled_from([1, 2, 5, 200])))
    labels = random.choice(names, size=samples)
    labels[random.random(samples) < draw(st.sampled_from([0, 0.2, 1]))] = -1
    left_out = np.flatnonzero(random.random(samples) < draw(st.sampled_from([0, 0.2, 1])))
    return labels, radices, left_out


def by_one_sort(labels: np.ndarray, left_out: np.ndarray) -> list[np.ndarray]:
    """sample_ids, group_starts and group_labels."""
    usable = labels.astype(np.int64)
    usable[left_out] = -1
    inside = np.flatnonzero(usable >= 0)
    inside = inside[np.argsort(usable[inside], kind="stable")]
    found, starts = np.unique(usable[inside], return_index=True)
    return [inside, np.append(starts, len(inside)), found]


def arrays_of(grouped: GroupedIndex) -> list[np.ndarray]:
    return [np.asarray(a) for a in (grouped.sample_ids, grouped.group_starts, grouped.group_labels)]


def written(directory: Path, blocks: LabelBlocks) -> GroupedIndex:
    stage = StageGroups(directory)
    stage.write(blocks, blocks.sizes(), np.array([3]))
    return stage.read()[0]


@stable
@given(labelled())
def test_blocks_of_every_size_give_what_one_sort_gives(case) -> None:
    labels, radices, left_out = case
    wanted = by_one_sort(labels, left_out)
    for rows in {1, 2, 3, 8, 17, 64, max(len(labels), 1), len(labels) + 1}:
        for ranges, joined in ((1, 100), (5, 3), (4096, 1)):
            with patch.multiple(groups, RANGES=ranges, JOINED=joined):
                grouped = in_memory(LabelBlocks(labels, radices, left_out, rows))
            for found, array in zip(arrays_of(grouped), wanted, strict=True):
                assert found.dtype == np.int64 and np.array_equal(found, array)
    usable = labels.copy()
    usable[left_out] = -1
    built = grouped_index(usable, radices)
    assert all(map(np.array_equal, arrays_of(built), wanted))


@pytest.mark.parametrize("kind", ["even", "skewed", "own"])
@pytest.mark.parametrize("rows", [1000, 4096, 100_000])
def test_larger_labels_are_merged_from_many_blocks(tmp_path, kind, rows, monkeypatch) -> None:
    """Even groups, one group of half of the samples beside tiny ones, a group for each sample."""
    monkeypatch.setattr(groups, "RANGES", 100)
    random, samples = np.random.default_rng(0), 30_000
    labels = {
        "even": random.integers(0, 100, samples),
        "skewed": np.where(random.random(samples) < 0.5, 7, random.integers(0, 10**9, samples)),
        "own": random.permutation(samples) * 30_000,
    }[kind]
    grouped = written(tmp_path, LabelBlocks(labels, (10**9,), None, rows))
    wanted = by_one_sort(labels, np.zeros(0, np.int64))
    assert all(map(np.array_equal, arrays_of(grouped), wanted))
    names = {"group_labels.npy", "group_starts.npy", "sample_ids.npy"}
    names |= {"grouped_index.json", "known_bad.json"}
    assert {path.name for path in tmp_path.iterdir()} == names  # and nothing that was temporary


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_labels_may_be_mapped_and_of_any_integers(tmp_path, dtype) -> None:
    labels = np.random.default_rng(1).integers(-1, 50, 5000).astype(dtype)
    np.save(tmp_path / "labels.npy", labels)
    mapped = np.load(tmp_path / "labels.npy", mmap_mode="r")
    grouped = written(tmp_path / "groups", LabelBlocks(mapped, (50,), None, 512))
    built = grouped_index(labels.astype(np.int64), (50,))
    assert all(map(np.array_equal, arrays_of(grouped), arrays_of(built)))


def test_memory_grows_neither_with_samples_nor_with_groups(tmp_path, monkeypatch) -> None:
    """Peak of numpy and Python beyond the labels: that of a block, for many groups and few."""
    monkeypatch.setattr(groups, "DENSE", 1000)
    monkeypatch.setattr(groups, "RANGES", 256)
    monkeypatch.setattr(groups, "JOINED", 1000)
    peaks = {}
    for samples in (100_000, 800_000):
        for count in (1, 10_000):
            labels = np.random.default_rng(0).integers(0, count, samples)
            blocks = LabelBlocks(labels, (count,), None, 2**14)
            groups_of = StageGroups(tmp_path / f"{samples}_{count}")
            tracemalloc.start()
            groups_of.write(blocks, blocks.sizes(), np.zeros(0, np.int64))
            peaks[samples, count] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert max(peaks.values()) < 30 * 8 * 2**14 + 80 * 10_000 < 8 * 800_000


def test_a_full_disk_is_an_error_with_a_path(tmp_path) -> None:
    """A file that may not grow stands for a disk that has no room."""
    code = f"""
import resource, signal, numpy as np
from pathlib import Path
from mclclip.data.groups import LabelBlocks
from mclclip.data.groups import StageGroups
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
blocks = LabelBlocks(np.arange(200_000) % 7, (7,))
try:
    StageGroups(Path({str(tmp_path)!r}) / "groups").write(blocks, blocks.sizes(), np.zeros(0))
except OSError as error:
    print(error.filename)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.startswith(str(tmp_path / "groups"))
    assert list((tmp_path / "groups").iterdir()) == []
