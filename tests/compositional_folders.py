"""Compositional benchmarks in small, in their published layouts, for encoders that read numbers.

An image spells a number, and the last number in a text is its own. A text that is true of an image
has the number of the image, where ``apart`` is off.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

Draw = Callable[[Path, int], None]

SUGARCREPE = "replace_obj replace_att replace_rel swap_obj swap_att add_obj add_att".split()
CONTROLLED = {
    "controlled_images": ("left_of", "right_of", "on", "under"),
    "controlled_clevr": ("left_of", "right_of", "in-front_of", "behind"),
}


def write(layout: str, root: Path, draw: Draw, size: int, *, apart: bool = False) -> int:
    """A folder of a layout with ``size`` items per part (sets of four photographs for What'sUp).
    Returns how many numbers are used, from 0 on.

    ``apart``: no two texts have the same number, so that random features of texts are independent.
    """
    numbers = count(1)
    files = WRITERS[layout](root, draw, size, numbers, apart)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "\n".join(map(json.dumps, content))
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(content))
    return next(numbers)


def _sugarcrepe(root: Path, draw: Draw, size: int, numbers: Iterator[int], _: bool) -> Any:
    files: dict[str, Any] = {}
    for part in SUGARCREPE:
        files[f"data/{part}.json"] = own = {}
        for item in range(size):
            right, wrong = next(numbers), next(numbers)
            name = f"{right:012}.jpg"
            draw(root / "val2017" / name, right)
            texts = {"caption": f"a {right}", "negative_caption": f"no {wrong}"}
            own[str(item)] = {"filename": name, **texts}
    return files


def _pairs(root: Path, draw: Draw, size: int, numbers: Iterator[int], _: bool) -> Any:
    files: dict[str, Any] = {}
    for rule in ("colour", "swap"):  # the other rules have no items
        files[f"data/{rule}.json"] = own = {}
        for item in range(size):
            right, wrong = next(numbers), next(numbers)
            draw(root / "images" / f"{right:06}.jpg", right)
            texts = {"caption": f"a {right}", "negative_caption": f"no {wrong}"}
            own[str(item)] = {"filename": f"{right:06}.jpg", "key": "k", **texts}
    return files


def _sugarcrepe_pp(root: Path, draw: Draw, size: int, numbers: Iterator[int], apart: bool) -> Any:
    files: dict[str, Any] = {}
    for part in SUGARCREPE[:5]:
        files[f"data/{part}.json"] = own = []
        for item in range(size):
            right, wrong = next(numbers), next(numbers)
            second = next(numbers) if apart else right
            name = f"{right:012}.jpg"
            draw(root / "val2017" / name, right)
            texts = {"caption": f"a {right}", "caption2": f"one {second}"}
            texts["negative_caption"] = f"no {wrong}"
            own.append({"id": item, "filename": name, **texts})
    return files


def _quadruples(key: str, file: str, suffix: str) -> Any:
    def files(root: Path, draw: Draw, size: int, numbers: Iterator[int], _: bool) -> Any:
        rows = []
        for item in range(size):
            row: dict[str, Any] = {key: item}
            for side in (0, 1):
                number = next(numbers)
                draw(root / "images" / f"ex_{item}_img_{side}.png", number)
                row |= {f"image_{side}": f"ex_{item}_img_{side}{suffix}"}
                row |= {f"caption_{side}": f"thing {number}"}
            rows.append(row)
        return {file: rows}

    return files


def _visual_genome(file: str, kinds: tuple[str, Any, Any]) -> Any:
    field, *values = kinds

    def files(root: Path, draw: Draw, size: int, numbers: Iterator[int], _: bool) -> Any:
        rows = []
        for item in range(size):
            right, wrong = next(numbers), next(numbers)
            draw(root / "images" / f"{right}.jpg", right)
            box = {"bbox_x": 1, "bbox_y": 0, "bbox_w": 2, "bbox_h": 3}
            texts = {"true_caption": f"a {right}", "false_caption": f"no {wrong}"}
            rows.append({"image_path": f"{right}.jpg", field: values[item % 2], **texts, **box})
        return {file: rows}

    return files


def _order(root: Path, draw: Draw, size: int, numbers: Iterator[int], _: bool) -> Any:
    rows = []
    for _item in range(size):
        options = [next(numbers) for _ in range(5)]
        draw(root / "test" / f"{options[0]}.jpg", options[0])
        texts = [f"words {number}" for number in options]
        rows.append({"image": f"test/{options[0]}.jpg", "caption_options": texts})
    return {"order.json": rows}


def _whatsup(root: Path, draw: Draw, size: int, numbers: Iterator[int], _: bool) -> Any:
    files: dict[str, Any] = {}
    for folder, relations in CONTROLLED.items():
        files[f"{folder}_dataset.json"] = rows = []
        for item in range(size):
            own = [next(numbers) for _ in relations]
            texts = [
                f"a mug {relation} a table {n}" for relation, n in zip(relations, own, strict=True)
            ]
            for place, relation in enumerate(relations):
                name = f"{folder}/mug-{item}_{relation}_table.jpeg"
                draw(root / name, own[place])
                options = [texts[place], *texts[:place], *texts[place + 1 :]]
                rows.append({"image_path": f"data/{name}", "caption_options": options})
    patterns = {"coco": "val2017/{:012}.jpg", "vg": "vg_images/{}.jpg"}
    for source in ("coco", "coco", "vg", "vg"):
        rows = []
        for _item in range(size):
            right, wrong = next(numbers), next(numbers)
            draw(root / patterns[source].format(right), right)
            rows.append([right, f"left {right}", f"right {wrong}"])
        first = f"{source}_qa_one_obj.json"
        files[f"{source}_qa_two_obj.json" if first in files else first] = rows
    return files


WRITERS: dict[str, Any] = {
    "sugarcrepe": _sugarcrepe,
    "sugarcrepe_pp": _sugarcrepe_pp,
    "winoground": _quadruples("id", "examples.jsonl", ""),
    "naturalbench": _quadruples("index", "metadata.json", ".png"),
    "aro_relation": _visual_genome(
        "visual_genome_relation.json", ("relation_name", "behind", "next to")
    ),
    "aro_attribute": _visual_genome(
        "visual_genome_attribution.json", ("attributes", ["red", "small"], ["old", "wet"])
    ),
    "aro_order": _order,
    "whatsup": _whatsup,
    "pairs": _pairs,
}
