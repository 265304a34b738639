"""How every item of a benchmark came out, from which figures are computed and encoders compared,
and what figures are measured in: percent of right answers, or nats of a loss.

An Arrow file per encoder and benchmark holds the outcomes of all its metrics. It lies in
``outcomes/`` beside results.jsonl. Its name is the digest of its bytes, and the rows of
results.jsonl carry it, so that a file that does not belong to its rows is noticed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mclclip.eval.metrics import BoolArray, FloatArray, IntArray, Ranking

FOLDER = "outcomes"

# --- units -------------------------------------------------------------------------------------

_SIGNIFICANT, _MOST = 4, 8  # digits of the largest value; decimals at most


@dataclass(frozen=True)
class Unit:
    """The unit of a figure.

    name              stands behind a value
    difference        stands behind a difference of two
    scale             by which the mean of outcomes (see ``Outcomes``) is multiplied
    smaller_is_better whether it is a loss
    """

    name: str
    difference: str
    scale: float = 1.0
    smaller_is_better: bool = False

    def decimals(self, values: Iterable[float]) -> int:
        """Digits behind the point of all ``values`` of a column: 1 of percent; else 4 significant
        ones of the largest, and as many more as it takes for different values to look different."""
        if self == PERCENT:
            return 1
        known = set(values)
        largest = max(map(abs, known), default=0.0)
        whole = len(f"{largest:.0f}") if largest >= 1 else 0
        least = max(1, _SIGNIFICANT - whole)
        told_apart = (
            d for d in range(least, _MOST) if len({f"{v:.{d}f}" for v in known}) == len(known)
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


PERCENT = Unit("%", "points", 100.0)
NATS = Unit("nats", "nats", smaller_is_better=True)


def unit_of(protocol: Mapping[str, Any]) -> Unit:
    """The unit of a row with this protocol; of one that is not known the larger value is better."""
    name = str(protocol.get("unit", PERCENT.name))
    return {"%": PERCENT, "percent": PERCENT, "nats": NATS}.get(name) or Unit(name, name)


# --- outcomes ----------------------------------------------------------------------------------

Statistic = Literal["mean", "mean_loss", "roc_auc", "roc_auc_half_ties", "precision_11_point"]
"""What is computed of the items of a stratum; all but the means rank values by ``truth``. Of a mean
of losses the smaller one is better. A tied pair is wrong for ``roc_auc``, and half right for
``roc_auc_half_ties``, as in scikit-learn."""
_MEANS = ("mean", "mean_loss")


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of all items of one metric. The metric is the statistic of the values of every
    stratum, and the unweighted mean over strata.

    items      [n] names of the items, the same for every encoder on the same data
    values     float32 [n] (others are converted): a share in [0, 1], such as 1 for a right answer;
               a loss in nats; or a score that ranks items
    strata     [n] names, such as classes; None: all items are one stratum
    units      [n] names of what was drawn independently, where several items are of one thing, such
               as the captions of an image; None: items are independent
    truth      [n] whether an item is a positive; None for means
    statistic  of the values of a stratum
    """

    items: Sequence[str]
    values: NDArray[Any]
    strata: Sequence[str] | None = None
    units: Sequence[str] | None = None
    truth: BoolArray | None = None
    statistic: Statistic = "mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", np.asarray(self.values, dtype=np.float32))
        columns = (self.items, self.values, self.strata, self.units, self.truth)
        assert len({len(column) for column in columns if column is not None}) == 1
        assert (self.truth is None) == (self.statistic in _MEANS)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def measured_in(self) -> Unit:
        """The unit of the metric."""
        return NATS if self.statistic == "mean_loss" else PERCENT

    @cached_property
    def stratum(self) -> IntArray:
        """[n] numbers of the strata, from 0 on."""
        return _numbers(self.strata, len(self), each=False)

    @cached_property
    def unit(self) -> IntArray:
        """[n] numbers of the units, from 0 on."""
        return _numbers(self.units, len(self), each=True)

    def value(self, weights: FloatArray | None = None) -> float:
        """The metric; of shares it is a fraction. ``weights`` [n]: how often each item counts
        (default: once).

        A stratum without weight is left out, and one of rankings without a positive or without a
        negative too: its statistic is not defined. NaN where no stratum is left.
        """
        weight = np.ones(len(self)) if weights is None else np.asarray(weights, dtype=np.float64)
        if self.statistic in _MEANS:
            count = np.bincount(self.stratum, weight)
            total = np.bincount(self.stratum, weight * self.values)
            return float(np.mean(total[count > 0] / count[count > 0]))
        areas = {"roc_auc": 0.0, "roc_auc_half_ties": 0.5}
        values = [
            ranking.area(weight[rows], areas[self.statistic])
            if self.statistic in areas
            else ranking.precision(weight[rows])
            for rows, ranking in self._rankings
        ]
        known = [value for value in values if not math.isnan(value)]
        return float(np.mean(known)) if known else math.nan

    @property
    def rarer(self) -> int:
        """Units that have a positive item, or those that have a negative one if these are fewer."""
        assert self.truth is not None
        return min(len(np.unique(self.unit[kind])) for kind in (self.truth, ~self.truth))

    def of_each_stratum(self) -> dict[str, Outcomes]:
        """The outcomes of each stratum by its name, in order; none where there are no strata."""
        if self.strata is None:
            return {}
        names = list(dict.fromkeys(self.strata))
        return {
            name: self._of(rows) for name, rows in zip(names, self._rows_of_strata, strict=True)
        }

    def _of(self, rows: IntArray) -> Outcomes:
        units = None if self.units is None else [self.units[row] for row in rows]
        truth = None if self.truth is None else self.truth[rows]
        items = [self.items[row] for row in rows]
        return Outcomes(items, self.values[rows], None, units, truth, self.statistic)

    @cached_property
    def _rankings(self) -> list[tuple[IntArray, Ranking]]:
        """The rows of every stratum, and their ranking."""
        assert self.truth is not None
        parts = self._rows_of_strata
        return [(rows, Ranking.of(self.values[rows], self.truth[rows])) for rows in parts]

    @cached_property
    def _rows_of_strata(self) -> list[IntArray]:
        order = np.argsort(self.stratum, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.stratum[order])) + 1)


def joined(parts: Mapping[str, Outcomes]) -> Outcomes:
    """The outcomes whose metric is the mean of the means of ``parts``.

    An item or unit that occurs in several parts, such as an image of which several things are
    asked, is one unit.
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
    known = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.fromiter((known[name] for name in names), dtype=np.int64, count=count)


# --- on disk -----------------------------------------------------------------------------------

_COLUMNS = ("items", "strata", "units")


def encode(outcomes: Mapping[str, Outcomes]) -> tuple[str, bytes]:
    """The name and the bytes of the file that holds the outcomes of every metric."""
    tables = []
    for metric, own in outcomes.items():
        texts = {
            name: pa.array(getattr(own, name) or [None] * len(own), pa.string())
            for name in _COLUMNS
        }
        columns = {"metric": pa.array([metric] * len(own), pa.string()), **texts}
        encoded = {name: column.dictionary_encode() for name, column in columns.items()}
        encoded["value"] = pa.array(own.values, pa.float32())
        truth = [None] * len(own) if own.truth is None else own.truth
        encoded["truth"] = pa.array(truth, pa.bool_())
        encoded["statistic"] = pa.array([own.statistic] * len(own)).dictionary_encode()
        tables.append(pa.table(encoded))
    sink = io.BytesIO()
    table = pa.concat_tables(tables).unify_dictionaries()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    data = sink.getvalue()
    return f"{blake2b(data, digest_size=8).hexdigest()}.arrow", data


def remove_others(directory: Path, kept: Iterable[str]) -> None:
    """Removes the files of ``encode`` that no row of results.jsonl names any more."""
    names = set(kept)
    for path in directory.glob("*.arrow"):
        if path.name not in names:
            path.unlink()


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
    return {metrics[start]: _decoded(table.slice(start, stop - start)) for start, stop in parts}


def _decoded(table: Any) -> Outcomes:
    texts: dict[str, Any] = {name: table[name].to_pylist() for name in _COLUMNS}
    texts = {name: own if own[0] is not None else None for name, own in texts.items()}
    statistic = table["statistic"][0].as_py()
    truth = None if statistic in _MEANS else table["truth"].to_numpy()
    return Outcomes(values=table["value"].to_numpy(), truth=truth, statistic=statistic, **texts)
