"""Correlations of loss and readout errors."""

import numpy as np
import pytest

from mclclip.analysis.loss_readout import loss_against_readouts


def test_correlations_are_pearsons() -> None:
    rng = np.random.default_rng(0)
    loss, shape, color = rng.normal(size=(3, 33))
    found = loss_against_readouts(loss, {"shape": shape, "color": color})
    assert found.names == ("loss", "shape", "color")
    np.testing.assert_allclose(found.matrix, np.corrcoef([loss, shape, color]))
    assert found.between("color", "shape") == pytest.approx(np.corrcoef(color, shape)[0, 1])


def test_signs_of_the_figure() -> None:
    loss = np.array([1.0, 2.0, 3.0])
    errors = {"easy": 2.0 * loss + 1.0, "hard": -loss, "same": [4.0, 4.0, 4.0]}
    found = loss_against_readouts(loss, errors)
    assert found.between("loss", "easy") == pytest.approx(1.0)
    assert found.between("easy", "hard") == pytest.approx(-1.0)
    assert np.isnan(found.between("loss", "same"))


def test_columns_are_checked() -> None:
    with pytest.raises(ValueError, match="wanted one number for each of 2 encoders or more"):
        loss_against_readouts([1.0, 2.0], {"shape": [1.0]})
    with pytest.raises(ValueError, match="2 encoders or more"):
        loss_against_readouts([1.0], {"shape": [1.0]})
