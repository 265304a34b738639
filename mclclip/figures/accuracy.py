"""Figure: every result in percent by benchmark, metric and model (MCL, Table 1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mclclip.eval.units import PERCENT
from mclclip.figures import drawing
from mclclip.figures.inputs import Figure, Inputs


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """Draws bars of all rows of results.jsonl that are in percent."""
    groups: dict[str, dict[str, float]] = {}
    for row in inputs.run.result_rows:
        if row.unit == PERCENT:
            groups.setdefault(f"{row.benchmark}\n{row.metric}", {})[row.model] = row.value
    if not groups:
        return None
    drawing.bars(path, "accuracy by encoder", groups)
    return {"percent": groups}


FIGURE = Figure(draw, "rows in results.jsonl: run 'mclclip eval'")
