"""The distribution of pseudo labels (MCL, Fig. 7), and label recall at l (MLCD, A.8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class LabelCounts:
    """A histogram of labels.

    labels      [C] in the order of ``counts``
    counts      [C] samples, most first
    share       of the most frequent label
    effective   exp of the entropy: labels of equal size that would be spread as much
    """

    labels: Integers
    counts: Integers
    share: float
    effective: float


def label_counts(labels: ArrayLike) -> LabelCounts:
    """The histogram of ``labels`` [N]; -1 is no label. ValueError where nobody has one."""
    given = np.asarray(labels)
    found, counts = np.unique(given[given >= 0], return_counts=True)
    if not len(found):
        raise ValueError("no sample has a label")
    order = np.argsort(-counts, kind="stable")
    shares = counts / counts.sum()
    effective = float(np.exp(-(shares * np.log(shares)).sum()))
    return LabelCounts(
        found[order].astype(np.int64),
        counts[order].astype(np.int64),
        float(shares.max()),
        effective,
    )


def dominant_classes(labels: ArrayLike, classes: ArrayLike) -> dict[int, int]:
    """label -> the class that most samples with this label have; of equally many the smaller."""
    found: dict[int, int] = {}
    pairs, counts = np.unique(
        np.stack([np.asarray(labels), np.asarray(classes)]), axis=1, return_counts=True
    )
    for (label, cls), _ in sorted(
        zip(pairs.T.tolist(), counts.tolist(), strict=True), key=lambda item: item[1], reverse=True
    ):
        if label >= 0:
            found.setdefault(label, cls)
    return found


def label_recall(nearest: ArrayLike, classes: ArrayLike) -> NDArray[np.float64]:
    """[L]: the share of samples whose class is that of one of their l nearest clusters, l = 1 to L.

    ``nearest`` [N, L] are clusters, nearest first (-1: none), ``classes`` [N]. A cluster stands for
    the class that most of the samples that are nearest to it have (MLCD, A.8).
    """
    clusters, wanted = np.asarray(nearest), np.asarray(classes)
    if clusters.ndim != 2 or wanted.shape != clusters.shape[:1]:
        raise ValueError(
            f"nearest {list(clusters.shape)} and classes {list(wanted.shape)}: wanted [N, L], [N]"
        )
    dominant = dominant_classes(clusters[:, 0], wanted)
    table = np.full(int(clusters.max(initial=0)) + 2, -2, dtype=np.int64)  # the last is for -1
    table[list(dominant)] = list(dominant.values())
    recalled = np.logical_or.accumulate(table[clusters] == wanted[:, None], axis=1)
    recall: NDArray[np.float64] = recalled.mean(axis=0)
    return recall
