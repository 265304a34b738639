"""Nearest samples against the whole matrix; IFM's modified samples move along the anchor."""

import sys

import numpy as np
import pytest

from mclclip.figures.modified import nearest_different, nearest_to_modified
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


def circle(*degrees: float) -> np.ndarray:
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_a_modified_positive_leaves_the_anchor_and_a_negative_comes() -> None:
    """On a circle, at every 10 degrees; the anchor is at 0."""
    bank = circle(*range(0, 360, 10))
    anchor, positive, negative = 3.0 * circle(0.0)[0], circle(30.0)[0], circle(120.0)[0]
    eps = [0.0, 0.1, 0.2, 1.0, 100.0]
    away = nearest_to_modified(bank, anchor, positive, eps, "positive")[1] * 10
    near = nearest_to_modified(bank, anchor, negative, eps, "negative")[1] * 10
    assert away[0] == 30 and away[-1] == 180 and (np.diff(away) >= 0).all()
    assert near[0] == 120 and near[-1] == 0 and (np.diff(near) <= 0).all()
    # v+ - eps v by hand: (cos 30 - 1, sin 30) lies at 105 degrees
    assert away[3] in (100, 110) and near[3] == 60


def test_the_zero_vector_has_no_neighbour() -> None:
    v = circle(0.0)[0]
    with pytest.raises(ValueError, match="zero or not finite"):
        nearest_to_modified(circle(0.0, 90.0), v, v, [1.0], "positive")


def test_the_nearest_that_is_no_copy() -> None:
    features = random(30)
    features[[2, 5]] = 3.0 * features[3]
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    cosine = unit @ unit[3]
    cosine[[2, 3, 5]] = -np.inf
    assert nearest_different(features, [3]).tolist() == [int(cosine.argmax())]
    assert nearest_different(np.ones((20, 4)), [0, 7]).tolist() == [-1, -1]


def test_examples_are_the_most_similar_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    # A cluster's rows lie in several blocks.
    monkeypatch.setattr("mclclip.figures.nearest_labels._BLOCK", 7)
    rng = np.random.default_rng(0)
    clusters, cosines = rng.integers(0, 4, (40, 2)), rng.random((40, 2))
    found = examples_of(clusters, cosines, [[2, 0], [2, 9]], 3)
    assert found.keys() == {0, 2, 9} and not len(found[9])
    for cluster in (0, 2):
        own = np.flatnonzero(clusters[:, 0] == cluster)
        expected = own[np.argsort(-cosines[own, 0])][:3]
        assert found[cluster].tolist() == expected.tolist()
