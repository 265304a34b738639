"""Alignment and uniformity: closed forms, invariants, loops."""

import math

import numpy as np
import pytest

from mclclip.analysis import hypersphere
from mclclip.analysis.hypersphere import alignment, uniformity


def random(count: int, dim: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim))


def test_alignment_by_hand() -> None:
    x, y = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[0.0, 3.0], [0.0, 1.0]])
    assert alignment(x, y) == pytest.approx((2.0 + 0.0) / 2)
    assert alignment(x, y, alpha=1.0) == pytest.approx(math.sqrt(2.0) / 2)
    assert alignment(x, x) == 0.0
    cosine = (hypersphere.unit_rows(random(9)) * hypersphere.unit_rows(random(9, seed=1))).sum(1)
    assert alignment(random(9), random(9, seed=1)) == pytest.approx((2 - 2 * cosine).mean())


def test_uniformity_by_hand() -> None:
    assert uniformity([[1.0, 0.0], [-5.0, 0.0]]) == pytest.approx(-8.0)  # the lowest there is
    assert uniformity([[1.0, 0.0], [0.0, 1.0]], t=3.0) == pytest.approx(-6.0)
    assert uniformity(np.ones((5, 3))) == pytest.approx(0.0)


def test_uniformity_is_the_mean_over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random(11)
    unit = hypersphere.unit_rows(rows)
    pairs = [
        math.exp(-2.0 * float(np.square(unit[i] - unit[j]).sum()))
        for i in range(11)
        for j in range(i)
    ]
    expected = math.log(sum(pairs) / len(pairs))
    assert uniformity(rows) == pytest.approx(expected)
    monkeypatch.setattr(hypersphere, "_TILE", 4)
    assert uniformity(3.0 * rows[::-1]) == pytest.approx(expected)
    assert uniformity(rows + 10.0) > expected  # a narrow cone is less uniform


def test_bad_features_are_refused() -> None:
    with pytest.raises(ValueError, match="features have 1 rows: uniformity is about pairs"):
        uniformity([[1.0, 2.0]])
    with pytest.raises(ValueError, match="zero or not finite"):
        uniformity([[1.0, 2.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match=r"features are \[3\], wanted \[N, D\]"):
        uniformity([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="wanted equal shapes"):
        alignment(random(3), random(4))
