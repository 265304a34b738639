"""Tables of results.jsonl, and whether a difference is larger than chance explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mclclip.config.plain_yaml import read_yaml
from mclclip.eval import results
from mclclip.eval.results import Reference, Result
from mclclip.eval.units import PERCENT
from mclclip.report import charts
from mclclip.report.verdict import Verdict
from mclclip.run.opened import Run
from mclclip.verbs import compare
from mclclip.verbs.compare import BASE, TWIN, Comparison

MINIMAL_PAIRS = "mmvp_vlm"
"""The protocol whose metrics are Types of minimal pairs."""


def colour_of(model: str) -> str:
    """The colour of a model in charts, a variable of the page's style."""
    if model == "stage_0":
        return "base"
    if model.startswith(TWIN):
        return "control"
    if model.startswith("control_"):
        return "other"
    return "joined" if model.startswith(("concat_", "soup_")) else "stage"


# --- tables --------------------------------------------------------------------------------------


def tables(rows: Sequence[Result], references: Sequence[Reference]) -> list[dict[str, Any]]:
    """The figures of each ``benchmark``, without metrics of the level ``detail``.

    metrics     the columns, each with its number of trials, and its unit unless it is percent
    figures     by model and source (of published ones, else empty) the figures by metric: a
                ``text``, the ``interval`` of ours, and the value in ``percent`` or None
    is_pairs    whether metrics are Types of minimal pairs, shown as a heat map
    headline    the metric of the strips, for each of our models its strip, and their axis
    notes       what a reader must know, as the table of ``eval`` has it
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
    for metric, own in columns.items():
        unit, counts = own[0].unit, "/".join(map(str, sorted({row.count for row in own})))
        note = unit.note.replace("\n", " ")
        trials[metric] = f"{counts} {own[0].protocol.get('trials', '')}{note}"
        digits = unit.decimals(row.value for row in own)
        for row in own:
            percent = row.unit == PERCENT
            of_value, of_bounds = (1, 0) if percent else (digits, digits)
            figures.setdefault((row.model, ""), {})[metric] = {
                "text": f"{row.value:.{of_value}f}",
                "interval": f"{row.ci_low:.{of_bounds}f}-{row.ci_high:.{of_bounds}f}",
                "percent": row.value if percent else None,
            }
    for one in references:
        if one.benchmark == benchmark and one.metric in columns:
            cell = {"text": f"{one.value:.1f}", "interval": "", "percent": one.value}
            figures.setdefault((one.model, one.source), {})[one.metric] = cell
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
    """``strips``: by model, the figures of a metric with their intervals, from the lowest bound to
    the highest; and the ``axis`` below them."""
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


@dataclass(frozen=True)
class Comparisons:
    """The comparisons that the run is judged by, with stage 0 and with the ungrouped control's, and
    the ``verdict``, with the reason where there is none."""

    with_base: Sequence[Comparison]
    with_control: Sequence[Comparison]
    verdict: Verdict | None
    missing: str = ""

    def of(self, model: str) -> list[Comparison]:
        """Comparisons of a model with stage 0, the first one of each benchmark."""
        first: dict[str, Comparison] = {}
        for one in self.with_base:
            if one.row.model == model:
                first.setdefault(one.row.benchmark, one)
        return [*first.values()]


def comparisons(run: Run) -> Comparisons:
    """Compares what was measured, in the metrics of the level ``headline``."""
    try:
        verdict = Verdict.of(compare.read_runs([run.directory]))
    except (ValueError, FileNotFoundError) as error:
        return Comparisons([], [], None, f"{error}.")
    with_base = [c for c in verdict.family if c.against.model == BASE]
    with_control = [c for c in verdict.family if c.against.model.startswith(TWIN)]
    return Comparisons(with_base, with_control, verdict)


def first_of_each(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], list[Comparison]]:
    """The comparisons of every encoder in the first metric of every benchmark, and the others."""
    first: dict[str, str] = {}
    for one in comparisons:
        first.setdefault(one.row.benchmark, one.row.metric)
    main = [one for one in comparisons if one.row.metric == first[one.row.benchmark]]
    return main, [one for one in comparisons if one.row.metric != first[one.row.benchmark]]
