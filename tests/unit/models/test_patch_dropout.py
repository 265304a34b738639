"""Patch dropout against open_clip's own, and where it rests or is refused."""

from __future__ import annotations

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
from tests import tiny
from tests.device_waits import DEVICE, following

LOCK = {
    "image_blocks": "all",
    "image_norm": True,
    "image_projection": True,
    "text": True,
    "logit_scale": True,
}


def prepared(share: float, config: Any = tiny.MODEL, **lock: Any) -> Model:
    model = load_towers(config, seed=1)
    prepare_model(
        model,
        lock=LOCK | lock,
        lora=None,
        seed=0,
        precision="fp32",
        grad_checkpointing=False,
        patch_dropout=share,
    )
    return model


def gradients(model: Model, images: Tensor) -> dict[str, Tensor]:
    """Features and all gradients of a pass whose draws are seeded."""
    model.zero_grad()
    torch.manual_seed(3)
    features = model.encode_image(images)
    features.square().sum().backward()  # type: ignore[no-untyped-call]
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found | {"features": features.detach()}


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_values_and_gradients_are_open_clips(images: Tensor, share: float) -> None:
    found = gradients(prepared(share), images)
    vision = tiny.MODEL["vision_cfg"] | {"patch_dropout": share}
    theirs = load_towers(tiny.MODEL | {"vision_cfg": vision}, seed=1).train()
    assert isinstance(theirs.visual.patch_dropout, Reference)
    wanted = gradients(theirs, images)
    assert found.keys() == wanted.keys() and "clip.visual.positional_embedding" in found
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


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


def test_a_device_is_not_waited_for() -> None:
    with following() as waits:
        tokens = torch.randn(2, 9, 4).to(DEVICE, non_blocking=True)
        waits.recording = True
        assert PatchDropout(0.5)(tokens).device == DEVICE
        assert not waits.found


def test_locked_blocks_below_and_towers_without_it_are_refused(images: Tensor) -> None:
    """An embedding alone may be locked."""
    with pytest.raises(ValueError, match="the first 1 of 3 blocks .* are locked"):
        prepared(0.5, image_blocks=2)
    prepared(0.0, image_blocks=2)
    assert "clip.visual.conv1.weight" not in gradients(prepared(0.5, image_blocks=3), images)
    timm = {"vision_cfg": {"backbone": "timm:test_resnet", "image_size": 32}}
    with pytest.raises(ValueError, match="is a ModifiedResNet: patches are dropped in"):
        load_towers(tiny.RESNET).drop_patches(0.5)
    with pytest.raises(ValueError, match="patches are dropped in open_clip's own vision"):
        load_towers(timm, text=False).drop_patches(0.5)
