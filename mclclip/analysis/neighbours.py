"""The nearest samples of chosen ones, and of samples that IFM makes.

Sources: MCL's Fig. 3 (neighbours of an anchor, stage by stage); IFM (Robinson et al., "Can
Contrastive Learning Avoid Shortcut Solutions?", 2021), section 3.1 and Fig. 4: a modified positive
v+ - eps v and a modified negative v- + eps v are shown by their nearest neighbour in a memory bank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.analysis.hypersphere import unit_rows
from mclclip.eval.knn import nearest

Integers = NDArray[np.int64]
Cosines = NDArray[np.float32]


def nearest_samples(features: ArrayLike, anchors: ArrayLike, k: int) -> tuple[Cosines, Integers]:
    """The k samples nearest to each of the ``anchors``, by cosine: similarities and rows [A, k].

    ``features`` are [N, D], ``anchors`` [A] rows of them; an anchor is not its own neighbour.
    ValueError unless 1 <= k < N.
    """
    bank, chosen = unit_rows(features).astype(np.float32), np.asarray(anchors, dtype=np.int64)
    if not 1 <= k < len(bank):
        raise ValueError(f"k is {k}, with {len(bank)} samples: wanted 1 to {len(bank) - 1}")
    similarity, rows = nearest(bank[chosen], bank, k + 1)
    # Among more than k copies of an anchor it may be absent itself: then the last one goes.
    drop = np.where((rows == chosen[:, None]).any(axis=1), (rows == chosen[:, None]).argmax(1), k)
    keep = np.arange(k + 1) != drop[:, None]
    return similarity[keep].reshape(-1, k), rows[keep].reshape(-1, k)


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
    similarity, rows = nearest(modified.astype(np.float32), bank, 1)
    return similarity[:, 0], rows[:, 0]
