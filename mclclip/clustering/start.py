"""The first centroids of k-means: rows drawn by greedy k-means++, or at random."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from mclclip.clustering.nearest import squared_distance
from mclclip.clustering.options import Init
from mclclip.clustering.rows import Rows
from mclclip.data.arrays import ROWS_PER_BLOCK

PLUS_PLUS_UP_TO = 1000  # clusters, for ``auto``: the cost grows with their square


def is_plus_plus(init: Init, num_clusters: int) -> bool:
    """Whether ``init`` means k-means++ for K clusters. Raises ValueError for an unknown word."""
    if init not in ("auto", "plus_plus", "random"):
        raise ValueError(f"init is {init!r}: wanted 'auto', 'plus_plus' or 'random'")
    return init == "plus_plus" or (init == "auto" and num_clusters <= PLUS_PLUS_UP_TO)


def plus_plus(rows: Rows, sample: Tensor, num_clusters: int, rng: np.random.Generator) -> Tensor:
    """K rows of ``sample`` [S, D], drawn by greedy k-means++, as centroids [K, D].

    Rows are drawn with a probability proportional to their squared distance to the nearest centroid
    so far. Of 2 + ln K draws it takes the one that lowers the sum of these distances most, as
    scikit-learn does. Where the sample has fewer distinct rows than clusters, rows repeat; then
    ``kmeans.fit`` finds empty clusters, and restarts them or raises a ValueError.
    """
    cut = (sample[i : i + ROWS_PER_BLOCK] for i in range(0, len(sample), ROWS_PER_BLOCK))
    parts = [(part, part.square().sum(dim=1, keepdim=True)) for part in cut]
    chosen: list[int] = []
    nearest = np.full(len(sample), np.inf)
    drawn = rng.integers(len(sample), size=1)
    while True:
        distances = torch.cat(rows.each(partial(_squared_distances, sample[drawn]), parts)).numpy()
        lowered = np.minimum(nearest[:, None], distances)
        best = int(lowered.sum(axis=0).argmin())
        chosen.append(int(drawn[best]))
        if len(chosen) == num_clusters:
            return rows.of_first_rank(sample[chosen])
        nearest = lowered[:, best]
        cumulative = np.cumsum(nearest)
        at = rng.random(2 + int(np.log(num_clusters))) * cumulative[-1]
        # Where all distances are zero, this draws the last row again.
        drawn = np.searchsorted(cumulative, at, "right").clip(max=len(sample) - 1)


def _squared_distances(centroids: Tensor, part: tuple[Tensor, Tensor]) -> Tensor:
    """float64 [n, C] on the CPU: distances of rows [n, D] to all centroids [C, D], where ``part``
    is the rows and their squared lengths [n, 1]. Equal vectors have distance zero.
    """
    rows, lengths = part
    squares = lengths + centroids.square().sum(dim=1)
    from_products = squares - 2.0 * (rows @ centroids.T)
    distances = from_products.double().cpu()
    near = torch.nonzero(from_products <= 1e-4 * squares)  # subtraction cancelled the digits
    row, centroid = near[:, 0], near[:, 1]
    distances[row.cpu(), centroid.cpu()] = squared_distance(centroids[centroid], rows[row])
    return distances
