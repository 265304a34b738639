"""Trifeature: one object per picture, of 10 shapes, 10 textures and 10 colours.

It is from Hermann and Lampinen, "What shapes feature representations?" (2020); MCL (section 5) and
IFM (section 2) use it. An object of 128 pixels lies at a random place on a grey canvas of 224,
turned by an angle from [-45, 45) degrees. Its texture is a mask with a period of 10 pixels and a
random phase and angle. Where the masks of shape and texture overlap, the canvas has the colour. The
picture is stored at ``size`` (128) pixels.

The papers do not say how the set is split; here it is by combination of the three values. Each
value of an attribute has a random number, 0 to 9. A combination belongs to the test set if the sum
of its three numbers modulo 10 is below 10 * ``test_share``. So every pair of values of two
attributes is equally frequent in a split, and any two attributes are exactly independent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mclclip.data.datasets.sources import (
    Pixels,
    Sources,
    Splits,
    check_size,
    in_random_order,
    png_sample,
)
from mclclip.data.shard_writer import PackedSample

Coordinates = npt.NDArray[np.floating[Any]]
Mask = npt.NDArray[np.bool_]
CANVAS, OBJECT, GREY = 224, 128, 0.5
COLOURS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "pink": (1, 0.4, 1),
    "cyan": (0, 1, 1),
    "purple": (0.3, 0, 0.5),
    "ocean": (0.1, 0.4, 0.5),
    "orange": (1, 0.6, 0),
    "white": (1, 1, 1),
}


def build(
    sources: Sources,
    seed: int,
    *,
    size: int = 128,
    images_per_combination: int = 100,
    test_share: float = 0.2,
    texture_period: float = 10.0,
) -> Splits:
    """Renders the train and test pictures; attributes shape, texture and colour.

    ``texture_period`` is in pixels of the canvas. At a ``size`` of 32 or 64 the published 10 is too
    fine to be seen. Raises ValueError for an option out of range.
    """
    check_size(size)
    tenths = round(test_share * 10)
    if not 1 <= tenths <= 9 or abs(tenths - test_share * 10) > 1e-6:
        raise ValueError(f"test_share is {test_share}: wanted 0.1 to 0.9 in tenths")
    if images_per_combination < 1 or not 2 <= texture_period <= CANVAS:
        raise ValueError(
            f"images_per_combination is {images_per_combination} and texture_period "
            f"{texture_period}: wanted at least 1, and 2 to {CANVAS}"
        )
    places = np.random.default_rng([seed, 0]).permuted(np.tile(np.arange(10), (3, 1)), axis=1)
    all_names = enumerate(itertools.product(SHAPES, TEXTURES, COLOURS))
    digits = itertools.product(range(10), repeat=3)
    test: dict[bool, list[tuple[int, tuple[str, str, str]]]] = {False: [], True: []}
    for combination, (s, t, c) in zip(all_names, digits, strict=True):
        held_out = (places[0, s] + places[1, t] + places[2, c]) % 10 < tenths
        test[bool(held_out)].append(combination)

    def samples(part: list[tuple[int, tuple[str, str, str]]]) -> Iterator[PackedSample]:
        numbered = in_random_order(itertools.product(part, range(images_per_combination)), seed)
        for number, ((combination, (shape, texture, colour)), copy) in enumerate(numbered):
            random = np.random.default_rng([seed, 1, combination, copy])
            pixels = render(shape, texture, colour, random, texture_period)
            facts = {"shape": shape, "texture": texture, "colour": colour}
            resized = Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR)
            yield png_sample(number, np.asarray(resized), facts)

    return {"train": samples(test[False]), "test": samples(test[True])}


def render(
    shape: str, texture: str, colour: str, random: np.random.Generator, period: float = 10.0
) -> Pixels:
    """Renders a picture uint8 [224, 224, 3]; ``random`` draws position, angles and phase."""
    angle, texture_angle = np.deg2rad(random.uniform(-45, 45, 2))
    half = OBJECT / 2 * (abs(np.cos(angle)) + abs(np.sin(angle)))
    centre = random.uniform(half, CANVAS - half, 2)
    phase = random.uniform(0, period, 2)
    grid = np.arange(CANVAS, dtype=np.float32) + np.float32(0.5)
    x, y = np.meshgrid(grid - np.float32(centre[0]), grid - np.float32(centre[1]))
    inside = SHAPES[shape](*_rotate(x / (OBJECT / 2), y / (OBJECT / 2), angle))
    u, v = _rotate(x, y, texture_angle)
    inside &= TEXTURES[texture]((u + phase[0]) / period, (v + phase[1]) / period, random)
    canvas = np.full((CANVAS, CANVAS, 3), GREY)
    canvas[inside] = COLOURS[colour]
    return np.asarray(np.rint(canvas * 255), np.uint8)


def _rotate(x: Coordinates, y: Coordinates, angle: float) -> tuple[Coordinates, Coordinates]:
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return x * cos + y * sin, y * cos - x * sin


# --- shapes: functions from points [-1, 1] x [-1, 1], y downwards, to inside or not ---------------

_Corners = list[tuple[float, float]]


def _polygons(*polygons: _Corners) -> Callable[[Coordinates, Coordinates], Mask]:
    """Makes the shape of all points inside any of the polygons (even-odd rule)."""

    def inside(x: Coordinates, y: Coordinates) -> Mask:
        inside_any = np.zeros(x.shape, bool)
        for corners in polygons:
            within = np.zeros(x.shape, bool)
            for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
                if y0 != y1:
                    crossing = (x1 - x0) * (y - y0) / (y1 - y0) + x0
                    within ^= ((y0 > y) != (y1 > y)) & (x < crossing)
            inside_any |= within
        return inside_any

    return inside


def _box(left: float, top: float, right: float, bottom: float) -> _Corners:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _on_circle(radii: list[float]) -> _Corners:
    """Returns corners at equal angles, beginning at the top, at these distances from the centre."""
    angles = np.arange(len(radii)) * 2 * np.pi / len(radii)
    return [
        (float(r * np.sin(a)), float(-r * np.cos(a))) for r, a in zip(radii, angles, strict=True)
    ]


_T = 1 / 3
SHAPES: dict[str, Callable[[Coordinates, Coordinates], Mask]] = {
    "triangle": _polygons([(0, -1), (1, 1), (-1, 1)]),
    "square": _polygons(_box(-1, -1, 1, 1)),
    "plus": _polygons(_box(-_T, -1, _T, 1), _box(-1, -_T, 1, _T)),
    "circle": lambda x, y: np.asarray(x * x + y * y < 1),
    "tee": _polygons(_box(-1, -1, 1, -_T), _box(-_T, -1, _T, 1)),
    "rhombus": _polygons([(0, -1), (0.6, 0), (0, 1), (-0.6, 0)]),
    "pentagon": _polygons(_on_circle([1.0] * 5)),
    "star": _polygons(_on_circle([1.0, 0.4] * 5)),
    "fivesquare": _polygons(
        *(
            _box(x - _T, y - _T, x + _T, y + _T)
            for x in (-2 * _T, 2 * _T)
            for y in (-2 * _T, 2 * _T)
        ),
        _box(-_T, -_T, _T, _T),
    ),
    "trapezoid": _polygons([(-0.5, -0.75), (0.5, -0.75), (1, 0.75), (-1, 0.75)]),
}


# --- textures: functions from points, in units of the period, to drawn or not ---------------------


def _cell(u: Coordinates) -> Coordinates:
    """Returns the distance of points from the middle of their cell, [-0.5, 0.5)."""
    return np.asarray(u - np.floor(u) - np.float32(0.5))


def _hexgrid(u: Coordinates, v: Coordinates, random: np.random.Generator) -> Mask:
    """Draws the borders of a honeycomb whose cells have a width of 1.5 periods."""
    u, v, height = u / 1.5, v / 1.5, np.float32(np.sqrt(3))
    centres = [
        (_cell(u + shift), height * _cell(v / height + shift))
        for shift in (np.float32(0), np.float32(0.5))
    ]
    distances = [np.maximum(abs(x), abs(x) / 2 + abs(y) * height / 2) for x, y in centres]
    return np.asarray(np.minimum(*distances) > 0.36)


def _noise(u: Coordinates, v: Coordinates, random: np.random.Generator) -> Mask:
    """Draws each block of half a period with the probability 1/2."""
    blocks = random.random((128, 128)) < 0.5
    columns, rows = (np.floor(2 * w).astype(np.int64) % 128 for w in (u, v))
    return np.asarray(blocks[rows, columns])


def _triangles(u: Coordinates, v: Coordinates, random: np.random.Generator) -> Mask:
    height = _cell(v) + np.float32(0.5)
    return np.asarray((abs(_cell(u)) < height / 2) & (height < 0.9))


def _rain(u: Coordinates, v: Coordinates, random: np.random.Generator) -> Mask:
    """Draws upright dashes of 1.2 periods; every second column is lower by one period."""
    shifted = v / 2 + np.float32(0.5) * (np.floor(u) % 2)
    return np.asarray((abs(_cell(u)) < 0.2) & (abs(_cell(shifted)) < 0.3))


def _pluses(u: Coordinates, v: Coordinates, random: np.random.Generator) -> Mask:
    across, down = abs(_cell(u)), abs(_cell(v))
    return np.asarray((np.minimum(across, down) < 0.12) & (np.maximum(across, down) < 0.36))


TEXTURES: dict[str, Callable[[Coordinates, Coordinates, np.random.Generator], Mask]] = {
    "solid": lambda u, v, random: np.ones(u.shape, bool),
    "stripes": lambda u, v, random: np.asarray(abs(_cell(v)) < 0.25),
    "grid": lambda u, v, random: np.asarray(np.minimum(abs(_cell(u)), abs(_cell(v))) < 0.15),
    "hexgrid": _hexgrid,
    "dots": lambda u, v, random: np.asarray(_cell(u) ** 2 + _cell(v) ** 2 < 0.35**2),
    "noise": _noise,
    "triangles": _triangles,
    "zigzags": lambda u, v, random: np.asarray(abs(_cell(v + abs(_cell(u / 2)) * 2)) < 0.22),
    "rain": _rain,
    "pluses": _pluses,
}
