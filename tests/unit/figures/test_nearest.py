"""Nearest samples against the whole matrix, and the examples of clusters."""

import sys

import numpy as np
import pytest

from mclclip.figures.nearest import nearest_samples
from mclclip.figures.nearest_labels import examples_of


def random(count: int, dim: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim))


def test_neighbours_are_those_of_the_whole_matrix() -> None:
    features = random(60)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    similarity, rows = nearest_samples(features, [7, 31], 4)
    for anchor, near, found in zip([7, 31], similarity, rows, strict=True):
        cosine = unit @ unit[anchor]
        cosine[anchor] = -np.inf
        expected = np.argsort(-cosine)[:4]
        assert found.tolist() == expected.tolist()
        np.testing.assert_allclose(near, cosine[expected], atol=1e-6)


def test_an_anchor_is_not_its_own_neighbour_and_a_copy_of_it_is() -> None:
    features = random(10)
    features[[2, 5, 8]] = features[3]
    similarity, rows = nearest_samples(features, [3, 8], 2)
    assert rows[0].tolist() == [2, 5] and rows[1].tolist() == [2, 3]
    np.testing.assert_allclose(similarity, 1.0, atol=1e-6)


def test_faiss_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures, the report and the demo ask for the neighbours of a few samples."""
    wanted = nearest_samples(random(20), [1], 3)[1]
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
    assert np.array_equal(nearest_samples(random(20), [1], 3)[1], wanted)


def test_examples_are_the_most_similar_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    # A cluster's rows lie in several blocks.
    monkeypatch.setattr("mclclip.figures.nearest_labels.BLOCK", 7)
    rng = np.random.default_rng(0)
    clusters, cosines = rng.integers(0, 4, (40, 2)), rng.random((40, 2))
    found = examples_of(clusters, cosines, [[2, 0], [2, 9]], 3)
    assert found.keys() == {0, 2, 9} and not len(found[9])
    for cluster in (0, 2):
        own = np.flatnonzero(clusters[:, 0] == cluster)
        expected = own[np.argsort(-cosines[own, 0])][:3]
        assert found[cluster].tolist() == expected.tolist()
