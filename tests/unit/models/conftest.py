"""Tiny models for the tests of models/."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mclclip.models.loading import load_towers
from mclclip.models.model import Model

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def vit() -> Model:
    return load_towers(CONFIGS / "tiny_vit.json", seed=1)


@pytest.fixture
def resnet() -> Model:
    model = load_towers(CONFIGS / "tiny_resnet.json", seed=1)
    # open_clip starts the last norm of every block at zero: the blocks would do nothing.
    for name, parameter in model.named_parameters():
        if name.endswith("bn3.weight"):
            torch.nn.init.ones_(parameter)
    return model


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def tokens(vit: Model) -> Tensor:
    result: Tensor = vit.tokenizer(["a red square", "two blue dots", "nothing"])
    return result
