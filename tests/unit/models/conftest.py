"""Tiny models for the tests of models/."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from tests.unit.models.stages import save_stages

CONFIGS = Path(__file__).parents[2] / "configs"


def tiny_config(name: str = "tiny_vit", vision: Any = (), text: Any = (), **top: Any) -> Any:
    """The model config of that name, with other fields in its parts and at its top."""
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | top
    config["vision_cfg"] |= dict(vision)
    config["text_cfg"] |= dict(text)
    return config


class RunsWhenOpened:
    """A pickle of it makes a folder wherever it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


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


@pytest.fixture
def stages(vit: Model, tmp_path: Path) -> list[Path]:
    """Exports of a base and of two stages."""
    return save_stages(vit, tmp_path, 3)
