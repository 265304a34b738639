"""Compares two encoders on the same items: difference, interval, test, and correction for many;
and the interval of one encoder's rankings.

Units (see ``Outcomes``) are drawn independently of each other; the items of one stay together.
Draws are seeded, so that a comparison gives the same figures each time.

Sources: McNemar, Psychometrika 12 (1947), in its exact form; Efron and Tibshirani, An Introduction
to the Bootstrap (1993), chapters 13 and 15; Agresti and Min, Statistics in Medicine 24 (2005), for
the pseudo-units; Holm, Scandinavian Journal of Statistics 6 (1979).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mclclip.eval.metrics import FloatArray, IntArray, wilson_interval
from mclclip.eval.outcomes import Outcomes

SEED = 20231017
NUM_DRAWS = 10_000
NUM_RANKING_DRAWS = 2_000
"""Draws for losses, and for statistics of rankings, each of which costs a sort."""

_PSEUDO_UNITS = 0.5
"""Added to wins and to losses before a bootstrap; without them encoders that differ on no unit, or
only for the better on a few, would get an interval of no width. Twice as many are added to ties."""


@dataclass(frozen=True)
class Difference:
    """Encoder a minus encoder b, in fractions, or in nats where it is one of losses.

    value      difference of the metrics
    low, high  95 % interval
    p_value    of no difference, two-sided
    test       how the p-value was computed
    wins       units on which a is better; of rankings, which units cannot win alone, None
    losses     units on which b is better; likewise
    units      number of units
    items      how many items more are right, a sum of shares; of rankings and losses None
    """

    value: float
    low: float
    high: float
    p_value: float
    test: str
    wins: int | None
    losses: int | None
    units: int
    items: float | None


class NotTheSame(ValueError):
    """Two encoders were not measured on the same items; the message says how they differ."""


def difference(a: Outcomes, b: Outcomes) -> Difference:
    """The difference of two encoders on the same items; NotTheSame where items are not the same.

    Shares (``mean``): the interval is a bootstrap over units, within strata where no unit is in two
    of them; strata's sizes are kept. The test is McNemar's where wins and losses are all of one
    size, else a permutation test that exchanges the encoders unit by unit. Losses likewise, of
    which the smaller one wins, with a bootstrap over all units. Rankings: both are a bootstrap over
    units.
    """
    check_same_items(a, b)
    if a.truth is not None:
        return _of_rankings(a, b)
    values, largest, stratum = _by_unit(a, b)
    better = a.measured_in.sign * values
    wins, losses = int(np.count_nonzero(better > 0)), int(np.count_nonzero(better < 0))
    is_loss = a.statistic == "mean_loss"
    low, high = _bootstrap(a, b)[1:] if is_loss else _interval(values, largest, stratum)
    sizes = np.unique(np.abs(values[values != 0]).round(12))
    if len(sizes) <= 1:
        p_value, test = mcnemar(wins, losses), "McNemar, exact"
    else:
        p_value, test = permutation(values), "permutation"
    value = a.value() - b.value()
    items = None if is_loss else float(np.sum(a.values) - np.sum(b.values))
    return Difference(value, low, high, p_value, test, wins, losses, len(values), items)


def check_same_items(a: Outcomes, b: Outcomes) -> None:
    """Raises NotTheSame where two encoders were not measured on the same items."""
    if a.statistic != b.statistic:
        raise NotTheSame(f"one is measured by {a.statistic}, the other by {b.statistic}")
    if len(a) != len(b):
        raise NotTheSame(f"one has {len(a):,} items, the other {len(b):,}")
    for name in ("items", "strata", "units"):
        ours, theirs = getattr(a, name), getattr(b, name)
        if ours != theirs:
            pairs = zip(ours or [None] * len(a), theirs or [None] * len(b), strict=True)
            row, pair = next((row, pair) for row, pair in enumerate(pairs) if pair[0] != pair[1])
            raise NotTheSame(
                f"their {name} differ, such as {pair[0]!r} and {pair[1]!r} in row {row}"
            )
    if a.truth is not None and b.truth is not None and not np.array_equal(a.truth, b.truth):
        raise NotTheSame("they disagree about which items are positive")


def mcnemar(wins: int, losses: int) -> float:
    """Two-sided exact p-value of as many wins as losses, each as likely as the other."""
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def permutation(values: FloatArray, draws: int = NUM_DRAWS, seed: int = SEED) -> float:
    """Two-sided p-value of a sum of differences [U] whose signs are equally likely to be turned."""
    rng = np.random.default_rng(seed)
    sizes, counts = np.unique(np.abs(values[values != 0]).round(12), return_counts=True)
    sums = np.zeros(draws)
    for size, count in zip(sizes, counts, strict=True):
        sums += size * (2.0 * rng.binomial(count, 0.5, draws) - count)
    # Sums in another order round differently; those that are equal count as reaching the observed.
    reached = np.count_nonzero(np.abs(sums) >= abs(float(values.sum())) - 1e-9 * sizes.sum())
    return (1 + int(reached)) / (1 + draws)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number, in their order: the chance of one false alarm among all
    stays below the level that a corrected p-value is compared with."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(raised), 1.0)
    return [float(value) for value in corrected]


def _by_unit(a: Outcomes, b: Outcomes) -> tuple[FloatArray, FloatArray, IntArray]:
    """Each unit's part of the difference [U], the largest that it could have [U], its stratum [U].

    All strata are one where a unit has items in two of them, or a stratum has one unit.
    """
    counts = np.bincount(a.stratum)
    weight = 1.0 / (len(counts) * counts[a.stratum])
    gained = weight * (a.values.astype(np.float64) - b.values)
    added, largest = (np.bincount(a.unit, of).astype(np.float64) for of in (gained, weight))
    first = np.full(len(added), -1)
    first[a.unit[::-1]] = a.stratum[::-1]
    nested = bool((first[a.unit] == a.stratum).all()) and int(np.bincount(first).min()) > 1
    stratum = first if nested else np.zeros(len(added), dtype=np.int64)
    return added, largest, stratum


def _interval(
    values: FloatArray,
    largest: FloatArray,
    stratum: IntArray,
    draws: int = NUM_DRAWS,
    seed: int = SEED,
) -> tuple[float, float]:
    """95 % bootstrap interval of the sum of ``values`` [U], drawn within strata."""
    rng, total = np.random.default_rng(seed), np.zeros(draws)
    for number in range(int(stratum.max()) + 1):
        own = stratum == number
        share, most = float(own.mean()), float(largest[own].mean())
        total += _resampled(values[own], most, share, draws, rng)
    low, high = np.quantile(total, [0.025, 0.975])
    return float(low), float(high)


def _resampled(
    values: FloatArray, most: float, share: float, draws: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Sums of ``values`` [U] drawn with replacement, for ``draws`` draws.

    Equal values are drawn together. Deviations are widened by sqrt(U / (U - 1)), since the spread
    of few values is smaller than that of what they were drawn from. So that an interval is never
    empty, a few invented units (``_PSEUDO_UNITS``) with the values ``most``, 0 and -``most`` are
    drawn too; ``share`` is the part of them that this stratum gets.
    """
    sizes, counts = np.unique(values.round(12), return_counts=True)
    sizes = np.concatenate([sizes, [most, 0.0, -most]])
    pseudo = share * _PSEUDO_UNITS * np.array([1.0, 2.0, 1.0])
    chances = np.concatenate([counts, pseudo])
    drawn = rng.multinomial(len(values), chances / chances.sum(), size=draws) @ sizes
    middle = len(values) * float(chances @ sizes) / float(chances.sum())
    widened: NDArray[np.float64] = middle + (drawn - middle) * np.sqrt(
        len(values) / max(len(values) - 1, 1)
    )
    return widened


def _of_rankings(a: Outcomes, b: Outcomes) -> Difference:
    drawn, low, high = _bootstrap(a, b)
    tail = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
    p_value = min(1.0, 2.0 * (1 + tail) / (1 + len(drawn)))
    value, units = a.value() - b.value(), int(a.unit.max()) + 1
    return Difference(value, low, high, p_value, "bootstrap", None, None, units, None)


def _bootstrap(a: Outcomes, b: Outcomes) -> tuple[NDArray[np.float64], float, float]:
    """Differences of the metrics by draws of units, and their 95 % interval."""
    drawn = _drawn(a.unit, lambda weights: a.value(weights) - b.value(weights))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return drawn, float(low), float(high)


def ranking_interval(outcomes: Outcomes) -> tuple[float, float]:
    """95 % interval of a statistic of rankings of one encoder: a seeded bootstrap over units.

    It is moved so that the middle of the draws is the statistic itself, because repeated items
    raise a precision. It is at least as wide as that of a share of as many trials as the rarer kind
    of item has units, if no ranking could be better or worse: all draws are equal then.
    """
    value = outcomes.value()
    drawn = _drawn(outcomes.unit, outcomes.value)
    low, high = np.quantile(drawn + (value - float(drawn.mean())), [0.025, 0.975])
    if high - low < 1e-9:
        return wilson_interval(value * outcomes.rarer, outcomes.rarer)
    return max(0.0, float(low)), min(1.0, float(high))


def _drawn(unit: IntArray, statistic: Callable[[FloatArray], float]) -> NDArray[np.float64]:
    """The statistic of items that are weighted by how often their units are drawn, of the draws in
    which it is defined."""
    rng, units = np.random.default_rng(SEED), int(unit.max()) + 1
    drawn = np.empty(NUM_RANKING_DRAWS)
    for number in range(NUM_RANKING_DRAWS):
        times = np.bincount(rng.integers(units, size=units), minlength=units).astype(np.float64)
        drawn[number] = statistic(times[unit])
    return drawn[~np.isnan(drawn)]
