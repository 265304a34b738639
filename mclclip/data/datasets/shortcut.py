"""Anybody's captioned pictures with a shortcut: something easy to see that solves the batch.

Web data hold such: stock agencies' frames and watermarks, templates, printed numbers and prices. A
model that tells the pictures of a batch apart by them has no reason to learn their content. Here
every picture gets one of N values of a shortcut, drawn by seed and bytes of the picture, and its
captions name it. What the shortcut suppressed, and what brings it back, can then be measured on
pictures that have no use for it.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from mclclip.data.datasets.sources import Files, Sources, Splits, jpeg, minimal_pairs, picture_of
from mclclip.data.findings import Findings
from mclclip.data.shard_scan import is_caption
from mclclip.data.shard_writer import PackedSample, image_extension
from mclclip.data.tables import open_table
from mclclip.util.randomness import mix

log = logging.getLogger("mclclip")

Place = npt.NDArray[np.float64]
"""Two numbers in [0, 1): where a shortcut lies that has no fixed place."""
Draw = Callable[[Image.Image, Place], None]
"""Draws on an RGB picture."""
Value = tuple[str, Draw]
"""One value of a shortcut: the words that name it, and how it is drawn."""

_COLOURS = {
    "red": (220, 30, 30), "orange": (255, 140, 0), "yellow": (250, 230, 40),
    "green": (40, 170, 60), "blue": (40, 80, 230), "purple": (150, 40, 200),
    "black": (0, 0, 0), "white": (255, 255, 255),
}  # fmt: skip
_SIDES = ("on the left", "on the right", "on top", "at the bottom")
_SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")
_LONGEST = 65_500  # pixels of a side, the most of a JPEG
_WIDTH, _RING = 1 / 8, 1 / 20  # of bars and of a frame's colours, of the shorter side


def build(
    sources: Sources,
    seed: int,
    *,
    kind: str = "bar",
    values: int = 32,
    probability: float = 1.0,
    template: str = "{shortcut}. {caption}",
    test_share: float = 0.1,
) -> Splits:
    """Puts a shortcut on the captioned pictures of ``--shards FOLDER``.

    FOLDER holds ``train`` and ``test``, or one set of shards, of which ``test_share`` is drawn by
    the pictures' bytes for testing, so that copies stay together. ``kind`` is one of ``KINDS``, of
    which there are ``values`` different ones. With this ``probability`` a caption becomes the
    ``template``, and otherwise it stays as it is. The splits::

        train/*.tar     pictures with a shortcut; their .json names it as the attribute shortcut
        content/*.tar   held-out pictures that all have the first value, with their plain captions
        plain/*.tar     held-out pictures and captions as they were
        shortcut/VALUE  held-out pictures by the value that they got: a folder per class
        mixed/          minimal pairs of MMVP-VLM's layout; of the Type content, two pictures with
                        the same value, and of the Type shortcut, one picture with two values

    Pictures that cannot be decoded, and those without a caption, are left out, with a warning.
    Raises ValueError for wrong options, and if training or testing would have no picture.
    """
    if kind not in KINDS:
        raise ValueError(f"--kind {kind}: wanted {', '.join(KINDS)}")
    most = sum(1 for _ in KINDS[kind](10**9))
    if not 2 <= values <= most:
        raise ValueError(f"--values {values}: wanted 2 to {most:,} for --kind {kind}")
    if not 0 <= probability <= 1 or not 0 < test_share < 1:
        raise ValueError(
            f"--probability {probability} --test-share {test_share}: wanted numbers from 0 to 1"
        )
    if "{shortcut}" not in template or "{caption}" not in template:
        raise ValueError(f"--template {template!r}: wanted {{shortcut}} and {{caption}} in it")
    folder = sources.folder("shards")
    parts = {part: folder / part for part in ("train", "test")}
    if all(path.is_dir() for path in parts.values()):
        train, test = (Originals(path, seed, part) for part, path in parts.items())
    else:
        train, test = (Originals(folder, seed, part, test_share) for part in parts)
    for part, pictures in (("train", train), ("test", test)):
        if next(iter(pictures), None) is None:
            raise ValueError(
                f"--shards {folder}: there is no picture with a caption to {part} on; without "
                f"folders train and test --test-share ({test_share}) of the pictures are held out"
            )
    shortcut = Shortcut([*itertools.islice(KINDS[kind](values), values)], probability, template)
    return {
        "train": shortcut.train(train),
        "content": shortcut.content(test),
        "plain": shortcut.plain(test),
        "shortcut": Files(shortcut.by_value(test)),
        "mixed": minimal_pairs(shortcut.statements(test)),
    }


@dataclass(frozen=True)
class Shortcut:
    """All values of a shortcut, and how captions name them."""

    values: Sequence[Value]
    probability: float
    template: str

    def train(self, pictures: Originals) -> Iterator[PackedSample]:
        """Yields pictures with the shortcut, and captions that name it."""
        for number, picture in enumerate(pictures):
            phrase, image = self._put(picture)
            captions = [
                self._fill_template(phrase, caption) if random < self.probability else caption
                for caption, random in zip(
                    picture.captions, picture.draw("captions", len(picture.captions)), strict=True
                )
            ]
            facts = {**picture.metadata, "shortcut": phrase}
            yield PackedSample(f"{number:09d}", image, "jpg", captions, facts)

    def content(self, pictures: Originals) -> Iterator[PackedSample]:
        """Yields pictures that all have the first value, with their own captions."""
        for number, picture in enumerate(pictures):
            phrase, image = self._put(picture, 0)
            facts = {**picture.metadata, "shortcut": phrase}
            yield PackedSample(f"{number:09d}", image, "jpg", picture.captions, facts)

    def plain(self, pictures: Originals) -> Iterator[PackedSample]:
        """Yields pictures as they were."""
        for number, picture in enumerate(pictures):
            extension = image_extension(picture.data) or "jpg"
            facts = dict(picture.metadata)
            yield PackedSample(f"{number:09d}", picture.data, extension, picture.captions, facts)

    def by_value(self, pictures: Originals) -> Iterator[tuple[str, bytes]]:
        """Yields the files of a folder per value."""
        for number, picture in enumerate(pictures):
            phrase, image = self._put(picture)
            yield f"{phrase}/{number:09d}.jpg", image

    def statements(self, pictures: Originals) -> Iterator[tuple[str, bytes, str]]:
        """Yields a minimal pair of each Type for two pictures: one of the first half, and one of
        the second, since neighbours are often of one class. They have no caption in common."""
        half, is_empty = sum(1 for _ in pictures) // 2, True
        others = itertools.islice(pictures, half, None)
        for first, second in zip(itertools.islice(pictures, half), others, strict=False):
            if not {*first.captions}.isdisjoint(second.captions):
                continue
            value, is_empty = self._value(first), False
            other = (value + 1 + self._value(second) % (len(self.values) - 1)) % len(self.values)
            for type_name, picture, number in (
                ("content", first, value), ("content", second, value),
                ("shortcut", first, value), ("shortcut", first, other),
            ):  # fmt: skip
                phrase, image = self._put(picture, number)
                yield type_name, image, self._fill_template(phrase, picture.captions[0])
        if is_empty:
            log.warning("make-dataset: mixed has no pair: no two pictures have other captions")

    def _value(self, picture: Original) -> int:
        return int(picture.draw("value")[0] * len(self.values))

    def _put(self, picture: Original, number: int | None = None) -> tuple[str, bytes]:
        """Returns the words of a value, and the picture with it as JPEG; None: its own value."""
        phrase, draw = self.values[self._value(picture) if number is None else number]
        image = picture.image.copy()
        draw(image, picture.draw("place", 2))
        return phrase, jpeg(np.asarray(image))

    def _fill_template(self, phrase: str, caption: str) -> str:
        return self.template.replace("{shortcut}", phrase).replace("{caption}", caption)


# --- the user's pictures -----------------------------------------------------------------------


@dataclass(frozen=True)
class Original:
    """A picture of the user's with its captions; ``key`` is a hash of seed and bytes."""

    data: bytes
    image: Image.Image
    captions: list[str]
    metadata: Mapping[str, object]
    key: int

    def draw(self, what: str, count: int = 1) -> npt.NDArray[np.float64]:
        """Draws ``count`` numbers in [0, 1) for one purpose, the same for copies of a picture."""
        return np.random.default_rng([self.key, *what.encode()]).random(count)


class Originals:
    """The usable pictures of a folder; with a ``test_share`` those of one part of them.

    The first whole pass logs what the others are.
    """

    def __init__(self, folder: Path, seed: int, part: str, test_share: float | None = None) -> None:
        self.table = open_table(folder)
        if not self.table.holds_images:
            raise ValueError(f"--shards {folder}: wanted shards, which 'mclclip pack' makes")
        self.seed, self.part, self.test_share = seed, part, test_share
        self.is_logged = False

    def __iter__(self) -> Iterator[Original]:
        findings = Findings()
        for row in self.table.rows(findings):
            data = row.image or b""
            digest = int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
            drawn = "test" if digest / 2**64 < (self.test_share or 0) else "train"
            if self.test_share is not None and drawn != self.part:
                continue
            captions = [text for text in map(str.strip, row.captions) if is_caption(text)]
            if not captions:
                findings.add("uncaptioned", row.where)
                continue
            try:
                image = picture_of(data, row.where).convert("RGB")
            except ValueError:
                image = None
            if image is None or max(image.size) > _LONGEST:
                findings.add("undecodable", row.where)
                continue
            yield Original(data, image, captions, row.metadata, int(mix(self.seed, digest)))
        for line in findings.lines() if not self.is_logged else ():
            log.warning("make-dataset: %s: %s", self.part, line)
        self.is_logged = True


# --- kinds of shortcuts ------------------------------------------------------------------------


def _bars(count: int) -> Iterator[Value]:
    """A bar of 8 colours on 4 sides; for more than 32 values two, one above or below."""
    left, right, top, bottom = _SIDES
    if count <= len(_COLOURS) * len(_SIDES):
        for side, colour in itertools.product(_SIDES, _COLOURS):
            yield f"{colour} bar {side}", partial(_draw_bars, [(side, colour)])
        return
    for above, beside, first, second in itertools.product(
        (top, bottom), (left, right), _COLOURS, _COLOURS
    ):
        phrase = f"{first} bar {above} and {second} bar {beside}"
        yield phrase, partial(_draw_bars, [(above, first), (beside, second)])


def _draw_bars(bars: Sequence[tuple[str, str]], picture: Image.Image, place: Place) -> None:
    left, top, side = _middle(picture)
    thick, right, bottom = max(1, round(_WIDTH * side)), left + side, top + side
    boxes = [(left, top, left + thick, bottom), (right - thick, top, right, bottom)]
    boxes += [(left, top, right, top + thick), (left, bottom - thick, right, bottom)]
    for where, colour in bars:
        picture.paste(_COLOURS[colour], boxes[_SIDES.index(where)])


def _middle(picture: Image.Image) -> tuple[int, int, int]:
    """Returns left, top and side of the square in the middle, which a CLIP's centre crop leaves."""
    side = min(picture.size)
    return (picture.width - side) // 2, (picture.height - side) // 2, side


def _frames(count: int) -> Iterator[Value]:
    """A frame of one colour; for more than 8 values of two or three different ones."""
    rings = 1 if count <= 8 else 2 if count <= 56 else 3
    for colours in itertools.permutations(_COLOURS, rings):
        *first, last = colours
        words = f"{', '.join(first)} and {last}" if first else last
        yield f"{words} frame", partial(_draw_frame, colours)


def _draw_frame(colours: Sequence[str], picture: Image.Image, place: Place) -> None:
    draw, (left, top, side) = ImageDraw.Draw(picture), _middle(picture)
    thick = max(1, round(_RING * side))
    for edge, colour in zip(range(0, (side + 1) // 2, thick), colours, strict=False):
        box = (left + edge, top + edge, left + side - 1 - edge, top + side - 1 - edge)
        draw.rectangle(box, outline=_COLOURS[colour], width=thick)


def _numbers(count: int) -> Iterator[Value]:
    """A sticker with a number, as prices and page numbers are."""
    for number in range(min(count, 10_000)):
        yield f"number {number}", partial(_draw_sticker, str(number))


def _draw_sticker(text: str, picture: Image.Image, place: Place) -> None:
    draw, (left, top, side) = ImageDraw.Draw(picture), _middle(picture)
    size = max(8, side // 5)
    font = ImageFont.load_default(size)
    box = draw.textbbox((0, 0), text, font)
    wide, high = (round(box[at + 2] + size / 3) for at in (0, 1))
    left += int(place[0] * (max(side - wide, 0) + 1))
    top += int(place[1] * (max(side - high, 0) + 1))
    draw.rectangle((left, top, left + wide, top + high), fill="white", outline="black")
    draw.text((left + size / 6, top + size / 6), text, "black", font)


def _watermarks(count: int) -> Iterator[Value]:
    """The name of an agency across the picture, made of two syllables and half transparent."""
    for last, first in itertools.product(_SYLLABLES, repeat=2):
        name = (first + last).capitalize()
        yield f"watermark of {name}", partial(_draw_watermark, name)


def _draw_watermark(name: str, picture: Image.Image, place: Place) -> None:
    size = max(8, min(picture.size) // 6)
    font = ImageFont.load_default(size)
    left, top, right, bottom = map(round, font.getbbox(name))
    stamp = Image.new("RGBA", (right - left + 2, bottom - top + 2))
    ImageDraw.Draw(stamp).text((1 - left, 1 - top), name, (255, 255, 255, 140), font)
    stamp = stamp.rotate(30, Image.Resampling.BILINEAR, expand=True)
    for row, high in enumerate(range(0, picture.height, stamp.height)):
        for wide in range(-stamp.width // 2 * (row % 2), picture.width, stamp.width):
            picture.paste(stamp, (wide, high), stamp)


KINDS: Mapping[str, Callable[[int], Iterator[Value]]] = {
    "bar": _bars, "frame": _frames, "number": _numbers, "watermark": _watermarks,
}  # fmt: skip
"""What a shortcut can be: each yields its values for a number of them."""
