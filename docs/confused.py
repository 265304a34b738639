"""``python docs/confused.py RUN OUT.jpg``: photographs that only the base confuses, as one picture.

RUN is a run of ``mclclip finetune`` on UC Merced, whose folders are classes. Of the pictures in the
share ``report``, which no training saw, it takes four whose nearest neighbour is of another class
for the base and of their own class for the tuned encoder: one of each class, the base's highest
cosine first. It prints how many there are, how many of the opposite, and the names of the files
that are shown, which NOTICE.md repeats.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import mclclip

SIDE, GAP, LEFT, LINE = 112, 8, 120, 22
ROWS = ("A photograph", "Most alike\nfor the base", "Most alike\nafter tuning")


def held_out(run: Path) -> tuple[list[Image.Image], list[Path]]:
    """The pictures of the share ``report`` with the names of their files."""
    pictures, paths = [], []
    for path in sorted((run / "data/report").glob("*.tar")):
        with tarfile.open(path) as tar:
            for name in sorted(name for name in tar.getnames() if name.endswith(".json")):
                about = json.load(tar.extractfile(name))  # type: ignore[arg-type]
                image = tar.extractfile(name.replace(".json", ".jpg")).read()  # type: ignore[union-attr]
                pictures.append(Image.open(io.BytesIO(image)).convert("RGB"))
                paths.append(Path(about["filepath"]))
    return pictures, paths


def main(run_dir: str, out: str) -> None:
    """Draws the picture; see the module."""
    run = mclclip.Run.open(run_dir)
    pictures, paths = held_out(Path(run_dir))
    names = [path.parent.name for path in paths]
    classes = np.array(names)
    nearest, alike = {}, {}
    for name in ("stage_0", run.tuned()):
        features = run.encoder(name).encode_image(pictures)
        cosines = features @ features.T
        np.fill_diagonal(cosines, -1.0)
        nearest[name], alike[name] = cosines.argmax(axis=1), cosines.max(axis=1)
    base, tuned = nearest["stage_0"], nearest[run.tuned()]
    wrong, right = classes[base] != classes, classes[tuned] == classes
    print(f"of {len(classes)} pictures the nearest is of another class for", end=" ")
    print(f"{wrong.sum()} (base), {(~right).sum()} ({run.tuned()})")
    print(f"mended {(wrong & right).sum()}, broken {(~wrong & ~right).sum()}")
    chosen: dict[str, int] = {}
    for i in sorted(np.flatnonzero(wrong & right), key=lambda i: -alike["stage_0"][i]):
        chosen.setdefault(names[i], int(i))
    page = Image.new("RGB", (LEFT + 4 * (SIDE + GAP), 3 * (SIDE + LINE)), "white")
    shown: set[str] = set()
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=14)
    for y, title in enumerate(ROWS):
        draw.text((4, y * (SIDE + LINE) + SIDE // 2 - 16), title, "black", font)
    for x, sample in enumerate([*chosen.values()][:4]):
        for y, j in enumerate((sample, int(base[sample]), int(tuned[sample]))):
            place = LEFT + x * (SIDE + GAP), y * (SIDE + LINE)
            shown.add(f"{names[j]}/{paths[j].name}")
            page.paste(pictures[j].resize((SIDE, SIDE)), place)
            colour = "black" if y == 0 else "firebrick" if y == 1 else "green"
            draw.text((place[0], place[1] + SIDE + 2), names[j], colour, font)
    page.save(out, quality=88)
    print(", ".join(sorted(shown)))


if __name__ == "__main__":
    main(*sys.argv[1:])
