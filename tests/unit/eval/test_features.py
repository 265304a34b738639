"""Feature extraction: order, batches, precision, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mclclip.data.loader import run_ahead
from mclclip.eval.features import Extractor
from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers
from tests import tiny


@pytest.fixture
def images(tmp_path: Path, draw: Callable[[Path, int], None]) -> list[Path]:
    """Ten images that spell 9, 8, ..., 0."""
    paths = [tmp_path / f"{name}.png" for name in range(10)]
    for number, path in enumerate(paths):
        draw(path, 9 - number)
    return paths


@pytest.mark.parametrize("batch_size", [3, 64])
def test_rows_come_in_the_order_asked(images: list[Path], planted: Any, batch_size: int) -> None:
    encoder = planted("random", 10)
    features = Extractor(encoder, batch_size=batch_size).images(images)
    assert features.dtype == np.float32 and features.shape == (10, 16)
    assert np.allclose(features, encoder.image_table.flip(0).numpy(), atol=1e-7)
    assert max(encoder.seen_batches) == min(batch_size, 10)


def test_rows_of_an_encoder_are_those_of_its_transform_to_the_bit(images: list[Path]) -> None:
    """The device normalises what workers have cut to its size."""
    encoder = Encoder([load_towers(tiny.MODEL, seed=0)])
    found = Extractor(encoder, batch_size=4, num_workers=1).images(images)
    pixels = torch.stack([encoder.preprocess_val(Image.open(path)) for path in images])
    wanted = [encoder.encode_image(pixels[start : start + 4]) for start in (0, 4, 8)]
    rows = torch.cat(wanted)
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
    assert np.array_equal(found, rows.numpy())


def test_the_next_batch_is_computed_before_a_row_is_read() -> None:
    """So that a GPU has work while the host writes."""
    done: list[str] = []

    def compute(number: int) -> tuple[torch.Tensor, int]:
        done.append(f"compute {number}")
        return torch.tensor([number]), -number

    for rows, note in run_ahead(compute, range(3)):
        assert rows.tolist() == [-note]
        done.append(f"read {rows[0]}")
    order = ["compute 0", "compute 1", "read 0", "compute 2", "read 1", "read 2"]
    assert done == order and list(run_ahead(compute, [])) == []


def test_equal_texts_are_encoded_once_and_are_equal(planted: Any) -> None:
    encoder = planted("random", 5)
    features = Extractor(encoder, batch_size=2).texts(["4", "1", "4", "2", "4"])
    assert encoder.seen_texts == ["4", "1", "2"]
    assert np.array_equal(features[0], features[2]) and np.array_equal(features[0], features[4])
    assert np.allclose(features, encoder.text_table[[4, 1, 4, 2, 4]].numpy(), atol=1e-7)


def test_texts_are_cut_before_they_are_tokenised(
    planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, lengths = planted("random", 5), []

    def tokenizer(texts: list[str]) -> Any:
        lengths.extend(map(len, texts))
        return torch.zeros(len(texts), 1, dtype=torch.int64)

    monkeypatch.setattr(encoder, "tokenizer", tokenizer)
    monkeypatch.setattr(encoder, "encode_text", lambda tokens: torch.ones(len(tokens), 16))
    Extractor(encoder).texts(["a" * 10**6, "b"])
    assert lengths == [4096, 1]


def test_features_are_of_length_1_or_refused(images: list[Path], planted: Any) -> None:
    encoder = planted("random", 10)
    encoder.image_table = encoder.image_table * 3
    assert np.allclose(np.linalg.norm(Extractor(encoder).images(images), axis=1), 1, atol=1e-6)
    encoder.image_table[3] = float("nan")
    with pytest.raises(RuntimeError, match="not finite in fp32"):
        Extractor(encoder).images(images)


class Probe(torch.nn.Module):
    """Records the arithmetic it is called under."""

    embed_dim, logit_scale = 4, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 4)
        self.seen: list[Any] = []

    def tokenizer(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor([[len(text)] for text in texts])

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(tokens.float())
        self.seen += [features.dtype, self.training, torch.is_grad_enabled()]
        return features


@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_is_the_one_asked_for(precision: str, dtype: torch.dtype) -> None:
    probe = Probe()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a training step's autocast is not inherited
        features = Extractor(probe, precision=precision).texts(["a", "bb"])
    assert probe.seen == [dtype, False, False]
    assert probe.training  # as it was before
    assert features.dtype == np.float32


def test_bad_images_are_all_named_in_one_line(images: list[Path], planted: Any) -> None:
    """Also where a worker reads them."""
    encoder = planted("random", 10)
    extractor = Extractor(encoder, batch_size=4, num_workers=1)
    for number in (1, 2, 7):
        images[number].write_bytes(b"")
    with pytest.raises(ValueError, match=r"1\.png cannot .*2\.png cannot .*7\.png cann") as caught:
        extractor.images(images)
    assert "\n" not in str(caught.value) and not encoder.seen_batches
    images[7].unlink()
    with pytest.raises(ValueError, match=r"image .*7\.png cannot be read: No such file"):
        extractor.images(images)
