"""A sheet of picture pairs as a PNG, by PIL alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont, ImageOps

from mclclip.files import whole_file

SIDE = 144
"""Pixels of the longer side of a picture; smaller ones are enlarged, with their pixels visible."""

COLUMNS = 4
_GAP, _LINE, _MARGIN = 4, 15, 14
_LETTERS = 7  # pixels of a letter, more than the font's mean


def pair_sheet(
    path: Path, title: str, pairs: Sequence[tuple[Image.Image, Image.Image, Sequence[str]]]
) -> None:
    """Writes a PNG with the pairs, four in a row: two pictures beside each other, and lines of text
    below them."""
    font = ImageFont.load_default(12)
    num_lines = max((len(lines) for _, _, lines in pairs), default=0)
    wide, high = 2 * SIDE + _GAP + _MARGIN, SIDE + num_lines * _LINE + _MARGIN
    columns = min(COLUMNS, max(len(pairs), 1))
    width = columns * wide + _MARGIN
    heading = wrap(title, max((width - 2 * _MARGIN) // _LETTERS, 20))
    top = 2 * _MARGIN + len(heading) * _LINE
    height = top + -(-len(pairs) // columns) * high
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(heading):
        draw.text((_MARGIN, _MARGIN + number * _LINE), line, "black", font)
    for number, (left, right, lines) in enumerate(pairs):
        x, y = _MARGIN + number % columns * wide, top + number // columns * high
        sheet.paste(_tile(left), (x, y))
        sheet.paste(_tile(right), (x + SIDE + _GAP, y))
        for place, line in enumerate(lines):
            draw.text((x, y + SIDE + place * _LINE), line, "black", font)
    with whole_file(path) as file:
        sheet.save(file, "PNG")


def _tile(picture: Image.Image) -> Image.Image:
    """The whole picture in a square of ``SIDE`` pixels."""
    small = max(picture.size) * 2 <= SIDE
    kind = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    return ImageOps.pad(picture.convert("RGB"), (SIDE, SIDE), kind, color="lightgrey")
