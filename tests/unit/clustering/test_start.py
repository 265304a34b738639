"""Where k-means starts, and who holds which centroids."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mclclip.clustering import kmeans
from mclclip.clustering.centroids import held_by, passes
from mclclip.data.arrays import cut_blocks
from tests.unit.clustering.test_kmeans import ALGORITHMS, BLOCK, noise, unit


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_random_start_is_distinct_usable_rows(algorithm: Any) -> None:
    rows = noise()
    valid = np.arange(len(rows)) % 3 > 0
    options: dict[str, Any] = {"init": "random", "algorithm": algorithm, "valid": valid}
    begun = [
        kmeans.fit(cut_blocks([rows], BLOCK), 200, max_iterations=0, seed=seed, **options)
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
    every = kmeans.fit(cut_blocks([rows], BLOCK), int(valid.sum()), **options)
    assert every.inertia == pytest.approx(0.0, abs=1e-3)
    assert (every.counts == 1).all()


def test_auto_is_plus_plus_for_few_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = cut_blocks([noise()], BLOCK)

    def begin(init: Any) -> Tensor:
        return kmeans.fit(blocks, 9, init=init, max_iterations=0).centroids

    assert torch.equal(begin("auto"), begin("plus_plus"))
    monkeypatch.setattr(kmeans, "PLUS_PLUS_UP_TO", 8)
    assert torch.equal(begin("auto"), begin("random"))
    assert not torch.equal(begin("random"), begin("plus_plus"))
    with pytest.raises(ValueError, match="'best': wanted 'auto', 'plus_plus' or 'random'"):
        begin("best")


def test_clusters_may_stay_empty_if_asked() -> None:
    repeated = np.repeat(noise(20)[:3], 40, axis=0)
    found = kmeans.fit(cut_blocks([repeated]), 5, keep_empty=True)
    assert sorted(found.counts.tolist()) == [0, 0, 40, 40, 40]
    assert found.inertia == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_process_may_shard_too(algorithm: Any) -> None:
    blocks = cut_blocks([noise()], BLOCK)
    options: dict[str, Any] = {"algorithm": algorithm, "restarts": 2}
    whole, sharded = (kmeans.fit(blocks, 20, sharded=how, **options) for how in (False, True))
    assert torch.equal(whole.centroids, sharded.centroids)
    assert whole.history == sharded.history
    assert sharded.held == range(20)


@pytest.mark.parametrize("num_clusters", (1, 2, 7, 16, 17, 1000, 20_000, 1_000_000))
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
