"""Reads and writes results.jsonl (one row per figure, with count and interval); prints a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mclclip.eval.metrics import (
    BoolArray,
    IntArray,
    mean_per_class,
    stratified_interval,
    wilson_interval,
)
from mclclip.files import parse_json, shown, write_bytes


@dataclass(frozen=True)
class Figure:
    """One figure of one benchmark, without the model's name.

    value, ci_low, ci_high: percent; count: number of trials; protocol: how it was measured.
    """

    metric: str
    value: float
    count: int
    ci_low: float
    ci_high: float
    protocol: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """One row of results.jsonl; value, ci_low and ci_high in percent, 95 % interval."""

    model: str
    benchmark: str
    metric: str
    value: float
    count: int
    ci_low: float
    ci_high: float
    protocol: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """A published figure in percent, printed beside our own, and its source."""

    model: str
    benchmark: str
    metric: str
    value: float
    source: str


def proportion(metric: str, hits: int, count: int, protocol: Mapping[str, Any]) -> Figure:
    """The figure of ``hits`` right trials out of ``count``, with its Wilson interval."""
    low, high = wilson_interval(hits, count)
    return Figure(metric, 100.0 * hits / count, count, 100.0 * low, 100.0 * high, dict(protocol))


def class_mean(
    metric: str, correct: BoolArray, labels: IntArray, protocol: Mapping[str, Any]
) -> Figure:
    """The mean over the classes present of the share of right answers [N], with its interval."""
    mean, shares, counts = mean_per_class(correct, labels)
    low, high = stratified_interval(shares, counts)
    return Figure(metric, 100 * mean, len(labels), 100 * low, 100 * high, dict(protocol))


def of_model(figures: Iterable[Figure], model: str, benchmark: str) -> list[Result]:
    """The rows of one model on one benchmark."""
    return [Result(model=model, benchmark=benchmark, **asdict(figure)) for figure in figures]


def read(path: Path) -> list[Result]:
    """The rows of a results.jsonl in order; an absent file has none.

    Raises ValueError, naming the line, where a line is not a row.
    """
    if not Path(path).exists():
        return []
    names = {f.name for f in fields(Result)}
    rows = []
    # Not splitlines: a metric's name may hold other characters that end a line.
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{path} line {number}")
        if not isinstance(row, dict) or set(row) != names or not _is_row(row):
            raise ValueError(
                f"{path} line {number} is not a result row: its fields must be {names}, names "
                "texts, figures numbers and the protocol an object; take that line out, or the "
                "file away"
            )
        rows.append(Result(**row))
    return rows


def _is_row(row: Mapping[str, Any]) -> bool:
    """Whether the fields have the types of ``Result``."""
    return (
        all(isinstance(row[name], str) for name in ("model", "benchmark", "metric"))
        and all(type(row[name]) in (int, float) for name in ("value", "ci_low", "ci_high"))
        and type(row["count"]) is int
        and isinstance(row["protocol"], dict)
    )


def write(path: Path, rows: Sequence[Result]) -> None:
    """Adds rows to a results.jsonl, atomically.

    Earlier rows of the same (model, benchmark) are replaced, so a benchmark that runs again does
    not appear twice. Only one process may call it at a time, which the run directory's lock
    ensures. Raises ValueError where a value is not finite (JSON cannot hold it).
    """
    for row in rows:
        if not all(map(math.isfinite, (row.value, row.ci_low, row.ci_high))):
            raise ValueError(f"{row.model} {row.benchmark} {row.metric} is {row.value}: not finite")
    renewed = {(row.model, row.benchmark) for row in rows}
    kept = [row for row in read(path) if (row.model, row.benchmark) not in renewed]
    lines = [json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) for row in kept + [*rows]]
    write_bytes(Path(path), ("\n".join(lines) + "\n" if lines else "").encode())


def table(
    results: Sequence[Result],
    references: Sequence[Reference] = (),
    *,
    intervals: bool = True,
) -> str:
    """The results as text: a block per benchmark, rows are models, columns are metrics.

    Models and metrics stand in the order of their first appearance; published references come
    last, marked. Cells are percent, with the 95 % interval below them unless ``intervals`` is off.
    """
    blocks = []
    for benchmark in dict.fromkeys(row.benchmark for row in results):
        rows = [row for row in results if row.benchmark == benchmark]
        published = [row for row in references if row.benchmark == benchmark]
        blocks.append(_aligned([*_block(benchmark, rows, published, intervals)]))
    return "\n\n".join(blocks)


def _block(
    benchmark: str, rows: Sequence[Result], published: Sequence[Reference], intervals: bool
) -> Iterator[list[str]]:
    counts: dict[str, set[int]] = {}
    models: dict[str, dict[str, Result | Reference]] = {}
    for row in rows:
        counts.setdefault(row.metric, set()).add(row.count)
        models.setdefault(row.model, {})[row.metric] = row
    for reference in published:
        name = f"{reference.model} [{reference.source}]"
        models.setdefault(name, {})[reference.metric] = reference
    yield [benchmark, *counts]
    yield ["trials", *("/".join(map(str, sorted(trials))) for trials in counts.values())]
    for model, values in models.items():
        cells = [values.get(metric) for metric in counts]
        yield [model, *(f"{cell.value:.1f}" if cell else "-" for cell in cells)]
        own = [f"{c.ci_low:.1f}-{c.ci_high:.1f}" if isinstance(c, Result) else "" for c in cells]
        if intervals and any(own):
            yield ["", *own]


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    lines = [[*map(shown, line)] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for name, *cells in lines:
        rest = map(str.rjust, cells, widths[1:])
        text.append("  ".join([name.ljust(widths[0]), *rest]).rstrip())
    text.insert(1, "-" * max(map(len, text)))
    return "\n".join(text)
