"""Charts as inline SVG. Colours are variables of the page's style, so that they follow its theme.

All functions are pure. Text is shown escaped. Lines and bars have coordinates in a fixed box that
scales with the page; a strip has coordinates in percent, so that it is as wide as its cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import ArrayLike

from mclclip.util.files import clean

WIDTH, HEIGHT = 340, 180
MOST_SIZES = 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 16, 8, 34


def lines(
    title: str, x: str, series: Sequence[tuple[str, Sequence[tuple[float, float]]]]
) -> Markup:
    """Lines over a common pair of axes, of which ``x`` names the lower one.

    ``series``: the colour of each line, a variable of the page's style such as ``stage``, and its
    points, of which those that are not finite are left out.
    """
    kept = [
        (colour, [point for point in points if all(map(math.isfinite, point))])
        for colour, points in series
    ]
    if not (every := [point for _, points in kept for point in points]):
        return Markup("")
    xs, ys = zip(*every, strict=True)
    across = _Scale(*round_ends(min(xs), max(xs)), _LEFT, WIDTH - _RIGHT)
    up = _Scale(*round_ends(min(ys), max(ys)), HEIGHT - _BOTTOM, _TOP)
    body = _axes(across, up, x)
    for colour, points in kept:
        # A line of one point would not be seen; one from it to itself is a dot.
        drawn = points * 2 if len(points) == 1 else points
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in drawn)
        body += f'<polyline class="line" style="stroke:var(--{colour})" points="{path}"/>'
    return _svg(title, body)


def sizes(title: str, x: str, numbers: ArrayLike, colour: str) -> Markup:
    """Sizes side by side as one filled outline, largest first and from 0 on; a bar for each of a
    few. Of more than ``MOST_SIZES`` as many are drawn that lie evenly over their order."""
    heights = np.sort(np.asarray(numbers, dtype=np.float64))[::-1]
    if not len(heights):
        return Markup("")
    if len(heights) > MOST_SIZES:
        heights = heights[np.linspace(0, len(heights) - 1, MOST_SIZES).astype(np.int64)]
    across = _Scale(0.0, float(len(heights)), _LEFT, WIDTH - _RIGHT, whole=True)
    up = _Scale(*round_ends(0.0, float(heights[0])), HEIGHT - _BOTTOM, _TOP)
    gap = 1.5 if len(heights) <= 40 else 0.0
    bars = "".join(
        f"M{across(number) + gap / 2:.1f},{up(0):.1f}V{up(height):.1f}"
        f"H{across(number + 1) - gap / 2:.1f}V{up(0):.1f}Z"
        for number, height in enumerate(heights.tolist())
    )
    filled = f'<path style="fill:var(--{colour})" d="{bars}"/>'
    return _svg(title, _axes(across, up, x) + filled)


def strip(
    figure: tuple[float, float, float], colour: str, *, ends: tuple[float, float], digits: int = 1
) -> Markup:
    """A value, and the bounds of its interval: a point on a bar. The whole width goes from one of
    ``ends`` to the other, and the places that ``strip_axis`` names are marked. ``digits``: decimals
    of what is read out."""
    place = _Scale(*ends, 0.0, 100.0)
    value, low, high = map(place, figure)
    read_out = "{}, from {} to {}".format(*(f"{v:.{digits}f}" for v in figure))
    grid = "".join(
        f'<line class="grid" x1="{mark:.1f}%" x2="{mark:.1f}%" y1="0" y2="18"/>'
        for mark in map(place, place.ticks())
    )
    return Markup(
        f'<svg class="strip" role="img" aria-label="{read_out}">{grid}'
        f'<line class="range" style="stroke:var(--{colour})" x1="{low:.1f}%" x2="{high:.1f}%" '
        f'y1="9" y2="9"/><circle style="fill:var(--{colour})" cx="{value:.1f}%" cy="9" r="4.5"/>'
        "</svg>"
    )


def strip_axis(ends: tuple[float, float], *, whole: bool = False) -> Markup:
    """The numbers of an axis below strips, from one end to the other; ``whole``: of counts."""
    place = _Scale(*ends, 0.0, 100.0, whole)
    texts = "".join(
        f'<text class="tick" x="{place(tick):.1f}%" y="12" '
        f'text-anchor="{_anchor(tick, ends)}">{number(tick)}</text>'
        for tick in place.ticks()
    )
    return Markup(
        '<svg class="strip" aria-hidden="true"><line class="axis" x1="0%" x2="100%" y1="1" y2="1"/>'
        f"{texts}</svg>"
    )


def _anchor(tick: float, ends: tuple[float, float]) -> str:
    return "start" if tick <= ends[0] else "end" if tick >= ends[1] else "middle"


def round_ends(
    low: float, high: float, most: tuple[float, float] | None = None
) -> tuple[float, float]:
    """The ends of an axis that values from ``low`` to ``high`` lie on: round numbers that its ticks
    name, within ``most``."""
    if high <= low:
        room = abs(low) / 10 or 1.0
        low, high = low - room, high + room
    step = _Scale(low, high, 0.0, 1.0).step()
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    least, largest = most or (low, high)
    return max(low, least), min(high, largest)


def balance(won: int, lost: int, most: int) -> Markup:
    """Items won as a bar to the right of the middle, and lost to its left; ``most``: of a side."""
    share = 50.0 / max(most, 1)
    return Markup(
        f'<svg class="strip" role="img" aria-label="{won} won, {lost} lost">'
        f'<rect style="fill:var(--worse)" x="{50 - lost * share:.1f}%" width="{lost * share:.1f}%" '
        'y="3" height="12"/>'
        f'<rect style="fill:var(--better)" x="50%" width="{won * share:.1f}%" y="3" height="12"/>'
        '<line class="axis" x1="50%" x2="50%" y1="0" y2="18"/></svg>'
    )


# --- axes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """Values from ``low`` to ``high`` as coordinates from ``start`` to ``stop``; ``whole``: only
    whole numbers are marked."""

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
        """The distance of two ticks; the scale must have a width."""
        least = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(least))
        steps = (power * size for size in (1, 2, 2.5, 5, 10))
        step = next(step for step in steps if step >= least * (1 - 1e-9))
        return max(step, 1.0) if self.whole else step

    def ticks(self) -> list[float]:
        """Round numbers within the scale, two to six of them where it has a width."""
        if self.high <= self.low:
            return [self.low]
        step = self.step()
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _axes(across: _Scale, up: _Scale, x: str) -> str:
    """Grid lines with their numbers, and the name of the lower axis."""
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 5}" y="{up(tick) + 3.5:.1f}" text-anchor="end">'
        f"{number(tick)}</text>"
        for tick in up.ticks()
    ]
    parts += [
        f'<text class="tick" x="{across(tick):.1f}" y="{bottom + 14}" text-anchor="middle">'
        f"{number(tick)}</text>"
        for tick in across.ticks()
    ]
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
        f'<text class="name" x="{right}" y="{HEIGHT - 4}" text-anchor="end">'
        f"{escape(clean(x))}</text>"
    )
    return "".join(parts)


def number(value: float) -> str:
    """A number for an axis: short, with k and M for thousands and millions."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.4g}"


def _svg(title: str, body: str) -> Markup:
    """A chart whose ``body`` holds markup of this file alone, in which names are escaped."""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(clean(title))}">{body}</svg>'
    )
