"""Figure: how alike classes are by three measures (SimLAP, Fig. 12)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.inputs import GATES, Figure, Inputs, unit_rows, without_nan
from mclclip.figures.overlap import class_similarity

_OPEN = 0.5
_COLUMNS = 3


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """The dimensions that two classes both open, the mean cosine of their samples' features, and
    the cosine of their label embeddings: a square table of classes for each, as shades.

    Features are those that the stage's encoder exports; a stage without embeddings lacks them.
    """
    data: dict[str, Any] = {}
    panels: dict[str, tuple[list[str], NDArray[Any]]] = {}
    for name, learned in inputs.gates.items():
        gates = learned.of_classes()
        names = [*learned.names[: len(gates)]]
        tables = {"open in both": gate_similarity(gates)}
        codes = learned.codes[inputs.ids]
        known = (codes >= 0) & (codes < len(names))
        if name in inputs.features and known.any():
            classes, cosines = class_similarity(inputs.features[name][known], codes[known])
            tables["features"] = np.full(
                (len(names), len(names)), np.nan
            )  # of classes with too few samples
            tables["features"][np.ix_(classes, classes)] = cosines
        labels = unit_rows(learned.filter.labels.weight.numpy()[: len(names)])
        tables["label embeddings"] = labels @ labels.T
        panels |= {f"{name}: {measure}": (names, table) for measure, table in tables.items()}
        data[name] = {"classes": names} | {m: without_nan(table) for m, table in tables.items()}
    if not data:
        return None
    _draw_tables(path, panels)
    return data


def gate_similarity(gates: ArrayLike) -> NDArray[np.float64]:
    """[C, C]: the number of dimensions that two classes both open, whose gates [C, D] are above a
    half."""
    sharp = (np.asarray(gates) > _OPEN).astype(np.float64)
    return sharp @ sharp.T


def _draw_tables(path: Path, panels: dict[str, tuple[list[str], NDArray[Any]]]) -> None:
    """A panel per table, each on a scale of its own, which the diagonal, a class with itself, does
    not set."""
    lines = -(-len(panels) // _COLUMNS)
    side = max(drawing.height_of(len(names)) for names, _ in panels.values())
    with drawing.canvas(path, (side + 1.4) * _COLUMNS, (side + 0.7) * lines + 0.4) as figure:
        grid = figure.subplots(lines, _COLUMNS, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes, (name, (names, table)) in zip(grid, panels.items(), strict=False):
            others = table[~np.eye(len(table), dtype=bool) & np.isfinite(table)]
            low, high = (others.min(), others.max()) if len(others) else (0.0, 1.0)
            shades = axes.imshow(table, vmin=low, vmax=high, cmap="viridis")
            axes.set_title(name, fontsize="small")
            drawing.name_ticks(axes, names, names)
            figure.colorbar(shades, ax=axes, shrink=0.8)
        figure.suptitle("how alike classes are")


FIGURE = Figure(draw, GATES)
