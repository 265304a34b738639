"""A comparison of two encoders in one metric: its verdict, its words, and tables of comparisons."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from mclclip.eval import outcomes, results
from mclclip.eval.outcomes import Difference
from mclclip.eval.results import Result, short_name
from mclclip.util.files import printable

if TYPE_CHECKING:
    from pandas import DataFrame

Format = Literal["text", "csv", "markdown", "latex"]

LEVEL = 0.05
"""A difference is taken for real if its corrected p-value is lower."""


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
                if self.difference.p_value < LEVEL
                else "; the interval is a bootstrap, the verdict goes by p"
            )
        if not excludes and self.corrected < LEVEL:
            return "; the interval is wide since there are few units, the verdict goes by p"
        return ""


def correct(comparisons: Sequence[Comparison], num_lacking: int = 0) -> list[Comparison]:
    """Makes the comparisons one family: corrects p-values for their number, by Holm's method.

    ``num_lacking``: comparisons of the family that could not be made, which count as p = 1."""
    number = len(comparisons) + num_lacking
    p_values = outcomes.holm([c.difference.p_value for c in comparisons] + [1.0] * num_lacking)
    return [replace(c, corrected=p_values[at], family=number) for at, c in enumerate(comparisons)]


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
    if format == "text":
        return _text(comparisons)
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
    return str(short.to_markdown(index=False, disable_numparse=True))


def _text(comparisons: Sequence[Comparison]) -> str:
    """Returns the tables of ``_blocks``, a sentence for each comparison, and how to read p."""
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
