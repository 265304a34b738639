"""Formulas of metrics in pure numpy: intervals, ranks with ties, hits, class means, minimal pairs.

Fractions are in [0, 1] here; rows of results.jsonl are in percent.
"""

from __future__ import annotations

import math

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

    With p the mean, its variance is at most p(1-p) / n for n = C^2 / sum(1 / counts), which is used
    as the number of trials; with equal counts this is the pooled interval.
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


def mean_per_class(correct: BoolArray, labels: IntArray) -> tuple[float, FloatArray, IntArray]:
    """Unweighted mean over the classes present of the share of correct samples.

    correct, labels: [N]. Returns (mean, shares [C], counts [C]) in ascending order of label.
    """
    if len(labels) == 0:
        raise ValueError("the mean per class of no samples is not defined")
    _, position, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shares = np.bincount(position, weights=correct.astype(np.float64)) / counts
    return float(shares.mean()), shares, counts.astype(np.int64)


def pair_margins(similarity: FloatArray) -> dict[str, FloatArray]:
    """Margins of minimal pairs by direction, from similarity [P, 2, 2] = (pair, statement, image).

    Statement i is true of image i. A margin is the right similarity minus the wrong one, and a
    decision is right where it is above 0: a softmax over two candidates is a comparison, and a tie
    counts against the model. A pair is right in a direction where all its margins there are.
    Returns [P, 2] for ``statement_to_image`` (statement i picks an image) and ``image_to_text``
    (image i picks a statement), and [P, 4] for ``group`` (both). ValueError on NaN.
    """
    if np.isnan(similarity).any():
        raise ValueError("similarities hold NaN: the encoder's features are not finite")
    right = similarity[:, [0, 1], [0, 1]]
    by_statement = right - similarity[:, [0, 1], [1, 0]]
    by_image = right - similarity[:, [1, 0], [0, 1]]
    both = np.concatenate([by_statement, by_image], axis=1)
    return {"statement_to_image": by_statement, "image_to_text": by_image, "group": both}
