"""``python docs/minimal_pairs.py RUN DATA OUT.png``: the demo's minimal pairs as one picture.

RUN is a seed's run of ``mclclip demo`` (``runs/demo/seed_3``) and DATA its pictures
(``runs/demo/data_3``). For each attribute it shows the first pair that was rendered, whoever is
right about it, what the two statements differ in, and the share of all pairs that the base, the
joined control and the joined stages of MCL get right. It prints these shares.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mclclip.data.patterns import ATTRIBUTES
from mclclip.eval import results

SIDE, GAP, LEFT, LINE = 96, 14, 186, 26
JOINED = "concat_stage_norm"
ROWS = {
    "the base": "stage_0",
    "the control: as many steps,\nwithout groups": f"control_ungrouped_{JOINED}",
    "MCL: the same steps\nin groups": JOINED,
}
CHANCE = 25.0
TITLE = (
    "Minimal pairs that an encoder gets right, of 200 for each attribute (one seed; chance: 25 %)"
)


def read_pairs(folder: Path) -> dict[str, tuple[list[Path], list[str]]]:
    """The pictures of the first pair of every attribute, and the words that tell their texts
    apart."""
    rows: dict[str, list[dict[str, str]]] = {}
    with open(folder / "Questions.csv", newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["Type"], []).append(row)
    pairs = {}
    for name in ATTRIBUTES:
        both = rows[name][:2]
        words = [row["Statement"].split() for row in both]
        differing = [
            " ".join(w for w in own if w not in other) for own, other in (words, words[::-1])
        ]
        paths = [folder / "MLLM_VLM Images" / name / f"{row['Question ID']}.jpg" for row in both]
        pairs[name] = paths, differing
    return pairs


def read_shares(run: Path) -> dict[str, dict[str, float]]:
    """The percent of right pairs by encoder and attribute."""
    shares: dict[str, dict[str, float]] = {}
    for row in results.read(run / "results.jsonl"):
        shares.setdefault(row.model, {})[row.metric] = row.value
    return shares


def colour_of(percent: float) -> tuple[int, int, int]:
    """White at chance and below, green at 100 %."""
    share = max(percent - CHANCE, 0.0) / (100.0 - CHANCE)
    return round(255 - 155 * share), round(255 - 60 * share), round(255 - 135 * share)


def main(run: str, data: str, out: str) -> None:
    """Draws the picture; see the module."""
    pairs, shares = read_pairs(Path(data) / "pairs"), read_shares(Path(run))
    columns = [*ATTRIBUTES, "average"]
    tall = 2 * LINE + 2 * (SIDE + LINE)
    page = Image.new("RGB", (LEFT + len(columns) * (SIDE + GAP), tall + 3 * 2 * LINE + 8), "white")
    draw = ImageDraw.Draw(page)
    font, small = ImageFont.load_default(size=15), ImageFont.load_default(size=12)
    draw.text((6, 5), TITLE, "black", font)
    nearest = Image.Resampling.NEAREST
    for y, title in enumerate(ROWS):
        draw.text((6, tall + y * 2 * LINE + 8), title, "black", small)
    for x, name in enumerate(columns):
        left = LEFT + x * (SIDE + GAP)
        draw.text((left + SIDE / 2, LINE + LINE / 2), name, "black", font, anchor="mm")
        for y, (path, words) in enumerate(zip(*pairs.get(name, ((), ())), strict=True)):
            top = 2 * LINE + y * (SIDE + LINE)
            page.paste(Image.open(path).convert("RGB").resize((SIDE, SIDE), nearest), (left, top))
            draw.text(
                (left + SIDE / 2, top + SIDE + LINE / 2 - 2), words, "black", small, anchor="mm"
            )
        for y, model in enumerate(ROWS.values()):
            percent, top = shares[model][name], tall + y * 2 * LINE
            draw.rectangle((left, top + 2, left + SIDE, top + 2 * LINE - 4), colour_of(percent))
            draw.text((left + SIDE / 2, top + LINE), f"{percent:.0f} %", "black", font, anchor="mm")
    page.save(out, optimize=True)
    for title, model in ROWS.items():
        cells = ", ".join(f"{name} {shares[model][name]:.1f}" for name in columns)
        print(f"{title.partition(':')[0]}: {cells}")


if __name__ == "__main__":
    main(*sys.argv[1:])
