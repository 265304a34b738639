"""Singular values and effective rank: closed forms, and planted collapses."""

import math

import numpy as np
import pytest

from mclclip.analysis.spectrum import covariance, effective_rank, singular_values


def test_covariance_is_numpys() -> None:
    rows = np.random.default_rng(0).normal(size=(30, 5)) + 1e6  # a far mean must not cancel
    np.testing.assert_allclose(covariance(rows), np.cov(rows.T, bias=True), atol=1e-9)


def test_values_are_squares_of_the_centred_features_singular_values() -> None:
    rows = np.random.default_rng(1).normal(size=(20, 6))
    expected = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False) ** 2 / 20
    np.testing.assert_allclose(singular_values(rows), expected)
    turn = np.linalg.qr(np.random.default_rng(2).normal(size=(6, 6)))[0]
    np.testing.assert_allclose(singular_values(rows @ turn + 3.0), expected)


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
        covariance(np.zeros((0, 3)))
