"""The outcome of every item of a benchmark. Figures are computed and encoders are compared from
these. A figure's unit is percent of right answers, or nats of a loss.

An Arrow file per encoder and benchmark holds the outcomes of all its metrics. It lies in
``outcomes/`` beside results.jsonl. Its name is the digest of its bytes. The rows of results.jsonl
hold this name, so a file that does not belong to its rows is noticed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mclclip.eval.metrics import BoolArray, FloatArray, IntArray, Ranking, wilson_interval

FOLDER = "outcomes"

# --- units -------------------------------------------------------------------------------------

_SIGNIFICANT, _MOST = 3, 8  # digits of the largest value; decimals at most


@dataclass(frozen=True)
class Unit:
    """The unit of a figure.

    name              stands behind a value
    difference        stands behind a difference of two
    scale             by which the mean of outcomes (see ``Outcomes``) is multiplied
    best              the figure of an encoder without a fault, in this unit
    smaller_is_better whether it is a loss
    """

    name: str
    difference: str
    scale: float = 1.0
    best: float = math.inf
    smaller_is_better: bool = False

    def decimals(self, values: Iterable[float]) -> int:
        """The number of digits behind the point for all ``values`` of a column.

        Percent gets 1 or 2. Other units get 3 significant digits of the largest value, or more if
        different values would look equal.
        """
        distinct = set(values)
        largest = max(map(abs, distinct), default=0.0)
        if self == PERCENT:
            return 1 if largest >= 9.995 or not largest else 2
        before = math.floor(math.log10(largest)) + 1 if largest else 0  # digits before the point
        least = max(1, _SIGNIFICANT - before)
        told_apart = (
            d for d in range(least, _MOST) if len({f"{v:.{d}f}" for v in distinct}) == len(distinct)
        )
        return next(told_apart, least)

    @property
    def note(self) -> str:
        """The unit for the head of a column, on a line of its own; empty for percent."""
        return "" if self == PERCENT else f"\n({self.name})"

    @property
    def sign(self) -> int:
        """1 where a larger value is better, -1 where a smaller one is."""
        return -1 if self.smaller_is_better else 1


PERCENT = Unit("%", "points", 100.0, best=100.0)
NATS = Unit("nats", "nats", best=0.0, smaller_is_better=True)


@dataclass(frozen=True)
class Statistic:
    """How the values of items become a metric.

    unit         unit of the metric
    is_share     the metric is a mean of values in [0, 1]; its interval is Wilson's
    is_ranking   values rank the items by ``truth``; otherwise the metric is a mean of values
    tied_pair    of an area: how much of a tied pair is right; None where the metric is no area
    """

    unit: Unit
    is_share: bool = False
    is_ranking: bool = False
    tied_pair: float | None = None


STATISTICS = {
    "mean": Statistic(PERCENT, is_share=True),
    "mean_loss": Statistic(NATS),
    "roc_auc": Statistic(PERCENT, is_ranking=True, tied_pair=0.0),
    "roc_auc_half_ties": Statistic(PERCENT, is_ranking=True, tied_pair=0.5),  # scikit-learn's
    "precision_11_point": Statistic(PERCENT, is_ranking=True),
}
"""Every statistic by the name that ``Outcomes.statistic`` and files of outcomes have. A figure in a
new unit, such as a cosine, is a row."""
UNITS = {each.unit.name: each.unit for each in STATISTICS.values()}
"""Units by the names that rows of results.jsonl have."""


# --- outcomes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of all items of one metric. The metric is the unweighted mean over strata of the
    statistic of each stratum's values.

    items      [n] names of the items, the same for every encoder on the same data
    values     float32 [n] (others are converted): a share in [0, 1], such as 1 for a right answer;
               a loss in nats; or a score that ranks items
    strata     [n] names, such as classes; None: all items are one stratum
    units      [n] names of resampling groups: items of one group, such as the captions of an image,
               are drawn together; None: items are independent
    truth      [n] whether an item is a positive; None for means
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
        """[n] numbers of the strata, from 0 on."""
        return _numbers(self.strata, len(self), each=False)

    @cached_property
    def resampling_group(self) -> IntArray:
        """[n] numbers of the resampling groups, from 0 on."""
        return _numbers(self.units, len(self), each=True)

    def value(self, weights: FloatArray | None = None) -> float:
        """The metric; of shares it is a fraction. ``weights`` [n]: how often each item counts
        (default: once).

        A stratum whose statistic is not defined is left out: one without weight, or of rankings one
        without a positive or without a negative item. NaN if no stratum is left.
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
        """The outcomes of each stratum by its name, in order; none where there are no strata."""
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
        """The rows of every stratum, and their ranking."""
        assert self.truth is not None
        parts = self._rows_of_strata
        return [(rows, Ranking(self.values[rows], self.truth[rows])) for rows in parts]

    @cached_property
    def _rows_of_strata(self) -> list[IntArray]:
        order = np.argsort(self.stratum, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.stratum[order])) + 1)


def join_outcomes(parts: Mapping[str, Outcomes]) -> Outcomes:
    """The outcomes whose metric is the mean of the metrics of ``parts``.

    An item or unit in several parts, such as an image with several questions, is one unit.
    """
    return Outcomes(
        items=[f"{name}:{item}" for name, part in parts.items() for item in part.items],
        values=np.concatenate([part.values for part in parts.values()]),
        strata=[name for name, part in parts.items() for _ in part.items],
        units=[unit for part in parts.values() for unit in part.units or part.items],
    )


def _numbers(names: Sequence[str] | None, count: int, *, each: bool) -> IntArray:
    if names is None:
        return np.arange(count) if each else np.zeros(count, dtype=np.int64)
    number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.fromiter((number_of[name] for name in names), dtype=np.int64, count=count)


# --- on disk -----------------------------------------------------------------------------------

_COLUMNS = ("items", "strata", "units")


def encode(outcomes: Mapping[str, Outcomes]) -> tuple[str, bytes]:
    """The name and the bytes of the file that holds the outcomes of every metric."""
    tables = []
    for metric, of_metric in outcomes.items():
        texts = {
            name: pa.array(getattr(of_metric, name) or [None] * len(of_metric), pa.string())
            for name in _COLUMNS
        }
        columns = {"metric": pa.array([metric] * len(of_metric), pa.string()), **texts}
        encoded = {name: column.dictionary_encode() for name, column in columns.items()}
        encoded["value"] = pa.array(of_metric.values, pa.float32())
        truth = [None] * len(of_metric) if of_metric.truth is None else of_metric.truth
        encoded["truth"] = pa.array(truth, pa.bool_())
        encoded["statistic"] = pa.array([of_metric.statistic] * len(of_metric)).dictionary_encode()
        tables.append(pa.table(encoded))
    sink = io.BytesIO()
    table = pa.concat_tables(tables).unify_dictionaries()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    data = sink.getvalue()
    return f"{blake2b(data, digest_size=8).hexdigest()}.arrow", data


def read(path: Path) -> dict[str, Outcomes]:
    """The outcomes of every metric in a file.

    Raises FileNotFoundError where it is missing and ValueError where its bytes are not those that
    its name stands for.
    """
    advice = "evaluate again with 'mclclip eval --force'"
    if not path.is_file():
        raise FileNotFoundError(f"no outcomes of items at {path}: {advice}")
    data = path.read_bytes()
    if f"{blake2b(data, digest_size=8).hexdigest()}.arrow" != path.name:
        raise ValueError(f"{path} is damaged, its bytes have changed: {advice}")
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    metrics = table["metric"].to_pylist()
    starts = [row for row in range(len(metrics)) if not row or metrics[row] != metrics[row - 1]]
    parts = zip(starts, [*starts[1:], len(metrics)], strict=True)
    decoded = {}
    for start, stop in parts:
        rows = table.slice(start, stop - start)
        texts: dict[str, Any] = {name: rows[name].to_pylist() for name in _COLUMNS}
        texts = {name: None if column[0] is None else column for name, column in texts.items()}
        statistic = rows["statistic"][0].as_py()
        truth = rows["truth"].to_numpy() if STATISTICS[statistic].is_ranking else None
        values = rows["value"].to_numpy()
        decoded[metrics[start]] = Outcomes(values=values, truth=truth, statistic=statistic, **texts)
    return decoded


# --- two encoders on the same items -----------------------------------------------------------

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
    value, num_units = a.value() - b.value(), int(a.resampling_group.max()) + 1
    if not a.rule.is_share:
        drawn = _draw_statistics(
            a.resampling_group, lambda weights: a.value(weights) - b.value(weights)
        )
        low, high = map(float, np.quantile(drawn, [0.025, 0.975]))
    if a.truth is not None:
        tail = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
        p_value, test = min(1.0, 2.0 * (1 + tail) / (1 + len(drawn))), "bootstrap"
        if value and high - low < 1e-12:
            (low, high, p_value), test = sign_test(a, value), "sign test over units"
        return Difference(value, low, high, p_value, test, None, None, num_units, None)
    values, largest, stratum = by_unit(a, b)
    better, items = a.rule.unit.sign * values, None
    wins, losses = int(np.count_nonzero(better > 0)), int(np.count_nonzero(better < 0))
    if a.rule.is_share:
        low, high = _interval(values, largest, stratum)
        items = float(np.sum(a.values) - np.sum(b.values))
    if len(np.unique(np.abs(values[values != 0]).round(12))) <= 1:
        p_value, test = mcnemar(wins, losses), "McNemar, exact"
    else:
        p_value, test = permutation(values), "permutation"
    return Difference(value, low, high, p_value, test, wins, losses, num_units, items)


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


def sign_test(ranking: Outcomes, value: float) -> tuple[float, float, float]:
    """The bounds of a 95 % interval and the p-value of a difference of rankings that is equal for
    every draw of units, such as that of a perfect and a collapsed ranking. Every unit of the rarer
    kind of item counts as a win."""
    count = _rarer_units(ranking)
    least = value * (2 * wilson_interval(count, count)[0] - 1)
    return min(least, value), max(least, value), mcnemar(count, 0)


def _rarer_units(ranking: Outcomes) -> int:
    """The number of units with positives or that with negatives, whichever is smaller."""
    assert ranking.truth is not None
    kinds = (ranking.truth, ~ranking.truth)
    return min(len(np.unique(ranking.resampling_group[kind])) for kind in kinds)


def permutation(values: FloatArray) -> float:
    """Two-sided p-value of a sum of differences [U] whose signs are equally likely to be turned."""
    rng, draws = np.random.default_rng(SEED), NUM_DRAWS
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


def by_unit(a: Outcomes, b: Outcomes) -> tuple[FloatArray, FloatArray, IntArray]:
    """Each unit's part of the difference [U], the largest possible part [U], its stratum [U].

    All strata become one if a unit has items in two of them, or a stratum has one unit.
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
    return added, largest, stratum


def bootstrap_strata(
    values: FloatArray, largest: FloatArray, stratum: IntArray
) -> Iterator[tuple[int, FloatArray, FloatArray]]:
    """Yields for each stratum the number of its units, the distinct rows of their ``values``
    [U, S], and how many units have each row.

    A few invented units (``_PSEUDO_UNITS``) with the mean ``largest`` value [U], 0 and its negative
    are added, so that no interval is empty; each stratum gets its share of them.
    """
    for number in range(int(stratum.max()) + 1):
        in_stratum = stratum == number
        rows, counts = np.unique(values[in_stratum].round(12), axis=0, return_counts=True)
        most = np.full((1, values.shape[1]), largest[in_stratum].mean())
        pseudo = float(in_stratum.mean()) * _PSEUDO_UNITS * np.array([1.0, 2.0, 1.0])
        rows = np.concatenate([rows, most, 0 * most, -most])
        yield int(in_stratum.sum()), rows, np.concatenate([counts, pseudo])


def widened(count: int) -> float:
    """U / (U - 1), the factor from the variance of U drawn units to that of their population."""
    return count / max(count - 1, 1)


def _interval(values: FloatArray, largest: FloatArray, stratum: IntArray) -> tuple[float, float]:
    """95 % bootstrap interval of the sum of ``values`` [U], drawn with replacement within strata.

    Equal values are drawn together, and deviations from the mean are widened.
    """
    rng, total = np.random.default_rng(SEED), np.zeros(NUM_DRAWS)
    for count, rows, counts in bootstrap_strata(values[:, None], largest, stratum):
        sizes = rows[:, 0]
        drawn = rng.multinomial(count, counts / counts.sum(), size=NUM_DRAWS) @ sizes
        middle = count * float(counts @ sizes) / float(counts.sum())
        total += middle + (drawn - middle) * np.sqrt(widened(count))
    low, high = np.quantile(total, [0.025, 0.975])
    return float(low), float(high)


def ranking_interval(outcomes: Outcomes) -> tuple[float, float]:
    """95 % interval of a statistic of rankings of one encoder: a seeded bootstrap over units.

    It is moved so that the middle of the draws is the statistic itself, because repeated items
    raise a precision. If no ranking could be better or worse, all draws are equal; the interval is
    then that of a share with as many trials as the rarer kind of item has units.
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
    """The statistic of every draw of units, with items weighted by how often their unit was drawn.
    Draws in which it is not defined are left out."""
    rng = np.random.default_rng(SEED)
    weights = draws(rng, unit, NUM_RANKING_DRAWS)
    drawn: NDArray[np.float64] = np.array([statistic(of_items) for of_items in weights])
    return drawn[~np.isnan(drawn)]


def draws(rng: np.random.Generator, unit: IntArray, number: int) -> Iterator[FloatArray]:
    """How often each item [n] is drawn when its units are drawn with replacement, so many times."""
    units = int(unit.max()) + 1
    for _ in range(number):
        times = np.bincount(rng.integers(units, size=units), minlength=units)
        yield times[unit].astype(np.float64)
