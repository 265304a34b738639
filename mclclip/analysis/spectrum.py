"""In how many dimensions features vary: the spectrum of their covariance.

Source: Jing et al., "Understanding Dimensional Collapse in Contrastive Self-supervised Learning"
(ICLR 2022), whose singular values SimLAP's Fig. 3 shows; effective rank after Roy and Vetterli
(2007): the exponential of the entropy of the values' shares.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mclclip.ranks.collectives import all_reduce_sum

Values = NDArray[np.float64]


def covariance(features: ArrayLike, *, alone: bool = False) -> Values:
    """[D, D], float64: of the rows [n, D] of all ranks, about their mean, divided by their number.

    Ranks may have different numbers of rows, also none, and all call it. The mean is summed over
    the ranks first, so that nothing cancels. ``alone``: of this process's rows; the other ranks do
    not call it. ValueError where there is no row.
    """
    rows = np.asarray(features, dtype=np.float64)
    sums = np.concatenate([rows.sum(axis=0), [len(rows)]])
    *total, count = _summed(sums, alone)
    if count == 0:
        raise ValueError("there are no features: their covariance is that of nothing")
    centred = rows - np.asarray(total) / count
    return np.asarray(_summed(centred.T @ centred, alone) / count, dtype=np.float64)


def _summed(values: Values, alone: bool) -> Values:
    """Sum over the ranks, or the values themselves."""
    return values if alone else all_reduce_sum(torch.from_numpy(values)).numpy()


def singular_values(features: ArrayLike, *, alone: bool = False) -> Values:
    """[D], largest first: singular values of the ``covariance`` of rows [n, D]."""
    matrix = covariance(features, alone=alone)
    return np.asarray(np.linalg.svd(matrix, compute_uv=False), dtype=np.float64)


def effective_rank(values: ArrayLike) -> float:
    """exp(H(p)) with the shares p of ``values`` [D]: from 1, one dimension, to D, all alike.

    0 where all values are 0, as those of features that do not vary.
    """
    shares = np.asarray(values, dtype=np.float64)
    if shares.sum() == 0.0:
        return 0.0
    shares = shares[shares > 0.0] / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))
