"""Grouping against a plain count of labels."""

from __future__ import annotations

import resource
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.data.groups import GroupedIndex, StageGroups, group_samples
from mclclip.data.labels import SampleWeights
from tests import forks

stable = settings(max_examples=30)
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


def arrays_of(grouped: GroupedIndex) -> list[np.ndarray]:
    return [np.asarray(a) for a in (grouped.sample_ids, grouped.group_starts, grouped.group_labels)]


def written(directory: Path, grouped: GroupedIndex) -> GroupedIndex:
    stage = StageGroups(directory)
    stage.write(grouped, np.array([3]))
    return stage.read()[0]


@stable
@given(labelled())
def test_groups_are_in_order_of_labels_and_ids(case) -> None:
    labels, radices, left_out = case
    members: dict[int, list[int]] = {}
    for sample_id, label in enumerate(labels.tolist()):
        if label >= 0 and sample_id not in left_out:
            members.setdefault(label, []).append(sample_id)
    grouped = group_samples(labels, radices, left_out)
    found = np.split(grouped.sample_ids, grouped.group_starts[1:-1]) if members else []
    assert [ids.tolist() for ids in found] == [members[label] for label in sorted(members)]
    assert grouped.group_labels.tolist() == sorted(members)
    assert grouped.num_samples == len(grouped.sample_ids) == sum(map(len, members.values()))
    assert all(array.dtype == np.int64 for array in arrays_of(grouped))


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_labels_may_be_mapped_and_of_any_integers(tmp_path, dtype) -> None:
    labels = np.random.default_rng(1).integers(-1, 50, 5000).astype(dtype)
    np.save(tmp_path / "labels.npy", labels)
    mapped = np.load(tmp_path / "labels.npy", mmap_mode="r")
    grouped = written(tmp_path / "groups", group_samples(mapped, (50,)))
    built = group_samples(labels.astype(np.int64), (50,))
    assert all(map(np.array_equal, arrays_of(grouped), arrays_of(built)))
    names = {"grouped_index.json", "group_labels.npy", "group_starts.npy", "sample_ids.npy"}
    assert {path.name for path in (tmp_path / "groups").iterdir()} == names


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [1, 10**6, 10**12])
def test_memory_for_each_sample(count: int, weighted: bool) -> None:
    labels = np.random.default_rng(0).integers(0, count, 400_000)
    values = np.ones(len(labels), np.float32)
    weights = SampleWeights(values, np.ones(1), np.zeros(len(labels), np.int32), None)
    tracemalloc.start()
    group_samples(labels, (count,), weights=weights if weighted else None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (75 if weighted else 42) * 400_000


def test_a_full_disk_is_an_error_with_a_path(tmp_path) -> None:
    """A file that may not grow stands for a disk that has no room."""
    grouped = group_samples(np.arange(200_000) % 7, (7,))

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(OSError) as error:
            StageGroups(tmp_path / "groups").write(grouped, np.zeros(0))
        assert str(error.value.filename).startswith(str(tmp_path / "groups"))

    assert forks.exit_code(write) == 0
    assert list((tmp_path / "groups").iterdir()) == []
