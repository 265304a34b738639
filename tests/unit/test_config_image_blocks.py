"""A lock of more image blocks than a tower has is refused when options are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mclclip import config
from mclclip.models.memory import load_shapes
from mclclip.models.options import ModelConfig, check_image_blocks
from tests import tiny

RECIPES = tiny.ROOT / "launch" / "recipes"
CONFIGS = tiny.ROOT / "tests" / "configs"


def load(*overrides: str) -> config.Config:
    return tiny.make_config(Path("run"), Path("data"), *overrides)


@pytest.mark.parametrize(
    "name",
    [
        "RN50-quickgelu",
        "ViT-B-32",
        "convnext_tiny",
        CONFIGS / "tiny_resnet.json",
        CONFIGS / "tiny_vit.json",
        {"vision_cfg": {"backbone": "timm:resnet50", "image_size": 32}},
        {"vision_cfg": {"backbone": "mclclip:small_conv", "image_size": 32}},
    ],
)
def test_it_counts_what_the_model_has(name: str | Path | dict[str, Any]) -> None:
    blocks = load_shapes(name, text=False).num_blocks
    named = name if isinstance(name, dict) else str(name)
    check_image_blocks(ModelConfig(named), "lock", blocks)
    with pytest.raises(ValueError, match=f"has {blocks} blocks"):
        check_image_blocks(ModelConfig(named), "lock", blocks + 1)


def test_each_training_is_held_against_its_own_model() -> None:
    load("base.lock.image_blocks=3", "train.lock.image_blocks=3")
    with pytest.raises(ValueError, match="base.lock.image_blocks is 4.*of the model has 3 blocks"):
        load("base.lock.image_blocks=4")
    with pytest.raises(ValueError, match="train.lock.image_blocks is 4"):
        load("train.lock.image_blocks=4")
    mlcd = ("train.objective.kind=mlcd", "train.objective.labels_per_sample=1")
    wider = (*mlcd, "cluster.num_clusters=100", "trained_model.name=ViT-B-32")
    load(*wider, "train.lock.image_blocks=12")
    with pytest.raises(ValueError, match="'ViT-B-32' has 12 blocks"):
        load(*wider, "train.lock.image_blocks=13")


def test_an_export_is_read_where_there_is_one(tmp_path: Path) -> None:
    name = f"local-dir:{tmp_path}"
    check_image_blocks(ModelConfig(name), "lock", 99)  # not yet written
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": tiny.MODEL}))
    with pytest.raises(ValueError, match="has 3 blocks"):
        check_image_blocks(ModelConfig(name), "lock", 4)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        ("all", "ViT-B-32"),
        (99, "hf-hub:some/model"),
        (99, {"embed_dim": 8, "vision_cfg": {"timm_model_name": "no_such"}, "text_cfg": {}}),
        (99, "no-such-model"),
        (99, {}),
        (99, {"vision_cfg": {"layers": "many"}}),
        (1, {"vision_cfg": {"layers": True}}),
        (99, {"model_cfg": [1]}),
        (99, "a" * 5000),
    ],
)
def test_what_is_not_known_here_is_left_to_the_loader(number: Any, name: Any) -> None:
    check_image_blocks(ModelConfig(name), "lock", number)


def test_a_tower_of_timm_is_built_only_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: Any) -> int:
        raise AssertionError("it was built")

    monkeypatch.setattr("mclclip.models.memory.load_shapes", build)
    for number in ("all", 0):
        check_image_blocks(ModelConfig("MobileCLIP2-S0"), "lock", number)


def test_blocks_of_a_text_tower_that_rests_are_refused() -> None:
    assert load("train.lock.text_blocks=1").train.model_arguments()["lock"]["text_blocks"] == 1
    with pytest.raises(
        ValueError, match="text_blocks=1 names blocks of a text tower that text=fal"
    ):
        load("train.lock.text=false", "train.lock.text_blocks=1")


@pytest.mark.parametrize(
    ("model", "blocks", "message"),
    [
        ("RN50-quickgelu", "all", "the image tower is an open_clip ResNet: patches are dropped"),
        ("convnext_tiny", "all", "the image tower is convnext_tiny: patches are dropped in"),
        ("ViT-B-32", "8", "lock.image_blocks=8 locks the first 4 of 12 blocks, which see whole"),
        ("ViT-B-32", "0", "lock.image_blocks=0 locks the first 12 of 12 blocks"),
    ],
)
def test_patch_dropout_that_cannot_be_is_refused_at_once(
    model: str, blocks: str, message: str
) -> None:
    overrides = (f"model.name={model}", f"train.lock.image_blocks={blocks}")
    with pytest.raises(ValueError, match=f"train.patch_dropout is 0.5.*{message}"):
        config.load(RECIPES / "cc12m_vitl14.yaml", (*overrides, "train.patch_dropout=0.5"))
    config.load(RECIPES / "cc12m_vitl14.yaml", overrides)


@pytest.mark.parametrize("blocks", ["12", "all"])
def test_patch_dropout_of_unlocked_blocks_is_read(blocks: str) -> None:
    overrides = ("model.name=ViT-B-32", f"train.lock.image_blocks={blocks}")
    read = config.load(RECIPES / "cc12m_vitl14.yaml", (*overrides, "train.patch_dropout=0.5"))
    assert read.train.model_arguments()["patch_dropout"] == 0.5
    with pytest.raises(ValueError, match="patch_dropout"):
        config.load(RECIPES / "cc12m_vitl14.yaml", (*overrides, "train.patch_dropout=1.0"))
