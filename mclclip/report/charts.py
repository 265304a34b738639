"""Makes charts as inline SVG by the macros of ``charts.html``.

Colours are names of variables in the page's style, so that they follow its theme. Lines and bars
have coordinates in a box of fixed size that scales with the page. A strip has coordinates in
percent, so that it is as wide as its cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from mclclip.report import environment

WIDTH, HEIGHT = 340, 180
MOST_SIZES = 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 16, 8, 34


def lines(
    title: str, x: str, series: Sequence[tuple[str, Sequence[tuple[float, float]]]]
) -> Markup:
    """A chart of lines with common axes; ``x`` names the horizontal one.

    ``series`` has for each line its colour, such as 'stage', and its points. Points that are not
    finite are left out. The result is empty if no point is left.
    """
    finite_series = [
        (colour, [point for point in points if all(map(math.isfinite, point))])
        for colour, points in series
    ]
    if not (every := [point for _, points in finite_series for point in points]):
        return Markup("")
    xs, ys = zip(*every, strict=True)
    across = Scale(*round_ends(min(xs), max(xs)), _LEFT, WIDTH - _RIGHT)
    up = Scale(*round_ends(min(ys), max(ys)), HEIGHT - _BOTTOM, _TOP)
    # A single point is doubled: a line from a point to itself is a dot.
    paths = [
        (
            colour,
            " ".join(
                f"{across(a):.1f},{up(b):.1f}"
                for a, b in (points * 2 if len(points) == 1 else points)
            ),
        )
        for colour, points in finite_series
    ]
    return _draw("chart", title=title, x=x, across=across, up=up, lines=paths)


def sizes(title: str, x: str, numbers: ArrayLike, colour: str) -> Markup:
    """A chart of sizes as bars, largest first; bars touch each other if there are more than 40.

    Of more than ``MOST_SIZES``, so many are drawn, evenly over their order.
    """
    heights = np.sort(np.asarray(numbers, dtype=np.float64))[::-1]
    if not len(heights):
        return Markup("")
    if len(heights) > MOST_SIZES:
        heights = heights[np.linspace(0, len(heights) - 1, MOST_SIZES).astype(np.int64)]
    across = Scale(0.0, float(len(heights)), _LEFT, WIDTH - _RIGHT, whole=True)
    up = Scale(*round_ends(0.0, float(heights[0])), HEIGHT - _BOTTOM, _TOP)
    gap = 1.5 if len(heights) <= 40 else 0.0
    bars = "".join(
        f"M{across(number) + gap / 2:.1f},{up(0):.1f}V{up(height):.1f}"
        f"H{across(number + 1) - gap / 2:.1f}V{up(0):.1f}Z"
        for number, height in enumerate(heights.tolist())
    )
    return _draw("chart", title=title, x=x, across=across, up=up, bars=bars, colour=colour)


def strip(
    figure: tuple[float, float, float], colour: str, *, ends: tuple[float, float], digits: int = 1
) -> Markup:
    """A strip that shows a value and its interval (value, low, high) as a point on a bar.

    Its width stands for the range from one of ``ends`` to the other; the numbers of ``strip_axis``
    are marked. ``digits`` is the number of decimals for screen readers.
    """
    value, low, high = figure
    return _draw(
        "strip", scale=Scale(*ends, 0.0, 100.0), value=value, low=low, high=high, colour=colour,
        digits=digits,
    )  # fmt: skip


def strip_axis(ends: tuple[float, float], *, whole: bool = False) -> Markup:
    """The axis below strips, with numbers from one of ``ends`` to the other; ``whole`` for
    counts."""
    return _draw("strip_axis", scale=Scale(*ends, 0.0, 100.0, whole))


def round_ends(
    low: float, high: float, most: tuple[float, float] | None = None
) -> tuple[float, float]:
    """The ends of an axis for values from ``low`` to ``high``: the next round numbers, which ticks
    name, but not outside of ``most``."""
    if high <= low:
        room = abs(low) / 10 or 1.0
        low, high = low - room, high + room
    step = Scale(low, high, 0.0, 1.0).step()
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    least, largest = most or (low, high)
    return max(low, least), min(high, largest)


def balance(won: int, lost: int, most: int) -> Markup:
    """A bar from the middle to the right for items won, and one to the left for items lost. A half
    of the width stands for ``most`` items."""
    return _draw("balance", won=won, lost=lost, share=50.0 / max(most, 1))


def _draw(macro: str, **values: Any) -> Markup:
    texts = {"width": WIDTH, "height": HEIGHT, "number": number}
    macros = environment().get_template("charts.html", globals=texts).module
    return Markup(getattr(macros, macro)(**values).strip())


# --- axes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Turns values from ``low`` to ``high`` into coordinates from ``start`` to ``stop``. With
    ``whole``, ticks are at whole numbers only."""

    low: float
    high: float
    start: float
    stop: float
    whole: bool = False

    def __call__(self, value: float) -> float:
        width = self.high - self.low
        share = (value - self.low) / width if width > 0 else 0.5
        return self.start + share * (self.stop - self.start)

    def step(self) -> float:
        """The distance between two ticks; ``high`` must be above ``low``."""
        least = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(least))
        steps = (power * size for size in (1, 2, 2.5, 5, 10))
        step = next(step for step in steps if step >= least * (1 - 1e-9))
        return max(step, 1.0) if self.whole else step

    def ticks(self) -> list[float]:
        """Two to six round numbers from ``low`` to ``high``, or one number if these are equal."""
        if self.high <= self.low:
            return [self.low]
        step = self.step()
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Formats a number for an axis, in few characters: '0.5', '20k', '1.5M' or '7.5e-4'."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    if 0 < abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"
