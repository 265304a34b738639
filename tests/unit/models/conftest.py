"""Tiny models for the tests of models/."""

import copy
import functools
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


_made = functools.cache(lambda name: load_towers(CONFIGS / name, seed=1))


@pytest.fixture
def vit() -> Model:
    return copy.deepcopy(_made("tiny_vit.json"))


@pytest.fixture
def resnet() -> Model:
    model = copy.deepcopy(_made("tiny_resnet.json"))
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


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Exports of a base and of two stages; read only."""
    model = copy.deepcopy(_made("tiny_vit.json"))
    return save_stages(model, tmp_path_factory.mktemp("stages"), 3)
