"""Renders the data of the demo: small pictures, their captions, and minimal pairs.

Every picture has seven independent attributes. Its caption names each with a certain probability,
as web captions do: background and colour nearly always, shape and count seldom. The attributes that
are often named nearly identify each picture of a batch, so that a CLIP model trained on them has
little reason to learn the others. Minimal pairs, two pictures that differ in one attribute only,
show which attributes a model sees. Everything is a pure function of the seed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

_COLOURS = {
    "red": (255, 70, 70),
    "orange": (255, 160, 40),
    "yellow": (250, 240, 70),
    "green": (90, 240, 90),
    "cyan": (80, 235, 245),
    "blue": (110, 140, 255),
    "pink": (255, 140, 220),
    "white": (245, 245, 245),
}
_BACKGROUNDS = {
    "black": (15, 15, 15),
    "gray": (70, 70, 70),
    "maroon": (90, 10, 15),
    "brown": (80, 50, 20),
    "olive": (65, 70, 10),
    "forest": (10, 75, 25),
    "navy": (15, 20, 95),
    "violet": (70, 15, 85),
}
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "background": tuple(_BACKGROUNDS),
    "colour": tuple(_COLOURS),
    "position": ("left", "middle", "right"),
    "texture": ("plain", "striped", "dotted", "checked"),
    "size": ("small", "large"),
    "count": ("one", "two", "three", "four"),
    "shape": ("square", "triangle", "cross", "ring"),
}
"""The values of each attribute; all combinations are equally likely."""

MENTION_RATES: Mapping[str, float] = {
    "background": 0.95,
    "colour": 0.95,
    "position": 0.5,
    "texture": 0.4,
    "size": 0.35,
    "count": 0.35,
    "shape": 0.35,
}
"""Probability that a caption names an attribute."""

RARELY_NAMED = tuple(name for name, rate in MENTION_RATES.items() if rate <= 0.5)
"""The attributes that a CLIP trained on these captions has little reason to see."""

IMAGE_SIZE = 32
_OVERSAMPLE = 3  # drawn larger and averaged, so that edges are smooth
_CANVAS = IMAGE_SIZE * _OVERSAMPLE

Values = Mapping[str, str]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pattern:
    """A picture uint8 [32, 32, 3] and its caption."""

    image: Bytes
    caption: str
    values: Values


def draw_values(rng: np.random.Generator) -> dict[str, str]:
    """Draws values of all attributes, independently and uniformly."""
    return {name: values[rng.integers(len(values))] for name, values in ATTRIBUTES.items()}


def caption(values: Values, mentions: Collection[str]) -> str:
    """Writes the caption of a picture, which names only the attributes in ``mentions``."""
    words = ["a"]
    words += [values[name] for name in ("size", "colour") if name in mentions]
    words.append(values["shape"] if "shape" in mentions else "thing")
    if "position" in mentions:
        words += ["at", values["position"]]
    ground = [values[name] for name in ("texture", "background") if name in mentions]
    if ground:
        words += ["on", *ground, "ground"]
    if "count" in mentions:
        words += ["with", values["count"], "dots"]
    return " ".join(words)


def patterns(num_samples: int, seed: int) -> Iterator[Pattern]:
    """Yields pictures with captions; picture i is a function of (seed, i)."""
    for number in range(num_samples):
        rng = np.random.default_rng([seed, 1, number])
        values = draw_values(rng)
        mentions = {name for name, rate in MENTION_RATES.items() if rng.random() < rate}
        yield Pattern(render(values, rng), caption(values, mentions), values)


def minimal_pairs(attribute: str, num_pairs: int, seed: int) -> Iterator[tuple[Pattern, Pattern]]:
    """Yields pairs that differ in one attribute; each caption names every attribute.

    Noise, exact place and tints are the same in both pictures.
    """
    choices = ATTRIBUTES[attribute]
    for number in range(num_pairs):
        rng = np.random.default_rng([seed, 2, list(ATTRIBUTES).index(attribute), number])
        first = draw_values(rng)
        shift = int(rng.integers(1, len(choices)))
        other = choices[(choices.index(first[attribute]) + shift) % len(choices)]
        nuisance = int(rng.integers(2**31))
        left, right = (
            Pattern(
                render(values, np.random.default_rng(nuisance)),
                caption(values, ATTRIBUTES),
                values,
            )
            for values in (first, first | {attribute: other})
        )
        yield left, right


def render(values: Values, rng: np.random.Generator) -> Bytes:
    """Renders a picture, uint8 [32, 32, 3]; ``rng`` draws noise, exact place and tints."""
    ground = np.array(_BACKGROUNDS[values["background"]], float) + rng.normal(0, 6, 3)
    offset = rng.integers(0, 6 * _OVERSAMPLE, 2)
    tint = rng.normal(0, 8, 3)
    scale, *jitter = rng.uniform(-1, 1, 4)
    noise = rng.normal(0, 5, (IMAGE_SIZE, IMAGE_SIZE, 3))
    mask = _texture(values["texture"], offset)
    image = Image.fromarray(_clip(ground + 40 * mask[..., None]))
    draw = ImageDraw.Draw(image)
    red, green, blue = (int(c) for c in _clip(np.array(_COLOURS[values["colour"]]) + tint))
    radius = {"small": 4.6, "large": 7.2}[values["size"]] * (1 + 0.06 * scale)
    x = {"left": 8, "middle": 16, "right": 24}[values["position"]] + jitter[0]
    y = 13 + 2.5 * jitter[1]
    _shape(draw, values["shape"], x, y, radius, (red, green, blue))
    _dots(draw, ATTRIBUTES["count"].index(values["count"]) + 1, 16 + 4 * jitter[2])
    small = np.asarray(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BOX), float)
    return _clip(small + noise)


def _clip(values: Floats) -> Bytes:
    return np.clip(values, 0, 255).astype(np.uint8)


def _texture(name: str, offset: Integers) -> Integers:
    """Draws a mask [canvas, canvas] of 0 and 1 with a period of 6 pixels, moved by ``offset``."""
    period = 6 * _OVERSAMPLE
    y, x = np.indices((_CANVAS, _CANVAS), np.int64) + offset[:, None, None]
    stripes, rows = x // (period // 2) % 2, y // (period // 2) % 2
    dots = np.hypot(x % period - period / 2, y % period - period / 2) < 0.3 * period
    masks = {"plain": np.zeros_like(x), "striped": stripes, "checked": (stripes + rows) % 2}
    mask: Integers = (masks | {"dotted": dots})[name].astype(np.int64)
    return mask


def _shape(
    draw: ImageDraw.ImageDraw,
    name: str,
    x: float,
    y: float,
    radius: float,
    colour: tuple[int, int, int],
) -> None:
    cx, cy, r = x * _OVERSAMPLE, y * _OVERSAMPLE, radius * _OVERSAMPLE
    if name == "square":
        s = 0.88 * r
        draw.rectangle((cx - s, cy - s, cx + s, cy + s), fill=colour)
    elif name == "triangle":
        w, h = 1.1 * r, 0.85 * r
        draw.polygon([(cx, cy - w), (cx + w, cy + h), (cx - w, cy + h)], fill=colour)
    elif name == "cross":
        s = 0.36 * r
        draw.rectangle((cx - r, cy - s, cx + r, cy + s), fill=colour)
        draw.rectangle((cx - s, cy - r, cx + s, cy + r), fill=colour)
    else:
        width = max(1, int(0.42 * r))
        draw.ellipse((cx - r, cy - r, cx + r, cy + r), outline=colour, width=width)


def _dots(draw: ImageDraw.ImageDraw, count: int, x: float) -> None:
    """Draws ``count`` white dots in a row at the lower edge, centred at ``x``."""
    r = 1.5 * _OVERSAMPLE
    for number in range(count):
        cx = (x + (number - (count - 1) / 2) * 5) * _OVERSAMPLE
        cy = 28 * _OVERSAMPLE
        draw.ellipse((cx - r, cy - r, cx + r, cy + r), fill=(255, 255, 255), outline=(0, 0, 0))
