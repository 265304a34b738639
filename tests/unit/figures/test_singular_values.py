"""Singular values and effective rank: closed forms, and planted collapses."""

import math

import numpy as np
import pytest

from mclclip.figures import singular_values as module
from mclclip.figures.inputs import unit_rows
from mclclip.figures.singular_values import effective_rank, singular_values, uniformity


def random(count: int, dim: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim))


def test_values_are_squares_of_the_centred_features_singular_values() -> None:
    rows = random(20, 6, seed=1)
    expected = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False) ** 2 / 20
    np.testing.assert_allclose(singular_values(rows), expected)
    turn = np.linalg.qr(np.random.default_rng(2).normal(size=(6, 6)))[0]
    np.testing.assert_allclose(singular_values(rows @ turn + 3.0), expected)
    far = singular_values(rows + 1e6)  # a far mean must not cancel
    np.testing.assert_allclose(far, expected, atol=1e-8)


def test_effective_rank_by_hand() -> None:
    assert effective_rank([1.0, 1.0, 1.0, 1.0]) == pytest.approx(4.0)
    assert effective_rank([5.0, 0.0, 0.0]) == pytest.approx(1.0)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_rank([30.0, 10.0]) == pytest.approx(math.exp(entropy))
    assert effective_rank([0.0, 0.0]) == 0.0


def test_a_collapse_to_two_dimensions_shows() -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(200, 2)) @ rng.normal(size=(2, 16))
    values = singular_values(rows)
    assert (values[2:] < 1e-12 * values[0]).all()
    assert effective_rank(values) < 2.0 + 1e-9
    assert effective_rank(singular_values(rng.normal(size=(2000, 16)))) > 15.5


def test_no_features_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no features"):
        singular_values(np.zeros((0, 3)))


def test_uniformity_by_hand() -> None:
    assert uniformity([[1.0, 0.0], [-5.0, 0.0]]) == pytest.approx(-8.0)  # the lowest there is
    assert uniformity([[1.0, 0.0], [0.0, 1.0]], t=3.0) == pytest.approx(-6.0)
    assert uniformity(np.ones((5, 3))) == pytest.approx(0.0)


def test_uniformity_is_the_mean_over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random(11)
    unit = unit_rows(rows)
    pairs = [
        math.exp(-2.0 * float(np.square(unit[i] - unit[j]).sum()))
        for i in range(11)
        for j in range(i)
    ]
    expected = math.log(sum(pairs) / len(pairs))
    assert uniformity(rows) == pytest.approx(expected)
    monkeypatch.setattr(module, "_TILE", 4)
    assert uniformity(3.0 * rows[::-1]) == pytest.approx(expected)
    assert uniformity(rows + 10.0) > expected  # a narrow cone is less uniform


def test_bad_features_are_refused() -> None:
    with pytest.raises(ValueError, match="features have 1 rows: uniformity is about pairs"):
        uniformity([[1.0, 2.0]])
    with pytest.raises(ValueError, match="zero or not finite"):
        uniformity([[1.0, 2.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match=r"features are \[3\], wanted \[N, D\]"):
        uniformity([1.0, 2.0, 3.0])
