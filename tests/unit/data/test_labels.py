"""Pseudo labels against their definition, one sample at a time."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.data.groups import group_samples
from mclclip.data.labels import (
    ami,
    combine_stages,
    group_statistics,
    label_space,
    truncate,
)

stable = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def clusterings(draw: st.DrawFn) -> tuple[list[np.ndarray], list[int]]:
    """Cluster labels of 1 to 4 stages with their radices; some samples lack labels."""
    radices = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    rows = draw(st.integers(0, 40))
    column = [st.lists(st.integers(-1, k - 1), min_size=rows, max_size=rows) for k in radices]
    return [np.array(draw(values), dtype=np.int64) for values in column], radices


@stable
@given(clusterings())
def test_prefix_labels_are_the_mixed_radix_number_of_the_stages(case) -> None:
    stages, radices = case
    labels, used = combine_stages(stages, radices)
    assert used == tuple(radices) and labels.dtype == np.int64
    for row, label in enumerate(labels.tolist()):
        expected = 0
        for stage, radix in zip(stages, radices, strict=True):
            expected = expected * radix + int(stage[row])
        outside = any(stage[row] < 0 for stage in stages)
        assert label == (-1 if outside else expected)
        assert label < np.prod(radices)


@stable
@given(clusterings())
def test_the_prefix_of_a_label_is_the_label_of_the_stages_before(case) -> None:
    stages, radices = case
    labels, _ = combine_stages(stages, radices)
    inside = labels >= 0
    for length in range(len(radices) + 1):
        short = truncate(labels, radices, length)
        assert (short[~inside] == -1).all()
        if length == 0:
            assert (short[inside] == 0).all()
        else:
            before, _ = combine_stages(stages[:length], radices[:length])
            assert np.array_equal(short[inside], before[inside])
    assert np.array_equal(truncate(labels, radices, len(radices)), labels)


@stable
@given(clusterings())
def test_last_labels_are_those_of_the_last_stage(case) -> None:
    stages, radices = case
    labels, used = combine_stages(stages, radices, "last")
    outside = np.any([stage < 0 for stage in stages], axis=0)
    assert used == (radices[-1],)
    assert np.array_equal(labels, np.where(outside, -1, stages[-1]))
    assert np.array_equal(labels < 0, combine_stages(stages, radices)[0] < 0)


@pytest.mark.parametrize(
    "stages, radices, message",
    [
        ([[0, 2]], [2], "stage 0 run from 0 to 2"),
        ([[0, -2]], [2], "run from -2"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages, radices, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combine_stages([np.array(stage) for stage in stages], radices)


@stable
@given(clusterings())
def test_group_statistics_equal_counts_by_hand(case) -> None:
    stages, radices = case
    labels, used = combine_stages(stages, radices)
    report = group_statistics(labels, used)
    assert json.loads(json.dumps(report)) == report
    sizes = sorted(Counter(label for label in labels.tolist() if label >= 0).values())
    assert report["num_samples"] == sum(sizes)
    assert report["num_outside"] == len(labels) - sum(sizes)
    assert report["num_groups"] == len(sizes)
    assert report["label_space"] == np.prod(radices)
    if sizes:
        assert (report["smallest"], report["largest"]) == (sizes[0], sizes[-1])
        assert report["median"] == np.median(sizes)
        assert report["max_share"] == pytest.approx(sizes[-1] / sum(sizes))
        share = np.array(sizes) / sum(sizes)
        entropy = -float((share * np.log(share)).sum())
        assert report["effective_groups"] == pytest.approx(np.exp(entropy))
        assert report["effective_groups"] <= len(sizes) + 1e-9


def test_ami_knows_equal_renamed_and_independent_labels() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 5, 3000)
    renamed = np.array([3, 4, 0, 1, 2])[labels]
    other = random.integers(0, 5, 3000)
    assert ami(labels, labels) == pytest.approx(1)
    assert ami(labels, renamed) == pytest.approx(1)
    assert abs(ami(labels, other)) < 0.01
    assert ami(labels, other) == pytest.approx(ami(other, labels))
    assert ami(np.zeros(9, dtype=int), np.zeros(9, dtype=int)) == 1


def test_ami_leaves_out_rows_without_a_label() -> None:
    a = np.array([0, 0, 1, 1, -1, 0])
    b = np.array([1, 1, 0, 0, 0, -1])
    assert ami(a, b) == pytest.approx(1)
    assert ami(np.array([-1, 0]), np.array([0, -1])) is None
    with pytest.raises(ValueError, match="shapes"):
        ami(a, b[:3])


@stable
@given(clusterings())
def test_the_grouped_index_sorts_samples_by_label(case) -> None:
    stages, radices = case
    labels, used = combine_stages(stages, radices)
    grouped = group_samples(labels, used)
    by_hand = sorted((label, row) for row, label in enumerate(labels.tolist()) if label >= 0)
    assert grouped.sample_ids.tolist() == [row for _, row in by_hand]
    assert grouped.group_labels.tolist() == sorted({label for label, _ in by_hand})
    assert (grouped.num_samples, grouped.num_groups) == (len(by_hand), len(grouped.group_labels))
    starts = grouped.group_starts
    for group, label in enumerate(grouped.group_labels.tolist()):
        members = grouped.sample_ids[starts[group] : starts[group + 1]]
        assert members.tolist() == np.flatnonzero(labels == label).tolist()
    for length in range(len(used) + 1):
        for label in range(label_space(used[:length])):
            start, stop = grouped.group_range(label, length)
            wanted = np.flatnonzero(truncate(labels, used, length) == label)
            assert sorted(grouped.sample_ids[start:stop].tolist()) == wanted.tolist()


def test_no_radices_make_one_group() -> None:
    grouped = group_samples(np.array([0, -1, 0, 0]), ())
    assert (grouped.num_groups, grouped.sample_ids.tolist()) == (1, [0, 2, 3])
    with pytest.raises(ValueError, match="run from 0 to 1"):
        group_samples(np.array([0, 1]), ())
