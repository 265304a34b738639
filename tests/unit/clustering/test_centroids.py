"""The nearest centroids of all rows: sorted, block by block, and never all in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.clustering.centroids import Assignment, Tally, held_by, passes
from mclclip.data.arrays import cut_blocks
from tests.benchmarks import memory
from tests.nearest_checks import assign, assign_rows, fit
from tests.unit.clustering.test_kmeans import ALGORITHMS, BLOCK, noise, slow_distances


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nearest_several_are_sorted_and_start_with_the_nearest(algorithm: Any) -> None:
    rows = noise()
    centroids = torch.from_numpy(noise(12, seed=9))
    centroids /= torch.linalg.vector_norm(centroids, dim=1, keepdim=True)
    blocks = cut_blocks([rows], BLOCK)
    near = assign(blocks, centroids, algorithm=algorithm, labels_per_sample=12)
    first = assign(blocks, centroids, algorithm=algorithm)
    assert torch.equal(near.labels[:, :1], first.labels)
    assert torch.equal(near.distances[:, :1], first.distances)
    assert first.labels.dtype == torch.int32 and first.distances.dtype == torch.float32
    assert (near.distances.diff(dim=1) >= 0).all()
    slow = slow_distances(rows, centroids, algorithm)
    assert np.array_equal(near.labels, slow.argsort(axis=1))
    np.testing.assert_allclose(near.distances, np.sort(slow, axis=1), atol=1e-5)


def test_ties_go_to_the_lowest_id() -> None:
    rows = np.eye(4, dtype=np.float32)[[0, 1, 2, 3]]
    centroids = torch.eye(4)[[1, 0, 1, 0]]
    near = assign([rows], centroids, labels_per_sample=4)
    assert near.labels.tolist() == [[1, 3, 0, 2], [0, 2, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


# --- block by block ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_blocks_come_in_order_and_are_those_of_the_whole(algorithm: Any) -> None:
    rows = noise(430)
    valid = np.random.default_rng(3).random(430) < 0.6
    valid[BLOCK : 2 * BLOCK] = False  # a whole block
    options: dict[str, Any] = {"algorithm": algorithm, "labels_per_sample": 3, "valid": valid}
    centroids = torch.from_numpy(noise(9, seed=4))
    whole = assign(cut_blocks([rows]), centroids, **options)
    found = list(assign_rows(cut_blocks([rows], BLOCK), centroids, **options))
    assert [some for some, _ in found] == [
        slice(first, min(first + BLOCK, 430)) for first in range(0, 430, BLOCK)
    ]
    for some, near in found:
        assert torch.equal(near.labels, whole.labels[some])
        assert torch.equal(near.distances, whole.distances[some])
    assert (whole.labels[~valid] == -1).all() and (whole.distances[~valid] == 0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_tally_is_that_of_k_means(algorithm: Any) -> None:
    rows, valid = noise(), np.random.default_rng(5).random(700) < 0.9
    blocks, options = cut_blocks([rows], BLOCK), {"algorithm": algorithm, "valid": valid}
    found = fit(blocks, 6, max_iterations=4, **options)
    tally = Tally(6)
    for _ in tally.of(assign_rows(blocks, found.centroids, labels_per_sample=2, **options)):
        pass
    assert torch.equal(tally.counts, found.counts)
    assert tally.inertia == pytest.approx(found.inertia, rel=1e-6)


def test_no_inertia_is_below_zero() -> None:
    """As many clusters as rows: distances are zero but for rounding, which may go below."""
    rows = noise(192, 64)
    tally = Tally(192)
    blocks = cut_blocks([rows])
    centroids = torch.nn.functional.normalize(torch.from_numpy(rows))
    below = list(tally.of(assign_rows(blocks, centroids)))[0][1].distances.min()
    assert below < 0.0
    tally = Tally(2)
    near = Assignment(torch.zeros((1, 1), dtype=torch.int32), torch.full((1, 1), -1e-6))
    assert len(list(tally.of([(slice(0, 1), near)]))) == 1
    assert tally.inertia == 0.0 and tally.counts.tolist() == [1, 0]


# --- which rank holds which ---


@pytest.mark.parametrize("num_clusters", (1, 7, 16, 17, 1000, 20_000))
def test_ranges_are_whole_passes_in_order(num_clusters: int) -> None:
    cut = passes(num_clusters)
    assert [i for some in cut for i in (some.start, some.stop)][1:-1:2] == [
        some.start for some in cut[1:]
    ]
    assert (cut[0].start, cut[-1].stop) == (0, num_clusters)
    assert max(len(some) for some in cut) <= 1024
    for world_size in (1, 3, 8, 80):
        held = [held_by(rank, world_size, num_clusters) for rank in range(world_size)]
        assert [i for some in held for i in some] == list(range(num_clusters))
        assert all(some.start in {part.start for part in cut} for some in held if some)
        assert max(map(len, held)) <= num_clusters / world_size + len(cut[0])


# --- memory ---

ROWS, LABELS = 500_000, 32
LIMIT_MIB = 32.0  # labels and distances of all rows are 122 MiB


def growth_mib(context: Any = None) -> float:
    """Of this process, while all rows get their nearest centroids; these are 8 MB."""
    rows = np.random.default_rng(0).standard_normal((ROWS, 4), dtype=np.float32)
    centroids = torch.from_numpy(noise(LABELS, 4))
    options: dict[str, Any] = {"labels_per_sample": LABELS}
    options |= {} if context is None else {"context": context}

    def go_through(num_rows: int) -> None:
        seen = 0
        for _, near in assign_rows(cut_blocks([rows[:num_rows]]), centroids, **options):
            seen += near.labels.numel()
        assert seen == num_rows * LABELS

    go_through(20_000)  # what is loaded or kept for good by a first call
    return memory.peak_mib(lambda: go_through(ROWS))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_rows() -> None:
    assert memory.in_fresh_process(growth_mib) < LIMIT_MIB
