"""Pseudo labels against their definition, one sample at a time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.data.groups import group_samples
from mclclip.data.labels import (
    ClassLabels,
    ami,
    combine_stages,
    group_statistics,
    label_space,
    truncate,
)
from mclclip.data.sample_index import SampleIndex
from mclclip.run.artifacts import Artifact

stable = settings(max_examples=30)


@st.composite
def clusterings(draw: st.DrawFn) -> tuple[list[np.ndarray], list[int]]:
    """Cluster labels of 1 to 4 stages with their radices; some samples lack labels."""
    radices = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    rows = draw(st.integers(0, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return [random.integers(-1, k, rows) for k in radices], radices


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
        assert label == (-1 if outside else expected) < np.prod(radices)
    last, used = combine_stages(stages, radices, "last")
    assert used == (radices[-1],)
    assert np.array_equal(last, np.where(labels < 0, -1, stages[-1]))
    inside = labels >= 0
    for length in range(len(radices) + 1):  # a prefix is the label of the stages before
        short = truncate(labels, radices, length)
        assert (short[~inside] == -1).all()
        before = combine_stages(stages[:length], radices[:length])[0] if length else 0 * labels
        assert np.array_equal(short[inside], before[inside])


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
    # Rows without a label are left out.
    a, b = np.array([0, 0, 1, 1, -1, 0]), np.array([1, 1, 0, 0, 0, -1])
    assert ami(a, b) == pytest.approx(1)
    assert ami(np.array([-1, 0]), np.array([0, -1])) is None


@stable
@given(clusterings())
def test_a_range_of_groups_has_the_samples_of_a_prefix(case) -> None:
    stages, radices = case
    labels, used = combine_stages(stages, radices)
    grouped = group_samples(labels, used)
    for length in range(len(used) + 1):
        for label in range(label_space(used[:length])):
            start, stop = grouped.group_range(label, length)
            wanted = np.flatnonzero(truncate(labels, used, length) == label)
            assert sorted(grouped.sample_ids[start:stop].tolist()) == wanted.tolist()


# --- labels of classes -------------------------------------------------------------------------


LABELS = np.array([[3, 1, 2], [0, 4, 1], [2, 0, 3], [-1, -1, -1]], dtype=np.int32)
SIMILARITIES = np.array(
    [[0.9, 0.8, 0.7], [0.5, 0.4, 0.3], [0.95, 0.75, 0.1], [0, 0, 0]], dtype=np.float16
)

CONFIG = {"cluster": {"num_clusters": 5, "labels_per_sample": 3}}


@pytest.fixture
def clusters(tmp_path: Path) -> tuple[Path, Any]:
    """Clusters of four samples, and what an index of them looks like to the labels."""
    directory = tmp_path / "clusters"
    artifact = Artifact(directory, kind="clusters", config=CONFIG, inputs={"index": "abc"}).compare(
        write=True
    )
    np.save(directory / "cluster_labels.npy", LABELS)
    np.save(directory / "similarities.npy", SIMILARITIES)
    np.save(directory / "centroids.npy", np.ones((5, 2), np.float32))
    artifact.finish({"samples": 4})

    class Index(SimpleNamespace):
        manifest_of = SampleIndex.manifest_of

        def __len__(self) -> int:
            return 4

    return directory, Index(digest="abc")


def test_the_nearest_first(clusters: tuple[Path, Any]) -> None:
    labels = ClassLabels(*clusters, labels_per_sample=2)
    found = labels[np.array([2, 0, 2])]
    assert found.dtype == np.int64 and found.tolist() == [[2, 0], [3, 1], [2, 0]]
    assert labels.centroids().shape == (5, 2)


@pytest.mark.parametrize(
    ("threshold", "wanted"),
    [
        (0.75, [[3, 1, -1], [0, -1, -1], [2, 0, -1]]),
        (0.99, [[3, -1, -1], [0, -1, -1], [2, -1, -1]]),  # the nearest in any case
        (0.0, [[3, 1, 2], [0, 4, 1], [2, 0, 3]]),
    ],
)
def test_a_threshold(clusters: tuple[Path, Any], threshold: float, wanted: Any) -> None:
    labels = ClassLabels(*clusters, labels_per_sample=3, threshold=threshold)
    assert labels[np.arange(3)].tolist() == wanted


def test_mistakes(clusters: tuple[Path, Any]) -> None:
    directory, index = clusters
    with pytest.raises(ValueError, match="have 3 labels per sample, wanted 4: raise cluster"):
        ClassLabels(directory, index, labels_per_sample=4)
    index.digest = "other"
    with pytest.raises(RuntimeError, match="run 'mclclip cluster --force'"):
        ClassLabels(directory, index, labels_per_sample=1)
