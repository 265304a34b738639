"""Tables of results.jsonl, and whether a difference is larger than chance explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mclclip import compare
from mclclip.compare import Comparison
from mclclip.config.plain_yaml import read_yaml
from mclclip.eval import results
from mclclip.eval.outcomes import PERCENT
from mclclip.eval.results import Reference, Result
from mclclip.opened_run import Run
from mclclip.report import charts

MINIMAL_PAIRS = "mmvp_vlm"
"""The protocol whose metrics are Types of minimal pairs."""

_UNGROUPED = "control_ungrouped_"
_BEST = ("concat_stage_norm", "concat_raw", "concat_weighted")


def colour_of(model: str) -> str:
    """The colour of a model in charts, a variable of the page's style."""
    if model == "stage_0":
        return "base"
    if model.startswith(_UNGROUPED):
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
    headline    the metric of the strips, and for each of our models its strip
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
        "strips": _strips(columns[headline]),
        "notes": results.notes(rows),
    }


def _strips(rows: Sequence[Result]) -> dict[str, Markup]:
    """By model, the figures of a metric with their intervals: percent from 0 to 100, those of
    another unit from the lowest bound to the highest."""
    unit, ends = rows[0].unit, (0.0, 100.0)
    if unit != PERCENT:
        ends = min(row.ci_low for row in rows), max(row.ci_high for row in rows)
    digits = unit.decimals(row.value for row in rows)
    return {
        row.model: charts.strip(
            (row.value, row.ci_low, row.ci_high), colour_of(row.model), ends=ends, digits=digits
        )
        for row in rows
    }


def best_of(run: Run, models: Sequence[str]) -> str | None:
    """The encoder of ``models`` that stands for the run: of a fine-tuning the one that was chosen
    by its figures, as its verdict has it; of other runs the concat, or the last stage. None where
    that is stage 0."""
    if any(row.benchmark == results.CHOOSE for row in run.result_rows):
        best = results.best(run.result_rows)
        return best if best in models and best != "stage_0" else None
    for name in _BEST:
        if name in models:
            return name
    stages = sorted(
        (name for name in models if name.startswith("stage_")),
        key=lambda name: int(number) if (number := name[len("stage_") :]).isdecimal() else -1,
    )
    return stages[-1] if stages and stages[-1] != "stage_0" else None


def references() -> list[Reference]:
    """The published figures of all suites that are shipped."""
    suites = Path(results.__file__).resolve().parent / "suites"
    published = [results.published(read_yaml(path)) for path in sorted(suites.glob("*.yaml"))]
    return list(dict.fromkeys(one for suite in published for one in suite))


# --- paired comparisons --------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparisons:
    """Comparisons of the run's encoders with stage 0, and with the ungrouped control's; each with
    the reason where there are none."""

    with_base: Sequence[Comparison]
    with_control: Sequence[Comparison]
    no_base: str = ""
    no_control: str = ""

    def of(self, model: str) -> list[Comparison]:
        """Comparisons of a model with stage 0."""
        return [one for one in self.with_base if one.row.model == model]


def comparisons(run: Run) -> Comparisons:
    """Compares what was measured, in the metrics of the level ``headline``."""
    models = list(dict.fromkeys(row.model for row in run.result_rows))
    twins = {name: _UNGROUPED + name for name in models if _UNGROUPED + name in models}
    # Of the controls only one that was chosen is compared with stage 0.
    best = best_of(run, models)
    own = [n for n in models if n == best or not (n == "stage_0" or n.startswith("control_"))]
    no_base = "" if "stage_0" in models else "stage_0 was not evaluated."
    if not own:
        no_base = "Only stage_0 was evaluated."
    no_control = "" if twins else "No ungrouped control was evaluated (controls=[ungrouped])."
    base, control = [], []
    try:
        rows = compare.read_runs([run.directory])
    except FileNotFoundError as error:
        return Comparisons([], [], f"{error}.", no_control)
    try:
        if not no_base:
            base = compare.compare(rows, own, "stage_0")
    except (ValueError, FileNotFoundError) as error:
        no_base = f"{error}."
    try:
        for name, twin in twins.items():
            control += compare.compare(rows, [name], twin)
    except (ValueError, FileNotFoundError) as error:
        control, no_control = [], f"{error}."
    # Those with controls were compared one by one: here they are corrected for their number.
    return Comparisons(base, compare.corrected(control), no_base, no_control)


def reported(comparisons: Sequence[Comparison]) -> Comparison | None:
    """The first of some comparisons, of a fine-tuning's those of the share that it is reported on;
    None where there are none."""
    on_share = [one for one in comparisons if one.row.benchmark == results.REPORT]
    return next(iter(on_share or comparisons), None)


def first_of_each(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], list[Comparison]]:
    """The comparisons of every encoder in the first metric of every benchmark, and the others."""
    first: dict[str, str] = {}
    for one in comparisons:
        first.setdefault(one.row.benchmark, one.row.metric)
    main = [one for one in comparisons if one.row.metric == first[one.row.benchmark]]
    return main, [one for one in comparisons if one.row.metric != first[one.row.benchmark]]
