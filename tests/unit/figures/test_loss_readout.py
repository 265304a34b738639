"""Correlations of loss and readout errors."""

import numpy as np
import pytest

from mclclip.figures.loss_readout import correlations


def test_correlations_are_pearsons() -> None:
    rng = np.random.default_rng(0)
    loss, shape, color = rng.normal(size=(3, 33))
    names, found = correlations(loss, {"shape": shape, "color": color})
    assert names == ["loss", "shape", "color"]
    np.testing.assert_allclose(found, np.corrcoef([loss, shape, color]))


def test_signs_of_the_figure() -> None:
    loss = np.array([1.0, 2.0, 3.0])
    errors = {"easy": 2.0 * loss + 1.0, "hard": -loss, "same": [4.0, 4.0, 4.0]}
    found = correlations(loss, errors)[1]
    assert found[0, 1] == pytest.approx(1.0) and found[1, 2] == pytest.approx(-1.0)
    assert np.isnan(found[0, 3])


def test_columns_are_checked() -> None:
    with pytest.raises(ValueError, match="wanted one number for each of 2 encoders or more"):
        correlations([1.0, 2.0], {"shape": [1.0]})
    with pytest.raises(ValueError, match="2 encoders or more"):
        correlations([1.0], {"shape": [1.0]})
