"""Figures about features that lie on several ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mclclip.analysis.spectrum import covariance
from mclclip.ranks import collectives

ROWS = np.random.default_rng(0).normal(size=(11, 4)) + 50.0


def own_share(bounds: list[int]) -> Any:
    """The covariance of all ranks' rows, of which this one has ``bounds[rank : rank + 2]``."""
    first, last = bounds[collectives.rank() : collectives.rank() + 2]
    return covariance(ROWS[first:last])


def on_the_first() -> Any:
    """The covariance of one rank's rows, which the others do not compute."""
    return collectives.on_main(lambda: covariance(ROWS, alone=True))


def test_one_rank_alone(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(2, on_the_first):
        np.testing.assert_allclose(found, np.cov(ROWS.T, bias=True), rtol=1e-12, atol=1e-12)


def test_covariance_is_that_of_all_rows(ranks: Callable[..., list[Any]]) -> None:
    """Also where ranks have different numbers of rows, and one has none."""
    for found in ranks(2, own_share, [0, 7, 11]) + ranks(2, own_share, [0, 11, 11]):
        np.testing.assert_allclose(found, np.cov(ROWS.T, bias=True), rtol=1e-12, atol=1e-12)
