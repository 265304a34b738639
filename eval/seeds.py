"""Compares methods that were each trained with several seeds, on the same items.

All methods have the same seeds, so effects of a seed on both methods of a pair (the order of the
samples, a trained base) cancel. Every seed is measured on the same items, so items and seeds are
crossed.

The variance of a mean difference has two parts (``Spread``), each with its degrees of freedom. An
interval gives each part its own quantile (Howe, JASA 1974), so having only two seeds does not widen
the part that many items determine well. Two or three seeds can look alike by chance. So the part of
the seeds is at least its mean over all comparisons, which has the degrees of freedom of all
methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtri, stdtrit

from mclclip.eval import outcomes
from mclclip.eval.metrics import FloatArray, IntArray
from mclclip.eval.outcomes import Difference, NotTheSame, Outcomes

_LARGER = 0.7
"""A method may differ more by seed than others. So a difference's own variance over seeds counts as
its upper bound of this confidence."""
_STEPS = 60  # steps of the bisection for a p-value
_GROUPS = 500  # the jackknife leaves out one of at most so many groups of units at a time


@dataclass(frozen=True)
class Spread:
    """The parts of the variance of mean differences over S seeds and U units, as arrays of one
    shape (two-way analysis of variance).

    units         the part from how units differ in their mean over seeds, MS_a / (U S), which
                  contains the residual MS_e / (U S)
    seeds         the part from how seeds differ beyond the residual, (MS_b - MS_e) / (U S); it may
                  be negative
    unit_degrees  the degrees of freedom of ``units``
    num_methods   M; the seeds of all have (M - 1) (S - 1) degrees of freedom
    num_seeds     S
    """

    units: FloatArray
    seeds: FloatArray
    unit_degrees: IntArray | int
    num_methods: int
    num_seeds: int

    def half_width(self, alpha: FloatArray | float) -> FloatArray:
        """Half the widths of intervals of level 1 - alpha, one for each difference.

        sqrt(t_a^2 units + t_b^2 seeds'), with quantiles t_a and t_b of Student's distribution,
        where seeds' is the larger of the mean of ``seeds`` over all differences (over the last
        axis) and of ``_LARGER``'s bound of the own one, and at least 0.
        """
        tail = np.asarray(alpha) / 2
        alone = self.seeds * (self.num_seeds - 1) / chdtri(self.num_seeds - 1, _LARGER)
        of_seeds = np.maximum(np.maximum(alone, self.seeds.mean(axis=-1, keepdims=True)), 0)
        of_units = stdtrit(self.unit_degrees, tail) ** 2 * self.units
        degrees = (self.num_methods - 1) * (self.num_seeds - 1)
        return np.asarray(np.sqrt(of_units + stdtrit(degrees, tail) ** 2 * of_seeds))

    def p_values(self, values: FloatArray) -> FloatArray:
        """The p-values of differences: the alpha at which ``half_width`` equals the difference. It
        is found by bisection."""
        low, high = np.zeros(np.shape(values)), np.ones(np.shape(values))
        for _ in range(_STEPS):
            middle = (low + high) / 2
            wide = self.half_width(middle) >= np.abs(values)
            low, high = np.where(wide, middle, low), np.where(wide, high, middle)
        return np.asarray(high)


def differences(
    methods: Mapping[str, Sequence[Outcomes]], compared: Sequence[tuple[str, str]]
) -> list[Difference]:
    """The mean differences, over seeds, of pairs of methods on one benchmark.

    ``methods`` has the outcomes of each method for every seed, and ``compared`` the names of each
    pair. With one seed a difference is ``outcomes.difference``, which knows the variance over items
    only. With more, ``Spread`` gives the interval and the p-value; its part ``units`` includes the
    invented units of ``outcomes.bootstrap_strata``. Statistics of rankings are not sums over units,
    so each unit gets a jackknife pseudo-value instead. If these are all equal, as for a perfect and
    a collapsed ranking, a sign test is used. ``wins``, ``losses`` and ``items`` are those of the
    mean over seeds.

    Raises NotTheSame if the items of two outcomes differ.
    """
    pairs = [[*zip(methods[left], methods[right], strict=True)] for left, right in compared]
    if not pairs:
        return []
    for names, some in zip(compared, pairs, strict=True):
        try:
            for left, right in some:
                outcomes.check_same_items(some[0][0], left)
                outcomes.check_same_items(left, right)
        except NotTheSame as error:
            joined = " and ".join(names)
            raise NotTheSame(f"{joined} were not measured on the same items: {error}") from None
    if (num_seeds := len(pairs[0])) == 1:
        return [outcomes.difference(*of_seed) for (of_seed,) in pairs]
    parts = [_parts(some) for some in pairs]
    variances = [_variances(each, some) for each, some in zip(parts, pairs, strict=True)]
    units, seeds, degrees = (np.array(numbers) for numbers in zip(*variances, strict=True))
    spread = Spread(units, seeds, degrees, len(methods), num_seeds)
    of_seeds = np.array([[outcomes.subtract(*both) for both in some] for some in pairs])
    values = outcomes.without_residue(of_seeds.mean(axis=1), np.abs(of_seeds).max(axis=1))
    columns = zip(values, spread.half_width(0.05), spread.p_values(values), strict=True)
    results = []
    for some, (of_units, *_), (variance, beyond, _), numbers in zip(
        pairs, parts, variances, columns, strict=True
    ):
        value, half, p_value = map(float, numbers)
        low, high, test = value - half, value + half, f"{num_seeds} seeds crossed with items"
        if some[0][0].truth is not None and value and variance + max(beyond, 0) < 1e-24:
            low, high, p_value = outcomes.sign_test(some[0][0], value)
            test = "sign test over units"
        results.append(Difference(value, low, high, p_value, test, *_counts(some, of_units)))
    return results


def _counts(
    pairs: Sequence[tuple[Outcomes, Outcomes]], of_units: FloatArray
) -> tuple[int | None, int | None, int, float | None]:
    """The ``wins``, ``losses``, ``units`` and ``items`` of a mean difference over seeds, from each
    unit's part of it [U, S]."""
    first, wins, losses, items = pairs[0][0], None, None, None
    if first.truth is None:
        means = outcomes.without_residue(of_units.mean(axis=1), np.abs(of_units).max(axis=1))
        better = first.rule.unit.sign * means
        wins, losses = int((better > 0).sum()), int((better < 0).sum())
    if first.rule.is_share:
        items = float(np.mean([np.sum(a.values) - np.sum(b.values) for a, b in pairs]))
    return wins, losses, int(first.resampling_group.max()) + 1, items


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


def _variances(
    parts: Parts, pairs: Sequence[tuple[Outcomes, Outcomes]]
) -> tuple[float, float, int]:
    """The variances ``Spread.units`` and ``Spread.seeds`` of the sum over units of the mean over
    seeds, and the degrees of freedom of the units. Units are drawn within strata. Where units have
    values of their own, strata get the invented units of ``outcomes.bootstrap_strata``."""
    values, _, stratum = parts
    num_seeds, strata = values.shape[1], np.unique(stratum)
    units = rest = 0.0
    if pairs[0][0].truth is not None:
        units = len(values) * float(values.mean(axis=1).var(ddof=min(1, len(values) - 1)))
    else:
        for count, rows, counts in outcomes.bootstrap_strata(*parts):
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
    return units, seeds - rest, max(len(values) - len(strata), 1)
