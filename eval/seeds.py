"""Two methods that were each trained with several seeds, on the same items: are they different?

The seeds of a pair are equal, so that what a seed changes for both (the order of the samples, the
base where it is trained) does not count. Items are the same in every seed: those that one method
happens to find do not become more by training again, so items and seeds are crossed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtr, stdtrit

from mclclip.eval import outcomes
from mclclip.eval.metrics import FloatArray, IntArray
from mclclip.eval.outcomes import Difference, Outcomes

NUM_DRAWS = 1_000
BOOTSTRAP_FROM = 5
"""Seeds from which their spread is bootstrapped; fewer ones give too few different draws."""


def difference(pairs: Sequence[tuple[Outcomes, Outcomes]]) -> Difference:
    """The difference of two methods, whose outcomes of every seed are a pair: the mean over seeds.

    One seed: ``outcomes.difference``, which knows items alone. More: Student's t of S - 1 degrees
    of freedom, for the interval and the p-value. Of two to four seeds its standard error is that of
    the mean of the seeds' differences, joined with that of the items' means over seeds (the sum of
    both variances, since all seeds have the same items). From five seeds a bootstrap of seeds and
    of items gives it, widened by sqrt(S / (S - 1)); its percentiles are not used, because those of
    five seeds are too narrow. ``wins``, ``losses`` and ``items`` are of the mean over seeds.

    Raises NotTheSame where items are not the same.
    """
    if len(pairs) == 1:
        return outcomes.difference(*pairs[0])
    first = pairs[0][0]
    for own, other in pairs:
        outcomes.check_same_items(first, own)
        outcomes.check_same_items(own, other)
    num_seeds, parts = len(pairs), _by_unit(pairs)
    of_seeds = np.array([own.value() - other.value() for own, other in pairs])
    value, freedom = float(of_seeds.mean()), num_seeds - 1
    if num_seeds < BOOTSTRAP_FROM:
        one = np.full((1, num_seeds), 1 / num_seeds)
        of_items = _drawn(pairs, one) if parts is None else _item_error(parts)
        error = float(np.hypot(of_seeds.std(ddof=1) / np.sqrt(num_seeds), of_items))
        test = f"t over {num_seeds} seeds, and items"
    else:
        rng = np.random.default_rng(outcomes.SEED)
        times = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=NUM_DRAWS)
        shares = times / num_seeds
        drawn = _drawn(pairs, shares) if parts is None else _drawn_of_means(parts, shares)
        error = drawn * float(np.sqrt(num_seeds / freedom))
        test = f"bootstrap of {num_seeds} seeds, and of items"
    p_value = 2.0 * float(stdtr(freedom, -abs(value) / error)) if value else 1.0
    half = error * float(stdtrit(freedom, 0.975))
    wins = losses = items = None
    if parts is not None:
        better = first.measured_in.sign * parts[0].mean(axis=1)
        wins, losses = int((better > 1e-12).sum()), int((better < -1e-12).sum())
    if first.statistic == "mean":
        items = float(np.mean([np.sum(own.values) - np.sum(other.values) for own, other in pairs]))
    units = int(first.unit.max()) + 1
    return Difference(value, value - half, value + half, p_value, test, wins, losses, units, items)


Parts = tuple[FloatArray, FloatArray, IntArray]
"""Each unit's part of the difference of every seed [U, S], the largest that it could have [U], and
its stratum [U]."""


def _by_unit(pairs: Sequence[tuple[Outcomes, Outcomes]]) -> Parts | None:
    """The parts of a difference of means; None of rankings, which are no sums over units."""
    if pairs[0][0].truth is not None:
        return None
    parts = [outcomes.by_unit(own, other) for own, other in pairs]
    largest = parts[0][1] * (pairs[0][0].statistic == "mean")  # a loss has no largest value
    return np.stack([values for values, _, _ in parts], axis=1), largest, parts[0][2]


def _item_error(parts: Parts) -> float:
    """The standard error of the sum over units of the mean over seeds, with units drawn with
    replacement within strata."""
    variance = 0.0
    for count, rows, counts in outcomes.bootstrap_strata(*parts):
        mean, chances = rows.mean(axis=1), counts / counts.sum()
        spread = float(chances @ (mean - chances @ mean) ** 2)
        variance += count * spread * outcomes.widened(count)
    return float(np.sqrt(variance))


def _drawn_of_means(parts: Parts, shares: FloatArray) -> float:
    """The standard deviation of a difference of means in draws of units, within strata, and of
    seeds, which count by ``shares`` [draws, S]."""
    rng, total = np.random.default_rng([outcomes.SEED, 1]), np.zeros(len(shares))
    for count, rows, counts in outcomes.bootstrap_strata(*parts):
        chances = counts / counts.sum()
        drawn = rng.multinomial(count, chances, size=len(shares)) @ rows
        middle = count * (chances @ rows)
        widened = middle + (drawn - middle) * np.sqrt(outcomes.widened(count))
        total += (widened * shares).sum(axis=1)
    return float(total.std())


def _drawn(pairs: Sequence[tuple[Outcomes, Outcomes]], shares: FloatArray) -> float:
    """The same of rankings; of shares [1, S] all draws have the same ones."""
    rng, unit = np.random.default_rng([outcomes.SEED, 1]), pairs[0][0].unit
    values = np.array(
        [
            [own.value(weights) - other.value(weights) for own, other in pairs]
            for weights in outcomes.draws(rng, unit, NUM_DRAWS)
        ]
    )
    widened = outcomes.widened(int(unit.max()) + 1)
    return float(np.nanstd((values * shares).sum(axis=1)) * np.sqrt(widened))
