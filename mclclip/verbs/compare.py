"""Verb ``compare``: results and the outcomes of items -> comparisons of encoders, with tests.

Encoders are compared item by item, so items that are hard for both do not count. ``eval.outcomes``
computes tests and intervals. A run is judged by a family of comparisons, which its results alone
determine (``family``). P-values are corrected over this family, so a comparison has the same
p-value in the table, in the report and in the verdict.
"""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Literal

from mclclip.eval import outcomes, results
from mclclip.eval.outcomes import Difference, Outcomes
from mclclip.eval.results import Result, short_name
from mclclip.run.opened import Run
from mclclip.util.files import printable, write_bytes

if TYPE_CHECKING:
    from pandas import DataFrame

log = logging.getLogger("mclclip")

Format = Literal["text", "csv", "markdown", "latex"]
Row = tuple[Result, Path | None]
"""A row of results.jsonl, and the file with the outcome of each item, if it has one."""
Pair = tuple[Row, Row]
"""The rows of two encoders in the same metric of a benchmark."""

LEVEL = 0.05
"""A difference is taken for real if its corrected p-value is lower."""

BASE, CONTROL, TWIN = "stage_0", "control_", "control_ungrouped_"
"""The encoder that others are compared with; how names of controls begin; how the name of the
ungrouped control of an encoder begins, such as ``control_ungrouped_stage_1``."""


@dataclass(frozen=True)
class Comparison:
    """One encoder (``row``) against another in one metric of a benchmark. ``corrected`` is Holm's
    p-value over a family of ``family`` comparisons."""

    row: Result
    against: Result
    difference: Difference
    corrected: float
    family: int = 1

    @property
    def verdict(self) -> Literal["better", "worse", "inside the noise"]:
        """Says whether the difference is larger than chance explains, and in which direction."""
        if self.corrected >= LEVEL:
            return "inside the noise"
        return "better" if self.gain > 0 else "worse"

    @property
    def gain(self) -> float:
        """The difference; above 0 if ``row`` is better."""
        return self.row.unit.sign * self.difference.value

    def texts(self) -> tuple[str, str, str, str, str]:
        """Returns both values, their difference, and the two bounds of its interval, as text in the
        unit of the row."""
        unit, d = self.row.unit, self.difference
        changes = [unit.scale * number for number in (d.value, d.low, d.high)]
        values = [self.row.value, self.against.value]
        digits = unit.decimals([*values, *changes])
        value, other = (f"{value:.{digits}f}" for value in values)
        change, low, high = (f"{value:+.{digits}f}" for value in changes)
        return value, other, change, low, high

    def sentence(self) -> str:
        """Returns the comparison in words."""
        items = ""
        if (more := self.difference.items) is not None:
            items = f", {more:+g} of {self.row.count:,} {self.row.protocol.get('trials', 'items')}"
        value, other, change, low, high = self.texts()
        return (
            f"{self.row.benchmark}, {short_name(self.row.metric)}: {self.row.model} has {value}, "
            f"{self.against.model} {other}, which is {change} {self.row.unit.difference} "
            f"(95 % interval {low} to {high}){items}: {self.verdict} "
            f"({self.p_text()}{self.reason()})"
        )

    def p_text(self) -> str:
        """Returns the corrected p-value, such as 'p = 0.03'; rounding keeps its side of LEVEL."""
        p, text = self.corrected, f"{self.corrected:.2g}"
        if p < 0.001:
            return "p < 0.001"
        return f"p < {LEVEL}" if p < LEVEL <= float(text) else f"p = {text}"

    def reason(self) -> str:
        """Says why verdict and interval disagree, if one shows a difference and the other does
        not; else returns ''."""
        excludes = not self.difference.low <= 0 <= self.difference.high
        if excludes and self.corrected >= LEVEL:
            return (
                "; the interval is of this difference alone, p is corrected over "
                f"{self.family} comparisons"
                if self.family > 1
                else "; the interval is a bootstrap, the verdict goes by p"
            )
        if not excludes and self.corrected < LEVEL:
            return "; the interval is wide since there are few units, the verdict goes by p"
        return ""


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

    If none of the four selections is given, it makes the comparisons of ``family``. ``models``:
    names in results.jsonl (default: all but ``against``). ``against``: default stage_0, or else the
    first model. With several runs a name begins with its run, as in 'mine:stage_1'. ``benchmarks``:
    default all. ``metrics``: default those of the level 'headline'. ``out``: a file for the table
    instead of the standard output. Raises FileNotFoundError if there are no results or outcomes,
    and ValueError for unknown names and encoders that were not measured on the same items.
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
    """Compares encoders of ``rows``; arguments and errors are those of ``run``.

    P-values of comparisons in the ``family`` are corrected over the whole family, and those of the
    other comparisons over each other.
    """
    names = [*dict.fromkeys(row.model for row, _ in rows)]
    if len(names) < 2:
        raise ValueError(f"there are results of one model, {names[0]}: evaluate another one too")
    read, standard = Reader(), family(rows)
    if models or against or benchmarks or metrics or not standard:
        pairs = _choose_pairs(rows, models, against or _base(names), benchmarks, metrics)
    else:
        pairs = standard
    in_family = {_key(pair) for pair in standard}
    compared = {}
    if any(_key(pair) in in_family for pair in pairs):
        compared = _compare_pairs(read, standard)
    compared |= _compare_pairs(read, [pair for pair in pairs if _key(pair) not in in_family])
    return [compared[_key(pair)] for pair in pairs]


def _choose_pairs(
    rows: Sequence[Row],
    models: Sequence[str],
    against: str,
    benchmarks: Sequence[str],
    metrics: Sequence[str],
) -> list[Pair]:
    """Pairs the rows of ``models`` with those of ``against``; ValueError for unknown names."""
    names = [*dict.fromkeys(row.model for row, _ in rows)]
    compared = [*models] or [name for name in names if name != against]
    _check_names("model", [*compared, against], names)
    if against in compared:
        raise ValueError(f"{against} cannot be compared with itself: name another --against")
    _check_names("benchmark", benchmarks, [*dict.fromkeys(row.benchmark for row, _ in rows)])
    every = [*dict.fromkeys(row.metric for row, _ in rows)]
    of_short = {short_name(metric): metric for metric in every}
    metrics = [of_short.get(metric, metric) for metric in metrics]
    _check_names("metric", metrics, every)
    cells = [
        (row, path)
        for row, path in rows
        if (not benchmarks or row.benchmark in benchmarks)
        and (row.metric in metrics if metrics else row.protocol.get("level") == "headline")
    ]
    pairs = _pair_rows(cells, [(name, against) for name in compared])
    if not pairs:
        raise ValueError(
            f"no metric of {', '.join(compared)} was measured for {against} too: evaluate them on "
            "the same benchmarks"
        )
    return pairs


def _pair_rows(cells: Sequence[Row], names: Sequence[tuple[str, str]]) -> list[Pair]:
    """Pairs the rows of each two encoders, in every metric in which both were measured."""
    of = {(row.benchmark, row.metric, row.model): (row, path) for row, path in cells}
    return [
        (of[*metric, model], of[*metric, other])
        for metric in dict.fromkeys(cell[:2] for cell in of)
        for model, other in names
        if (*metric, model) in of and (*metric, other) in of
    ]


def _key(pair: Pair) -> tuple[str, str, str, str]:
    (row, _), (against, _) = pair
    return row.benchmark, row.metric, row.model, against.model


def _compare_pairs(
    read: Reader, pairs: Sequence[Pair]
) -> dict[tuple[str, str, str, str], Comparison]:
    """Compares pairs as one family; returns the comparisons by ``_key``."""
    comparisons = correct([_compare_rows(read, row, against) for row, against in pairs])
    return dict(zip(map(_key, pairs), comparisons, strict=True))


def correct(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Makes the comparisons one family: corrects p-values for their number, by Holm's method."""
    p_values, number = outcomes.holm([c.difference.p_value for c in comparisons]), len(comparisons)
    return [
        replace(c, corrected=p, family=number) for c, p in zip(comparisons, p_values, strict=True)
    ]


# --- the comparisons that judge a run ----------------------------------------------------------


def family(rows: Sequence[Row]) -> list[Pair]:
    """Returns the comparisons that judge a run, in the main metrics of every benchmark.

    If there is a share ``choose`` of held-out pictures, as after ``finetune``, the encoder that it
    chooses (``tuned``) is judged on all other benchmarks. Otherwise every encoder except controls
    is. Each is compared with stage 0 and with its ungrouped control. Without stage 0, as with
    several runs, all others are compared with the first encoder.
    """
    names = [*dict.fromkeys(row.model for row, _ in rows)]
    base, main = _base(names), _main(rows)
    judged = [name for name in names if not name.startswith(CONTROL)]
    if base == BASE and (choosing := [row for row, _ in main if row.benchmark == results.CHOOSE]):
        best = tuned(rows)
        judged = [] if best is None else [best]
        if len(choosing) < len(main):  # the chosen encoder's figures there are too good
            main = [(row, path) for row, path in main if row.benchmark != results.CHOOSE]
    pairs = [(name, base) for name in judged if name != base]
    pairs += [(name, TWIN + name) for name in judged if TWIN + name in names]
    return _pair_rows(main, pairs)


def tuned(rows: Sequence[Row]) -> str | None:
    """Returns the trained encoder that represents a run, such as 'stage_2': the one with the
    highest mean of the main metrics of the share ``choose``, or of all benchmarks without it.

    If a concat has the highest mean but is not better beyond chance than a single model, the single
    model is taken, since every client can load it. None if only stage 0 and controls were measured.
    """
    by_mean = means(rows)
    trained = [name for name in by_mean if name != BASE and not name.startswith(CONTROL)]
    order = sorted(trained, key=lambda name: -by_mean[name])
    if not order or "concat_" not in order[0]:
        return next(iter(order), None)
    best, read, deciding = order[0], Reader(), _deciding(rows)
    above = [name for name in order if by_mean[name] > by_mean.get(BASE, -math.inf)]
    for single in (name for name in above if "concat_" not in name):
        pairs = _pair_rows(deciding, [(best, single)])
        if all(c.verdict != "better" for c in _compare_pairs(read, pairs).values()):
            return single
    return best


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Returns for each encoder the mean of the metrics by which ``tuned`` chooses; losses count
    with the opposite sign."""
    values: dict[str, list[float]] = {}
    for row, _ in _deciding(rows):
        values.setdefault(row.model, []).append(row.unit.sign * row.value)
    return {name: mean(each) for name, each in values.items()}


def _deciding(rows: Sequence[Row]) -> list[Row]:
    main = _main(rows)
    return [(row, path) for row, path in main if row.benchmark == results.CHOOSE] or main


def _main(rows: Sequence[Row]) -> list[Row]:
    return [(row, path) for row, path in rows if row.protocol.get("level") == "headline"]


def _base(names: Sequence[str]) -> str:
    return BASE if BASE in names else names[0]


def _check_names(what: str, names: Sequence[str], there: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in there]:
        raise ValueError(f"no {what} {unknown[0]!r} in the results: there are {', '.join(there)}")


def read_runs(runs: Sequence[Path]) -> list[Row]:
    """Reads the rows of all runs; with several runs a model's name begins with its run.

    Raises FileNotFoundError for a run without results.
    """
    rows: list[Row] = []
    last = [Path(run_dir).resolve().name for run_dir in runs]
    for run_dir, name in zip(runs, last, strict=True):
        run = Run(run_dir)
        if not run.result_rows:
            raise FileNotFoundError(f"no results in {run.layout.results}: run 'mclclip eval' first")
        # The name of a run is its last folder, or its whole path if another run has that folder.
        prefix = f"{name if last.count(name) == 1 else run_dir}:" if len(runs) > 1 else ""
        rows += [(replace(row, model=prefix + row.model), path) for row, path in rows_of(run)]
    return rows


def rows_of(run: Run) -> list[Row]:
    """Returns the rows of a run, each with the file of its items if its protocol names one."""
    rows: list[Row] = []
    for row in run.result_rows:
        name = row.protocol.get("outcomes")
        is_name = isinstance(name, str) and Path(name).name == name
        folder = run.layout.results.parent / outcomes.FOLDER
        rows.append((row, folder / str(name) if is_name else None))
    return rows


class Reader:
    """Reads the outcomes of items; each file is read once."""

    def __init__(self) -> None:
        self._read = cache(outcomes.read)

    def __call__(self, row: Result, path: Path | None) -> Outcomes:
        """Returns the outcomes of a row from its file ``path``.

        Raises FileNotFoundError or ValueError if they are missing or damaged.
        """
        if path is None:
            raise FileNotFoundError(
                f"{row.model} on {row.benchmark} has no outcomes of items: evaluate again with "
                "'mclclip eval --force'"
            )
        if row.metric not in (by_metric := self._read(path)):
            raise ValueError(f"{path} has no outcomes of {row.metric}: evaluate again with --force")
        return by_metric[row.metric]

    def beside(self, row: Result, path: Path | None) -> Outcomes:
        """Returns the outcomes of a row; for a pooled figure those of the mean over its parts, if
        the file has them."""
        if row.metric == "pooled" and path is not None:
            return self._read(path).get("average") or self(row, path)
        return self(row, path)


def _compare_rows(read: Reader, a: Row, b: Row) -> Comparison:
    """Compares two rows, without a correction of the p-value."""
    (row, _), (against, _) = a, b
    if row.unit != against.unit:
        raise ValueError(
            f"{row.benchmark}, {row.metric}: {row.model} is measured in {row.unit.name} and "
            f"{against.model} in {against.unit.name}: evaluate again with 'mclclip eval --force'"
        )
    try:
        difference = outcomes.difference(read(*a), read(*b))
    except outcomes.NotTheSame as error:
        raise ValueError(
            f"{row.model} and {against.model} were not measured on the same items of "
            f"{row.benchmark}: {error}; evaluate both on the same data"
        ) from None
    return Comparison(row, against, difference, difference.p_value)


# --- table -------------------------------------------------------------------------------------


def frame(comparisons: Sequence[Comparison]) -> DataFrame:
    """Returns a table with a row per comparison; figures are in the unit of the metric."""
    import pandas

    return pandas.DataFrame(
        {
            "benchmark": printable(c.row.benchmark),
            "metric": printable(c.row.metric),
            "model": printable(c.row.model),
            "unit": c.row.unit.name,
            "value": c.row.value,
            "against": printable(c.against.model),
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
    """Returns the comparisons as CSV, Markdown, LaTeX, or text with a sentence for each."""
    table = frame(comparisons)
    if format == "csv":
        text: str = table.to_csv(index=False)
        return text.rstrip("\n")
    import pandas

    mixed = len({c.row.unit for c in comparisons}) > 1
    names = ["benchmark", "metric", "model"] + ["against"] * (table["against"].nunique() > 1)
    short = table[names].join(
        pandas.DataFrame(_cells(c, "value" if mixed else c.row.unit.name) for c in comparisons)
    )
    if format == "latex":
        styled = short.style.hide(axis="index").format(escape="latex")
        return str(styled.format_index(escape="latex", axis=1).to_latex(hrules=True)).rstrip("\n")
    if format == "markdown":
        return str(short.to_markdown(index=False, disable_numparse=True))
    lines = [
        textwrap.fill(
            printable(c.sentence()), results.WIDTH, initial_indent="- ", subsequent_indent="  "
        )
        for c in comparisons
    ]
    tests = " and ".join(dict.fromkeys(c.difference.test for c in comparisons))
    sizes = " and over ".join(dict.fromkeys(str(c.family) for c in comparisons))
    note = (
        f"p: {tests}, corrected by Holm's method over {sizes} comparisons: those that the run is "
        "judged by make one family, and others that were asked for another. "
        f"Below {LEVEL} a difference is taken for real. Intervals (bootstrap) are of each "
        "difference alone. A training with another seed may give other figures: train several "
        "seeds before you believe a small difference."
    )
    return "\n".join([_blocks(comparisons), "", *lines, "", textwrap.fill(note, results.WIDTH)])


def _cells(c: Comparison, head: str) -> dict[str, str]:
    """Returns the cells of a comparison by column. ``head`` is the column of the value: the name of
    the unit, or another word, and then the cell has the unit too."""
    d = c.difference
    value, _, change, low, high = c.texts()
    return {
        head: value if head == c.row.unit.name else f"{value} {c.row.unit.name}",
        "difference": change,
        "95 % interval": f"{low} to {high}",
        "items": "-" if d.items is None else f"{d.items:+g} of {c.row.count}",
        "p": c.p_text().removeprefix("p ").removeprefix("= "),
        "verdict": c.verdict,
    }


def _blocks(comparisons: Sequence[Comparison]) -> str:
    """Returns a table with a heading for each benchmark, metric and encoder to compare with."""
    from tabulate import tabulate

    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for c in comparisons:
        groups.setdefault((c.row.benchmark, c.row.metric, c.against.model), []).append(c)
    blocks = []
    for (benchmark, metric, other), group in groups.items():
        what = f"{printable(benchmark)}, {printable(short_name(metric))}"
        head = f"{what}, against {printable(other)} ({group[0].texts()[1]})"
        rows = [_lines(c) for c in group]
        align = ("left", "right", "right", "right", "right", "right", "left")
        body = tabulate(rows, headers="keys", disable_numparse=True, colalign=align)
        blocks.append(f"{head}\n{body}")
    return "\n\n".join(blocks)


def _lines(c: Comparison) -> dict[str, str]:
    """Returns the cells of a comparison, broken into lines so that the table fits a terminal."""
    unit = c.row.unit.name
    cells = _cells(c, unit)
    return {
        "model": results.wrap_name(printable(c.row.model), 18),
        unit: cells[unit],
        "change": cells["difference"],
        "95 %\nrange": cells["95 % interval"].replace(" to", "\nto"),
        "items": cells["items"].replace(" of", "\nof"),
        "p": cells["p"],
        "verdict": results.wrap_name(c.verdict, 10),
    }
