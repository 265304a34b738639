"""Stores the outcome of every item of a benchmark, such as 1 for a right answer, and compares two
encoders by them.

An Arrow file per encoder and benchmark holds the outcomes of all metrics. It lies in ``outcomes/``
beside results.jsonl and is named by the digest of its bytes. Rows of results.jsonl hold this name,
so a file that does not belong to its rows is noticed.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mclclip.eval.metrics import BoolArray, FloatArray, IntArray, Ranking, wilson_interval
from mclclip.eval.units import STATISTICS, Statistic

FOLDER = "outcomes"

# --- outcomes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of all items of one metric.

    Items form strata, such as classes. The metric is the unweighted mean over strata of the
    ``statistic`` of each stratum's values.

    items      [n] names of the items, the same for every encoder on the same data
    values     float32 [n] (other types are converted): a share in [0, 1], such as 1 for a right
               answer; a loss in nats; or a score that ranks items
    strata     [n] the name of each item's stratum; None: all items are one stratum
    units      [n] the name of each item's unit. Items of a unit belong together, such as the
               captions of an image, and are resampled together; None: each item is a unit
    truth      bool [n] True for positive items, only for statistics of rankings
    statistic  of the values of a stratum, one of `STATISTICS`
    """

    items: Sequence[str]
    values: NDArray[Any]
    strata: Sequence[str] | None = None
    units: Sequence[str] | None = None
    truth: BoolArray | None = None
    statistic: str = "mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", np.asarray(self.values, dtype=np.float32))
        columns = (self.items, self.values, self.strata, self.units, self.truth)
        assert len({len(column) for column in columns if column is not None}) == 1
        assert (self.truth is not None) == self.rule.is_ranking
        assert not self.rule.is_share or not ((self.values < 0) | (self.values > 1)).any(), (
            f"values of the statistic {self.statistic} are shares in [0, 1]: name another statistic"
        )

    def __len__(self) -> int:
        return len(self.items)

    @property
    def rule(self) -> Statistic:
        """How the values become the metric."""
        return STATISTICS[self.statistic]

    @cached_property
    def stratum(self) -> IntArray:
        """[n] the number, from 0 on, of each item's stratum."""
        return _numbers(self.strata, len(self), each=False)

    @cached_property
    def resampling_group(self) -> IntArray:
        """[n] the number, from 0 on, of each item's unit."""
        return _numbers(self.units, len(self), each=True)

    def value(self, weights: FloatArray | None = None) -> float:
        """The metric, a fraction if values are shares; an item counts ``weights`` [n] times (None:
        once).

        A stratum without weight is left out. So is, for rankings, one without a positive or without
        a negative item. NaN if no stratum is left.
        """
        weight = np.ones(len(self)) if weights is None else np.asarray(weights, dtype=np.float64)
        if not self.rule.is_ranking:
            count = np.bincount(self.stratum, weight)
            total = np.bincount(self.stratum, weight * self.values)
            return float(np.mean(total[count > 0] / count[count > 0]))
        tied_pair = self.rule.tied_pair
        values = [
            ranking.precision(weight[rows])
            if tied_pair is None
            else ranking.area(weight[rows], tied_pair)
            for rows, ranking in self._rankings
        ]
        defined = [value for value in values if not math.isnan(value)]
        return float(np.mean(defined)) if defined else math.nan

    def of_each_stratum(self) -> dict[str, Outcomes]:
        """The outcomes of each stratum by its name, in order; empty if ``strata`` is None."""
        if self.strata is None:
            return {}
        parts = {}
        for name, rows in zip(dict.fromkeys(self.strata), self._rows_of_strata, strict=True):
            units = None if self.units is None else [self.units[row] for row in rows]
            truth = None if self.truth is None else self.truth[rows]
            items = [self.items[row] for row in rows]
            parts[name] = Outcomes(items, self.values[rows], None, units, truth, self.statistic)
        return parts

    @cached_property
    def _rankings(self) -> list[tuple[IntArray, Ranking]]:
        """For each stratum the numbers of its items, and their ranking."""
        assert self.truth is not None
        parts = self._rows_of_strata
        return [(rows, Ranking(self.values[rows], self.truth[rows])) for rows in parts]

    @cached_property
    def _rows_of_strata(self) -> list[IntArray]:
        order = np.argsort(self.stratum, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.stratum[order])) + 1)


def join_outcomes(parts: Mapping[str, Outcomes]) -> Outcomes:
    """Joins the outcomes of several metrics to those of their mean; each part becomes a stratum.

    Items or units of the same name in several parts, such as an image with several questions,
    become one unit.
    """
    return Outcomes(
        items=[f"{name}:{item}" for name, part in parts.items() for item in part.items],
        values=np.concatenate([part.values for part in parts.values()]),
        strata=[name for name, part in parts.items() for _ in part.items],
        units=[unit for part in parts.values() for unit in part.units or part.items],
    )


def _numbers(names: Sequence[str] | None, count: int, *, each: bool) -> IntArray:
    """Gives equal names equal numbers, from 0 on. None: all are equal, or with ``each`` none."""
    if names is None:
        return np.arange(count) if each else np.zeros(count, dtype=np.int64)
    number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.fromiter((number_of[name] for name in names), dtype=np.int64, count=count)


# --- on disk -----------------------------------------------------------------------------------

_COLUMNS = ("items", "strata", "units")


def encode(outcomes: Mapping[str, Outcomes]) -> tuple[str, bytes]:
    """Returns the name and the bytes of the file that holds the outcomes of all metrics, which are
    given by name."""
    tables = []
    for metric, of_metric in outcomes.items():
        nothing, truth = [None] * len(of_metric), of_metric.truth
        texts: dict[str, Any] = {"metric": [metric] * len(of_metric)}
        texts |= {name: getattr(of_metric, name) or nothing for name in _COLUMNS}
        columns = {n: pa.array(text, pa.string()).dictionary_encode() for n, text in texts.items()}
        columns["value"] = pa.array(of_metric.values, pa.float32())
        columns["truth"] = pa.array(nothing if truth is None else truth, pa.bool_())
        columns["statistic"] = pa.array([of_metric.statistic] * len(of_metric)).dictionary_encode()
        tables.append(pa.table(columns))
    sink = io.BytesIO()
    table = pa.concat_tables(tables).unify_dictionaries()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    data = sink.getvalue()
    return f"{blake2b(data, digest_size=8).hexdigest()}.arrow", data


def read(path: Path) -> dict[str, Outcomes]:
    """Reads the outcomes of all metrics, by name, from a file.

    Raises FileNotFoundError if it is missing, and ValueError if its bytes do not have the digest
    that is its name.
    """
    advice = "evaluate again with 'mclclip eval --force'"
    if not path.is_file():
        raise FileNotFoundError(f"no outcomes of items at {path}: {advice}")
    data = path.read_bytes()
    if f"{blake2b(data, digest_size=8).hexdigest()}.arrow" != path.name:
        raise ValueError(f"{path} is damaged, its bytes have changed: {advice}")
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all().combine_chunks()
    decoded: dict[str, Outcomes] = {}
    start = 0
    columns = {name: table[name].combine_chunks() for name in ("metric", *_COLUMNS)}
    words = {name: column.dictionary.to_pylist() for name, column in columns.items()}

    def texts_of(name: str, begin: int, count: int) -> list[str]:
        numbers = columns[name].indices.slice(begin, count).to_pylist()
        return [words[name][number] for number in numbers]

    for metric, group in groupby(texts_of("metric", 0, len(table))):
        rows = table.slice(start, sum(1 for _ in group))
        texts: dict[str, Any] = {
            name: None if rows[name].null_count else texts_of(name, start, len(rows))
            for name in _COLUMNS
        }
        start += len(rows)
        statistic = rows["statistic"][0].as_py()
        is_ranking = STATISTICS[statistic].is_ranking
        truth = np.array(rows["truth"].to_pylist()) if is_ranking else None
        values = np.from_dlpack(rows["value"].chunk(0))  # to_numpy would import pandas
        decoded[metric] = Outcomes(values=values, truth=truth, statistic=statistic, **texts)
    return decoded


# --- two encoders on the same items -----------------------------------------------------------

SEED = 20231017
NUM_DRAWS = 10_000
NUM_RANKING_DRAWS = 2_000
"""Number of draws for losses and for rankings, which take longer to compute than shares."""

_PSEUDO_UNITS = 0.5
"""So many invented units are added to wins and to losses before a bootstrap, and twice as many to
ties. Otherwise encoders that differ on no unit would get an interval without width."""


@dataclass(frozen=True)
class Difference:
    """The difference of two encoders, a minus b, in fractions, or in nats for losses.

    value      the difference of the metrics
    low, high  its 95 % interval
    p_value    two-sided, of the hypothesis that there is no difference
    test       how the p-value was computed, for example 'permutation'
    wins       the number of units on which a is better; None for rankings
    losses     the number of units on which b is better; None for rankings
    units      the number of units
    items      how many more items a has right (a sum of shares); None for rankings and losses
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
    """The difference of two encoders on the same items; raises NotTheSame if items differ.

    For shares, the interval is a bootstrap over units, within strata if no unit is in two of them.
    The test is McNemar's if all wins and losses are of one size, otherwise a permutation test that
    exchanges the encoders unit by unit. For losses the test is the same, and the interval is a
    bootstrap over all units. For rankings, interval and test are a bootstrap over units.
    """
    check_same_items(a, b)
    value, num_units = subtract(a, b), int(a.resampling_group.max()) + 1
    if not a.rule.is_share:
        drawn = _draw_statistics(a.resampling_group, partial(subtract, a, b))
        low, high = map(float, np.quantile(drawn, [0.025, 0.975]))
    if a.truth is not None:
        tail = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
        p_value, test = min(1.0, 2.0 * (1 + tail) / (1 + len(drawn))), "bootstrap"
        if not tail:
            least = mcnemar(_rarer_units(a), 0)  # as if each of these units were a win
            p_value = min(p_value, max(_normal_p(value, float(drawn.std())), least))
        if value and high - low < 1e-12:
            (low, high, p_value), test = sign_test(a, value), "sign test over units"
        return Difference(value, low, high, p_value, test, None, None, num_units, None)
    values, largest, stratum = by_unit(a, b)
    better, items = a.rule.unit.sign * values, None
    wins, losses = int(np.count_nonzero(better > 0)), int(np.count_nonzero(better < 0))
    if a.rule.is_share:
        low, high = _interval(values, largest, stratum)
        items = float(np.sum(a.values) - np.sum(b.values))
    if len(np.unique(np.abs(_rounded(values[values != 0])))) <= 1:
        p_value, test = mcnemar(wins, losses), "McNemar, exact"
    else:
        p_value, test = permutation(values), "permutation"
    return Difference(value, low, high, p_value, test, wins, losses, num_units, items)


def check_same_items(a: Outcomes, b: Outcomes) -> None:
    """Raises NotTheSame if two encoders were not measured on the same items."""
    for name in ("statistic", "items", "strata", "units"):
        if getattr(a, name) != getattr(b, name):
            raise NotTheSame(f"they differ in their {name} ({len(a):,} and {len(b):,} items)")
    if a.truth is not None and b.truth is not None and (a.truth != b.truth).any():
        raise NotTheSame("they disagree about which items are positive")


def mcnemar(wins: int, losses: int) -> float:
    """The two-sided exact p-value of the hypothesis that wins and losses are equally likely."""
    from scipy.special import bdtr  # scipy.stats takes three times as long to import

    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


def sign_test(ranking: Outcomes, value: float) -> tuple[float, float, float]:
    """Returns low and high of a 95 % interval, and the p-value, for a difference of rankings that
    is the same in every draw of units, such as that of a perfect and a collapsed ranking. Each unit
    of the kind, positive or negative, that has fewer units counts as a win."""
    count = _rarer_units(ranking)
    least = value * (2 * wilson_interval(count, count)[0] - 1)
    return min(least, value), max(least, value), mcnemar(count, 0)


def _rarer_units(ranking: Outcomes) -> int:
    """The number of units with positives or that with negatives, whichever is smaller."""
    assert ranking.truth is not None
    kinds = (ranking.truth, ~ranking.truth)
    return min(len(np.unique(ranking.resampling_group[kind])) for kind in kinds)


def permutation(values: FloatArray) -> float:
    """The two-sided p-value of a sum of differences [U] if each sign could as well be the other."""
    rng, draws = np.random.default_rng(SEED), NUM_DRAWS
    rounded = _rounded(values)
    sizes, counts = np.unique(np.abs(rounded[rounded != 0]), return_counts=True)
    sums = np.zeros(draws)
    for size, count in zip(sizes, counts, strict=True):
        sums += size * (2.0 * rng.binomial(count, 0.5, draws) - count)
    # Sums in another order round differently: 1e-9 lets those that are equal count as reached.
    total = abs(float(rounded.sum()))
    reached = int(np.count_nonzero(np.abs(sums) >= total - 1e-9 * sizes.sum()))
    if not reached:
        normal = _normal_p(total, math.sqrt(float(counts @ sizes**2)))
        return min(1 / (1 + draws), max(normal, 2.0 ** (1 - int(counts.sum()))))
    return (1 + reached) / (1 + draws)


def _normal_p(value: float, deviation: float) -> float:
    """The two-sided p-value of a normal variable around 0. It stands for that of draws where none
    of them is as far from 0: the least p-value of draws, 1 / (1 + their number), would be above any
    level once it is corrected over many comparisons."""
    if not deviation:
        return 1.0
    return max(math.erfc(abs(value) / (deviation * math.sqrt(2))), sys.float_info.min)


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrects p-values for their number by Holm's method; returns them in the same order.

    If corrected p-values are compared with a level, the probability of any false alarm among all of
    them is at most this level.
    """
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(raised), 1.0)
    return [float(value) for value in corrected]


def subtract(a: Outcomes, b: Outcomes, weights: FloatArray | None = None) -> float:
    """Returns the value of a minus that of b, ``without_residue``; both with ``weights`` [n]."""
    first, second = a.value(weights), b.value(weights)
    return float(without_residue(first - second, max(abs(first), abs(second))))


def without_residue(numbers: FloatArray | float, size: FloatArray | float) -> FloatArray:
    """Returns ``numbers``, and 0 in place of those that are nothing but what rounding leaves of
    sums of ``size``."""
    return np.where(np.abs(numbers) <= 1e-12 * np.asarray(size), 0.0, numbers)


def _rounded(values: FloatArray) -> FloatArray:
    """Rounds ``values`` to 9 digits of the largest, so that those which differ by the rounding of
    their sums alone become equal."""
    largest = float(np.abs(values).max(initial=0.0))
    return (values / largest).round(9) * largest if largest else values


def by_unit(a: Outcomes, b: Outcomes) -> tuple[FloatArray, FloatArray, IntArray]:
    """Returns each unit's part of the difference [U] a - b (0 if the encoders are equal on it), the
    largest part that it could have [U], and the number of its stratum [U].

    All units are in one stratum if a unit has items in two strata, or a stratum has a single unit.
    """
    counts = np.bincount(a.stratum)
    weight = 1.0 / (len(counts) * counts[a.stratum])
    gained = weight * (a.values.astype(np.float64) - b.values)
    added, largest = (
        np.bincount(a.resampling_group, of).astype(np.float64) for of in (gained, weight)
    )
    first = np.full(len(added), -1)
    first[a.resampling_group[::-1]] = a.stratum[::-1]
    nested = (
        bool((first[a.resampling_group] == a.stratum).all()) and int(np.bincount(first).min()) > 1
    )
    stratum = first if nested else np.zeros(len(added), dtype=np.int64)
    return without_residue(added, largest), largest, stratum


def bootstrap_strata(
    values: FloatArray, largest: FloatArray, stratum: IntArray
) -> Iterator[tuple[int, FloatArray, FloatArray]]:
    """Yields for each stratum the number of its units, the distinct rows among their ``values``
    [U, S], and how many units have each row.

    The rows include invented units (``_PSEUDO_UNITS``) with the mean of ``largest`` [U], 0, and the
    negative of this mean; each stratum gets its share of them.
    """
    for number in range(int(stratum.max()) + 1):
        in_stratum = stratum == number
        rows, counts = np.unique(_rounded(values[in_stratum]), axis=0, return_counts=True)
        most = np.full((1, values.shape[1]), largest[in_stratum].mean())
        pseudo = float(in_stratum.mean()) * _PSEUDO_UNITS * np.array([1.0, 2.0, 1.0])
        rows = np.concatenate([rows, most, 0 * most, -most])
        yield int(in_stratum.sum()), rows, np.concatenate([counts, pseudo])


def variance_factor(count: int) -> float:
    """U / (U - 1) for U = ``count`` units: the factor from the variance of the units that were
    measured to an estimate of that of all units there could be."""
    return count / max(count - 1, 1)


def _interval(values: FloatArray, largest: FloatArray, stratum: IntArray) -> tuple[float, float]:
    """The 95 % bootstrap interval of the sum of ``values`` [U], drawn with replacement in strata.

    Equal values are drawn together, which is faster. Deviations from the mean are multiplied by the
    square root of ``variance_factor``.
    """
    rng, total = np.random.default_rng(SEED), np.zeros(NUM_DRAWS)
    for count, rows, counts in bootstrap_strata(values[:, None], largest, stratum):
        sizes = rows[:, 0]
        drawn = rng.multinomial(count, counts / counts.sum(), size=NUM_DRAWS) @ sizes
        middle = count * float(counts @ sizes) / float(counts.sum())
        total += middle + (drawn - middle) * np.sqrt(variance_factor(count))
    low, high = np.quantile(total, [0.025, 0.975])
    return float(low), float(high)


def ranking_interval(outcomes: Outcomes) -> tuple[float, float]:
    """The 95 % interval of one encoder's statistic of rankings: a seeded bootstrap over units.

    Repeated items raise a precision, so the draws are moved to have the statistic as their mean. If
    all draws are equal, as for a perfect ranking, it is Wilson's interval of a share; the trials
    are then the units of positive or of negative items, whichever are fewer.
    """
    value = outcomes.value()
    drawn = _draw_statistics(outcomes.resampling_group, outcomes.value)
    low, high = np.quantile(drawn + (value - float(drawn.mean())), [0.025, 0.975])
    if high - low < 1e-9:
        rarer = _rarer_units(outcomes)
        return wilson_interval(value * rarer, rarer)
    return max(0.0, float(low)), min(1.0, float(high))


def _draw_statistics(
    unit: IntArray, statistic: Callable[[FloatArray], float]
) -> NDArray[np.float64]:
    """Computes a statistic for each draw of units; it gets the weights [n] of the items, how often
    their unit was drawn. Draws for which it is NaN are left out."""
    rng, units = np.random.default_rng(SEED), int(unit.max()) + 1
    drawn = np.empty(NUM_RANKING_DRAWS)
    for number in range(NUM_RANKING_DRAWS):
        times = np.bincount(rng.integers(units, size=units), minlength=units)
        drawn[number] = statistic(times[unit].astype(np.float64))
    return drawn[~np.isnan(drawn)]
