"""Figure: the gates that SimLAP has learned of every class, and their sums (SimLAP, Fig. 9).

Gates [C, D] are in (0, 1), a row per class; their sum is the size of a class's subspace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.inputs import GATES, Figure, Inputs, unit_rows


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """Per stage the gates of its classes as shades, and beside them their sums as bars."""
    data: dict[str, dict[str, Any]] = {}
    panels = []
    for name, learned in inputs.gates.items():
        gates = learned.of_classes()
        names, sizes = [*learned.names[: len(gates)]], gates.astype(np.float64).sum(axis=1)
        panels.append((name, names, gates, sizes))
        data[name] = {"classes": names, "gates": gates.tolist(), "sizes": sizes.tolist()}
    if not data:
        return None
    heights = [drawing.height_of(len(names)) for _, names, _, _ in panels]
    with drawing.canvas(path, 9.0, sum(heights) + 0.5) as figure:
        grid = figure.subplots(
            len(panels), 2, squeeze=False, width_ratios=[4, 1], height_ratios=heights, sharey="row"
        )
        for (left, right), (name, names, gates, sizes) in zip(grid, panels, strict=True):
            shades = left.imshow(
                gates, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest"
            )
            left.set_title(name, fontsize="small")
            left.set_xlabel("dimension")
            drawing.name_ticks(left, None, names)
            right.barh(np.arange(len(names)), sizes)
            right.set_xlabel("sum of gates")
            figure.colorbar(shades, ax=left, label="gate")
        figure.suptitle("gates of classes")
    return data


def unlike_pairs(gates: ArrayLike, count: int) -> NDArray[np.int64]:
    """[P, 2]: pairs of different classes, from those whose gates are least alike to the most.

    Alike is the cosine of their rows of ``gates`` [C, D]. ``count`` pairs of each end; all of them
    where there are fewer.
    """
    rows = unit_rows(gates)
    first, second = np.triu_indices(len(rows), 1)
    order = np.argsort((rows @ rows.T)[first, second], kind="stable")
    if len(order) > 2 * count:
        order = np.concatenate([order[:count], order[-count:]])
    return np.column_stack([first, second])[order].astype(np.int64)


FIGURE = Figure(draw, GATES)
