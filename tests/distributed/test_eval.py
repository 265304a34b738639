"""Features and losses over several gloo ranks are those of one process.

Rows of every evaluator are compared in ``tests/contracts/test_evaluators.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mclclip.eval.classification import LabelledFeatures
from mclclip.eval.features import Extractor
from mclclip.eval.protocols import linear_probe
from mclclip.eval.protocols.contrastive_loss import row_losses
from tests.distributed.conftest import here


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
    """Fourteen images of noise."""
    rng = np.random.default_rng(0)
    for number in range(1, 15):
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number:02d}.png")
    return tmp_path


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


@pytest.mark.parametrize("world_size, batch_size", [(3, 64), (4, 5)])
def test_features_are_equal_bit_for_bit(
    ranks: Any, folder: Path, world_size: int, batch_size: int
) -> None:
    """Also where some ranks have no batch at all (3 ranks, one batch)."""
    images, texts = extract(folder, batch_size)
    for got_images, got_texts in ranks(world_size, extract, folder, batch_size):
        assert np.array_equal(got_images, images) and np.array_equal(got_texts, texts)


def test_a_bad_image_stops_every_rank_with_one_line(ranks: Any, folder: Path) -> None:
    bad = folder / "01.png"  # only the first rank reads it
    bad.write_bytes(b"broken")
    for line in ranks(2, fail_together, folder):
        assert f"image {bad} cannot be decoded" in line and "\n" not in line


def held_out_losses(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sides = [rng.standard_normal((37, 24)).astype(np.float32) for _ in range(2)]
    unit = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides]
    return row_losses(*unit, scale=50.0, context=here(), chunk_bytes=8 * 37 * 5)


def test_the_validation_loss_is_equal_bit_for_bit(ranks: Any) -> None:
    alone = held_out_losses(0)
    for losses in ranks(4, held_out_losses, 0):
        np.testing.assert_array_equal(losses, alone)


def probe(data: LabelledFeatures) -> tuple[Any, Any]:
    """Weights and protocol of the probe."""
    options: dict[str, Any] = {"validation_share": 0.3, "seed": 1, "max_iterations": 20}
    metric: Any = "accuracy" if data.train_labels.ndim == 1 else "map_11_point"
    fitted, protocol = linear_probe.train(here(), data, strength=None, metric=metric, **options)
    parts = [(one.classes, one.weight, one.bias) for one in fitted if one is not None]
    return parts, protocol


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_linear_probe_is_equal_bit_for_bit(ranks: Any, num_labels: int) -> None:
    """Of classes, and of several labels per image; three ranks do not divide the strengths."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, 90)
    rows = np.eye(12, dtype=np.float32)[truth] + 0.5 * rng.normal(size=(90, 12))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    labels = truth if num_labels == 1 else np.where(np.eye(4)[truth][:, :num_labels] > 0, 1, -1)
    data = LabelledFeatures(
        rows[:60], labels[:60], rows[60:], labels[60:], class_names=[*"abcd"[:num_labels]]
    )
    ((alone, protocol),) = ranks(1, probe, data)
    for parts, told in ranks(3, probe, data):
        assert told == protocol and len(parts) == len(alone) == num_labels
        for part, other in zip(parts, alone, strict=True):
            assert all(map(np.array_equal, part, other))
