"""Attributes of a data set in shards, read out of planted features."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.data.datasets.sources import array_sample
from mclclip.data.picture_transform import PictureTransform
from mclclip.data.shard_writer import write_shards
from mclclip.eval.features import Extractor
from mclclip.eval.protocols.attributes import evaluate

SIZES = {"train": 60, "test": 20}


def write(root: Path, **changes: Any) -> Path:
    """Pictures of one pixel that hold the shape and, hidden from the encoder, the colour."""
    for split, number in SIZES.items():
        samples = []
        for n in range(number):
            values = {"shape": n % 3, "colour": ["red", "green"][n // 3 % 2]} | changes
            pixels = np.array([[[n % 3, n // 3 % 2]]], np.uint8)
            samples.append(array_sample(n, pixels, values))
        write_shards(samples, root / split, 25)
    return root


class Transform(PictureTransform):
    reads_arrays = True

    def __call__(self, image: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(image.astype(np.float32)).flatten()


def extractor() -> Extractor:
    def encode(images: torch.Tensor) -> torch.Tensor:
        noise = torch.sin(torch.arange(len(images)) * 12.9898)[:, None]
        return torch.cat([torch.eye(3)[images[:, 0].long()], 0.01 * noise], dim=1)

    planted: Any = SimpleNamespace(
        embed_dim=4, logit_scale=1.0, preprocess_val=Transform(), encode_image=encode
    )
    return Extractor(planted, batch_size=16)


@pytest.mark.parametrize("probe", ["linear", "knn"])
def test_what_is_in_the_features_is_found(tmp_path: Path, probe: Any) -> None:
    root = write(tmp_path)
    shape, colour, mean = evaluate(extractor(), root, attributes=["shape", "colour"], probe=probe)
    assert (shape.metric, colour.metric, mean.metric) == ("shape", "colour", "mean")
    assert shape.value == 100 and shape.count == SIZES["test"] and colour.value < 80
    assert mean.value == pytest.approx((shape.value + colour.value) / 2)
    assert shape.protocol["num_classes"] == 3 and shape.protocol["num_train"] == SIZES["train"]
    (few,) = evaluate(extractor(), root, attributes=["shape"], probe=probe, max_train=30)
    assert few.protocol["num_train"] == 30 and few.value == 100


def test_mistakes(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    for options, error, message in (
        ({"attributes": ["size"]}, ValueError, "holds 60 no_attribute:size"),
        ({"attributes": ["shape"], "max_train": 2}, ValueError, "that no train image has"),
    ):
        with pytest.raises(error, match=message) as raised:
            evaluate(extractor(), root, **options)  # type: ignore[arg-type]
        assert "\n" not in str(raised.value)
    same = write(tmp_path / "d", shape=1)
    with pytest.raises(ValueError, match="all 60 train images have the same value of 'shape'"):
        evaluate(extractor(), same, attributes=["shape"])
