"""A folder of small captioned pictures and a CSV of them, as somebody would bring them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests import tiny

COLOURS = {"red": (200, 40, 40), "green": (40, 180, 60), "blue": (50, 60, 200), "grey": (120,) * 3}


def write(folder: Path, count: int = 135) -> Path:
    """Writes ``count`` JPEGs of a coloured square at its own place, and ``captions.csv`` with two
    captions of each; returns the CSV's path."""
    rng = np.random.default_rng(0)
    (folder / "photos").mkdir(parents=True)
    rows = []
    for number in range(count):
        name = [*COLOURS][number % len(COLOURS)]
        picture = rng.integers(0, 40, (40, 40, 3))
        x, y = rng.integers(0, 24, 2)
        picture[y : y + 16, x : x + 16] += np.array(COLOURS[name])
        file = f"photos/{number:03d}.jpg"
        Image.fromarray(picture.astype(np.uint8)).save(folder / file)
        side = "left" if x < 12 else "right"
        rows += [(file, f"a {name} square"), (file, f"a {name} square on the {side}")]
    table = folder / "captions.csv"
    with open(table, "w", newline="") as opened:
        csv.writer(opened).writerows([("image", "caption"), *rows])
    return table


def base(folder: Path) -> str:
    """A tiny architecture with random weights, as ``--base`` names it."""
    path = folder / "tiny.json"
    path.write_text(json.dumps(tiny.MODEL))
    return f"{path}@random"


FEW_STEPS = (
    "base.steps=4", "train.steps=4", "train.checkpoint.every=2", "data.num_workers=0",
    "data.index_workers=1",
)  # fmt: skip
