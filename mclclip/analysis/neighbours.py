"""The nearest samples of chosen ones, and of samples that IFM makes.

Sources: MCL's Fig. 3 (neighbours of an anchor, stage by stage); MLCD's Fig. 2 and 5 (samples of a
cluster); IFM (Robinson et al., "Can
Contrastive Learning Avoid Shortcut Solutions?", 2021), section 3.1 and Fig. 4: a modified positive
v+ - eps v and a modified negative v- + eps v are shown by their nearest neighbour in a memory bank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.analysis.hypersphere import unit_rows
from mclclip.search import nearest_to_few

Integers = NDArray[np.int64]
Cosines = NDArray[np.float32]
_BLOCK = 1 << 20
_COPIES, _SAME = 16, 1e-5


def nearest_samples(features: ArrayLike, anchors: ArrayLike, k: int) -> tuple[Cosines, Integers]:
    """The k samples nearest to each of the ``anchors``, by cosine: similarities and rows [A, k].

    ``features`` are [N, D], ``anchors`` [A] rows of them; an anchor is not its own neighbour.
    ValueError unless 1 <= k < N.
    """
    bank, chosen = unit_rows(features).astype(np.float32), np.asarray(anchors, dtype=np.int64)
    if not 1 <= k < len(bank):
        raise ValueError(f"k is {k}, with {len(bank)} samples: wanted 1 to {len(bank) - 1}")
    similarity, rows = nearest_to_few(bank[chosen], bank, k + 1)
    # Among more than k copies of an anchor it may be absent itself: then the last one goes.
    drop = np.where((rows == chosen[:, None]).any(axis=1), (rows == chosen[:, None]).argmax(1), k)
    keep = np.arange(k + 1) != drop[:, None]
    return similarity[keep].reshape(-1, k), rows[keep].reshape(-1, k)


def nearest_different(features: ArrayLike, anchors: ArrayLike) -> Integers:
    """The row [A] that is nearest to each of the ``anchors`` [A] without being a copy of it.

    Rows of the same direction are copies. -1 where there is no other among its 16 nearest ones.
    """
    rows = np.asarray(features)
    cosines, near = nearest_samples(rows, anchors, min(_COPIES, len(rows) - 1))
    different = cosines < 1.0 - _SAME
    found = near[np.arange(len(near)), different.argmax(axis=1)]
    return np.where(different.any(axis=1), found, -1)


def examples_of(
    nearest_clusters: NDArray[np.integer],
    similarities: NDArray[np.floating],
    wanted: ArrayLike,
    count: int,
) -> dict[int, Integers]:
    """Cluster -> at most ``count`` rows whose nearest cluster it is, most similar ones first.

    ``nearest_clusters`` and ``similarities`` are [N, L], nearest first, perhaps memory-mapped: they
    are read once, in blocks. A cluster of ``wanted`` [C] that is nobody's nearest has no rows.
    """
    clusters = np.unique(np.asarray(wanted, dtype=np.int64))
    found = {int(cluster): np.zeros(0, np.int64) for cluster in clusters}
    for start in range(0, len(nearest_clusters), _BLOCK):
        own = np.asarray(nearest_clusters[start : start + _BLOCK, 0])
        rows = np.flatnonzero(np.isin(own, clusters))
        for cluster in np.unique(own[rows]).tolist():
            here = np.concatenate([found[cluster], start + rows[own[rows] == cluster]])
            order = np.argsort(-similarities[here, 0], kind="stable")
            found[cluster] = here[order[:count]]
    return found


def nearest_to_modified(
    features: ArrayLike,
    anchor: ArrayLike,
    sample: ArrayLike,
    eps: Sequence[float],
    kind: Literal["positive", "negative"],
) -> tuple[Cosines, Integers]:
    """The sample of the bank that is nearest to ``sample`` as IFM modifies it, for each of ``eps``.

    features   [N, D], the memory bank
    anchor     [D], v
    sample     [D], v+ or v-
    kind       ``positive``: v+ - eps v, away from the anchor; ``negative``: v- + eps v, towards it

    anchor and sample are brought to unit length first. Returns cosines and rows [len(eps)].
    ValueError where a modified sample is the zero vector.
    """
    v, s = unit_rows(np.stack([np.asarray(anchor), np.asarray(sample)]))
    sign = -1.0 if kind == "positive" else 1.0
    modified = unit_rows(s + sign * np.asarray(eps, dtype=np.float64)[:, None] * v)
    bank = unit_rows(features).astype(np.float32)
    similarity, rows = nearest_to_few(modified.astype(np.float32), bank, 1)
    return similarity[:, 0], rows[:, 0]
