"""How similar samples of one class are, and of two: distributions, their overlap, class by class.

Source: SimLAP (Wu et al., 2024), Fig. 1, 4, 10 and 12: cosines of pairs, in all dimensions or in
chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.analysis.hypersphere import Matrix, unit_rows

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
_TILE = 1024


@dataclass(frozen=True)
class Overlap:
    """Distributions of cosines.

    edges     [n + 1], from -1 to 1
    intra     [n], shares of the pairs of one class in each bin; they add up to 1
    inter     [n], the same of the pairs of two classes
    overlap   sum of the smaller shares: 0, separate, to 1, equal
    """

    edges: Matrix
    intra: Matrix
    inter: Matrix
    overlap: float


def in_dimensions(features: ArrayLike, dimensions: ArrayLike | None) -> Matrix:
    """The features [N, D], or their chosen dimensions, at unit length; float64."""
    rows = np.asarray(features)
    return unit_rows(rows if dimensions is None else rows[:, np.asarray(dimensions)])


def class_overlap(
    features: ArrayLike, labels: ArrayLike, dimensions: ArrayLike | None = None, bins: int = 100
) -> Overlap:
    """Distributions of the cosines of all pairs of rows of [N, D], within and between ``labels``.

    ``labels`` are [N] integers. ValueError where there is no pair of one of the two kinds.
    """
    classes = np.asarray(labels)

    def kinds(block: slice) -> tuple[Booleans, Booleans]:
        numbers = np.arange(len(classes))
        later = numbers > numbers[block, None]
        same = classes[block, None] == classes
        return later & same, later & ~same

    return _overlap(in_dimensions(features, dimensions), kinds, bins)


def pair_overlap(
    features: ArrayLike,
    labels: ArrayLike,
    pair: tuple[int, int],
    dimensions: ArrayLike | None = None,
    bins: int = 100,
) -> Overlap:
    """The same where samples of two classes are taken for alike (Fig. 1b): ``intra`` are pairs of
    a sample of the first class and one of the second, ``inter`` pairs of a sample of the two and
    one of another class."""
    classes = np.asarray(labels)

    def kinds(block: slice) -> tuple[Booleans, Booleans]:
        first, second = (classes == label for label in pair)
        others = ~(first | second)
        return first[block, None] & second, ~others[block, None] & others

    return _overlap(in_dimensions(features, dimensions), kinds, bins)


def _overlap(
    rows: Matrix, kinds: Callable[[slice], tuple[Booleans, Booleans]], bins: int
) -> Overlap:
    """``kinds`` gives, for a block of rows, which pairs [n, N] are intra and which are inter."""
    edges = np.linspace(-1.0, 1.0, bins + 1)
    counts = np.zeros((2, bins), dtype=np.int64)
    for first in range(0, len(rows), _TILE):
        block = slice(first, first + _TILE)
        cosine = np.clip(rows[block] @ rows.T, -1.0, 1.0)
        for kind, chosen in enumerate(kinds(block)):
            counts[kind] += np.histogram(cosine[chosen], edges)[0]
    total = counts.sum(axis=1, keepdims=True)
    if not total.all():
        raise ValueError(
            f"{total[0, 0]} pairs of one class and {total[1, 0]} of two: wanted some of both"
        )
    intra, inter = counts / total
    return Overlap(edges, intra, inter, float(np.minimum(intra, inter).sum()))


def class_similarity(
    features: ArrayLike, labels: ArrayLike, dimensions: ArrayLike | None = None
) -> tuple[Integers, Matrix]:
    """Classes [C] in order, and [C, C]: the mean cosine over all pairs of different samples.

    A class of one sample has nan with itself.
    """
    rows = in_dimensions(features, dimensions)
    classes, place, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    sums = np.zeros((len(classes), rows.shape[1]))
    np.add.at(sums, place, rows)
    similarity = sums @ sums.T / np.outer(counts, counts)
    own = np.square(sums).sum(axis=1) - counts  # without each sample with itself, which has 1
    pairs = (counts * (counts - 1)).astype(np.float64)
    pairs[pairs == 0.0] = np.nan
    np.fill_diagonal(similarity, own / pairs)
    return classes, similarity


def quietest_dimensions(
    features: ArrayLike, labels: ArrayLike, pair: tuple[int, int], count: int
) -> Integers:
    """[count]: the dimensions in which the samples of two classes vary least, quietest first.

    They are taken for the features that the two share (Fig. 1: 500 of 2,048). ValueError where
    there are none of them.
    """
    chosen = np.asarray(features)[np.isin(np.asarray(labels), pair)]
    if not len(chosen):
        raise ValueError(f"no sample is of class {pair[0]} or {pair[1]}")
    order = np.argsort(chosen.astype(np.float64).var(axis=0), kind="stable")
    quietest: Integers = order[:count].astype(np.int64)
    return quietest
