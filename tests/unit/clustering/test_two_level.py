"""Two-level k-means: split, share out, cluster, merge."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_mutual_info_score

from mclclip.clustering import kmeans
from mclclip.clustering.centroids import Assignment, Tally
from mclclip.data.arrays import cut_blocks
from tests.matrix import kept
from tests.nearest_checks import assign, assign_rows, fit, fit_two_level

ALGORITHMS = ("spherical", "euclidean")


def unit(rows: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / lengths).astype(np.float32)


def planted(sizes: list[int], dim: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tight clusters of these sizes around random directions, shuffled; and whose each row is."""
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    means = unit(rng.normal(size=(len(sizes), dim)))
    return unit(means[truth] + 0.02 * rng.normal(size=(len(truth), dim))), truth


def clustered(
    blocks: list[np.ndarray], *args: Any, labels_per_sample: int = 1, **options: Any
) -> tuple[kmeans.Clustering, Assignment, Tally]:
    """Centroids, the nearest of each row, and what these come to."""
    found = fit_two_level(blocks, *args, **options)
    common = {name: options[name] for name in ("algorithm", "valid") if name in options}
    common["labels_per_sample"] = labels_per_sample
    tally = Tally(found.num_clusters)
    for _ in tally.of(assign_rows(blocks, found.centroids, **common)):
        pass
    return found, assign(blocks, found.centroids, **common), tally


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nested_clusters_are_recovered(algorithm: Any) -> None:
    """Four far families of equal size with four members each: 16 of 4 splits."""
    rng = np.random.default_rng(1)
    families = np.eye(24)[:4]
    members = unit(np.repeat(families, 4, axis=0) + 0.1 * rng.normal(size=(16, 24)))
    truth = rng.permutation(np.repeat(np.arange(16), 50))
    rows = unit(members[truth] + 0.01 * rng.normal(size=(800, 24)))
    _, near, tally = clustered(
        cut_blocks([rows], 100), 16, num_splits=4, algorithm=algorithm, restarts=5
    )
    assert adjusted_mutual_info_score(truth, near.labels[:, 0]) == pytest.approx(1.0, abs=1e-12)
    # In the order of groups: four that follow each other are one family.
    family = {frozenset(truth[near.labels[:, 0] // 4 == group] // 4) for group in range(4)}
    assert family == {frozenset([number]) for number in range(4)}
    assert tally.inertia == pytest.approx(float(near.distances[:, 0].sum()), rel=1e-6)


@pytest.mark.parametrize("num_clusters", kept([7, 40, 333], 0))
def test_exactly_k_of_uneven_groups(num_clusters: int) -> None:
    rows, _ = planted([500, 90, 30, 5, 2, 1, 1])
    blocks = cut_blocks([rows], 64)
    found, near, tally = clustered(
        blocks, num_clusters, num_splits=7, labels_per_sample=5, restarts=3, seed=2
    )
    assert found.centroids.shape == (num_clusters, 24)
    assert found.held == range(num_clusters) == range(found.num_clusters)
    assert near.labels.shape == (len(rows), 5) and tally.counts.sum() == len(rows)
    assert torch.equal(tally.counts, torch.bincount(near.labels[:, 0], minlength=num_clusters))
    twice = fit_two_level(blocks, num_clusters, num_splits=7, restarts=3, seed=2)
    assert torch.equal(twice.centroids, found.centroids)


def test_masked_rows_take_no_part() -> None:
    rows, _ = planted([100, 80, 60])
    valid = np.random.default_rng(0).random(len(rows)) < 0.7
    spoilt = rows.copy()
    spoilt[~valid] = np.nan
    _, near, tally = clustered(cut_blocks([spoilt], 50), 20, valid=valid)
    _, _, alone = clustered(cut_blocks([rows[valid]], 50), 20)
    assert tally.counts.sum() == valid.sum()
    assert (near.labels[~valid] == -1).all() and (near.labels[valid] >= 0).all()
    assert alone.inertia == pytest.approx(tally.inertia, rel=0.3)


def test_groups_of_equal_rows_leave_clusters_empty() -> None:
    """A picture that is in the data a thousand times does not stop the run."""
    rows, _ = planted([30, 30])
    repeated = np.concatenate([rows, np.repeat(rows[:1], 200, axis=0)])
    found, _, tally = clustered(cut_blocks([repeated], 64), 40, num_splits=3)
    assert found.centroids.shape == (40, 24)
    assert tally.counts.sum() == len(repeated)


def test_near_to_flat_k_means() -> None:
    rows = unit(np.random.default_rng(3).normal(size=(1500, 8)))
    blocks = cut_blocks([rows], 200)
    flat = fit(blocks, 60, init="random")
    _, _, tally = clustered(blocks, 60)
    assert tally.inertia <= 1.1 * flat.inertia


# --- sharing out ---


def test_shares_are_proportional() -> None:
    assert kmeans.share_out(10, np.array([50, 30, 20])).tolist() == [5, 3, 2]
    assert kmeans.share_out(4, np.array([1, 1, 1, 1])).tolist() == [1, 1, 1, 1]
    assert kmeans.share_out(5, np.array([1000, 0, 1, 1, 1])).tolist() == [2, 0, 1, 1, 1]
    assert kmeans.share_out(12, np.array([10, 1, 1])).tolist() == [10, 1, 1]
    assert kmeans.share_out(4, np.array([5, 5, 5])).tolist() == [2, 1, 1]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60), st.floats(0, 1))
def test_shares_keep_their_promises(sizes: list[int], place: float) -> None:
    least, most = sum(size > 0 for size in sizes), sum(sizes)
    if not most:
        return
    num_clusters = least + int(place * (most - least))
    shares = kmeans.share_out(num_clusters, np.array(sizes))
    assert shares.sum() == num_clusters
    assert all(min(size, 1) <= share <= size for share, size in zip(shares, sizes, strict=True))
    # No group with twice the rows gets less.
    order = np.argsort(sizes, kind="stable")
    assert (np.diff(shares[order]) >= -1).all()
