"""A case for every evaluator: its data in small, for encoders that read numbers, and its options.

``CASES`` has at least one entry per kind of benchmark; ``test_evaluators`` holds what all keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.eval.items import LAYOUTS
from mclclip.eval.protocols import mmvp
from tests import compositional_folders
from tests.planted import draw_number

NUM_CLASSES = 3


@dataclass(frozen=True)
class Case:
    """An evaluator with data and options.

    write       writes the data below a folder; returns how many numbers are used, from 0 on
    by_class    whether images of one class (their number modulo ``NUM_CLASSES``) look alike to a
                perfect encoder
    floor       percent that equal features get, by a figure's protocol; in other units they get
                its chance
    is_solved   whether a perfect encoder gets the best of its unit
    by_chance   whether random features get the ``chance`` of the protocol
    """

    kind: str
    write: Callable[[Path], int]
    options: Mapping[str, Any] = field(default_factory=dict)
    by_class: bool = False
    floor: Callable[[Mapping[str, Any]], float] = lambda _: 0.0
    is_solved: bool = True
    by_chance: bool = True


def _mmvp(root: Path) -> int:
    rows = ["Question ID,Type,Statement"]
    for number in range(1, 31):
        kind = "Color" if number <= 12 else "State"
        draw_number(root / "MLLM_VLM Images" / kind / f"{number}.png", number)
        rows.append(f"{number},{kind},statement {number}")
    (root / "Questions.csv").write_text("\n".join(rows))
    return 31


def _captions(root: Path) -> int:
    """One, two or three captions per image, and a language for each of them."""
    lines = ["filepath,title,language"]
    for number in range(12):
        draw_number(root / f"{number}.png", number)
        for caption in range(1 + number % 3):
            lines.append(f"{number}.png,caption {caption} of {number},{['en', 'fr'][number % 2]}")
    (root / "captions.csv").write_text("\n".join(lines))
    return 12


def _write_shards(root: Path, numbers: Iterable[int]) -> None:
    """Images with a caption and with attributes, of which each is the class of the image."""
    samples = []
    for number in numbers:
        draw_number(root / "one.png", number)
        attributes = {"shape": f"s{number % NUM_CLASSES}", "colour": number % NUM_CLASSES}
        data, texts = (root / "one.png").read_bytes(), [f"it {number}"]
        samples.append(PackedSample(f"{number:05d}", data, "png", texts, attributes))
    (root / "one.png").unlink()
    write_shards(samples, root, 5)


def _shards(root: Path) -> int:
    _write_shards(root, range(13))
    return 13


def _shards_in_parts(root: Path) -> int:
    _write_shards(root / "train", range(15))
    _write_shards(root / "test", range(15, 24))
    return 24


def _classes(root: Path) -> int:
    """A folder per class, whose images spell the class, and a table of two classes."""
    rows = ["filepath,label"]
    for label in range(7):
        for number in range(1 + label % 2):
            draw_number(root / f"class_{label}" / f"{number}.png", label)
            if label < 2:
                rows.append(f"class_{label}/{number}.png,{label}")
    (root / "labels.csv").write_text("\n".join(rows))
    return 7


def _labels(root: Path) -> int:
    """A table of images with labels of which each image may have several."""
    rows = ["filepath,label"]
    for number in range(9):
        draw_number(root / f"{number}.png", number % NUM_CLASSES)
        rows.append(f"{number}.png,class {number % NUM_CLASSES}")
    (root / "labels.csv").write_text("\n".join(rows))
    return NUM_CLASSES


def _parts(root: Path) -> int:
    """Images to learn from and to be tested on, in folders and in a table."""
    rows = ["filepath,label,split"]
    for number in range(24):
        part, label = "train" if number < 15 else "test", f"class {number % NUM_CLASSES}"
        draw_number(root / part / label / f"{number:02d}.png", number)
        rows.append(f"{part}/{label}/{number:02d}.png,{label},{part}")
    (root / "parts.csv").write_text("\n".join(rows))
    return 24


def _layout(layout: str, size: int, apart: bool = False) -> Callable[[Path], int]:
    return lambda root: compositional_folders.write(layout, root, draw_number, size, apart=apart)


def _chance(protocol: Mapping[str, Any]) -> float:
    return float(protocol["chance"])


def _share(_: Mapping[str, Any]) -> float:
    return 100 / NUM_CLASSES


_PROBE = {"by_class": True, "floor": _chance, "by_chance": False}
_TABLE = {"captions": "captions.csv", "ks": [1, 5]}
CASES: Mapping[str, Case] = {
    "mmvp": Case("mmvp", _mmvp, {"directions": [*mmvp.DIRECTIONS]}),
    "retrieval": Case("retrieval", _captions, _TABLE, by_chance=False),
    "languages": Case("retrieval", _captions, {**_TABLE, "languages": "all"}, by_chance=False),
    "shards": Case("retrieval", _shards, {"captions": "."}),
    "zeroshot": Case("zeroshot", _classes),
    "kinetics": Case("zeroshot", _classes, {"metric": "mean_of_top1_and_top5"}),
    "memes": Case(
        "zeroshot", _classes, {"metric": "roc_auc", "labels": "labels.csv"}, by_chance=False
    ),
    "voc": Case(
        "zeroshot",
        _labels,
        {"metric": "map_11_point", "labels": "labels.csv"},
        floor=_share,
        by_chance=False,
    ),
    "knn": Case("knn", _parts, {"k": 5, "weights": "similarity"}, **_PROBE),
    "probe": Case("linear_probe", _parts, {"validation_share": 0.4}, **_PROBE),
    "voc probe": Case(
        "linear_probe",
        _parts,
        {"metric": "map_11_point", "labels": "parts.csv", "strength": 1.0},
        by_class=True,
        floor=_share,
        by_chance=False,
    ),
    **{
        f"attributes, {probe}": Case(
            "attributes",
            _shards_in_parts,
            {"attributes": ["shape", "colour"], "strength": 1.0, "probe": probe, "k": 5},
            by_class=True,
            floor=_share,
            by_chance=False,
        )
        for probe in ("linear", "knn")
    },
    "loss": Case("contrastive_loss", _shards, by_chance=False),
    **{
        layout: Case(
            "compositional",
            _layout(layout, 50 if layout == "aro_attribute" else 4),
            {"layout": layout},
            # Others choose between two texts as sugarcrepe and aro_relation do.
            by_chance=layout not in ("sugarcrepe_pp", "aro_attribute", "pairs"),
        )
        for layout in LAYOUTS
    },
    "sugarcrepe_pp apart": Case(  # texts of other numbers than their images', so that none is true
        "compositional",
        _layout("sugarcrepe_pp", 4, apart=True),
        {"layout": "sugarcrepe_pp"},
        is_solved=False,
    ),
}
