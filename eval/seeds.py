"""Compares two methods that were each trained with several seeds, on the same items.

Both methods of a pair have the same seed, so effects of the seed on both (the order of the samples,
a trained base) cancel. Every seed is measured on the same items, so items and seeds are crossed.

The variance of a mean difference has three parts (``Spread``), each with its degrees of freedom. An
interval gives each part its own quantile (Howe, JASA 1974). So having only two seeds does not widen
the part that many items determine well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtri, ndtri, stdtrit

from mclclip.eval import outcomes
from mclclip.eval.metrics import FloatArray, IntArray
from mclclip.eval.outcomes import Difference, Outcomes

_FACTOR = 1 / float(chdtri(1, 0.85))
"""The factor by which the variance that two seeds show is increased: in 85 % of cases the true
variance is smaller than the increased one."""

_STEPS = 60  # steps of the bisection for a p-value
_GROUPS = 500  # the jackknife leaves out one of at most so many groups of units at a time


@dataclass(frozen=True)
class Spread:
    """The parts of the variance of the mean difference over S seeds and U units, as numbers or as
    arrays of one shape (two-way analysis of variance).

    units         the part from how units differ in their mean over seeds, MS_a / (U S)
    seeds         the part from how seeds differ, MS_b / (U S)
    rest          the residual, MS_e / (U S), which both other parts contain
    unit_degrees  the degrees of freedom of ``units``; ``seeds`` has S - 1
    num_seeds     S
    """

    units: FloatArray | float
    seeds: FloatArray | float
    rest: FloatArray | float
    unit_degrees: int
    num_seeds: int

    def half_width(self, alpha: FloatArray | float) -> FloatArray:
        """Half the width of an interval of level 1 - alpha.

        From three seeds on it is sqrt(t_a^2 units + t_b^2 max(seeds - rest, 0)), with quantiles t_a
        and t_b of Student's distribution. Two seeds, with a single degree of freedom, cannot show
        that seeds differ little. So their part is taken ``_FACTOR`` times as large, and the
        quantile is that of the normal distribution.
        """
        tail = np.asarray(alpha) / 2
        if self.num_seeds == 2:
            of_seeds = np.maximum(_FACTOR * self.seeds - self.rest, 0)
            return np.asarray(np.sqrt(ndtri(tail) ** 2 * (self.units + of_seeds)))
        of_units = stdtrit(self.unit_degrees, tail) ** 2 * self.units
        of_seeds = np.maximum(self.seeds - self.rest, 0)
        return np.asarray(np.sqrt(of_units + stdtrit(self.num_seeds - 1, tail) ** 2 * of_seeds))

    def p_values(self, values: FloatArray | float) -> FloatArray:
        """The p-values of differences: the alpha at which ``half_width`` equals the difference. It
        is found by bisection."""
        low, high = np.zeros(np.shape(values)), np.ones(np.shape(values))
        for _ in range(_STEPS):
            middle = (low + high) / 2
            wide = self.half_width(middle) >= np.abs(values)
            low, high = np.where(wide, middle, low), np.where(wide, high, middle)
        return np.asarray(high)


def difference(pairs: Sequence[tuple[Outcomes, Outcomes]]) -> Difference:
    """The mean difference, over seeds, of two methods; ``pairs`` are their outcomes for each seed.

    With one seed it is ``outcomes.difference``, which knows the variance over items only. With
    more, ``Spread`` gives the interval and the p-value; its part ``units`` includes the invented
    units of ``outcomes.bootstrap_strata``. Statistics of rankings are not sums over units, so each
    unit gets a jackknife pseudo-value instead. If these are all equal, as for a perfect and a
    collapsed ranking, a sign test is used. ``wins``, ``losses`` and ``items`` are those of the mean
    over seeds.

    Raises NotTheSame if the items of two outcomes differ.
    """
    if len(pairs) == 1:
        return outcomes.difference(*pairs[0])
    first, num_seeds = pairs[0][0], len(pairs)
    for a, b in pairs:
        outcomes.check_same_items(first, a)
        outcomes.check_same_items(a, b)
    parts = _parts(pairs)
    spread = _spread(parts, invented=first.truth is None)
    value = float(np.mean([a.value() - b.value() for a, b in pairs]))
    units, half = int(first.resampling_group.max()) + 1, float(spread.half_width(0.05))
    if value and half < 1e-12:
        low, high, p_value = outcomes.sign_test(first, value)
        test = "sign test over units"
        return Difference(value, low, high, p_value, test, None, None, units, None)
    wins = losses = items = None
    if first.truth is None:
        better = first.rule.unit.sign * parts[0].mean(axis=1)
        wins, losses = int((better > 1e-12).sum()), int((better < -1e-12).sum())
    if first.rule.is_share:
        items = float(np.mean([np.sum(a.values) - np.sum(b.values) for a, b in pairs]))
    p_value, test = float(spread.p_values(value)), f"{num_seeds} seeds crossed with items"
    return Difference(value, value - half, value + half, p_value, test, wins, losses, units, items)


Parts = tuple[FloatArray, FloatArray, IntArray]
"""Each unit's part of the difference for every seed [U, S], the largest part that it could have
[U], and the number of its stratum [U]."""


def _parts(pairs: Sequence[tuple[Outcomes, Outcomes]]) -> Parts:
    first = pairs[0][0]
    if first.truth is not None:
        pseudo = np.stack([_pseudo_values(a, b) for a, b in pairs], axis=1)
        return pseudo, np.zeros(len(pseudo)), np.zeros(len(pseudo), dtype=np.int64)
    parts = [outcomes.by_unit(a, b) for a, b in pairs]
    largest = parts[0][1] * first.rule.is_share  # a loss has no largest value
    return np.stack([values for values, _, _ in parts], axis=1), largest, parts[0][2]


def _pseudo_values(a: Outcomes, b: Outcomes) -> FloatArray:
    """Jackknife pseudo-values of a difference of rankings, one for each unit (or for each of
    ``_GROUPS`` groups of units), divided by their number so that their sum is the difference."""
    units = int(a.resampling_group.max()) + 1
    number = min(units, _GROUPS)
    of_unit = np.random.default_rng(outcomes.SEED).permutation(units) % number
    group, whole = of_unit[a.resampling_group], a.value() - b.value()
    left_out = np.empty(number)
    for left_out_group in range(number):
        weights = (group != left_out_group).astype(np.float64)
        left_out[left_out_group] = a.value(weights) - b.value(weights)
    left_out[np.isnan(left_out)] = whole  # NaN: the group that was left out has all positives
    return whole - (number - 1) / number * left_out


def _spread(parts: Parts, *, invented: bool) -> Spread:
    """The variance of the sum over units of the mean over seeds. Units are drawn within strata.
    With ``invented``, strata get the invented units of ``outcomes.bootstrap_strata``."""
    values, _, stratum = parts
    num_seeds, strata = values.shape[1], np.unique(stratum)
    units = rest = 0.0
    if not invented:
        units = len(values) * float(values.mean(axis=1).var(ddof=min(1, len(values) - 1)))
    for count, rows, counts in outcomes.bootstrap_strata(*parts) if invented else ():
        means, chances = rows.mean(axis=1), counts / counts.sum()
        spread = float(chances @ (means - chances @ means) ** 2)
        units += count * spread * outcomes.variance_factor(count)
    for part in (values[stratum == name] for name in strata):
        left = part - part.mean(axis=1, keepdims=True) - part.mean(axis=0) + part.mean()
        rest += (
            outcomes.variance_factor(len(part))
            * float((left**2).sum())
            / (num_seeds - 1)
            / num_seeds
        )
    seeds = float(values.sum(axis=0).var(ddof=1)) / num_seeds
    degrees = max(len(values) - len(strata), 1)
    return Spread(units, seeds, rest, degrees, num_seeds)
