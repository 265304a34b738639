"""k-means in one process, against definitions written out slowly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_mutual_info_score
from torch import Tensor

from mclclip.clustering import kmeans
from mclclip.clustering.centroids import Assignment, Tally, hold
from mclclip.clustering.rows import RankRows
from mclclip.data.arrays import cut_blocks
from mclclip.ranks.process_group import num_threads
from tests.matrix import kept
from tests.nearest_checks import assign, assign_rows, fit, fit_two_level

ALGORITHMS = ("spherical", "euclidean")
BLOCK = 100


def noise(num_rows: int = 700, dim: int = 16, seed: int = 0) -> np.ndarray:
    rows: np.ndarray = np.random.default_rng(seed).normal(size=(num_rows, dim)).astype(np.float32)
    return rows


def unit(rows: np.ndarray) -> np.ndarray:
    wide: np.ndarray = rows.astype(np.float64)
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    return wide


def mixture(spread: float, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """600 rows around 8 directions, and which direction each belongs to."""
    rng = np.random.default_rng(1)
    truth = rng.integers(8, size=600)
    rows = unit(rng.normal(size=(8, 32)))[truth] + spread * rng.normal(size=(600, 32))
    return unit(rows).astype(dtype), truth


def slow_distances(rows: np.ndarray, centroids: Tensor, algorithm: str) -> np.ndarray:
    """float64 [N, K]: 1 - cosine, or the squared distance."""
    wide = centroids.double().numpy()
    if algorithm == "spherical":
        cosine: np.ndarray = 1.0 - unit(rows) @ unit(wide).T
        return cosine
    squared: np.ndarray = ((rows.astype(np.float64)[:, None] - wide[None]) ** 2).sum(axis=2)
    return squared


def start(rows: np.ndarray, *numbers: int) -> Tensor:
    return torch.from_numpy(rows[list(numbers)])


# --- fit ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_result_describes_its_own_assignment(algorithm: Any) -> None:
    rows = noise()
    found = fit(cut_blocks([rows], BLOCK), 6, algorithm=algorithm, max_iterations=4)
    near = assign(cut_blocks([rows], BLOCK), found.centroids, algorithm=algorithm)
    assert torch.equal(found.counts, torch.bincount(near.labels[:, 0], minlength=6))
    assert found.counts.sum() == len(rows)
    distances = slow_distances(rows, found.centroids, algorithm)
    assert np.array_equal(near.labels[:, 0], distances.argmin(axis=1))
    np.testing.assert_allclose(near.distances[:, 0], distances.min(axis=1), atol=1e-5)
    assert found.inertia == pytest.approx(distances.min(axis=1).sum(), rel=1e-6)
    assert found.history[-1] == found.inertia
    assert len(found.history) == found.iterations + 1 <= 5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(2))
def test_inertia_never_rises(algorithm: Any, seed: int) -> None:
    rows = noise(seed=seed)
    # The same row five times: clusters that start empty restart elsewhere.
    initial = start(rows, 0, 0, 0, 0, 0, 1, 2)
    blocks = cut_blocks([rows], BLOCK)
    for options in ({"initial": initial}, {"seed": seed}):
        found = fit(blocks, 7, algorithm=algorithm, tolerance=0.0, **options)
        falls = np.diff(found.history) / found.history[0]
        assert found.iterations > 3
        assert falls.max() <= 1e-7
        assert int((found.counts == 0).sum()) == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_planted_mixture_is_recovered(algorithm: Any) -> None:
    for dtype in (np.float16, np.float64):
        rows, truth = mixture(0.05, dtype)
        blocks = cut_blocks([rows], BLOCK)
        found = fit(blocks, 8, algorithm=algorithm, restarts=2)
        labels = assign(blocks, found.centroids, algorithm=algorithm).labels[:, 0]
        assert adjusted_mutual_info_score(truth, labels) == pytest.approx(1.0, abs=1e-12)
        assert found.centroids.dtype == torch.float32


def test_spherical_labels_do_not_depend_on_length() -> None:
    rows = noise()
    lengths = 2.0 ** np.random.default_rng(0).integers(-6, 7, size=(len(rows), 1))
    found = fit(cut_blocks([rows], BLOCK), 5)
    scaled = fit(cut_blocks([(rows * lengths).astype(np.float32)], BLOCK), 5)
    assert torch.equal(found.centroids, scaled.centroids)
    norms = torch.linalg.vector_norm(found.centroids.double(), dim=1)
    torch.testing.assert_close(norms, torch.ones(5, dtype=torch.float64), atol=1e-6, rtol=0)


def test_threads_and_cache_do_not_change_a_bit() -> None:
    rows = noise(600, 64).astype(np.float16)
    options: dict[str, Any] = {"restarts": 2, "init_samples": 300}
    results = []
    for threads, cache_bytes in ((1, None), (2, 50_000), (3, 0)):
        with num_threads(threads):
            blocks = cut_blocks([rows[:320], rows[320:]], BLOCK)
            results.append(fit(blocks, 9, cache_bytes=cache_bytes, **options))
            assert torch.get_num_threads() == threads
    for other in results[1:]:
        assert torch.equal(other.centroids, results[0].centroids)
        assert other.history == results[0].history


@pytest.mark.parametrize(("threads", "sharded"), [(1, False), (3, True)])
def test_sums_of_moved_rows_are_those_of_all_rows(threads: int, sharded: bool) -> None:
    """Also where rows were summed by other centroids before; what was returned stays."""
    data = noise(900).astype(np.float16)
    valid = np.random.default_rng(4).random(900) < 0.9
    valid[BLOCK : 2 * BLOCK] = False
    with num_threads(threads):
        rows = RankRows(cut_blocks([data], BLOCK), "euclidean", valid=valid)
        rows.survey()
        kept, shown = hold(rows, 6, sharded), []
        for seed in (1, 2, 3, 2):
            centroids = torch.from_numpy(noise(6, seed=seed))
            sums, counts = kept.sums(centroids)
            fresh = hold(rows, 6, sharded).sums(centroids)
            assert torch.equal(sums, fresh[0]) and torch.equal(counts, fresh[1])
            nearest = assign(rows.blocks, centroids, algorithm="euclidean", valid=valid).labels
            labels = nearest[torch.from_numpy(valid), 0].long()
            shown.append((counts, torch.bincount(labels, minlength=6)))
        assert all(torch.equal(found, wanted) for found, wanted in shown)
        assert not torch.equal(shown[0][0], shown[1][0])


def test_starts_are_seeded_and_the_best_wins() -> None:
    blocks = cut_blocks([noise(300)], BLOCK)
    one = [fit(blocks, 9, seed=[7, 1], restarts=n) for n in (1, 3, 3)]
    assert one[1].inertia <= one[0].inertia
    labels = assign(blocks, one[1].centroids).labels[:, 0].long()
    assert torch.equal(one[1].counts, torch.bincount(labels, minlength=9))
    assert torch.equal(one[1].centroids, one[2].centroids)
    assert one[1].restart == one[2].restart
    assert not torch.equal(one[0].centroids, fit(blocks, 9, seed=[7, 2]).centroids)


def test_a_subsample_can_start_it() -> None:
    """Of 5000 rows 1024 (256 per cluster) are looked at, and still the clusters are found."""
    rows = np.tile(mixture(0.05)[0], (9, 1))[:5000]
    found = fit(cut_blocks([rows], BLOCK), 4, init_samples=0, max_iterations=0)
    assert found.iterations == 0
    assert found.counts.sum() == 5000
    distances = slow_distances(rows, found.centroids, "spherical")
    assert (distances.min(axis=0) < 1e-6).all()  # centroids are rows


def test_masked_rows_take_no_part() -> None:
    rows, truth = mixture(0.05)
    valid = np.random.default_rng(2).random(len(rows)) < 0.8
    valid[:BLOCK] = False  # a whole block
    spoilt = rows.copy()
    spoilt[~valid] = np.nan
    options: dict[str, Any] = {"initial": start(rows, *np.unique(truth, return_index=True)[1])}
    found = fit(cut_blocks([spoilt], BLOCK), 8, valid=valid, **options)
    alone = fit(cut_blocks([rows[valid]], BLOCK), 8, **options)
    torch.testing.assert_close(found.centroids, alone.centroids, atol=1e-6, rtol=0)
    assert found.counts.sum() == valid.sum()
    near = assign(cut_blocks([spoilt], BLOCK), found.centroids, valid=valid, labels_per_sample=2)
    assert (near.labels[~valid] == -1).all() and (near.distances[~valid] == 0).all()
    assert (near.labels[valid] >= 0).all()


def test_empty_clusters_restart_at_the_farthest_rows_of_the_largest() -> None:
    rows = np.array([[0, 0], [0, 1], [1, 0], [6, 0], [8, 0], [50, 0], [52, 0]], dtype=np.float32)
    initial = torch.tensor([[1.0, 0.0], [-900.0, 0.0], [51.0, 0.0]])
    once = fit(cut_blocks([rows], 3), 3, algorithm="euclidean", initial=initial, max_iterations=1)
    assert once.centroids.tolist() == [[3.0, pytest.approx(0.2)], [8.0, 0.0], [51.0, 0.0]]
    found = fit(cut_blocks([rows], 3), 3, algorithm="euclidean", initial=initial)
    assert found.counts.tolist() == [3, 2, 2]
    # Of several the first restarts in the largest cluster, though the farthest row of the next
    # largest comes first among the rows.
    small, large = [[100, 0], [101, 0], [110, 0]], [[0, 0], [0, 1], [1, 0], [9, 0]]
    initial = torch.tensor([[0.0, 0.0], [-900.0, 0.0], [100.0, 0.0], [0.0, -900.0]])
    rows = np.array(small + large, dtype=np.float32)
    once = fit(cut_blocks([rows], 2), 4, algorithm="euclidean", initial=initial, max_iterations=1)
    assert once.centroids[[1, 3]].tolist() == [[9.0, 0.0], [110.0, 0.0]]
    # Of two equally far rows the first is taken, whatever the blocks.
    tied = np.array([[0, 0], [3, 0], [-3, 0], [0, 1], [0, -1]], dtype=np.float32)
    for rows_per_block in (1, 2, 5):
        twice = fit(
            cut_blocks([tied], rows_per_block),
            2,
            algorithm="euclidean",
            initial=torch.tensor([[0.0, 0.0], [0.0, 99.0]]),
            max_iterations=1,
        )
        assert twice.centroids[1].tolist() == [3.0, 0.0]


# --- where it starts, and who holds the centroids ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_random_start_is_distinct_usable_rows(algorithm: Any) -> None:
    rows = noise()
    valid = np.arange(len(rows)) % 3 > 0
    options: dict[str, Any] = {"init": "random", "algorithm": algorithm, "valid": valid}
    begun = [
        fit(cut_blocks([rows], BLOCK), 200, max_iterations=0, seed=seed, **options)
        for seed in (1, 1, 2)
    ]
    used = unit(rows) if algorithm == "spherical" else rows
    distances = np.linalg.norm(used[None] - begun[0].centroids.double().numpy()[:, None], axis=2)
    drawn = distances.argmin(axis=1)
    assert distances.min(axis=1).max() < 1e-6
    assert len(set(drawn)) == 200 and valid[drawn].all()
    assert torch.equal(begun[0].centroids, begun[1].centroids)
    assert not torch.equal(begun[0].centroids, begun[2].centroids)
    # All rows, where as many are asked for.
    every = fit(cut_blocks([rows], BLOCK), int(valid.sum()), **options)
    assert every.inertia == pytest.approx(0.0, abs=1e-3)
    assert (every.counts == 1).all()


def test_clusters_may_stay_empty_if_asked() -> None:
    repeated = np.repeat(noise(20)[:3], 40, axis=0)
    found = fit(cut_blocks([repeated]), 5, keep_empty=True)
    assert sorted(found.counts.tolist()) == [0, 0, 40, 40, 40]
    assert found.inertia == pytest.approx(0.0, abs=1e-4)


# --- mistakes ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_clusters_than_rows_or_distinct_rows(algorithm: Any) -> None:
    rows = noise(20)
    with pytest.raises(ValueError, match="is 21, but there are 20 usable rows: set cluster.num"):
        fit(cut_blocks([rows]), 21, algorithm=algorithm)
    with pytest.raises(ValueError, match="is 11, but there are 10 usable rows"):
        fit(cut_blocks([rows]), 11, algorithm=algorithm, valid=np.arange(20) < 10)
    with pytest.raises(ValueError, match="num_clusters is 0"):
        fit(cut_blocks([rows]), 0, algorithm=algorithm)
    repeated = np.repeat(rows[:3], 40, axis=0)
    assert fit(cut_blocks([repeated]), 3, algorithm=algorithm).counts.tolist() == [40] * 3
    with pytest.raises(ValueError, match="is 4, but there are 3 distinct usable rows"):
        fit(cut_blocks([repeated]), 4, algorithm=algorithm)
    # As directions, rows of another length are not distinct.
    if algorithm == "spherical":
        longer = repeated * np.linspace(0.5, 3.0, len(repeated), dtype=np.float32)[:, None]
        with pytest.raises(ValueError, match="3 distinct usable rows"):
            fit(cut_blocks([longer]), 4, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_that_are_not_finite_or_too_long_for_float32(algorithm: Any) -> None:
    rows = noise(300)
    rows[7, 2], rows[299, 0], rows[299, 1] = np.nan, np.inf, np.nan
    centroids = torch.eye(16)[:3]
    with pytest.raises(ValueError, match="2 of 300 rows hold NaN or infinite values"):
        fit(cut_blocks([rows], BLOCK), 3, algorithm=algorithm)
    with pytest.raises(ValueError, match="2 of 300 rows hold NaN or infinite values"):
        assign(cut_blocks([rows], BLOCK), centroids, algorithm=algorithm)
    # Here the values are finite and their squares are not: a distance would be infinite.
    rows = noise(300)
    rows[[7, 299]] *= np.float32(1e20)
    with pytest.raises(ValueError, match="2 of 300 rows .* too long for float32"):
        fit(cut_blocks([rows], BLOCK), 3, algorithm=algorithm)
    with pytest.raises(ValueError, match="2 of 300 rows .* too long for float32"):
        assign(cut_blocks([rows], BLOCK), torch.eye(16)[:3], algorithm=algorithm)
    rows[[7, 299]] *= np.float32(1e-4)
    found = fit(cut_blocks([rows], BLOCK), 3, algorithm=algorithm)
    assert np.isfinite(found.inertia) and found.inertia > 0.0


# --- two levels: split, share out, cluster, merge ----------------------------------------------


def unit32(rows: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / lengths).astype(np.float32)


def planted(sizes: list[int], dim: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tight clusters of these sizes around random directions, shuffled; and whose each row is."""
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    means = unit32(rng.normal(size=(len(sizes), dim)))
    return unit32(means[truth] + 0.02 * rng.normal(size=(len(truth), dim))), truth


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
    members = unit32(np.repeat(families, 4, axis=0) + 0.1 * rng.normal(size=(16, 24)))
    truth = rng.permutation(np.repeat(np.arange(16), 50))
    rows = unit32(members[truth] + 0.01 * rng.normal(size=(800, 24)))
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


def test_masked_rows_take_no_part_in_two_levels() -> None:
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
    assert found.centroids.shape == (40, 24) and tally.counts.sum() == len(repeated)


def test_near_to_flat_k_means() -> None:
    rows = unit32(np.random.default_rng(3).normal(size=(700, 8)))
    blocks = cut_blocks([rows], 200)
    flat = fit(blocks, 30, init="random")
    _, _, tally = clustered(blocks, 30)
    assert tally.inertia <= 1.1 * flat.inertia


# --- sharing out ---


def test_shares_are_proportional() -> None:
    assert kmeans.share_out(10, np.array([50, 30, 20])).tolist() == [5, 3, 2]
    assert kmeans.share_out(4, np.array([1, 1, 1, 1])).tolist() == [1, 1, 1, 1]
    assert kmeans.share_out(5, np.array([1000, 0, 1, 1, 1])).tolist() == [2, 0, 1, 1, 1]
    assert kmeans.share_out(12, np.array([10, 1, 1])).tolist() == [10, 1, 1]
    assert kmeans.share_out(4, np.array([5, 5, 5])).tolist() == [2, 1, 1]


@settings(max_examples=60)
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
