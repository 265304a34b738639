"""Charts as inline SVG. Colours are variables of the page's style, so that they follow its theme.

All functions are pure. Text is shown escaped. Lines and bars have coordinates in a fixed box that
scales with the page; a strip has coordinates in percent, so that it is as wide as its cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from mclclip.files import shown

WIDTH, HEIGHT = 340, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 16, 8, 34


@dataclass(frozen=True)
class Line:
    """A line of a chart; ``colour`` is a variable of the page's style, such as ``stage``."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str


def lines(title: str, x: str, series: Sequence[Line], *, log: bool = False) -> Markup:
    """Lines over a common pair of axes, of which ``x`` names the lower one; ``log``: y is
    logarithmic. Points that are not finite, and with ``log`` not positive, are left out."""
    kept = [
        Line(
            line.name,
            [p for p in line.points if all(map(math.isfinite, p)) and (p[1] > 0 or not log)],
            line.colour,
        )
        for line in series
    ]
    points = [point for line in kept for point in line.points]
    if not points:
        return Markup("")
    xs, ys = ([point[axis] for point in points] for axis in (0, 1))
    across, up = _Scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT), _vertical(ys, log)
    body = [_axes(across, up, x)]
    for line in kept:
        # A line of one point would not be seen; one from it to itself is a dot.
        drawn = [*line.points, *line.points] if len(line.points) == 1 else line.points
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in drawn)
        body.append(
            Markup('<polyline class="line" style="stroke:var(--{})" points="{}"/>').format(
                line.colour, path
            )
        )
    return _svg(title, body)


def steps(title: str, x: str, heights: Sequence[float], colour: str) -> Markup:
    """Heights side by side as one filled outline, with y from 0 on; a bar for each of a few."""
    if not len(heights):
        return Markup("")
    across = _Scale(0.0, float(len(heights)), _LEFT, WIDTH - _RIGHT, whole=True)
    up = _Scale(0.0, float(max(heights)), HEIGHT - _BOTTOM, _TOP)
    gap = 1.5 if len(heights) <= 40 else 0.0
    bars = "".join(
        f"M{across(place) + gap / 2:.1f},{up(0):.1f}V{up(height):.1f}"
        f"H{across(place + 1) - gap / 2:.1f}V{up(0):.1f}Z"
        for place, height in enumerate(heights)
    )
    filled = Markup('<path style="fill:var(--{})" d="{}"/>').format(colour, bars)
    return _svg(title, [_axes(across, up, x), filled])


def strip(
    figure: tuple[float, float, float],
    colour: str,
    *,
    ends: tuple[float, float] = (0.0, 100.0),
    digits: int = 1,
) -> Markup:
    """A value, and the bounds of its interval: a point on a bar. The whole width goes from one of
    ``ends`` to the other; its quarters are marked. ``digits``: decimals of what is read out."""
    first, last = ends
    value, low, high = (100 * (v - first) / (last - first) if last > first else 50 for v in figure)
    read_out = "{}, from {} to {}".format(*(f"{v:.{digits}f}" for v in figure))
    grid = Markup("").join(
        Markup('<line class="grid" x1="{0}%" x2="{0}%" y1="0" y2="18"/>').format(mark)
        for mark in (25, 50, 75)
    )
    return Markup(
        '<svg class="strip" role="img" aria-label="{}">{}'
        '<line class="range" style="stroke:var(--{})" x1="{:.1f}%" x2="{:.1f}%" y1="9" y2="9"/>'
        '<circle style="fill:var(--{})" cx="{:.1f}%" cy="9" r="4.5"/></svg>'
    ).format(read_out, grid, colour, low, high, colour, value)


def balance(won: int, lost: int, most: int) -> Markup:
    """Items won as a bar to the right of the middle, and lost to its left; ``most``: of a side."""
    share = 50.0 / max(most, 1)
    return Markup(
        '<svg class="strip" role="img" aria-label="{0} won, {1} lost">'
        '<rect style="fill:var(--worse)" x="{2:.1f}%" width="{3:.1f}%" y="3" height="12"/>'
        '<rect style="fill:var(--better)" x="50%" width="{4:.1f}%" y="3" height="12"/>'
        '<line class="axis" x1="50%" x2="50%" y1="0" y2="18"/></svg>'
    ).format(won, lost, 50 - lost * share, lost * share, won * share)


# --- axes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """Values from ``low`` to ``high`` as coordinates from ``start`` to ``stop``; ``whole``: only
    whole numbers are marked."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log10(number) for number in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round numbers within the scale, two to six of them where it has a width."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            powers = [10.0**n for n in range(first, last + 1)]
            if len(powers) >= 2:
                return powers[:: max(1, len(powers) // 4)]
        if self.high <= self.low:
            return [self.low]
        step = _round_up((self.high - self.low) / 4)
        step = max(step, 1.0) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_up(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * size for size in (1, 2, 2.5, 5, 10) if power * size >= step * (1 - 1e-9))


def _vertical(values: Sequence[float], log: bool) -> _Scale:
    low, high = min(values), max(values)
    room = 0.0 if log else 0.05 * (high - low)
    return _Scale(low - room, high + room, HEIGHT - _BOTTOM, _TOP, log)


def _axes(across: _Scale, up: _Scale, x: str) -> Markup:
    """Grid lines with their numbers, and the name of the lower axis."""
    parts = []
    for tick in up.ticks():
        place = f"{up(tick):.1f}"
        parts.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>'
                '<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>'
            ).format(_LEFT, WIDTH - _RIGHT, place, place, _LEFT - 5, up(tick) + 3.5, number(tick))
        )
    for tick in across.ticks():
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(
                across(tick), HEIGHT - _BOTTOM + 14, number(tick)
            )
        )
    parts.append(
        Markup(
            '<line class="axis" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>'
            '<text class="name" x="{1}" y="{3}" text-anchor="end">{4}</text>'
        ).format(_LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM, HEIGHT - 4, shown(x))
    )
    return Markup("").join(parts)


def number(value: float) -> str:
    """A number for an axis: short, with k and M for thousands and millions."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.4g}"


def _svg(title: str, body: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(WIDTH, HEIGHT, shown(title), Markup("").join(body))


def largest_first(sizes: ArrayLike, count: int = 200) -> list[float]:
    """Sizes, largest first; of more than ``count`` as many that lie evenly over their order."""
    order = np.sort(np.asarray(sizes, dtype=np.float64))[::-1]
    if len(order) > count:
        order = order[np.linspace(0, len(order) - 1, count).astype(np.int64)]
    found: list[float] = order.tolist()
    return found
