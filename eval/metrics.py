"""Formulas of metrics in pure numpy: intervals, ranks with ties, hits, class means, minimal pairs.

Fractions are in [0, 1] here; rows of results.jsonl are in percent (see ``units``).
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


def wilson_interval(successes: float, count: float) -> tuple[float, float]:
    """Wilson score interval of ``successes`` out of ``count`` binomial trials.

    Returns (low, high) fractions, inside [0, 1] and never empty, also at 0 and at ``count``
    successes. Source: Wilson, J. Am. Stat. Assoc. 22 (1927), without continuity correction.
    ``count`` may be an effective number of trials. ValueError unless 0 <= successes <= count > 0.
    """
    if not (count > 0 and 0 <= successes <= count):
        raise ValueError(f"an interval of {successes} successes in {count} trials does not exist")
    share, z = successes / count, Z_95
    denominator = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / denominator
    spread = math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    half = z * spread / denominator
    # At 0 and 1 the bound is the share itself; rounding must not leave it on the wrong side.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == count else min(1.0, centre + half)
    return low, high


def stratified_interval(
    shares: FloatArray, counts: IntArray, effect: float = 1.0
) -> tuple[float, float]:
    """Wilson interval of the unweighted mean of the strata's shares [C], with counts [C] > 0.

    With p the mean, its variance is at most p(1-p) / n for n = C^2 / sum(1 / counts), which is used
    as the number of trials; with equal counts this is the pooled interval. ``effect``: the design
    effect by which the number is divided where items are not independent (``design_effect``).
    """
    effective = len(counts) ** 2 / float(np.sum(1.0 / counts)) / effect
    mean = float(np.mean(shares))
    return wilson_interval(min(mean * effective, effective), effective)


def design_effect(residuals: FloatArray, unit: IntArray) -> float:
    """The factor by which items that belong together raise the variance of a sum of ``residuals``
    [N], compared with independent items (Kish, Survey Sampling, 1965). Items with the same number
    in ``unit`` [N] belong together.

    It is clamped between 1 and the mean number of items per unit, and is that mean if all residuals
    are 0.
    """
    largest = len(unit) / len(np.unique(unit))
    alone = float(np.sum(residuals**2))
    if alone == 0:
        return largest
    together = float(np.sum(np.bincount(unit, residuals) ** 2))
    return min(max(together / alone, 1.0), largest)


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


def hits_at(ranks: IntArray, k: int) -> BoolArray:
    """Returns [Q], True where a query's rank is at most ``k`` (ValueError unless k >= 1)."""
    if k < 1:
        raise ValueError(f"recall at {k} is not defined: k counts from 1")
    return ranks <= k


def chance_at(k: int, candidates: int, right: IntArray) -> float:
    """The expected share of queries with a right candidate among the first ``k`` of ``candidates``
    in random order; ``right`` [Q] is the number of right candidates of each query."""
    numbers, queries = np.unique(right, return_counts=True)
    every = math.comb(candidates, min(k, candidates))
    missed = [math.comb(candidates - int(n), min(k, candidates)) / every for n in numbers]
    return 1.0 - float(np.average(missed, weights=queries))


class Ranking:
    """Items [N] by their scores, sorted once for many weights; ValueError on NaN.

    order     [N] rows of the items, from the highest score to the lowest
    starts    [S] rows of ``order`` at which a new score begins
    positive  [N] which items are positive, in this order
    """

    def __init__(self, scores: FloatArray, positive: BoolArray) -> None:
        if np.isnan(scores).any():
            raise ValueError("scores hold NaN: the encoder's features are not finite")
        self.order = np.argsort(-scores, kind="stable")
        ranked = scores[self.order]
        self.starts = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))
        self.positive = positive[self.order]

    def sums(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Weights of positives and of negatives at every distinct score [S], the highest first."""
        weight = np.asarray(weights, dtype=np.float64)[self.order]
        right = np.add.reduceat(weight * self.positive, self.starts)
        return right, np.add.reduceat(weight, self.starts) - right

    def area(self, weights: FloatArray, ties: float = 0.0) -> float:
        """Share of the pairs of a positive and a negative item in which the positive scores higher,
        where items count ``weights`` [N] times; NaN where a kind of item has no weight.

        A tied pair counts ``ties``: 0 is against the model, 0.5 the usual area under the ROC curve.
        """
        right, wrong = self.sums(weights)
        pairs = float(right.sum() * wrong.sum())
        below = wrong.sum() - np.cumsum(wrong)
        return float(np.sum(right * (below + ties * wrong))) / pairs if pairs else math.nan

    def precision(self, weights: FloatArray) -> float:
        """Average precision, interpolated at recalls 0, 0.1, ..., 1, with items weighted as above.

        At each recall it takes the highest precision at that recall or a higher one. Of items that
        tie, negatives come first. Source: Everingham et al., PASCAL VOC 2007, section 4.1 of its
        guide.
        """
        right, wrong = self.sums(weights)
        if not (right.sum() > 0 and wrong.sum() > 0):
            return math.nan
        hits, ranked = np.cumsum(right), np.cumsum(right + wrong)
        precision = np.divide(hits, ranked, out=np.zeros_like(hits), where=ranked > 0)
        later = np.maximum.accumulate(precision[::-1])[::-1]
        # Recalls are sums of weights: rounding must not put one below the level it stands for.
        return float(np.mean(later[np.searchsorted(hits / hits[-1], _RECALLS - 1e-9)]))


_RECALLS = np.arange(11) / 10


def item_similarities(queries: FloatArray, candidates: FloatArray) -> FloatArray:
    """Cosines float32 [N, Q, C] of every item's queries [N, Q, E] and candidates [N, C, E].

    They are summed in float64 and rounded to float32, so that equal features tie exactly, in any
    order of sums.
    """
    left, right = queries.astype(np.float64), candidates.astype(np.float64)
    similarity: FloatArray = np.einsum("nqe,nce->nqc", left, right).astype(np.float32)
    return similarity


def match_margins(
    similarity: FloatArray, right: BoolArray, wrong: BoolArray | None = None
) -> FloatArray:
    """Margins [N, Q] of the decisions of items whose queries pick candidates, from [N, Q, C].

    ``right`` [Q, C]: which candidates are true of a query; ``wrong`` [Q, C]: which are false of it;
    None: all others. A margin is the lowest similarity of a true candidate minus the highest of a
    false one; it is infinite where there is no true or no false one. A decision is right where its
    margin is above 0 (a tie counts against the model), and tied where it is 0. ValueError on NaN.
    """
    if np.isnan(similarity).any():
        raise ValueError("similarities hold NaN: the encoder's features are not finite")
    wrong = ~right if wrong is None else wrong
    lowest = np.where(right, similarity, np.inf).min(axis=2)
    highest = np.where(wrong, similarity, -np.inf).max(axis=2)
    margins: FloatArray = lowest - highest
    return margins
