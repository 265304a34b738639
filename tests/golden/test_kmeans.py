"""k-means against faiss, with the same start, and both against the planted truth."""

from typing import Any

import faiss
import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_mutual_info_score

from mclclip.data.arrays import cut_blocks
from tests.nearest_checks import assign, fit

NUM_CLUSTERS, DIM, UPDATES = 12, 24, 15


def rows_and_truth(spread: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    truth = rng.integers(NUM_CLUSTERS, size=2000)
    rows = rng.normal(size=(NUM_CLUSTERS, DIM))[truth] + spread * rng.normal(size=(2000, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), truth


@pytest.mark.parametrize("algorithm", ("spherical", "euclidean"))
@pytest.mark.parametrize("spread", (0.15, 0.8))
def test_equal_to_faiss_with_the_same_start(algorithm: Any, spread: float) -> None:
    rows, truth = rows_and_truth(spread)
    start = rows[np.unique(truth, return_index=True)[1]]
    spherical = algorithm == "spherical"
    reference = faiss.Kmeans(
        DIM, NUM_CLUSTERS, niter=UPDATES, spherical=spherical, max_points_per_centroid=10**6
    )
    reference.train(rows, init_centroids=start)
    found = fit(
        cut_blocks([rows], 300),
        NUM_CLUSTERS,
        algorithm=algorithm,
        initial=torch.from_numpy(start),
        max_iterations=UPDATES,
        tolerance=-1.0,  # as many updates as faiss makes
    )
    assert found.iterations == UPDATES
    centroids = torch.from_numpy(np.asarray(reference.centroids))
    torch.testing.assert_close(found.centroids, centroids, atol=2e-6, rtol=0.0)
    labels = assign(cut_blocks([rows]), found.centroids, algorithm=algorithm).labels[:, 0]
    theirs = reference.index.search(rows, 1)[1][:, 0]
    assert adjusted_mutual_info_score(theirs, labels) == pytest.approx(1.0, abs=1e-9)
    if spread < 0.5:
        assert adjusted_mutual_info_score(truth, labels) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("algorithm", ("spherical", "euclidean"))
def test_own_starts_are_no_worse_than_faiss(algorithm: Any) -> None:
    rows, _ = rows_and_truth(0.4)
    spherical = algorithm == "spherical"
    reference = faiss.Kmeans(
        DIM, NUM_CLUSTERS, niter=50, nredo=5, spherical=spherical, max_points_per_centroid=10**6
    )
    reference.train(rows)
    theirs = reference.index.search(rows, 1)[0].sum()
    inertia = float(len(rows) - theirs) if spherical else float(theirs)
    found = fit(cut_blocks([rows], 300), NUM_CLUSTERS, algorithm=algorithm, restarts=5)
    assert found.inertia <= inertia * 1.01
