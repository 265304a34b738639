"""Alignment and uniformity of features on the unit sphere.

Source: Wang and Isola, "Understanding Contrastive Representation Learning through Alignment and
Uniformity on the Hypersphere" (ICML 2020), Eq. 1 and 2.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]
_TILE = 1024


def unit_rows(features: ArrayLike) -> Matrix:
    """[N, D] -> rows of unit length, float64. ValueError for another shape, or a row of zeros."""
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2:
        raise ValueError(f"features are {list(rows.shape)}, wanted [N, D]")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0.0)).all():
        raise ValueError("a row of the features is zero or not finite: it has no direction")
    unit: Matrix = rows / lengths
    return unit


def alignment(first: ArrayLike, second: ArrayLike, alpha: float = 2.0) -> float:
    """Mean of |x - y|^alpha over positive pairs, the rows of two arrays [N, D]; 0 is the best.

    The rows are brought to unit length. ValueError for arrays of different shapes.
    """
    x, y = unit_rows(first), unit_rows(second)
    if x.shape != y.shape:
        raise ValueError(f"pairs are of {list(x.shape)} and {list(y.shape)}: wanted equal shapes")
    return float((np.linalg.norm(x - y, axis=1) ** alpha).mean())


def uniformity(features: ArrayLike, t: float = 2.0) -> float:
    """Log of the mean of exp(-t |x - y|^2) over all pairs of different rows of [N, D].

    It lies in [-4 t, 0]; 0 is a collapse to one point, and lower is more uniform. The rows are
    brought to unit length. ValueError for fewer than two rows.
    """
    rows = unit_rows(features)
    count = len(rows)
    if count < 2:
        raise ValueError(f"features have {count} rows: uniformity is about pairs")
    total = 0.0
    for first in range(0, count, _TILE):
        block = rows[first : first + _TILE]
        kernel = np.exp(2.0 * t * (block @ rows.T - 1.0))  # |x - y|^2 = 2 - 2 x.y
        kernel[np.arange(len(block)), first + np.arange(len(block))] = 0.0
        total += float(kernel.sum())
    return math.log(total / (count * (count - 1)))
