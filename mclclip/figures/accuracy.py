"""Figure: every result in percent by benchmark, metric and model (MCL, Table 1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mclclip.eval.results import short_name
from mclclip.eval.units import PERCENT
from mclclip.figures import drawing
from mclclip.figures.inputs import Inputs, MissingInput


def draw(inputs: Inputs, path: Path) -> dict[str, Any]:
    """Draws a table of the results in percent, without metrics of the level ``detail``: a row for
    each metric, a column for each encoder."""
    groups: dict[str, dict[str, float]] = {}
    for row in inputs.run.result_rows:
        if row.unit == PERCENT and row.protocol.get("level") != "detail":
            name = f"{row.benchmark}, {short_name(row.metric)}"
            groups.setdefault(name, {})[row.model] = row.value
    if not groups:
        raise MissingInput("rows in results.jsonl: run 'mclclip eval'")
    models = dict.fromkeys(model for values in groups.values() for model in values)
    values = [[of_metric.get(model) for model in models] for of_metric in groups.values()]
    drawing.table(path, "percent", [*groups], [*models], values, most=100.0, digits=1)
    return {"percent": groups}
