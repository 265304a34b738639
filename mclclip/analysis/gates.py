"""SimLAP's gates of classes: their sizes, their open dimensions, and how alike they are.

Source: SimLAP (Wu et al., 2024), Fig. 9, 11 and 12. Gates [K, D] are in (0, 1), a row per class.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.analysis.hypersphere import Matrix, unit_rows

_OPEN = 0.5


def subspace_sizes(gates: ArrayLike) -> Matrix:
    """[K]: the sum of a class's gates (Fig. 9)."""
    sizes: Matrix = np.asarray(gates, dtype=np.float64).sum(axis=1)
    return sizes


def most_open(gates: ArrayLike, classes: ArrayLike, count: int = 10) -> NDArray[np.int64]:
    """[count]: the dimensions with the highest mean gate over some classes, highest first."""
    mean = np.asarray(gates, dtype=np.float64)[np.asarray(classes)].mean(axis=0)
    dimensions: NDArray[np.int64] = np.argsort(-mean, kind="stable")[:count].astype(np.int64)
    return dimensions


def gate_similarity(gates: ArrayLike) -> Matrix:
    """[K, K]: the dot product of gates, each sharpened to 1 above a half and to 0 otherwise.

    It counts the dimensions that both classes open.
    """
    sharp = (np.asarray(gates) > _OPEN).astype(np.float64)
    shared: Matrix = sharp @ sharp.T
    return shared


def unlike_pairs(gates: ArrayLike, count: int) -> NDArray[np.int64]:
    """[P, 2]: pairs of different classes, from those whose gates are least alike to the most.

    Alike is the cosine of their gates. ``count`` pairs of each end; all of them where there are
    fewer.
    """
    rows = unit_rows(gates)
    first, second = np.triu_indices(len(rows), 1)
    order = np.argsort((rows @ rows.T)[first, second], kind="stable")
    if len(order) > 2 * count:
        order = np.concatenate([order[:count], order[-count:]])
    return np.column_stack([first, second])[order].astype(np.int64)


def label_similarity(embeddings: ArrayLike) -> Matrix:
    """[K, K]: the cosine of the classes' label embeddings [K, E]."""
    rows = unit_rows(embeddings)
    cosine: Matrix = rows @ rows.T
    return cosine
