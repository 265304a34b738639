"""Patch dropout against open_clip's own, and where it rests or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip.transformer import PatchDropout as Reference
from torch import Tensor

from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.preparing import prepare_model
from mclclip.models.towers import PatchDropout
from mclclip.objectives.moco import MomentumCopy
from tests import tiny
from tests.device_waits import DEVICE, following

LOCK = {
    "image_blocks": "all",
    "image_norm": True,
    "image_projection": True,
    "text": True,
    "logit_scale": True,
}
RESNET = json.loads((tiny.ROOT / "tests/configs/tiny_resnet.json").read_text())


def prepared(share: float, config: Any = tiny.MODEL, lora: Any = None, **lock: Any) -> Model:
    model = load_towers(config, seed=1)
    prepare_model(
        model,
        lock=LOCK | lock,
        lora=lora,
        seed=0,
        precision="fp32",
        grad_checkpointing=False,
        patch_dropout=share,
    )
    return model


def gradients(model: Model, images: Tensor, seed: int = 3) -> dict[str, Tensor]:
    """Features and all gradients of a pass whose draws are seeded."""
    model.zero_grad()
    torch.manual_seed(seed)
    features = model.encode_image(images)
    features.square().sum().backward()  # type: ignore[no-untyped-call]
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found | {"features": features.detach()}


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9, 0.99])
def test_values_and_gradients_are_open_clips(images: Tensor, share: float) -> None:
    found = gradients(prepared(share), images)
    vision = tiny.MODEL["vision_cfg"] | {"patch_dropout": share}
    theirs = load_towers(tiny.MODEL | {"vision_cfg": vision}, seed=1).train()
    assert isinstance(theirs.visual.patch_dropout, Reference)
    wanted = gradients(theirs, images)
    assert found.keys() == wanted.keys() and "clip.visual.positional_embedding" in found
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("num", "share", "kept"), [(16, 0.5, 8), (9, 0.5, 4), (4, 0.99, 1)])
def test_the_class_token_and_different_patches_stay(num: int, share: float, kept: int) -> None:
    tokens = torch.arange(num + 1.0).expand(50, num + 1)[..., None]
    found = PatchDropout(share)(tokens)[..., 0]
    assert found.shape == (50, kept + 1)
    assert (found[:, 0] == 0).all()
    assert all(len(set(row.tolist())) == kept + 1 for row in found)
    assert len(set(found[:, 1:].flatten().tolist())) == num  # each picture draws its own


def test_nothing_is_dropped_outside_of_training(images: Tensor) -> None:
    model, plain = prepared(0.5), load_towers(tiny.MODEL, seed=1)
    assert not torch.equal(model.encode_image(images), plain.train().encode_image(images))
    assert torch.equal(model.eval().encode_image(images), plain.eval().encode_image(images))


def test_exports_know_nothing_of_it(tmp_path: Path) -> None:
    for name, share in (("with", 0.5), ("without", 0.0)):
        prepared(share).save(tmp_path / name)
    for path in sorted((tmp_path / "without").iterdir()):
        assert (tmp_path / "with" / path.name).read_bytes() == path.read_bytes(), path.name
    assert "patch_dropout" not in (tmp_path / "with/open_clip_config.json").read_text()


def test_recomputed_blocks_see_the_same_patches(images: Tensor) -> None:
    model = prepared(0.5)
    plain = gradients(model, images)
    model.set_grad_checkpointing()
    for name, value in gradients(model, images).items():
        assert torch.equal(value, plain[name]), name


def test_adapters_see_the_patches_that_are_left(images: Tensor) -> None:
    lora = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": "all", "text": False}
    model, seen = prepared(0.5, lora=lora), []
    block = model.visual.transformer.resblocks[0]
    block.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    model.encode_image(images)
    assert seen == [9]  # 16 patches


def test_a_momentum_copy_draws_its_own(images: Tensor) -> None:
    model = prepared(0.5)
    keys = MomentumCopy(model, 0.9)
    torch.manual_seed(0)
    same = [model(image=images)["image_features"], keys(images)]
    assert not torch.equal(*same)
    torch.manual_seed(0)
    torch.testing.assert_close(keys(images), same[0].detach())


def test_a_device_is_not_waited_for() -> None:
    with following() as waits:
        tokens = torch.randn(2, 9, 4).to(DEVICE, non_blocking=True)
        waits.recording = True
        assert PatchDropout(0.5)(tokens).device == DEVICE
        assert not waits.found


@pytest.mark.parametrize("image_blocks", [0, 2])
def test_locked_blocks_below_are_refused(image_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"the first {3 - image_blocks} of 3 blocks .* are locked"):
        prepared(0.5, image_blocks=image_blocks)
    prepared(0.0, image_blocks=image_blocks)


def test_an_embedding_may_be_locked(images: Tensor) -> None:
    assert "clip.visual.conv1.weight" not in gradients(prepared(0.5, image_blocks=3), images)


def test_towers_without_it_are_refused() -> None:
    timm = {"vision_cfg": {"backbone": "timm:resnet18", "image_size": 32}}
    with pytest.raises(ValueError, match="is a ModifiedResNet: patches are dropped in"):
        load_towers(RESNET).drop_patches(0.5)
    with pytest.raises(ValueError, match="patches are dropped in open_clip's own vision"):
        load_towers(timm, text=False).drop_patches(0.5)
