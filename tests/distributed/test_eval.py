"""Evaluation over several gloo ranks gives the figures of one process."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.eval import results
from mclclip.eval import run as evaluation
from mclclip.eval.features import Extractor
from mclclip.eval.options import BenchmarkConfig
from mclclip.eval.protocols import KINDS
from mclclip.eval.protocols.contrastive_loss import row_losses
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from tests import compositional_folders
from tests.matrix import kept

NUM_IMAGES = 14


class LinearEncoder(torch.nn.Module):
    """A fixed random linear map of pixels and of bytes."""

    embed_dim, logit_scale = 24, 100.0

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.image = torch.nn.Parameter(torch.randn(8 * 8 * 3, 24, generator=generator))
        self.text = torch.nn.Parameter(torch.randn(256, 24, generator=generator))

    def preprocess_val(self, image: Any) -> torch.Tensor:
        pixels = np.asarray(image, dtype=np.float32) / 255 - 0.5
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def tokenizer(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor([list(text.encode()[:40].ljust(40)) for text in texts])

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(images.flatten(1) @ self.image, dim=1)

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(self.text[tokens].sum(1), dim=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Noise images as minimal pairs, as a retrieval table and as classes, in one folder; beside
    them, train and test images whose brightness is their class."""
    rng = np.random.default_rng(0)
    questions = [["Question ID", "Type", "Statement"]]
    captions = [["filepath", "title"]]
    labels = [["filepath", "label"]]
    parts = [["filepath", "label", "split"]]
    for number in range(1, NUM_IMAGES + 1):
        kind = "Color" if number <= 8 else "State"
        name = f"MLLM_VLM Images/{kind}/{number}.png"
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
        questions.append([str(number), kind, f"statement {number}"])
        captions += [[name, f"caption {number % 5} {c}"] for c in range(number % 3 + 1)]  # ties
        labels.append([name, f"class_{number % 6}"])
        part = ["train", "test", "valid"][number // 4 % 3]
        parts += [[name, f"by_{n}_{number % n == 0}", part] for n in (2, 3)]
    tables = {
        "Questions.csv": questions, "captions.csv": captions, "labels.csv": labels,
        "parts.csv": parts,
    }  # fmt: skip
    for name, rows in tables.items():
        with open(tmp_path / name, "w", newline="") as file:
            csv.writer(file).writerows(rows)
    for number in range(27):
        part = "test" if number % 3 == 2 else "train"
        path = tmp_path / "split" / part / f"class_{number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = rng.integers(0, 256, (8, 8, 3)) // 2 + 30 * (number % 4)
        Image.fromarray(noise.astype(np.uint8)).save(path)
    shutil.copy(path, tmp_path / "split" / "train" / path.parent.name)  # the last is in test
    for part, seed in (("train", 1), ("test", 2)):
        write_shards(samples(seed), tmp_path / "shards" / part, 5)
    rows = [
        [*captions[0], "language"],
        *([*row, "en fr".split()[n % 2]] for n, row in enumerate(captions[1:])),
    ]
    with open(tmp_path / "languages.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    for layout in ("sugarcrepe_pp", "winoground"):
        compositional_folders.write(layout, tmp_path / layout, lambda path, _: draw(path, rng), 3)
    return tmp_path


def samples(seed: int) -> list[PackedSample]:
    """Noise with captions and attributes."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(13):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file, format="PNG")
        attributes = {"colour": f"c{number % 3}", "shape": f"s{number % 2}"}
        made.append(
            PackedSample(f"{number:05d}", file.getvalue(), "png", [f"it {number}"], attributes)
        )
    return made


def draw(path: Path, rng: np.random.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, format="PNG")


def suite_of(folder: Path) -> dict[str, BenchmarkConfig]:
    directions = ["statement_to_image", "image_to_text", "group"]
    return {
        "mmvp": BenchmarkConfig("mmvp", str(folder), {"directions": directions}),
        "pairs": BenchmarkConfig("retrieval", str(folder), {"captions": "captions.csv"}),
        "classes": BenchmarkConfig("zeroshot", str(folder), {"labels": "labels.csv"}),
        "several": BenchmarkConfig(
            "zeroshot", str(folder), {"labels": "labels.csv", "metric": "map_11_point"}
        ),
        "probe": BenchmarkConfig("linear_probe", f"{folder}/split", {"validation_share": 0.4}),
        "several_probe": BenchmarkConfig(
            "linear_probe", str(folder), {"labels": "parts.csv", "metric": "map_11_point"}
        ),
        "large_probe": BenchmarkConfig(
            "linear_probe", f"{folder}/split", {"solver": "torch", "strength": 0.5}
        ),
        **{
            layout: BenchmarkConfig("compositional", f"{folder}/{layout}", {"layout": layout})
            for layout in ("sugarcrepe_pp", "winoground")
        },
        "languages": BenchmarkConfig(
            "retrieval", str(folder), {"captions": "languages.csv", "languages": "all"}
        ),
        "attributes": BenchmarkConfig(
            "attributes", f"{folder}/shards", {"attributes": ["colour", "shape"]}
        ),
        "loss": BenchmarkConfig("contrastive_loss", f"{folder}/shards/test", {}),
        "shards": BenchmarkConfig("retrieval", f"{folder}/shards", {"captions": "test"}),
        "neighbours": BenchmarkConfig("knn", f"{folder}/split", {"k": 5, "weights": "similarity"}),
    }


def here() -> Context:
    """The Context of the process this runs in."""
    return Context(collectives.rank(), collectives.world_size())


def evaluate(folder: Path, results_path: Path) -> list[dict[str, Any]]:
    rows = evaluation.run_suite(
        LinearEncoder(), suite_of(folder), results_path, "stage_0", context=here(), batch_size=3
    )
    return [vars(row) for row in rows]


def extract(folder: Path, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    extractor = Extractor(LinearEncoder(), here(), batch_size=batch_size)
    images = sorted(folder.rglob("*.png"))
    return extractor.images(images), extractor.texts([path.name for path in images])


def fail_together(folder: Path) -> str:
    try:
        extract(folder, 3)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", kept([2, 4], 0))
def test_rows_are_those_of_one_process(ranks: Any, folder: Path, world_size: int) -> None:
    alone = evaluate(folder, folder / "one.jsonl")
    path = folder / "many.jsonl"
    for rows in ranks(world_size, evaluate, folder, path):
        assert rows == alone
    assert path.read_bytes() == (folder / "one.jsonl").read_bytes()  # written once, by one rank
    assert len(results.read(path)) == len(alone)
    assert any("optimistic" in row["metric"] for row in alone)
    assert {one.kind for one in suite_of(folder).values()} == {*KINDS}
    kinds = ("probe", "large_probe", "neighbours")
    split = [row for row in alone if row["benchmark"] in kinds]
    assert len(split) == 6 and all(row["protocol"]["copies_in_train"] == 1 for row in split)
    assert {row["metric"] for row in alone} >= {"ITT/average", "TOT/average", "group"}


@pytest.mark.parametrize("world_size, batch_size", [(2, 3), (3, 64), (4, 5)])
def test_features_are_equal_bit_for_bit(
    ranks: Any, folder: Path, world_size: int, batch_size: int
) -> None:
    """Also where some ranks have no batch at all (3 ranks, one batch)."""
    images, texts = extract(folder, batch_size)
    for got_images, got_texts in ranks(world_size, extract, folder, batch_size):
        assert np.array_equal(got_images, images) and np.array_equal(got_texts, texts)


def test_a_bad_image_stops_every_rank_with_one_line(ranks: Any, folder: Path) -> None:
    bad = folder / "MLLM_VLM Images" / "Color" / "1.png"  # only the first rank reads it
    bad.write_bytes(b"broken")
    for line in ranks(2, fail_together, folder):
        assert f"image {bad} cannot be decoded" in line and "\n" not in line


def held_out_losses(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sides = [rng.standard_normal((37, 24)).astype(np.float32) for _ in range(2)]
    unit = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides]
    return row_losses(*unit, scale=50.0, context=here(), chunk_bytes=8 * 37 * 5)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_validation_loss_is_equal_bit_for_bit(ranks: Any, world_size: int) -> None:
    alone = held_out_losses(0)
    for losses in ranks(world_size, held_out_losses, 0):
        np.testing.assert_array_equal(losses, alone)
