"""Encoders whose answers are planted: what evaluators must score is known beforehand."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def draw_number(path: Path, number: int) -> None:
    """Writes a small PNG whose red and green channels spell ``number``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (number // 256, number % 256, 0)).save(path, format="PNG")


@dataclass
class PlantedEncoder:
    """Row ``n`` of a table for the image that spells n, or for the last number in a text."""

    image_table: Tensor
    text_table: Tensor
    logit_scale: float = 100.0
    seen_texts: list[str] = field(default_factory=list)
    seen_batches: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.image_table = torch.nn.functional.normalize(self.image_table.float(), dim=1)
        self.text_table = torch.nn.functional.normalize(self.text_table.float(), dim=1)

    @property
    def embed_dim(self) -> int:
        return int(self.image_table.shape[1])

    stage_dim = embed_dim

    def preprocess_val(self, image: Image.Image) -> Tensor:
        return torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1)

    def tokenizer(self, texts: list[str]) -> Tensor:
        self.seen_texts += texts
        return torch.tensor([[int(re.findall(r"\d+", text)[-1])] for text in texts])

    def encode_image(self, images: Tensor) -> Tensor:
        self.seen_batches.append(len(images))
        numbers = (images[:, 0, 0, 0] * 256 + images[:, 1, 0, 0]).long()
        return self.image_table[numbers]

    def encode_text(self, tokens: Tensor) -> Tensor:
        return self.text_table[tokens[:, 0]]


def planted(kind: str, size: int, dim: int = 16, seed: int = 0) -> PlantedEncoder:
    """Features of the numbers below ``size``: perfect (equal for an image and a text of one
    number), constant, independent and random, or coarse: random ones of which many are equal."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "perfect":
        return PlantedEncoder(torch.eye(size), torch.eye(size))
    if kind == "constant":
        return PlantedEncoder(torch.ones(size, dim), torch.ones(size, dim))
    if kind == "coarse":
        signs = torch.randint(0, 2, (2, size, 4), generator=generator) * 2 - 1
        return PlantedEncoder(signs[0], signs[1])
    assert kind == "random"
    tables = torch.randn(2, size, dim, generator=generator)
    return PlantedEncoder(tables[0], tables[1])
