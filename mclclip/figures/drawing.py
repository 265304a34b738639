"""Draws PNG files by matplotlib, without a display.

The kinds of drawings here serve several figures; a drawing of a single figure is in its module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.util.files import needed, whole_file

Series = Mapping[str, Sequence[float]]
_NAMED = 20  # a legend names at most so many colours


def library(what: str = "a picture") -> Any:
    """Imports matplotlib's module of figures; ValueError, which names ``what``, if it is
    missing."""
    return needed("matplotlib.figure", what, "pip install 'mclclip[analyse]'")


@contextmanager
def canvas(path: Path, width: float, height: float, math: bool = False) -> Iterator[Any]:
    """Yields a matplotlib figure of this size in inches, and saves it as a PNG after the block.

    What is between two dollar signs is a formula only with ``math``, which the ticks of logarithmic
    axes are; a value such as "$5 to $10" is none.
    """
    figure = library().Figure(figsize=(width, height), layout="constrained", dpi=120)
    from matplotlib import rc_context

    with rc_context({"text.parse_math": math}):
        yield figure
        with whole_file(path) as file:
            # Without its version, files are equal for any matplotlib that draws the same.
            figure.savefig(file, format="png", metadata={"Software": None})


def table(
    path: Path,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Any,
    *,
    most: float = 1.0,
    digits: int = 2,
) -> None:
    """Draws a table of ``values`` [rows, columns] with shades from 0 to ``most``; NaN is empty."""
    numbers = np.asarray(values, dtype=float)
    width = 1.4 + 0.8 * len(columns) + 0.075 * max(map(len, (*rows, *columns)))
    height = 0.8 + 0.05 * max(map(len, columns)) + 0.3 * len(rows)
    with canvas(path, width, height) as figure:
        axes = figure.subplots()
        axes.imshow(numbers, vmin=0, vmax=most, cmap="Blues", aspect="auto")
        axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
        axes.set_yticks(range(len(rows)), rows)
        for (row, column), value in np.ndenumerate(numbers):
            if not np.isnan(value):
                colour = "white" if value > 0.6 * most else "black"
                text = f"{value:.{digits}f}"
                axes.text(column, row, text, ha="center", va="center", color=colour)
        axes.set_title(title)


def lines(
    path: Path,
    title: str,
    series: Series,
    x: str,
    y: str,
    *,
    log: bool = False,
    places: Sequence[float] | None = None,
    marked: float | None = None,
) -> None:
    """Draws a line for each series by name.

    ``x`` and ``y`` name the axes, which are logarithmic with ``log``. The values of a series stand
    at ``places`` of the x axis (None: at 1, 2, ...). A dashed vertical line is drawn at ``marked``.
    """
    with canvas(path, 7.0, 3.6, math=log) as figure:
        axes = figure.subplots()
        for name, values in series.items():
            xs, marker = (np.arange(1, len(values) + 1), "") if places is None else (places, "o")
            axes.plot(xs, values, marker=marker, markersize=3, label=name)
        if marked is not None:
            axes.axvline(marked, linestyle="--", linewidth=1, color="grey")
        if log:
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_title(title)
        figure.legend(loc="outside right upper", fontsize="small")


Plane = tuple[Any, Any, Sequence[str]]
"""Points [N, 2]; for each point the number [N] of its value, which gives its colour (-1: it has
none; None: no point has one); and the values, such as ('cat', 'dog')."""


def planes(path: Path, title: str, rows: Sequence[Mapping[str, Plane]]) -> None:
    """Draws rows of panels by name, each with coloured points; points without a value are grey.

    All panels of a row have the same values, which a legend beside the last panel names.
    """
    width = max(map(len, rows))
    with canvas(path, 3.4 * width + 1.6, 3.4 * len(rows) + 0.4) as figure:
        grid = figure.subplots(len(rows), width, squeeze=False)
        for axes in grid.ravel():
            axes.set_axis_off()
        for line, panels in zip(grid, rows, strict=True):
            for axes, (name, (places, codes, values)) in zip(line, panels.items(), strict=False):
                axes.set_axis_on()
                axes.set_xticks([])
                axes.set_yticks([])
                axes.set_title(name, fontsize="small")
                _scatter(axes, np.asarray(places), codes, values)
            if codes is not None and len(values) <= _NAMED:
                axes.legend(
                    loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="x-small", markerscale=2
                )
        figure.suptitle(title)


def _scatter(axes: Any, places: Any, codes: Any, values: Sequence[str]) -> None:
    """Draws the points of a panel, and a large dot at the mean of the points of each value. Points
    without a value are drawn first, below the others."""
    codes = np.full(len(places), -1) if codes is None else np.asarray(codes)
    shades = ["lightgrey", *_shades(len(values))]
    for number, value in enumerate(("none", *values), start=-1):
        if (has_code := codes == number).any():
            colour, points = [shades[number + 1]], places[has_code]
            # Matplotlib leaves labels that begin with _ out of a legend.
            axes.scatter(*points.T, s=5, c=colour, label=f" {value}" if value[:1] == "_" else value)
            if number >= 0:
                axes.scatter(*points.mean(axis=0), s=70, c=colour, edgecolors="black", zorder=3)


def _shades(count: int) -> Sequence[Any]:
    """Returns ``count`` colours that differ as much as possible."""
    from matplotlib import colormaps

    if count <= _NAMED:
        return list(colormaps["tab10" if count <= 10 else "tab20"](np.arange(count)))
    return list(colormaps["gist_rainbow"](np.linspace(0.0, 1.0, count)))


def sheet(
    path: Path,
    title: str,
    rows: Sequence[Sequence[Any]],
    labels: Sequence[str],
) -> None:
    """Draws rows of pictures [H, W, 3]; each row has a label, and rows can have any length."""
    width = max(len(row) for row in rows)
    with canvas(path, 0.9 * width + 1.2, 0.95 * len(rows) + 0.5) as figure:
        grid = figure.subplots(len(rows), width, squeeze=False)
        for axes in grid.ravel():
            axes.set_axis_off()
        for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
            for axes, image in zip(grid[number], row, strict=False):
                axes.imshow(image)
            grid[number, 0].set_title(label, fontsize="x-small", loc="left")
        figure.suptitle(title)
