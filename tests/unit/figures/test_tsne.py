"""t-SNE keeps near rows near, depends on its seed, and says when there is too little."""

import numpy as np
import pytest

from mclclip.figures.tsne import layout


def test_near_rows_stay_near() -> None:
    """Rows around three directions; nearest neighbours on the plane are of the same one."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    rows = rng.uniform(0.5, 2.0, (60, 1)) * (np.eye(6)[labels] + rng.normal(0, 0.1, (60, 6)))
    places = layout(rows, seed=1)
    assert places.shape == (60, 2)
    distance = np.linalg.norm(places[:, None] - places, axis=2) + np.diag(np.full(60, np.inf))
    assert (labels[distance.argmin(axis=1)] == labels).mean() > 0.95
    assert np.array_equal(layout(rows, seed=1), places)


def test_few_rows_and_one_dimension() -> None:
    assert np.isfinite(layout(np.random.default_rng(0).normal(size=(5, 3)), seed=0)).all()
    assert layout(np.array([[1.0], [2.0], [-1.0], [3.0], [-2.0], [1.5]]), seed=0).shape == (6, 2)
    with pytest.raises(ValueError, match="4 rows: t-SNE wants at least 5"):
        layout(np.ones((4, 3)), seed=0)
