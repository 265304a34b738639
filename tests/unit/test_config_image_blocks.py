"""The blocks of image towers are counted when options are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mclclip import config
from mclclip.models.memory import load_shapes
from mclclip.models.options import ModelConfig, num_blocks
from tests import tiny

CONFIGS = tiny.ROOT / "tests" / "configs"


def load(*overrides: str) -> config.Config:
    return tiny.make_config(Path("run"), Path("data"), *overrides)


@pytest.mark.parametrize(
    "name",
    [
        "ViT-B-32",
        CONFIGS / "tiny_resnet.json",
        {"vision_cfg": {"backbone": "timm:resnet18", "image_size": 32}},
        {"vision_cfg": {"backbone": "mclclip:small_conv", "image_size": 32}},
    ],
)
def test_it_counts_what_the_model_has(name: str | Path | dict[str, Any]) -> None:
    blocks = load_shapes(name, text=False).num_blocks
    named = name if isinstance(name, dict) else str(name)
    assert num_blocks(ModelConfig(named)) == blocks


def test_an_export_is_read_where_there_is_one(tmp_path: Path) -> None:
    name = f"local-dir:{tmp_path}"
    assert num_blocks(ModelConfig(name)) is None  # not yet written
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": tiny.MODEL}))
    assert num_blocks(ModelConfig(name)) == 3


@pytest.mark.parametrize(
    "name",
    [
        "hf-hub:some/model",
        {"embed_dim": 8, "vision_cfg": {"timm_model_name": "no_such"}, "text_cfg": {}},
        "no-such-model",
        {"vision_cfg": {"layers": "many"}},
        {"model_cfg": [1]},
    ],
)
def test_what_is_not_known_here_is_left_to_the_loader(name: Any) -> None:
    assert num_blocks(ModelConfig(name)) is None
    load(f"model.name={json.dumps(name)}", "train.lock.image_blocks=99", "base=null")


def test_a_tower_of_timm_is_built_only_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: Any) -> int:
        raise AssertionError("it was built")

    monkeypatch.setattr("mclclip.models.memory.load_shapes", build)
    for number in ("all", 0):
        load("model.name=MobileCLIP2-S0", f"train.lock.image_blocks={number}")


def test_blocks_of_a_text_tower_that_rests_are_refused() -> None:
    assert load("train.lock.text_blocks=1").train.model_arguments()["lock"]["text_blocks"] == 1
    with pytest.raises(
        ValueError, match="text_blocks=1 names blocks of a text tower that text=fal"
    ):
        load("train.lock.text=false", "train.lock.text_blocks=1")
