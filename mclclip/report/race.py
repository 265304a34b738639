"""Shows a race as a table, a page and a few sentences: what every remedy gains and loses.

Every remedy is compared with the base and with the ungrouped control, in the main metrics of every
benchmark, over all seeds (``eval.seeds``). The p-values of these comparisons are corrected together
by Holm's method, and those of parts of a metric, such as Types of minimal pairs, by themselves.
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
from mclclip.eval import comparisons, outcomes, results, seeds
from mclclip.eval.comparisons import LEVEL, Comparison
from mclclip.report import charts, duration, environment
from mclclip.run.opened import Run
from mclclip.run.runlog import count_of
from mclclip.util.files import printable
from mclclip.verbs import compare

if TYPE_CHECKING:
    from pandas import DataFrame

PAGE, TABLE = "race.html", "race.csv"
MOST_PARTS = 40
"""The parts of a metric, such as Types, are shown if there are at most so many: a thousand classes
are not."""

Against = Literal["base", "control"]


@dataclass(frozen=True)
class Entrant:
    """A remedy, the control or the base, as it ran in the race.

    encoder  its name in results.jsonl
    runs     the run directory of every seed
    about    what the remedy is, in a few words
    options  its overrides, in words
    cost     figures for a seed: steps, samples, operations and their share of the control's,
             seconds and rank_hours (None: unknown); and ``of``, the remedy whose trainings it uses
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
    """All comparisons of a race, with the base and with the control.

    whole  comparisons in main metrics
    parts  comparisons in the parts of a main metric, in the order of ``whole``
    """

    whole: Mapping[Against, Sequence[Comparison]]
    parts: Mapping[Against, Sequence[Part]]
    num_seeds: int

    @cached_property
    def metrics(self) -> list[tuple[str, str]]:
        """The main metrics, each as (benchmark, metric), in order."""
        return [*dict.fromkeys(_metric(c) for of in self.whole.values() for c in of)]

    def of(self, name: str, metric: tuple[str, str], against: Against) -> Comparison | None:
        """The comparison of the remedy ``name`` in one metric; None for the control against
        itself."""
        for c in self.whole[against]:
            if c.row.model == name and _metric(c) == metric:
                return c
        return None


# --- comparisons ---------------------------------------------------------------------------------


def standings(
    base: Entrant,
    control: Entrant,
    remedies: Sequence[Entrant],
    benchmarks: Sequence[str],
    metrics: Sequence[str] = (),
) -> Standings:
    """Compares all ``remedies``, the control among them, with the base and with the control.

    ``metrics`` names those to compare, as ``BENCHMARK/METRIC`` (none: the main ones of the
    ``benchmarks``).

    Raises FileNotFoundError and ValueError if figures or outcomes are missing, damaged or not of
    the same items, and ValueError for a metric that the base has no figure of.
    """
    read = compare.Reader()
    cells = {
        run: {(r.benchmark, r.metric, r.model): (r, path) for r, path in compare.rows_of(Run(run))}
        for entrant in (base, *remedies)
        for run in entrant.runs
    }
    measured = {f"{benchmark}/{name}" for benchmark, name, _ in cells[base.runs[0]]}
    if unknown := [name for name in metrics if name not in measured]:
        raise ValueError(f"{base.runs[0]} has no figure of {unknown[0]}")

    def rows_of(entrant: Entrant, metric: tuple[str, str]) -> list[compare.Row]:
        rows = []
        for run in entrant.runs:
            row = cells[run].get((*metric, entrant.encoder))
            if row is None:
                raise FileNotFoundError(
                    f"{run} has no figure of {entrant.encoder} on {metric[0]} ({metric[1]}): the "
                    "race has not come so far, run it without --only"
                )
            rows.append(row)
        return rows

    others: list[tuple[Against, Entrant]] = [("base", base), ("control", control)]
    pairs = [(against, (remedy.name, other.name)) for against, other in others
             for remedy in remedies if remedy.name != other.name]  # fmt: skip
    whole: dict[Against, list[Comparison]] = {"base": [], "control": []}
    parts: dict[Against, list[Part]] = {"base": [], "control": []}
    for (benchmark, name, model), (row, _) in cells[base.runs[0]].items():
        is_main = row.protocol.get("level") == "headline"
        is_compared = f"{benchmark}/{name}" in metrics if metrics else is_main
        if model != base.encoder or benchmark not in benchmarks or not is_compared:
            continue
        rows = {e.name: rows_of(e, (benchmark, name)) for e in (base, *remedies)}
        compared = _compare(rows, [names for _, names in pairs], read)
        for (against, _), (comparison, of_parts) in zip(pairs, compared, strict=True):
            whole[against].append(comparison)
            parts[against] += of_parts
    count = len(whole["base"])
    corrected = comparisons.correct([*whole["base"], *whole["control"]])
    whole = {"base": corrected[:count], "control": corrected[count:]}
    for against, uncorrected in parts.items():
        names = [name for name, _ in uncorrected]
        corrected_parts = comparisons.correct([c for _, c in uncorrected])
        parts[against] = [*zip(names, corrected_parts, strict=True)]
    return Standings(whole, parts, len(base.runs))


def _compare(
    rows: Mapping[str, Sequence[compare.Row]],
    pairs: Sequence[tuple[str, str]],
    read: compare.Reader,
) -> list[tuple[Comparison, list[Part]]]:
    """Compares pairs of entrants in a metric, by their means over seeds, and in its parts; p-values
    are not corrected yet.

    ``rows`` has the rows of each entrant for every seed, and ``pairs`` the names of each pair.
    """
    mean = {
        name: replace(some[0][0], model=name, value=float(np.mean([row.value for row, _ in some])))
        for name, some in rows.items()
    }
    # A figure that is pooled over all items has no parts: those of the benchmark's average are
    # used.
    with_parts = {name: [read.beside(*row) for row in some] for name, some in rows.items()}
    strata = {
        name: [each.of_each_stratum() if each.rule.is_share else {} for each in some]
        for name, some in with_parts.items()
    }
    names = [*next(iter(strata.values()))[0]]
    try:
        every = {name: [read(*row) for row in some] for name, some in rows.items()}
        whole = seeds.differences(every, pairs)
        compared = [(Comparison(mean[a], mean[b], d, d.p_value), list[Part]())
                    for (a, b), d in zip(pairs, whole, strict=True)]  # fmt: skip
        for part in names if 1 < len(names) <= MOST_PARTS else ():
            of_part = {name: [each[part] for each in some] for name, some in strata.items()}
            means = {
                name: replace(
                    mean[name],
                    value=mean[name].unit.scale * float(np.mean([each.value() for each in some])),
                    count=len(some[0]),
                )
                for name, some in of_part.items()
            }
            differences = seeds.differences(of_part, pairs)
            for (a, b), (_, parts), d in zip(pairs, compared, differences, strict=True):
                parts.append((part, Comparison(means[a], means[b], d, d.p_value)))
    except outcomes.NotTheSame as error:
        benchmark = next(iter(mean.values())).benchmark
        raise ValueError(f"{benchmark}: {error}; run the race with --force") from None
    return compared


# --- in words and tables -------------------------------------------------------------------------


def sentences(race: Standings) -> list[str]:
    """Describes a race: what is better or worse than the control and the base, and how far to trust
    it."""
    control = race.whole["control"]
    better = [_describe(c) for c in control if c.verdict == "better"]
    worse = [_describe(c) for c in control if c.verdict == "worse"]
    metrics = count_of(len(race.metrics), "main metric")
    lines = []
    if better:
        lines.append(f"Better than the ungrouped control beyond chance: {'; '.join(better)}.")
    elif control:  # empty in a race of the control alone
        lines.append(
            "Nothing beats the ungrouped control: no remedy is better than it beyond chance in "
            f"any of {metrics}."
        )
    if worse:
        lines.append(f"Worse than the ungrouped control beyond chance: {'; '.join(worse)}.")
    base = [c for c in race.whole["base"] if c.verdict != "inside the noise"]
    lines.append(
        "Against the base beyond chance: " + "; ".join(f"{_describe(c)} {c.verdict}" for c in base)
        + "."
        if base
        else "Against the base no remedy, and not the control either, is better or worse beyond "
        "chance."
    )  # fmt: skip
    return [*lines, _trust(race)]


def _describe(c: Comparison) -> str:
    metric = f"{c.row.benchmark}, {results.short_name(c.row.metric)}"
    return f"{c.row.model} on {metric} ({c.texts()[2]} {c.row.unit.difference})"


def _trust(race: Standings) -> str:
    """Explains how verdicts are made with this number of seeds, and what they cannot show."""
    number = sum(map(len, race.whole.values()))
    if race.num_seeds == 1:
        return (
            "Each remedy was trained with one seed: tests and intervals know the items of the "
            "benchmarks alone, and another seed may differ. Give --seeds with several."
        )
    return (
        f"Differences are paired within each of {race.num_seeds} seeds and are means over them. "
        "Intervals and p-values know how items differ and how seeds differ, the latter at least as "
        "far as on average over all comparisons of a metric. The "
        f"{number} p-values are corrected by Holm's method; intervals are of each difference "
        "alone, so that one may exclude 0 without a verdict."
    )


def table(race: Standings, remedies: Sequence[Entrant]) -> str:
    """Formats a table of at most 80 columns for each metric: the value of every remedy, and its
    differences to the control and to the base, with a verdict if they are beyond chance."""
    blocks = []
    for metric in race.metrics:
        of_base = {c.row.model: c for c in race.whole["base"] if _metric(c) == metric}
        body = [
            (
                *(results.wrap_name(remedy.name, 20), of_base[remedy.name].texts()[0]),
                *(_cell(race.of(remedy.name, metric, "control")), _cell(of_base[remedy.name])),
            )
            for remedy in remedies
        ]
        title = results.wrap_name(printable(f"{metric[0]}, {results.short_name(metric[1])}"), 20)
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


def frame(race: Standings) -> DataFrame:
    """All comparisons as rows of a table; the column ``part`` names the part, or is empty."""
    rows = [("", c) for of in race.whole.values() for c in of]
    rows += [part for of in race.parts.values() for part in of]
    table = comparisons.frame([c for _, c in rows])
    table.insert(2, "part", [printable(name) for name, _ in rows])
    return table


# --- the page ------------------------------------------------------------------------------------


def render(title: str, race: Standings, base: Entrant, remedies: Sequence[Entrant]) -> str:
    """The HTML page; the same race gives the same bytes."""
    control = race.whole["control"]
    count = len({c.row.model for c in control if c.verdict == "better"})
    tiles = [
        (f"{count} of {len(remedies) - 1}", "remedies better than the ungrouped control", ""),
        (str(race.num_seeds), "seeds" if race.num_seeds > 1 else "seed", ""),
        (str(sum(map(len, race.whole.values()))), "comparisons", "corrected by Holm's method"),
    ]
    # A remedy with ``of`` uses the trainings of another one.
    costs = [remedy.cost for remedy in remedies if not remedy.cost.get("of")]
    if seconds := [cost["seconds"] for cost in costs if cost.get("seconds") is not None]:
        total = duration(race.num_seeds * sum(seconds))
        tiles.append((total, "of training", "remedies alone, over all seeds"))
    most = dict.fromkeys(race.metrics, 1)
    for c in control:
        moved = max(c.difference.wins or 0, c.difference.losses or 0)
        most[_metric(c)] = max(most[_metric(c)], moved)
    content = {
        "title": title,
        "version": __version__,
        "summary": tiles,
        "sentences": sentences(race),
        "base": base,
        "remedies": remedies,
        "race": race,
        "bars": lambda c: charts.balance(
            c.difference.wins or 0, c.difference.losses or 0, most[_metric(c)]
        ),
        "parts": _heat(race),
        "level": LEVEL,
    }
    return environment().get_template("race.html").render(content)


def _metric(c: Comparison) -> tuple[str, str]:
    return c.row.benchmark, c.row.metric


def _heat(race: Standings) -> list[dict[str, Any]]:
    """Makes the tables of parts, two for every metric that has parts: ``against`` the control and
    the base. ``rows`` maps each part to the comparisons of the remedies ``names``."""
    tables = []
    for metric in race.metrics:
        for against in ("control", "base"):
            parts = [(part, c) for part, c in race.parts[against] if _metric(c) == metric]
            rows: dict[str, dict[str, Comparison]] = {}
            for part, c in parts:
                rows.setdefault(part, {})[c.row.model] = c
            if rows:
                names = list(dict.fromkeys(c.row.model for _, c in parts))
                tables.append({"metric": metric, "against": against, "names": names, "rows": rows})
    return tables
