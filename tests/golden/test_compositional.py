"""Compositional benchmarks against the definitions of their papers, written with loops over the
files. Features are such that similarities tie often, and their sums are exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mclclip.eval.features import Extractor
from mclclip.eval.protocols import compositional
from tests.compositional_folders import CONTROLLED, SUGARCREPE, write

Table = dict[str, float]


class FourSigns:
    """Features of four signs from the number that an image spells or that a text ends with."""

    embed_dim, logit_scale = 4, 100.0

    def preprocess_val(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1)

    def tokenizer(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor([[int(text.split()[-1])] for text in texts])

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.image(int(i[0, 0, 0]) * 256 + int(i[1, 0, 0])) for i in images])

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.text(int(token)) for token in tokens[:, 0]])

    def image(self, number: int) -> torch.Tensor:
        return self.signs(7 * number + 1)

    def text(self, number: int) -> torch.Tensor:
        return self.signs(13 * number + 5)

    def signs(self, number: int) -> torch.Tensor:
        bits = (number * 2654435761) >> 9
        return torch.tensor([1.0 if bits >> k & 1 else -1.0 for k in range(4)]) / 2

    def score(self, image: int, text: str) -> float:
        """Similarity of the image with a number and a text."""
        return float(self.image(image) @ self.text(int(text.split()[-1])))

    def between(self, a: str, b: str) -> float:
        """Similarity of two texts."""
        return float(self.text(int(a.split()[-1])) @ self.text(int(b.split()[-1])))


MODEL = FourSigns()


def draw(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (number // 256, number % 256, 0)).save(path, format="PNG")


def number_in(path: Path) -> int:
    red, green, _ = Image.open(path).getpixel((1, 1))  # type: ignore[misc]
    return int(red) * 256 + int(green)


def percent(right: list[bool]) -> float:
    return 100 * sum(right) / len(right)


def sugarcrepe(root: Path) -> Table:
    found = {}
    for part in SUGARCREPE:
        right = []
        for row in json.loads((root / "data" / f"{part}.json").read_text()).values():
            image = number_in(root / "val2017" / row["filename"])
            positive, negative = row["caption"], row["negative_caption"]
            right.append(MODEL.score(image, positive) > MODEL.score(image, negative))
        found[part] = percent(right)
    return found | {"average": sum(found.values()) / len(found)}


def sugarcrepe_pp(root: Path) -> Table:
    found = {}
    for part in SUGARCREPE[:5]:
        itt, tot = [], []
        for row in json.loads((root / "data" / f"{part}.json").read_text()):
            image = number_in(root / "val2017" / row["filename"])
            one, two, false = row["caption"], row["caption2"], row["negative_caption"]
            first, second, third = (MODEL.score(image, text) for text in (one, two, false))
            itt.append(first > third and second > third)
            near = MODEL.between(one, two)
            tot.append(near > MODEL.between(one, false) and near > MODEL.between(two, false))
        found[f"ITT/{part}"], found[f"TOT/{part}"] = percent(itt), percent(tot)
    means = {
        f"{task}/average": sum(v for k, v in found.items() if k.startswith(task)) / 5
        for task in ("ITT", "TOT")
    }
    return found | means


def winoground(root: Path) -> Table:
    text, image, group = [], [], []
    for line in (root / "examples.jsonl").read_text().splitlines():
        row = json.loads(line)
        i0, i1 = (number_in(root / "images" / f"{row[f'image_{n}']}.png") for n in (0, 1))
        c0, c1 = row["caption_0"], row["caption_1"]
        s = MODEL.score
        text.append(s(i0, c0) > s(i0, c1) and s(i1, c1) > s(i1, c0))
        image.append(s(i0, c0) > s(i1, c0) and s(i1, c1) > s(i0, c1))
        group.append(text[-1] and image[-1])
    return {"text": percent(text), "image": percent(image), "group": percent(group)}


def aro_relation(root: Path) -> Table:
    by_relation: dict[str, list[bool]] = {}
    for row in json.loads((root / "visual_genome_relation.json").read_text()):
        image = number_in(root / "images" / row["image_path"])
        options = [row["false_caption"], row["true_caption"]]
        pick = int(np.argmax([MODEL.score(image, text) for text in options]))
        by_relation.setdefault(row["relation_name"], []).append(pick == 1)
    every = [right for rows in by_relation.values() for right in rows]
    kept = [percent(rows) for name, rows in by_relation.items() if name != "next to"]
    return {"average": sum(kept) / len(kept), "pooled": percent(every)}


def choices(root: Path, rows: list[Any], image: Callable[[Any], str]) -> list[tuple[bool, bool]]:
    """Whether the first caption is picked: alone at the top, and by argmax."""
    found = []
    for row in rows:
        options = row["caption_options"] if isinstance(row, dict) else row[1:]
        scores = [MODEL.score(number_in(root / image(row)), text) for text in options]
        found.append((scores[0] > max(scores[1:]), int(np.argmax(scores)) == 0))
    return found


def aro_order(root: Path) -> Table:
    rows = json.loads((root / "order.json").read_text())
    strict, official = zip(*choices(root, rows, lambda row: row["image"]), strict=True)
    return {"accuracy": percent([*strict]), "accuracy_official": percent([*official])}


def whatsup(root: Path) -> Table:
    found: Table = {}
    names = ("controlled_a", "controlled_b", "coco_one", "coco_two", "vg_one", "vg_two")
    files = (*(f"{folder}_dataset" for folder in CONTROLLED),) + tuple(
        f"{source}_qa_{number}_obj" for source in ("coco", "vg") for number in ("one", "two")
    )
    for name, file in zip(names, files, strict=True):
        rows = json.loads((root / f"{file}.json").read_text())
        place: Any = lambda row: row["image_path"][5:]  # noqa: E731
        if name.startswith("coco"):
            place = lambda row: f"val2017/{row[0]:012}.jpg"  # noqa: E731
        elif name.startswith("vg"):
            place = lambda row: f"vg_images/{row[0]}.jpg"  # noqa: E731
        by_rule = zip(*choices(root, rows, place), strict=True)
        for end, right in zip(("", "_official"), by_rule, strict=True):
            found[f"{name}{end}"] = percent([*right])
            if name.startswith("controlled"):  # sets of four follow each other: two pairs each
                fours = [right[n : n + 4] for n in range(0, len(right), 4)]
                pairs = [four[k] and four[k + 1] for four in fours for k in (0, 2)]
                found[f"{name}/pair{end}"] = percent(pairs)
                found[f"{name}/set{end}"] = percent([all(four) for four in fours])
    for end in ("", "_official"):
        found[f"average{end}"] = sum(found[f"{name}{end}"] for name in names) / len(names)
    return found


@pytest.mark.parametrize(
    "reference", [sugarcrepe, sugarcrepe_pp, winoground, aro_relation, aro_order, whatsup]
)
def test_figures_equal_the_definitions(reference: Callable[[Path], Table], tmp_path: Path) -> None:
    layout: Any = reference.__name__
    write(layout, tmp_path, draw, 8, apart=True)
    figures = compositional.evaluate(Extractor(MODEL, batch_size=64), tmp_path, layout=layout)  # type: ignore[arg-type]
    wanted = reference(tmp_path)
    assert {figure.metric: figure.value for figure in figures} == pytest.approx(wanted)
    assert any(figure.protocol["tied_items"] for figure in figures)
    assert any(0 < value < 100 for value in wanted.values())
