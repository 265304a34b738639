"""Verb: results and the outcomes of items -> whether one encoder is really better than another.

Encoders are compared on the same items, so that what is hard for both does not count. Tests and
intervals are those of ``eval.outcomes``; p-values are corrected for the number of comparisons.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mclclip.eval import outcomes, results
from mclclip.eval.outcomes import Difference, Outcomes
from mclclip.eval.results import Result, short_name
from mclclip.files import clean, write_bytes
from mclclip.opened_run import Run

if TYPE_CHECKING:
    from pandas import DataFrame

log = logging.getLogger("mclclip")

Format = Literal["text", "csv", "markdown", "latex"]
Row = tuple[Result, Path | None]
"""A row of results.jsonl, and the file of its items, where it has one."""

LEVEL = 0.05
"""Corrected p-values below it are taken for a difference."""


@dataclass(frozen=True)
class Comparison:
    """One encoder against another in one metric of a benchmark; ``corrected``: Holm's p-value."""

    row: Result
    against: Result
    difference: Difference
    corrected: float

    @property
    def verdict(self) -> Literal["better", "worse", "inside the noise"]:
        """Whether the difference is larger than chance explains."""
        if self.corrected >= LEVEL:
            return "inside the noise"
        return "better" if self.gain > 0 else "worse"

    @property
    def gain(self) -> float:
        """The difference, above 0 where ``row`` is the better one."""
        return self.row.unit.sign * self.difference.value

    def texts(self) -> tuple[str, str, str, str, str]:
        """The two values, their difference, and the bounds of its interval, in the row's unit."""
        unit, d = self.row.unit, self.difference
        changes = [unit.scale * number for number in (d.value, d.low, d.high)]
        values = [self.row.value, self.against.value]
        digits = unit.decimals([*values, *changes])
        own, other = (f"{value:.{digits}f}" for value in values)
        change, low, high = (f"{value:+.{digits}f}" for value in changes)
        return own, other, change, low, high

    def sentence(self) -> str:
        """The comparison in words."""
        items = ""
        if (more := self.difference.items) is not None:
            items = f", {more:+g} of {self.row.count:,} {self.row.protocol.get('trials', 'items')}"
        own, other, change, low, high = self.texts()
        return (
            f"{self.row.benchmark}, {short_name(self.row.metric)}: {self.row.model} has {own}, "
            f"{self.against.model} {other}, which is {change} {self.row.unit.difference} "
            f"(95 % interval {low} to {high}){items}: {self.verdict} "
            f"(p {'' if self.corrected < 0.001 else '= '}{_rounded(self.corrected)})"
        )


def run(
    runs: Sequence[Path],
    *,
    models: Sequence[str] = (),
    against: str | None = None,
    benchmarks: Sequence[str] = (),
    metrics: Sequence[str] = (),
    format: Format = "text",
    out: Path | None = None,
) -> list[Comparison]:
    """Compares ``models`` with ``against`` in the results of some run directories; prints a table.

    ``models``: names in results.jsonl (default: all but ``against``); ``against``: default stage_0,
    or the first model. With several runs a name has its run's before it, as in ``mine:stage_1``.
    ``benchmarks`` and ``metrics`` (as results.jsonl or a table names them): default are all
    benchmarks, and the metrics of the level ``headline``. ``out``: a file for the table instead of
    the standard output.
    Raises FileNotFoundError where there are no results or outcomes, and ValueError for unknown
    names and where encoders were not measured on the same items.
    """
    rows = read_runs(runs)
    comparisons = compare(rows, models, against, benchmarks, metrics)
    text = render(comparisons, format)
    if out is None:
        print(text)
    else:
        write_bytes(out, f"{text}\n".encode())
        log.info("wrote %s", out)
    return comparisons


def compare(
    rows: Sequence[Row],
    models: Sequence[str] = (),
    against: str | None = None,
    benchmarks: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> list[Comparison]:
    """Compares encoders of ``rows``.

    See ``run`` for the arguments and errors.
    """
    names = [*dict.fromkeys(row.model for row, _ in rows)]
    against = against or ("stage_0" if "stage_0" in names else names[0])
    wanted = [*models] or [name for name in names if name != against]
    if len(names) < 2:
        raise ValueError(f"there are results of one model, {names[0]}: evaluate another one too")
    _known("model", [*wanted, against], names)
    if against in wanted:
        raise ValueError(f"{against} cannot be compared with itself: name another --against")
    _known("benchmark", benchmarks, [*dict.fromkeys(row.benchmark for row, _ in rows)])
    every = [*dict.fromkeys(row.metric for row, _ in rows)]
    of_short = {short_name(metric): metric for metric in every}
    metrics = [of_short.get(metric, metric) for metric in metrics]
    _known("metric", metrics, every)
    cells = {
        (row.benchmark, row.metric, row.model): (row, path)
        for row, path in rows
        if (not benchmarks or row.benchmark in benchmarks)
        and (row.metric in metrics if metrics else row.protocol.get("level") == "headline")
    }
    pairs = [
        (own, base)
        for benchmark, metric in dict.fromkeys(cell[:2] for cell in cells)
        for model in wanted
        if (own := cells.get((benchmark, metric, model)))
        and (base := cells.get((benchmark, metric, against)))
    ]
    if not pairs:
        raise ValueError(
            f"no metric of {', '.join(wanted)} was measured for {against} too: evaluate them on "
            "the same benchmarks"
        )
    read = Reader()
    return corrected([_compared(read, own, base) for own, base in pairs])


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with p-values corrected for their number, by Holm's method."""
    p_values = outcomes.holm([c.difference.p_value for c in comparisons])
    return [replace(c, corrected=p) for c, p in zip(comparisons, p_values, strict=True)]


def _known(what: str, given: Sequence[str], there: Sequence[str]) -> None:
    if unknown := [name for name in given if name not in there]:
        raise ValueError(f"no {what} {unknown[0]!r} in the results: there are {', '.join(there)}")


def read_runs(runs: Sequence[Path]) -> list[Row]:
    """The rows of all runs; with several runs, each model's name has its run's before it.

    Raises FileNotFoundError for a run without results.
    """
    rows: list[Row] = []
    last = [Path(run_dir).resolve().name for run_dir in runs]
    for run_dir, name in zip(runs, last, strict=True):
        own = Run(run_dir)
        if not own.result_rows:
            raise FileNotFoundError(f"no results in {own.layout.results}: run 'mclclip eval' first")
        # A run is called by its last folder, or by its whole path where another's is the same.
        prefix = f"{name if last.count(name) == 1 else run_dir}:" if len(runs) > 1 else ""
        rows += [(replace(row, model=prefix + row.model), path) for row, path in rows_of(own)]
    return rows


def rows_of(run: Run) -> list[Row]:
    """The rows of a run, each with the file of its items where its protocol names one."""
    rows: list[Row] = []
    for row in run.result_rows:
        name = row.protocol.get("outcomes")
        known = isinstance(name, str) and Path(name).name == name
        folder = run.layout.results.parent / outcomes.FOLDER
        rows.append((row, folder / str(name) if known else None))
    return rows


class Reader:
    """Reads the outcomes of the items of rows, each file once."""

    def __init__(self) -> None:
        self._read = cache(outcomes.read)

    def __call__(self, row: Result, path: Path | None) -> Outcomes:
        """The outcomes of a row, whose file is ``path``.

        Raises FileNotFoundError and ValueError where they are missing or damaged.
        """
        if path is None:
            raise FileNotFoundError(
                f"{row.model} on {row.benchmark} has no outcomes of items, it was evaluated by an "
                "older version: evaluate again with 'mclclip eval --force'"
            )
        if row.metric not in (found := self._read(path)):
            raise ValueError(f"{path} has no outcomes of {row.metric}: evaluate again with --force")
        return found[row.metric]


def _compared(read: Reader, a: Row, b: Row) -> Comparison:
    """Not corrected yet."""
    (own, _), (base, _) = a, b
    if own.unit != base.unit:  # an older version wrote none
        raise ValueError(
            f"{own.benchmark}, {own.metric}: {own.model} is measured in {own.unit.name} and "
            f"{base.model} in {base.unit.name}: evaluate again with 'mclclip eval --force'"
        )
    try:
        difference = outcomes.difference(read(*a), read(*b))
    except outcomes.NotTheSame as error:
        raise ValueError(
            f"{own.model} and {base.model} were not measured on the same items of "
            f"{own.benchmark}: {error}; evaluate both on the same data"
        ) from None
    return Comparison(own, base, difference, difference.p_value)


# --- table -------------------------------------------------------------------------------------


def frame(comparisons: Sequence[Comparison]) -> DataFrame:
    """A row per comparison, figures in the unit of its metric."""
    import pandas

    return pandas.DataFrame(
        {
            "benchmark": clean(c.row.benchmark),
            "metric": clean(c.row.metric),
            "model": clean(c.row.model),
            "unit": c.row.unit.name,
            "value": c.row.value,
            "against": clean(c.against.model),
            "against_value": c.against.value,
            "difference": c.row.unit.scale * c.difference.value,
            "ci_low": c.row.unit.scale * c.difference.low,
            "ci_high": c.row.unit.scale * c.difference.high,
            "items": c.difference.items,
            "count": c.row.count,
            "better_on": c.difference.wins,
            "worse_on": c.difference.losses,
            "units": c.difference.units,
            "p_value": c.difference.p_value,
            "p_corrected": c.corrected,
            "test": c.difference.test,
            "verdict": c.verdict,
        }
        for c in comparisons
    )


def render(comparisons: Sequence[Comparison], format: Format) -> str:
    """The comparisons as text for a terminal (with a sentence each), CSV, Markdown or LaTeX."""
    table = frame(comparisons)
    if format == "csv":
        text: str = table.to_csv(index=False)
        return text.rstrip("\n")
    import pandas

    mixed = len({c.row.unit for c in comparisons}) > 1
    short = table[["benchmark", "metric", "model"]].join(
        pandas.DataFrame(_cells(c, "value" if mixed else c.row.unit.name) for c in comparisons)
    )
    if format == "latex":
        styled = short.style.hide(axis="index").format(escape="latex")
        return str(styled.format_index(escape="latex", axis=1).to_latex(hrules=True)).rstrip("\n")
    if format == "markdown":
        return str(short.to_markdown(index=False, disable_numparse=True))
    lines = [
        textwrap.fill(
            clean(c.sentence()), results.WIDTH, initial_indent="- ", subsequent_indent="  "
        )
        for c in comparisons
    ]
    tests = " and ".join(dict.fromkeys(c.difference.test for c in comparisons))
    note = (
        f"p: {tests}, corrected for {len(comparisons)} comparison(s) by Holm's method. "
        f"Below {LEVEL} a difference is taken for real. Intervals (bootstrap) are of each "
        "difference alone. Neither says how figures change with the seed of a training: train "
        "several seeds."
    )
    return "\n".join([_blocks(comparisons), "", *lines, "", textwrap.fill(note, results.WIDTH)])


def _cells(c: Comparison, head: str) -> dict[str, str]:
    """The cells of a comparison by their columns. ``head`` is the column of the value; where it is
    not the name of the unit, the value names its unit."""
    d = c.difference
    own, _, change, low, high = c.texts()
    return {
        head: own if head == c.row.unit.name else f"{own} {c.row.unit.name}",
        "difference": change,
        "95 % interval": f"{low} to {high}",
        "items": "-" if d.items is None else f"{d.items:+g} of {c.row.count}",
        "p": _rounded(c.corrected),
        "verdict": c.verdict,
    }


def _blocks(comparisons: Sequence[Comparison]) -> str:
    """A table per benchmark and metric, with the encoder that is compared against in its head."""
    from tabulate import tabulate

    blocks = []
    for benchmark, metric in dict.fromkeys((c.row.benchmark, c.row.metric) for c in comparisons):
        own = [c for c in comparisons if (c.row.benchmark, c.row.metric) == (benchmark, metric)]
        base = own[0].against
        value = own[0].texts()[1]
        what = f"{clean(benchmark)}, {clean(short_name(metric))}"
        head = f"{what}, against {clean(base.model)} ({value})"
        rows = [_lines(c) for c in own]
        align = ("left", "right", "right", "right", "right", "right", "left")
        body = tabulate(rows, headers="keys", disable_numparse=True, colalign=align)
        blocks.append(f"{head}\n{body}")
    return "\n\n".join(blocks)


def _lines(c: Comparison) -> dict[str, str]:
    """The cells of one encoder, in several lines where the table would be wider than a terminal."""
    unit = c.row.unit.name
    cells = _cells(c, unit)
    return {
        "model": results.wrapped(clean(c.row.model), 18),
        unit: cells[unit],
        "change": cells["difference"],
        "95 %\nrange": cells["95 % interval"].replace(" to", "\nto"),
        "items": cells["items"].replace(" of", "\nof"),
        "p": cells["p"],
        "verdict": results.wrapped(c.verdict, 10),
    }


def _rounded(p_value: float) -> str:
    return f"{p_value:.2g}" if p_value >= 0.001 else "< 0.001"
