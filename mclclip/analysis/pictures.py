"""Figures as PNG files, drawn by matplotlib without a display.

Every function takes what a figure's JSON file holds, so that the picture can be drawn again, or in
another way, from the data alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.files import whole_file

Series = Mapping[str, Sequence[float]]


def library() -> Any:
    """matplotlib's Figure class; ValueError, one line, where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError(
            "pictures need the package matplotlib, which is not installed: pip install "
            "'mclclip[analyse]'"
        ) from None
    return Figure


@contextmanager
def _figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """A figure of this size in inches, which is saved when the block ends."""
    figure = library()(figsize=(width, height), layout="constrained", dpi=120)
    yield figure
    with whole_file(path) as file:
        # Without the version of matplotlib, which says nothing of the figure.
        figure.savefig(file, format="png", metadata={"Software": None})


def bars(path: Path, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Values in percent: one group of bars per metric, one bar per model."""
    metrics = list(groups)
    models = list(dict.fromkeys(model for values in groups.values() for model in values))
    with _figure(path, max(5.0, 0.28 * len(models) * len(metrics) + 4), 3.6) as figure:
        axes = figure.subplots()
        width = 0.8 / max(len(models), 1)
        for number, model in enumerate(models):
            places = np.arange(len(metrics)) + (number - (len(models) - 1) / 2) * width
            axes.bar(places, [groups[m].get(model, np.nan) for m in metrics], width, label=model)
        axes.set_xticks(np.arange(len(metrics)), metrics)
        axes.set_ylabel("percent")
        axes.set_title(title)
        figure.legend(loc="outside right upper", fontsize="small")


def lines(path: Path, title: str, series: Series, x: str, y: str, *, log: bool = False) -> None:
    """One line per series over its places 1, 2, ...; ``log``: both axes are logarithmic."""
    with _figure(path, 5.5, 3.6) as figure:
        axes = figure.subplots()
        for name, values in series.items():
            axes.plot(np.arange(1, len(values) + 1), values, label=name)
        if log:
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_title(title)
        axes.legend(fontsize="small")


def matrix(
    path: Path, title: str, rows: Sequence[str], columns: Sequence[str], values: Any
) -> None:
    """A table of numbers between 0 and 1 as shades, with the numbers in them."""
    shades = np.asarray(values, dtype=np.float64)
    with _figure(path, 1.8 + 0.8 * len(columns), 1.4 + 0.5 * len(rows)) as figure:
        axes = figure.subplots()
        axes.imshow(shades, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
        axes.set_yticks(range(len(rows)), rows)
        for (row, column), value in np.ndenumerate(shades):
            colour = "white" if value > 0.6 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
        axes.set_title(title)


def histograms(
    path: Path, title: str, edges: Sequence[float], panels: Mapping[str, Series]
) -> None:
    """A panel per name with shares by bin, one step line per series."""
    with _figure(path, 5.5, 0.6 + 1.7 * len(panels)) as figure:
        every = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (name, series) in zip(every, panels.items(), strict=True):
            for label, shares in series.items():
                axes.stairs(shares, edges, label=label, fill=True, alpha=0.5)
            axes.set_title(name, fontsize="small")
            axes.legend(fontsize="small")
        every[-1].set_xlabel("cosine")
        figure.suptitle(title)


def sheet(path: Path, title: str, rows: Sequence[Sequence[Any]], labels: Sequence[str]) -> None:
    """Pictures in rows, the first of each apart from the others; ``rows`` hold [H, W, 3] arrays."""
    width = max(len(row) for row in rows)
    with _figure(path, 0.9 * width + 1.2, 0.95 * len(rows) + 0.5) as figure:
        grid = figure.subplots(len(rows), width, squeeze=False)
        for axes in grid.ravel():
            axes.set_axis_off()
        for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
            for axes, image in zip(grid[number], row, strict=False):
                axes.imshow(image)
            grid[number, 0].set_title(label, fontsize="x-small", loc="left")
        figure.suptitle(title)
