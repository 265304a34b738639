"""A race as a table, a page and a few sentences: what every remedy gains and loses.

Every remedy is compared with the base and with the ungrouped control, in the main metrics of every
benchmark, over all seeds (``eval.seeds``); p-values are corrected over all of these by Holm's
method. Parts of a metric, such as Types of minimal pairs, are corrected among themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tabulate import tabulate

from mclclip import __version__
from mclclip.eval import outcomes, results, seeds
from mclclip.report import charts, duration, environment
from mclclip.run.opened import Run
from mclclip.run.runlog import count_of
from mclclip.util.files import printable
from mclclip.verbs import compare
from mclclip.verbs.compare import LEVEL, Comparison

if TYPE_CHECKING:
    from pandas import DataFrame

PAGE, TABLE = "race.html", "race.csv"
MOST_PARTS = 40
"""Parts of a metric up to which all of them are shown: Types and rules are, a thousand classes are
not."""

Against = Literal["base", "control"]


@dataclass(frozen=True)
class Entrant:
    """A remedy, the control or the base, as it ran.

    encoder     its name in results.jsonl
    runs        the run directory of every seed
    options     its overrides, in words
    cost        figures of a seed: steps, samples, operations and their share of the control's,
                seconds and rank_hours (None: unknown), and whose trainings these are (``of``)
    """

    name: str
    encoder: str
    runs: Sequence[Path]
    about: str = ""
    options: str = ""
    cost: dict[str, Any] = field(default_factory=dict)


Part = tuple[str, Comparison]
"""The name of one part of a metric, such as a Type, and a comparison in it."""


@dataclass(frozen=True)
class Standings:
    """All comparisons of a race.

    whole   those of main metrics, by what they are against
    parts   those of the parts of a main metric, in the order of ``whole``
    """

    whole: Mapping[Against, Sequence[Comparison]]
    parts: Mapping[Against, Sequence[Part]]
    num_seeds: int

    @cached_property
    def metrics(self) -> list[tuple[str, str]]:
        """Benchmark and metric, in order."""
        return [*dict.fromkeys(_metric(c) for of in self.whole.values() for c in of)]

    def of(self, name: str, metric: tuple[str, str], against: Against) -> Comparison | None:
        """One remedy in one metric; None for the control against itself."""
        for c in self.whole[against]:
            if c.row.model == name and _metric(c) == metric:
                return c
        return None


# --- comparisons ---------------------------------------------------------------------------------


def standings(
    base: Entrant, control: Entrant, remedies: Sequence[Entrant], benchmarks: Sequence[str]
) -> Standings:
    """Compares all ``remedies``, the control among them, with base and control.

    Raises FileNotFoundError and ValueError where figures or outcomes are missing, damaged or not of
    the same items.
    """
    read = compare.Reader()
    cells = {
        run: {(r.benchmark, r.metric, r.model): (r, path) for r, path in compare.rows_of(Run(run))}
        for one in (base, *remedies)
        for run in one.runs
    }

    def rows_of(one: Entrant, metric: tuple[str, str]) -> list[compare.Row]:
        found = [cells[run].get((*metric, one.encoder)) for run in one.runs]
        if None in found:
            run = one.runs[found.index(None)]
            raise FileNotFoundError(
                f"{run} has no figure of {one.encoder} on {metric[0]} ({metric[1]}): the race has "
                "not come so far, run it without --only"
            )
        return [row for row in found if row is not None]

    others: dict[Against, Entrant] = {"base": base, "control": control}
    whole: dict[Against, list[Comparison]] = {"base": [], "control": []}
    parts: dict[Against, list[Part]] = {"base": [], "control": []}
    for (benchmark, name, model), (row, _) in cells[base.runs[0]].items():
        is_main = benchmark in benchmarks and row.protocol.get("level") == "headline"
        if model != base.encoder or not is_main:
            continue
        for against, other in others.items():
            for own in remedies:
                if own.name != other.name:
                    rows = rows_of(own, (benchmark, name)), rows_of(other, (benchmark, name))
                    one, of_parts = _compared(own.name, other.name, *rows, read)
                    whole[against].append(one)
                    parts[against] += of_parts
    count = len(whole["base"])
    corrected = compare.correct([*whole["base"], *whole["control"]])
    whole = {"base": corrected[:count], "control": corrected[count:]}
    for against, own_parts in parts.items():
        settled = compare.correct([c for _, c in own_parts])
        names = [name for name, _ in own_parts]
        parts[against] = [*zip(names, settled, strict=True)]
    return Standings(whole, parts, len(base.runs))


def _compared(
    own: str,
    other: str,
    rows: Sequence[compare.Row],
    against: Sequence[compare.Row],
    read: compare.Reader,
) -> tuple[Comparison, list[Part]]:
    """Two entrants in a metric by their means over seeds, and in its parts; not corrected yet.

    ``rows`` of the one and ``against`` of the other are those of every seed.
    """
    pairs = [(read(*a), read(*b)) for a, b in zip(rows, against, strict=True)]
    # What is pooled over parts has none of its own: those of the benchmark's average are its parts.
    with_parts = [(read.beside(*a), read.beside(*b)) for a, b in zip(rows, against, strict=True)]
    means = [
        replace(some[0][0], model=name, value=float(np.mean([row.value for row, _ in some])))
        for name, some in ((own, rows), (other, against))
    ]
    scale, parts = means[0].unit.scale, []
    try:
        difference = seeds.difference(pairs)
        split = [
            (a.of_each_stratum(), b.of_each_stratum()) for a, b in with_parts if a.rule.is_share
        ]
        names = [*split[0][0]] if split else []
        for name in names if 1 < len(names) <= MOST_PARTS else ():
            part = [(a[name], b[name]) for a, b in split]
            sides = []
            for mean, some in zip(means, zip(*part, strict=True), strict=True):
                value = scale * float(np.mean([side.value() for side in some]))
                sides.append(replace(mean, value=value, count=len(some[0])))
            of_part = seeds.difference(part)
            parts.append((name, Comparison(sides[0], sides[1], of_part, of_part.p_value)))
    except outcomes.NotTheSame as error:
        raise ValueError(
            f"{own} and {other} were not measured on the same items of {means[0].benchmark}: "
            f"{error}; run the race with --force"
        ) from None
    return Comparison(means[0], means[1], difference, difference.p_value), parts


# --- in words and tables -------------------------------------------------------------------------


def sentences(found: Standings) -> list[str]:
    """The race in words: what beats the control and what is worse, and how far to trust it."""
    control = found.whole["control"]
    better, worse = (
        [_describe(c) for c in control if c.verdict == verdict] for verdict in ("better", "worse")
    )
    metrics = count_of(len(found.metrics), "main metric")
    lines = [
        f"Better than the ungrouped control beyond chance: {'; '.join(better)}."
        if better
        else "Nothing beats the ungrouped control: no remedy is better than it beyond chance in "
        f"any of {metrics}."
    ]
    if worse:
        lines.append(f"Worse than the ungrouped control beyond chance: {'; '.join(worse)}.")
    base = [c for c in found.whole["base"] if c.verdict != "inside the noise"]
    lines.append(
        "Against the base beyond chance: " + "; ".join(f"{_describe(c)} {c.verdict}" for c in base)
        + "."
        if base
        else "Against the base no remedy, and not the control either, is better or worse beyond "
        "chance."
    )  # fmt: skip
    return [*lines, _trust(found)]


def _describe(c: Comparison) -> str:
    return f"{c.row.model} on {c.row.benchmark} ({c.texts()[2]} {c.row.unit.difference})"


def _trust(found: Standings) -> str:
    """How a verdict is made with this number of seeds, and what it cannot show."""
    number = sum(map(len, found.whole.values()))
    if found.num_seeds == 1:
        return (
            "Each remedy was trained with one seed: tests and intervals know the items of the "
            "benchmarks alone, and another seed may differ. Give --seeds with several."
        )
    few = (
        " Two seeds say little of how far seeds differ, which is taken to be five times as far as "
        "it looks: only large differences can be shown."
        if found.num_seeds == 2
        else ""
    )
    return (
        f"Differences are paired within each of {found.num_seeds} seeds and are means over them. "
        "Intervals and p-values know how items differ and how seeds differ. The "
        f"{number} p-values are corrected by Holm's method; intervals are of each difference "
        f"alone, so that one may exclude 0 without a verdict.{few}"
    )


def table(found: Standings, remedies: Sequence[Entrant]) -> str:
    """A block of at most 80 columns per metric: the value of every remedy, and its differences to
    the control and to the base, with a verdict where they are beyond chance."""
    blocks = []
    for metric in found.metrics:
        of_base = {c.row.model: c for c in found.whole["base"] if _metric(c) == metric}
        body = [
            (
                *(results.wrapped(one.name, 20), of_base[one.name].texts()[0]),
                *(_cell(found.of(one.name, metric, "control")), _cell(of_base[one.name])),
            )
            for one in remedies
        ]
        title = results.wrapped(printable(f"{metric[0]}, {results.short_name(metric[1])}"), 20)
        unit = next(iter(of_base.values())).row.unit.name
        heads = [title, unit, "against the control", "against the base"]
        blocks.append(tabulate(body, headers=heads, disable_numparse=True))
    return "\n\n".join(blocks)


def _cell(c: Comparison | None) -> str:
    if c is None:
        return "is the control"
    _, _, change, low, high = c.texts()
    verdict = "" if c.verdict == "inside the noise" else f"\n{c.verdict}"
    return f"{change} ({low} to {high}){verdict}"


def frame(found: Standings) -> DataFrame:
    """Every comparison as a row, those of parts too, whose ``part`` is named."""
    import pandas

    rows = [("", c) for of in found.whole.values() for c in of]
    rows += [part for of in found.parts.values() for part in of]
    made: DataFrame = compare.frame([c for _, c in rows])
    made.insert(2, "part", [printable(name) for name, _ in rows])
    return pandas.DataFrame(made)


# --- the page ------------------------------------------------------------------------------------


def render(title: str, found: Standings, base: Entrant, remedies: Sequence[Entrant]) -> str:
    """The page as text; the same bytes for the same race."""
    control = found.whole["control"]
    count = len({c.row.model for c in control if c.verdict == "better"})
    tiles = [
        (f"{count} of {len(remedies) - 1}", "remedies better than the ungrouped control", ""),
        (str(found.num_seeds), "seeds" if found.num_seeds > 1 else "seed", ""),
        (str(sum(map(len, found.whole.values()))), "comparisons", "corrected by Holm's method"),
    ]
    trained = [one for one in remedies if not one.cost.get("of")]  # others have no trainings
    if seconds := [own for one in trained if (own := one.cost.get("seconds")) is not None]:
        total = duration(found.num_seeds * sum(seconds))
        tiles.append((total, "of training", "remedies alone, over all seeds"))
    most = dict.fromkeys(found.metrics, 1)
    for c in control:
        moved = max(c.difference.wins or 0, c.difference.losses or 0)
        most[_metric(c)] = max(most[_metric(c)], moved)
    content = {
        "title": title,
        "version": __version__,
        "summary": tiles,
        "sentences": sentences(found),
        "base": base,
        "remedies": remedies,
        "found": found,
        "bars": lambda c: charts.balance(
            c.difference.wins or 0, c.difference.losses or 0, most[_metric(c)]
        ),
        "parts": _heat(found),
        "level": LEVEL,
    }
    return environment().get_template("race.html").render(content)


def _metric(c: Comparison) -> tuple[str, str]:
    return c.row.benchmark, c.row.metric


def _heat(found: Standings) -> list[dict[str, Any]]:
    """For every metric with parts, and by what it is against: the names of the remedies, and of
    every part its number of items and its comparisons."""
    tables = []
    for metric in found.metrics:
        for against in ("control", "base"):
            own = [(part, c) for part, c in found.parts[against] if _metric(c) == metric]
            rows: dict[str, dict[str, Comparison]] = {}
            for part, c in own:
                rows.setdefault(part, {})[c.row.model] = c
            if rows:
                names = list(dict.fromkeys(c.row.model for _, c in own))
                tables.append({"metric": metric, "against": against, "names": names, "rows": rows})
    return tables
