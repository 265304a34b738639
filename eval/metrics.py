"""Formulas of metrics in pure numpy: intervals, ranks with ties, rankings, margins.

Shares are fractions in [0, 1] here; rows of results.jsonl are in percent.
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
    """Wilson score interval of a share: ``successes`` out of ``count`` binomial trials.

    Returns (low, high) inside [0, 1]. The interval has a width even for 0 and for ``count``
    successes. ``count`` may be an effective number of trials. Source: Wilson, J. Am. Stat. Assoc.
    22 (1927), without continuity correction.
    """
    assert 0 <= successes <= count > 0
    share, z = successes / count, Z_95
    denominator = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / denominator
    spread = math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    half = z * spread / denominator
    # For a share of 0 or 1 that bound is the share itself, which rounding must not change.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == count else min(1.0, centre + half)
    return low, high


def stratified_interval(
    shares: FloatArray, counts: IntArray, effect: float = 1.0
) -> tuple[float, float]:
    """Wilson interval of the unweighted mean of shares [C] of C strata with counts [C] > 0.

    The variance of the mean p is at most p(1-p) / n with n = C^2 / sum(1 / counts), so n is taken
    as the number of trials; for equal counts it is the number of all items. ``effect`` divides n if
    items are not independent (``design_effect``).
    """
    effective = len(counts) ** 2 / float(np.sum(1.0 / counts)) / effect
    mean = float(np.mean(shares))
    return wilson_interval(min(mean * effective, effective), effective)


def design_effect(residuals: FloatArray, unit: IntArray) -> float:
    """The factor by which the variance of a sum of ``residuals`` [N] grows because items belong
    together, compared with independent items (Kish, Survey Sampling, 1965).

    Items with the same number in ``unit`` [N] belong together. The result is clamped between 1 and
    the mean number of items per unit, and is that mean if all residuals are 0.
    """
    largest = len(unit) / len(np.unique(unit))
    alone = float(np.sum(residuals**2))
    if alone == 0:
        return largest
    together = float(np.sum(np.bincount(unit, residuals) ** 2))
    return min(max(together / alone, 1.0), largest)


def ranks_with_ties(similarity: FloatArray, positive: BoolArray) -> tuple[IntArray, IntArray]:
    """Ranks, from 1 on, of each query's best right candidate, with ties against and for the model.

    ``similarity`` [Q, C]; ``positive`` [Q, C] is True if the candidate is right for the query, as
    at least one is. Returns two int64 [Q]: 1 + the number of wrong candidates that are at least as
    similar (so a collapsed encoder ranks last), and 1 + that of strictly more similar ones.
    """
    assert positive.any(axis=1).all() and not np.isnan(similarity).any()  # NaN would rank first
    best = np.where(positive, similarity, -np.inf).max(axis=1, keepdims=True)
    wrong = np.where(positive, -np.inf, similarity)
    greater = np.count_nonzero(wrong > best, axis=1)
    equal = np.count_nonzero((wrong == best) & ~positive, axis=1)
    return (1 + greater + equal).astype(np.int64), (1 + greater).astype(np.int64)


def chance_at(k: int, candidates: int, right: IntArray) -> float:
    """The expected share of queries with a right candidate among the first ``k`` of ``candidates``
    in random order; ``right`` [Q] is the number of right candidates of each query."""
    numbers, queries = np.unique(right, return_counts=True)
    every = math.comb(candidates, min(k, candidates))
    missed = [math.comb(candidates - int(n), min(k, candidates)) / every for n in numbers]
    return 1.0 - float(np.average(missed, weights=queries))


class Ranking:
    """Items [N] sorted by their scores, so that metrics can be computed for many weights.

    order     [N] numbers of the items, from the highest score to the lowest
    starts    [S] places in ``order`` at which another score begins
    positive  bool [N] True for positive items, in this order
    """

    def __init__(self, scores: FloatArray, positive: BoolArray) -> None:
        assert not np.isnan(scores).any()
        self.order = np.argsort(-scores, kind="stable")
        ranked = scores[self.order]
        self.starts = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))
        self.positive = positive[self.order]

    def sums(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The sum of the weights of positive items, and that of negative ones, at each distinct
        score: two [S], from the highest score on."""
        weight = np.asarray(weights, dtype=np.float64)[self.order]
        right = np.add.reduceat(weight * self.positive, self.starts)
        return right, np.add.reduceat(weight, self.starts) - right

    def area(self, weights: FloatArray, ties: float = 0.0) -> float:
        """Area under the ROC curve: the share of pairs of a positive and a negative item in which
        the positive one has the higher score.

        An item counts ``weights`` [N] times; a tied pair counts ``ties``, 0 against the model or
        0.5 as usual. NaN if all positive or all negative items have weight 0.
        """
        right, wrong = self.sums(weights)
        pairs = float(right.sum() * wrong.sum())
        below = wrong.sum() - np.cumsum(wrong)
        return float(np.sum(right * (below + ties * wrong))) / pairs if pairs else math.nan

    def precision(self, weights: FloatArray) -> float:
        """Average precision, interpolated at recalls 0, 0.1, ..., 1; weights are as for ``area``.

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
        # Recalls are sums of weights; 1e-9 makes up for their rounding.
        return float(np.mean(later[np.searchsorted(hits / hits[-1], _RECALLS - 1e-9)]))


_RECALLS = np.arange(11) / 10


def item_similarities(queries: FloatArray, candidates: FloatArray) -> FloatArray:
    """Cosines float32 [N, Q, C] of every item's queries [N, Q, E] and candidates [N, C, E].

    They are summed in float64 and rounded to float32, so that equal features tie exactly.
    """
    left, right = queries.astype(np.float64), candidates.astype(np.float64)
    similarity: FloatArray = np.einsum("nqe,nce->nqc", left, right).astype(np.float32)
    return similarity


def match_margins(
    similarity: FloatArray, right: BoolArray, wrong: BoolArray | None = None
) -> FloatArray:
    """Margins [N, Q] by which each query of N items prefers its right candidates, from similarities
    [N, Q, C].

    ``right`` bool [Q, C] is True for candidates that are right for a query, ``wrong`` [Q, C] for
    wrong ones (None: all others). A margin is the lowest similarity of a right candidate minus the
    highest of a wrong one, or infinite if there are none of a kind. A decision is right if its
    margin is above 0, and tied if it is 0, which counts against the model.
    """
    assert not np.isnan(similarity).any()
    wrong = ~right if wrong is None else wrong
    lowest = np.where(right, similarity, np.inf).min(axis=2)
    highest = np.where(wrong, similarity, -np.inf).max(axis=2)
    margins: FloatArray = lowest - highest
    return margins
