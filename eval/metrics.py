"""Metric maths in pure numpy: intervals, ranks with ties, recall, means per class, minimal pairs.

Fractions are in [0, 1] here; rows of results hold percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.floating]

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal distribution."""


def wilson_interval(successes: float, count: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of ``successes`` out of ``count`` binomial trials.

    Returns (low, high) fractions, inside [0, 1] and never empty, also at 0 and at ``count``
    successes. Source: Wilson, J. Am. Stat. Assoc. 22 (1927), without continuity correction.
    ``count`` may be an effective number of trials. ValueError unless 0 <= successes <= count > 0.
    """
    if not (count > 0 and 0 <= successes <= count):
        raise ValueError(f"an interval of {successes} successes in {count} trials does not exist")
    share = successes / count
    denominator = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / denominator
    spread = math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    half = z * spread / denominator
    # At 0 and 1 the bound is the share itself; rounding must not leave it on the wrong side.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == count else min(1.0, centre + half)
    return low, high


def stratified_interval(shares: FloatArray, counts: IntArray) -> tuple[float, float]:
    """Wilson interval of the unweighted mean of the strata's shares [C], with counts [C] > 0.

    The mean's variance is at most that of p(1-p) trials numbering C^2 / sum(1 / counts), which is
    taken as the effective count; with equal counts this is the pooled interval.
    """
    effective = len(counts) ** 2 / float(np.sum(1.0 / counts))
    mean = float(np.mean(shares))
    return wilson_interval(min(mean * effective, effective), effective)


def ranks_with_ties(similarity: FloatArray, positive: BoolArray) -> tuple[IntArray, IntArray]:
    """Rank of each query's best positive, with ties against and for the model.

    similarity: [Q, C]; positive: [Q, C], True where the candidate answers the query.
    Returns int64 ([Q], [Q]), counted from 1: 1 + #strictly greater + #equal wrong candidates (so
    that a collapsed encoder ranks last), and the optimistic rank without the equal ones.
    ValueError on NaN (which would compare as a perfect rank) or a query without a positive.
    """
    if np.isnan(similarity).any():
        raise ValueError("similarities hold NaN: the encoder's features are not finite")
    if not positive.any(axis=1).all():
        query = int(np.flatnonzero(~positive.any(axis=1))[0])
        raise ValueError(f"query {query} has no positive candidate: it cannot be ranked")
    best = np.where(positive, similarity, -np.inf).max(axis=1, keepdims=True)
    wrong = np.where(positive, -np.inf, similarity)
    greater = np.count_nonzero(wrong > best, axis=1)
    equal = np.count_nonzero((wrong == best) & ~positive, axis=1)
    return (1 + greater + equal).astype(np.int64), (1 + greater).astype(np.int64)


def hits_at(ranks: IntArray, k: int) -> int:
    """Number of queries whose rank is at most ``k`` (ValueError unless k >= 1)."""
    if k < 1:
        raise ValueError(f"recall at {k} is not defined: k counts from 1")
    return int(np.count_nonzero(ranks <= k))


def recall_at(ranks: IntArray, k: int) -> float:
    """Share of queries ranked at ``k`` or better; 1 where k covers all candidates."""
    if len(ranks) == 0:
        raise ValueError("recall of no queries is not defined")
    return hits_at(ranks, k) / len(ranks)


def mean_per_class(correct: BoolArray, labels: IntArray) -> tuple[float, FloatArray, IntArray]:
    """Unweighted mean over the classes present of the share of correct samples.

    correct, labels: [N]. Returns (mean, shares [C], counts [C]) in ascending order of label.
    """
    if len(labels) == 0:
        raise ValueError("the mean per class of no samples is not defined")
    _, position, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shares = np.bincount(position, weights=correct.astype(np.float64)) / counts
    return float(shares.mean()), shares, counts.astype(np.int64)


@dataclass(frozen=True)
class PairOutcomes:
    """Outcome of every minimal pair in the three directions; arrays over P pairs.

    ``statements``/``images`` [P, 2]: whether statement i picks image i / image i picks statement i,
    strictly. ``statement_margins``/``image_margins`` [P, 2]: right minus wrong similarity.
    """

    statements: BoolArray
    images: BoolArray
    statement_margins: FloatArray
    image_margins: FloatArray

    def right(self, direction: str) -> BoolArray:
        """[P]: is the pair right in ``statement_to_image``, ``image_to_text`` or ``group``?"""
        by_statement, by_image = self.statements.all(axis=1), self.images.all(axis=1)
        if direction == "statement_to_image":
            return np.asarray(by_statement)
        if direction == "image_to_text":
            return np.asarray(by_image)
        if direction == "group":
            return np.asarray(by_statement & by_image)
        raise ValueError(
            f"unknown direction {direction!r}: use statement_to_image, image_to_text or group"
        )

    def margins(self, direction: str) -> FloatArray:
        """[P, 2] or, for ``group``, [P, 4]: the margins that decide ``direction``."""
        if direction == "statement_to_image":
            return self.statement_margins
        if direction == "image_to_text":
            return self.image_margins
        return np.concatenate([self.statement_margins, self.image_margins], axis=1)


def pair_outcomes(similarity: FloatArray) -> PairOutcomes:
    """Scores minimal pairs from similarity [P, 2, 2] = (pair, statement, image).

    Statement i is true of image i. A softmax over two candidates is a comparison: the right one
    must be strictly greater, so a tie counts against the model. ValueError on NaN.
    """
    if np.isnan(similarity).any():
        raise ValueError("similarities hold NaN: the encoder's features are not finite")
    right = np.stack([similarity[:, 0, 0], similarity[:, 1, 1]], axis=1)
    other_image = np.stack([similarity[:, 0, 1], similarity[:, 1, 0]], axis=1)
    other_statement = other_image[:, ::-1]
    return PairOutcomes(
        statements=right > other_image,
        images=right > other_statement,
        statement_margins=right - other_image,
        image_margins=right - other_statement,
    )
