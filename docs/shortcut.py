"""``python docs/shortcut.py UCM OUT.jpg``: what a shortcut is, and what it hides, as one picture.

UCM is the folder of UC Merced's photographs with ``captions.csv``. Above are six of them as
`make-dataset shortcut` would change them, with the captions that it would write. Below is what
encoders see that were trained on Flickr8k's photographs with such bars: means over seeds, of
``tests/benchmarks/results/shortcut_seeds.json``.
"""

from __future__ import annotations

import csv
import itertools
import sys
import textwrap
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mclclip.data.datasets.shortcut import KINDS
from mclclip.util import files

RESULTS = Path(__file__).resolve().parents[1] / "tests/benchmarks/results/shortcut_seeds.json"
SIDE, GAP, LEFT, LINE = 112, 12, 210, 24
PHOTOGRAPHS = (
    "baseballdiamond/02_016", "buildings/04_017", "freeway/08_064", "golfcourse/09_029",
    "river/16_031", "storagetanks/19_076",
)  # fmt: skip
VALUES = (0, 12, 18, 25, 5, 11)  # of the 32 bars
ROWS = {
    "the base": "base",
    "more training (the control)": "ungrouped",
    "MCL: as many steps in groups": "mcl",
}
TITLES = (
    "Bars on photographs, which are easy to see and named by every caption (here aerial ones)",
    "What encoders see that were trained on 6,105 such photographs of Flickr8k, percent",
)
COLUMNS = {
    "the bar\nis named": ("shortcut", "top1"),
    "the photograph of a\ncaption is found (R@10)": ("content", "text_to_image/R@10"),
    "a caption of a photo-\ngraph is found (R@10)": ("content", "image_to_text/R@10"),
}


def read_shares() -> dict[tuple[str, str, str], float]:
    """The mean over seeds by encoder, benchmark and metric, in percent."""
    shares = {}
    for row in (row for row in files.read_json(RESULTS) if not row["part"]):
        for model, value in ("model", "value"), ("against", "against_value"):
            shares[row[model], row["benchmark"], row["metric"]] = row[value]
    return shares


def main(folder: str, out: str) -> None:
    """Draws the picture; see the module."""
    with open(Path(folder) / "captions.csv", newline="") as file:
        captions = {row["filepath"]: row["title"] for row in csv.DictReader(file)}
    shares, bars = read_shares(), [*itertools.islice(KINDS["bar"](32), 32)]
    font, small = ImageFont.load_default(size=15), ImageFont.load_default(size=12)
    wide, high = GAP + len(PHOTOGRAPHS) * (SIDE + GAP), LINE + SIDE + 4 * 15 + 3 * LINE + 8
    page = Image.new("RGB", (wide, high + len(ROWS) * 2 * LINE), "white")
    draw = ImageDraw.Draw(page)
    draw.text((GAP, 4), TITLES[0], "black", font)
    for x, (name, value) in enumerate(zip(PHOTOGRAPHS, VALUES, strict=True)):
        phrase, put = bars[value]
        path = f"images/{name}.jpg"
        picture = Image.open(Path(folder) / path).convert("RGB")
        put(picture, np.zeros(2))
        left = GAP + x * (SIDE + GAP)
        page.paste(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC), (left, LINE))
        text = textwrap.fill(f"{phrase}. {captions[path]}", 18, max_lines=4)
        draw.text((left, LINE + SIDE + 2), text, "black", small)
    draw.text((GAP, high - 3 * LINE), TITLES[1], "black", font)
    most = max(shares[arm, *key] for arm in ROWS.values() for key in COLUMNS.values())
    each = (wide - LEFT - GAP) // len(COLUMNS)
    for x, (title, key) in enumerate(COLUMNS.items()):
        left = LEFT + x * each
        draw.text((left, high - LINE - 22), title, "black", small)
        for y, (label, arm) in enumerate(ROWS.items()):
            top, share = high + y * 2 * LINE, shares[arm, *key]
            draw.text((GAP, top + 8), label, "black", small)
            length = round((each - 60) * share / most)
            draw.rectangle((left, top, left + length, top + LINE + 8), (120, 170, 220))
            draw.text((left + length + 6, top + 7), f"{share:.1f}", "black", font)
    page.save(out, quality=90)


if __name__ == "__main__":
    main(*sys.argv[1:])
