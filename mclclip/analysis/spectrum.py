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


def covariance(features: ArrayLike) -> Values:
    """[D, D], float64: of the rows [n, D] of all ranks, about their mean, divided by their number.

    Ranks may have different numbers of rows, also none, and all call it. The mean is summed over
    the ranks first, so that nothing cancels. ValueError where no rank has a row.
    """
    rows = np.asarray(features, dtype=np.float64)
    sums = np.concatenate([rows.sum(axis=0), [len(rows)]])
    *total, count = all_reduce_sum(torch.from_numpy(sums)).numpy()
    if count == 0:
        raise ValueError("there are no features: their covariance is that of nothing")
    centred = rows - np.asarray(total) / count
    products = all_reduce_sum(torch.from_numpy(centred.T @ centred)).numpy()
    return np.asarray(products / count, dtype=np.float64)


def singular_values(features: ArrayLike) -> Values:
    """[D], largest first: singular values of the covariance of all ranks' rows [n, D]."""
    return np.asarray(np.linalg.svd(covariance(features), compute_uv=False), dtype=np.float64)


def effective_rank(values: ArrayLike) -> float:
    """exp(H(p)) with the shares p of ``values`` [D]: from 1, one dimension, to D, all alike.

    0 where all values are 0, as those of features that do not vary.
    """
    shares = np.asarray(values, dtype=np.float64)
    if shares.sum() == 0.0:
        return 0.0
    shares = shares[shares > 0.0] / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))
