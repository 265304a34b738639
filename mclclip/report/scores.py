"""Makes the tables of results.jsonl for the page, and compares encoders beyond chance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mclclip.config.plain_yaml import read_yaml
from mclclip.eval import results
from mclclip.eval.comparisons import Comparison
from mclclip.eval.results import Reference, Result
from mclclip.eval.units import PERCENT
from mclclip.report import charts
from mclclip.verbs.compare import BASE, TWIN

MINIMAL_PAIRS = "mmvp_vlm"
"""The name of the protocol whose metrics are Types of minimal pairs."""


def colour_of(model: str) -> str:
    """The colour of a model in charts, such as 'stage', a variable of the page's style."""
    if model == BASE:
        return "base"
    if model.startswith(TWIN):
        return "control"
    if model.startswith("control_"):
        return "other"
    return "joined" if model.startswith(("concat_", "soup_")) else "stage"


# --- tables --------------------------------------------------------------------------------------


def tables(rows: Sequence[Result], references: Sequence[Reference]) -> list[dict[str, Any]]:
    """Makes the table of each ``benchmark``, without metrics of the level ``detail``.

    metrics       the columns, each with its number of trials, and its unit unless it is percent
    figures       (model, source) -> metric -> its ``text``, its ``interval``, and its value in
                  ``percent`` or None. Published figures have a source and no interval
    is_pairs      True if metrics are Types of minimal pairs, which are shown as a heat map
    headline      the metric that is shown as strips
    strips, axis  the strip of each measured model, and the axis below them
    notes         the notes below the table of ``mclclip eval``
    """
    main = [row for row in rows if row.protocol.get("level") != "detail"]
    return [
        _table(benchmark, [row for row in main if row.benchmark == benchmark], references)
        for benchmark in dict.fromkeys(row.benchmark for row in main)
    ]


def _table(
    benchmark: str, rows: Sequence[Result], references: Sequence[Reference]
) -> dict[str, Any]:
    columns: dict[str, list[Result]] = {}
    for row in rows:
        columns.setdefault(row.metric, []).append(row)
    figures: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    trials = {}
    for metric, cells in columns.items():
        unit, counts = cells[0].unit, "/".join(map(str, sorted({row.count for row in cells})))
        note = unit.note.replace("\n", " ")
        trials[metric] = f"{counts} {cells[0].protocol.get('trials', '')}{note}"
        digits = unit.decimals(row.value for row in cells)
        for row in cells:
            percent = row.unit == PERCENT
            of_value, of_bounds = (1, 0) if percent else (digits, digits)
            figures.setdefault((row.model, ""), {})[metric] = {
                "text": f"{row.value:.{of_value}f}",
                "interval": f"{row.ci_low:.{of_bounds}f}-{row.ci_high:.{of_bounds}f}",
                "percent": row.value if percent else None,
            }
    for reference in references:
        if reference.benchmark == benchmark and reference.metric in columns:
            value = reference.value
            cell = {"text": f"{value:.1f}", "interval": "", "percent": value}
            figures.setdefault((reference.model, reference.source), {})[reference.metric] = cell
    headlines = [row.metric for row in rows if row.protocol.get("level") == "headline"]
    headline = (headlines or [rows[0].metric])[0]
    return {
        "benchmark": benchmark,
        "metrics": trials,
        "figures": figures,
        "is_pairs": any(row.protocol.get("name") == MINIMAL_PAIRS for row in rows),
        "headline": headline,
        **_strips(columns[headline]),
        "notes": results.notes(rows),
    }


def _strips(rows: Sequence[Result]) -> dict[str, Any]:
    """``strips``, the figures of a metric with their intervals by model, and their ``axis``."""
    unit = rows[0].unit
    lowest, highest = min(row.ci_low for row in rows), max(row.ci_high for row in rows)
    ends = charts.round_ends(lowest, highest, (0.0, 100.0) if unit == PERCENT else None)
    digits = unit.decimals(row.value for row in rows)
    strips = {
        row.model: charts.strip(
            (row.value, row.ci_low, row.ci_high), colour_of(row.model), ends=ends, digits=digits
        )
        for row in rows
    }
    return {"strips": strips, "axis": charts.strip_axis(ends)}


def references() -> list[Reference]:
    """The published figures of all suites that are shipped."""
    suites = Path(results.__file__).resolve().parent / "suites"
    published = [results.published(read_yaml(path)) for path in sorted(suites.glob("*.yaml"))]
    return list(dict.fromkeys(one for suite in published for one in suite))


# --- paired comparisons --------------------------------------------------------------------------


def by_opponent(family: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    """Divides the comparisons that a run is judged by into those with stage 0 and those with the
    ungrouped control, each under a title."""
    titles = {"Against stage 0, the base": BASE, "Against the ungrouped control": TWIN}
    groups = [
        (title, [c for c in family if c.against.model.startswith(other)])
        for title, other in titles.items()
    ]
    return [group for group in groups if group[1]]


def first_of_each(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], list[Comparison]]:
    """Divides comparisons into those in the first metric of each benchmark, and the others."""
    first: dict[str, str] = {}
    for c in comparisons:
        first.setdefault(c.row.benchmark, c.row.metric)
    main = [c for c in comparisons if c.row.metric == first[c.row.benchmark]]
    return main, [c for c in comparisons if c.row.metric != first[c.row.benchmark]]
