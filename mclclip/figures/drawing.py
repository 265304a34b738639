"""Pictures as PNG files, drawn by matplotlib without a display.

Here are the kinds of pictures that several figures have; what one figure alone draws stands there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mclclip.util.files import needed, whole_file

Series = Mapping[str, Sequence[float]]
_NAMED = 20  # more colours than this stand without their names


def library(what: str = "a picture") -> Any:
    """matplotlib's module of figures; ValueError, one line, where it is not installed."""
    return needed("matplotlib.figure", what, "pip install 'mclclip[analyse]'")


@contextmanager
def canvas(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yields a figure of this size in inches, which is saved as a PNG when the block ends."""
    figure = library().Figure(figsize=(width, height), layout="constrained", dpi=120)
    yield figure
    with whole_file(path) as file:
        # Without the version of matplotlib, which says nothing of the figure.
        figure.savefig(file, format="png", metadata={"Software": None})


def bars(path: Path, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Values in percent: one group of bars per metric, one bar per model."""
    metrics = list(groups)
    models = list(dict.fromkeys(model for values in groups.values() for model in values))
    with canvas(path, max(5.0, 0.28 * len(models) * len(metrics) + 4), 3.6) as figure:
        axes = figure.subplots()
        width = 0.8 / max(len(models), 1)
        for number, model in enumerate(models):
            places = np.arange(len(metrics)) + (number - (len(models) - 1) / 2) * width
            axes.bar(places, [groups[m].get(model, np.nan) for m in metrics], width, label=model)
        axes.set_xticks(np.arange(len(metrics)), metrics)
        axes.set_ylabel("percent")
        axes.set_title(title)
        figure.legend(loc="outside right upper", fontsize="small")


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
    """One line per series over ``places`` (None: 1, 2, ...), with a dashed upright line at
    ``marked``; ``log``: both axes are logarithmic."""
    with canvas(path, 7.0, 3.6) as figure:
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
"""Points [N, 2], the codes [N] of their colours (None: there are none), and the codes' values."""


def planes(path: Path, title: str, rows: Sequence[Mapping[str, Plane]]) -> None:
    """Rows of panels with coloured points; the points of code -1 are grey.

    All panels of a row have the same values, which are named beside the last one.
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
    """Points by their code, and large the mean of each code's; what has none lies below."""
    codes = np.full(len(places), -1) if codes is None else np.asarray(codes)
    shades = ["lightgrey", *_shades(len(values))]
    for number, value in enumerate(("none", *values), start=-1):
        if (has_code := codes == number).any():
            colour, points = [shades[number + 1]], places[has_code]
            axes.scatter(*points.T, s=5, c=colour, label=value)
            if number >= 0:
                axes.scatter(*points.mean(axis=0), s=70, c=colour, edgecolors="black", zorder=3)


def _shades(count: int) -> Sequence[Any]:
    """As many colours, which differ as much as can be."""
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
    """Pictures [H, W, 3] in rows with labels; rows may have different lengths."""
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
