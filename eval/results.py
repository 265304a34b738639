"""Reads and writes results.jsonl, with a row per figure, and formats it as a table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from tabulate import tabulate

from mclclip.eval import outcomes
from mclclip.eval.metrics import Z_95, design_effect, stratified_interval
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.units import PERCENT, UNITS, Unit
from mclclip.util.files import printable, remove_leftovers, write_bytes
from mclclip.util.options import first_problem

WIDTH = 80
"""A table is at most so many characters wide."""

KEY = """(below each figure: its 95 % interval; trials: the number of items judged;
 chance: the figure of features that know nothing)"""
"""The last lines of `table`."""

CHOOSE, REPORT = "choose", "report"
"""The two benchmarks of a fine-tuning: the best encoder is chosen by the first, and the second says
how good it is."""

Column = tuple[str, Unit]
"""A column of a table: a metric and its unit."""

Level = Literal["headline", "table", "detail"]
"""How important a metric is. Encoders are compared by headlines; tables show details on request."""


@dataclass(frozen=True)
class Measurement:
    """One figure of one benchmark, without the model's name.

    value, ci_low, ci_high  the value and its 95 % interval, in the unit of the outcomes
    count                   the number of trials
    protocol                how it was measured, and its ``level``
    outcomes                the outcome of every item
    """

    metric: str
    value: float
    count: int
    ci_low: float
    ci_high: float
    protocol: dict[str, Any] = field(default_factory=dict)
    outcomes: Outcomes | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Result:
    """One row of results.jsonl: a ``Measurement`` of a model on a benchmark."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    model: str
    benchmark: str
    metric: str
    value: float
    count: int
    ci_low: float
    ci_high: float
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> Unit:
        """The unit of the value and its interval. Of an unknown unit, larger values are better."""
        name = printable(str(self.protocol.get("unit", PERCENT.name)))
        return PERCENT if name == "percent" else UNITS.get(name) or Unit(name, name)


@dataclass(frozen=True)
class Reference:
    """A published figure in percent, which tables show beside measured ones."""

    model: str
    benchmark: str
    metric: str
    value: float
    source: str


def published(suite: Mapping[str, Any]) -> list[Reference]:
    """Reads the published figures under ``references`` of a suite's file."""
    return [
        Reference(item["model"], item["benchmark"], metric, float(value), item["source"])
        for item in suite.get("references", [])
        for metric, value in item["values"].items()
    ]


def figure(
    metric: str,
    measured: Outcomes,
    protocol: Mapping[str, Any],
    *,
    level: Level = "table",
) -> Measurement:
    """Computes the figure of a metric, in the unit of its outcomes.

    The interval of shares is Wilson's for the mean over strata, corrected for items of the same
    unit (``design_effect``). That of rankings is a bootstrap, and that of other means is of a mean.
    """
    settings = dict(protocol) | ({} if level == "table" else {"level": level})
    unit, values = measured.rule.unit, measured.values.astype(np.float64)
    if measured.rule.is_ranking:
        low, high = outcomes.ranking_interval(measured)
    elif measured.rule.is_share:
        counts = np.bincount(measured.stratum)
        shares = np.bincount(measured.stratum, values) / counts
        residuals = (values - shares[measured.stratum]) / counts[measured.stratum]
        effect = (
            1.0 if measured.units is None else design_effect(residuals, measured.resampling_group)
        )
        low, high = stratified_interval(shares, counts, effect)
    else:
        half = Z_95 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        low, high = measured.value() - half, measured.value() + half
    if unit != PERCENT:
        settings["unit"] = unit.name
    value, low, high = (unit.scale * number for number in (measured.value(), low, high))
    return Measurement(metric, value, len(measured), low, high, settings, measured)


def record(path: Path, figures: Sequence[Measurement], model: str, benchmark: str) -> list[Result]:
    """Writes the figures of one model on one benchmark into the results.jsonl at ``path``, and the
    outcomes of their items beside it; returns the rows.

    Files of outcomes that no row names any more, and what a killed process left, are removed.
    """
    of_items = {f.metric: f.outcomes for f in figures if f.outcomes is not None}
    names = [field.name for field in fields(Measurement) if field.name != "outcomes"]
    rows = [Result(model, benchmark, **{n: getattr(f, n) for n in names}) for f in figures]
    if of_items:
        name, data = outcomes.encode(of_items)
        write_bytes(path.parent / outcomes.FOLDER / name, data)
        rows = [replace(row, protocol=row.protocol | {"outcomes": name}) for row in rows]
    write(path, rows)
    referenced = {row.protocol.get("outcomes") for row in read(path)}
    for file in (path.parent / outcomes.FOLDER).glob("*.arrow"):
        if file.name not in referenced:
            file.unlink()
    remove_leftovers(path.parent / outcomes.FOLDER)
    return rows


def copy(rows: Sequence[Result], source: Path, target: Path) -> None:
    """Copies ``rows`` of the results.jsonl ``source``, with the outcomes of their items, to the one
    at ``target``. Nothing is written if it has all of them already."""
    target_rows = read(target)
    if all(row in target_rows for row in rows):
        return
    for name in {str(row.protocol["outcomes"]) for row in rows if "outcomes" in row.protocol}:
        data = (source.parent / outcomes.FOLDER / name).read_bytes()
        write_bytes(target.parent / outcomes.FOLDER / name, data)
    write(target, rows)


def read(path: Path) -> list[Result]:
    """Reads the rows of a results.jsonl in order; a missing file has none.

    Raises ValueError, which names the line, if a line is not a row.
    """
    if not Path(path).exists():
        return []
    adapter, rows = TypeAdapter(Result), []
    # splitlines would also split at other characters, which a metric's name may hold.
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(adapter.validate_json(line))
        except ValidationError as error:
            problem = ": ".join(filter(None, first_problem(error)))
            raise ValueError(
                f"{path} line {number} is not a result row ({problem}): take that line out, or the "
                "file away"
            ) from None
    return rows


def write(path: Path, rows: Sequence[Result]) -> None:
    """Adds rows to a results.jsonl, atomically; they replace rows of the same model and benchmark.

    Only one process may call it at a time, which the run directory's lock ensures. Raises json's
    ValueError if a value is not finite.
    """
    renewed = {(row.model, row.benchmark) for row in rows}
    left = [row for row in read(path) if (row.model, row.benchmark) not in renewed]
    lines = [json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) for row in left + [*rows]]
    write_bytes(Path(path), ("\n".join(lines) + "\n" if lines else "").encode())


def trained_on(trained: int, judged: int) -> str:
    """Says, for messages, how many of a benchmark's ``judged`` images the run is trained on."""
    return f"the run is trained on {trained:,} of its {judged:,} images"


def unfit_benchmark(
    benchmark: str, trained: int, judged: int, choice: str, again: str = ""
) -> ValueError:
    """The error for a benchmark by which ``choice``, for example 'the best encoder', is chosen
    although the run is trained on its images."""
    return ValueError(
        f"benchmark {benchmark!r}: {trained_on(trained, judged)}, and {choice} is chosen by it: "
        f"give data that no training has read{again}"
    )


def check_unseen(rows: Sequence[Result], benchmarks: Sequence[str], choice: str) -> None:
    """Raises ValueError if, by their rows, the run is trained on images of ``benchmarks``, by which
    ``choice`` is chosen."""
    for row in rows:
        if row.benchmark in benchmarks:
            if counts := _counts([row], "training_images", "judged_images"):
                again = ", and evaluate with 'mclclip eval --force'"
                raise unfit_benchmark(row.benchmark, *counts[0], choice, again)


def notes(rows: Sequence[Result]) -> list[str]:
    """The notes below a benchmark's table: how many items were left out, on how many of its images
    the run is trained, which models were measured with other options or on other data, and how many
    queries tie."""
    left_out = [
        f"{out} of {out + measured} items are left out: not comparable with published figures"
        for out, measured in _counts(rows, "left_out_items", "num_items")
    ]
    seen = _counts(rows, "training_images", "judged_images")
    unlike = []
    for part, what in (("settings", "with other options"), ("data", "on other data")):
        recorded = {row.model: row.protocol[part] for row in rows if part in row.protocol}
        first = next(iter(recorded), "")
        if others := [name for name in recorded if recorded[name] != recorded[first]]:
            models = f"{', '.join(others)} were measured {what} than {first}"
            unlike.append(f"{models}: figures that cannot be compared")
    shown = [row for row in rows if row.protocol.get("level") != "detail"]
    ties = [row.protocol.get("tied_queries") for row in shown]
    shares = [n / row.count for n, row in zip(ties, shown, strict=True) if type(n) is int]
    share = max(shares, default=0.0)
    tied = [
        f"for up to {100 * share:.0f} % of the queries of a model a wrong answer is as near as the "
        "right one, as equal images and captions are: they count as wrong"
    ] * (share > 0.01)
    too_good = [f"{trained_on(*counts)}: figures are too good" for counts in seen]
    return [*left_out, *too_good, *unlike, *tied]


def _counts(rows: Sequence[Result], part: str, other: str) -> list[tuple[int, int]]:
    """The distinct pairs (protocol[part], protocol[other]) of rows, sorted, without pairs whose
    first number is 0, or that are not whole numbers."""
    pairs = {(row.protocol.get(part), row.protocol.get(other)) for row in rows}
    return sorted((a, b) for a, b in pairs if a and type(a) is type(b) is int)


def table(
    results: Sequence[Result],
    references: Sequence[Reference] = (),
    *,
    details: bool = False,
) -> str:
    """Formats results as text: a table per benchmark, with a row per model and a column per metric.

    Models and metrics are in the order in which they first appear. Above the models are the number
    of trials and, if the protocol has it, the chance; published figures come last. Below a value
    stands its 95 % interval, and below the head of a column its unit unless it is percent. Metrics
    of the level ``detail`` are counted only, or shown with ``details``. Columns beyond ``WIDTH``
    continue in another table. The ``notes`` of a benchmark follow; the last lines are ``KEY``.
    """
    blocks = []
    for benchmark in dict.fromkeys(row.benchmark for row in results):
        rows = [row for row in results if row.benchmark == benchmark]
        main = [row for row in rows if details or row.protocol.get("level") != "detail"]
        published = [row for row in references if row.benchmark == benchmark]
        block = _block(benchmark, main, published)
        if hidden := len({row.metric for row in rows}) - len({row.metric for row in main}):
            block += f"\n({hidden} further metrics: 'mclclip eval' shows them with --details)"
        blocks.append("\n".join([block, *(f"({note})" for note in notes(rows))]))
    return "\n\n".join([*blocks, KEY] if blocks else [])


def _block(benchmark: str, rows: Sequence[Result], published: Sequence[Reference]) -> str:
    models: dict[str, dict[Column, Result | Reference]] = {}
    trials: dict[Column, set[int]] = {}
    chances: dict[Column, set[float]] = {}
    for row in rows:
        column = row.metric, row.unit
        models.setdefault(row.model, {})[column] = row
        trials.setdefault(column, set()).add(row.count)
        if isinstance(value := row.protocol.get("chance"), int | float):
            chances.setdefault(column, set()).add(value)
    for reference in published:
        name = f"{reference.model} [{reference.source}]"
        models.setdefault(name, {})[reference.metric, PERCENT] = reference
    above = ["trials", *(["chance"] if chances else [])]
    names = [wrap_name(printable(name), 40) for name in (benchmark, *above, *models)]
    columns = []
    for (metric, unit), counts in trials.items():
        cells = [row_of.get((metric, unit)) for row_of in models.values()]
        digits = unit.decimals(cell.value for cell in cells if cell)
        head = wrap_name(printable(short_name(metric)), 11) + unit.note
        texts = [head, "/".join(map(str, sorted(counts)))]
        if chances:
            own_chances = sorted(chances.get((metric, unit), ()))
            texts.append("/".join(f"{value:.{digits}f}" for value in own_chances) or "-")
        for cell in cells:
            text = f"{cell.value:.{digits}f}" if cell else "-"
            if isinstance(cell, Result):
                text += f"\n{cell.ci_low:.{digits}f}-{cell.ci_high:.{digits}f}"
            texts.append(text)
        columns.append(texts)
    blocks = []
    for part in _fitting(columns, WIDTH - _width(names)):
        lines = [*zip(names[1:], *(column[1:] for column in part), strict=True)]
        blocks.append(
            tabulate(
                [line for line in lines if set(line[1:]) != {"-"}],  # without models that lack all
                headers=[names[0], *(column[0] for column in part)],
                disable_numparse=True,
                colalign=("left", *["right"] * len(part)),
            )
        )
    return "\n\n".join(blocks)


def _fitting(columns: Sequence[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Divides columns into parts that are at most ``width`` characters wide, with two between
    columns."""
    part: list[list[str]] = []
    taken = 0
    for column in columns:
        needed = 2 + _width(column)
        if part and taken + needed > width:
            yield part
            part, taken = [], 0
        part.append(column)
        taken += needed
    if part:
        yield part


def _width(cells: Sequence[str]) -> int:
    """The width in characters that tabulate gives to a column, whose first cell is its header."""
    head, *rest = (max(map(len, cell.split("\n"))) for cell in cells)
    return max(head + 2, *rest)


def short_name(metric: str) -> str:
    """The short name of a metric for tables: 'i2t R@1' for 'image_to_text/R@1'."""
    for direction, short in (("image_to_text", "i2t"), ("text_to_image", "t2i")):
        metric = metric.replace(f"{direction}/", f"{short} ").replace(direction, short)
    return metric


def wrap_name(name: str, width: int) -> str:
    """Breaks a name behind '/', '_' and spaces into lines of at most ``width`` characters. A longer
    word stays whole."""
    lines = [""]
    for word in re.findall(r"[^/_ ]*[/_ ]?", name):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(map(str.rstrip, lines))
