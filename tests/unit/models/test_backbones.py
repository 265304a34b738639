"""Towers of timm and torchvision: channels, stems, layouts, exports, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import mclclip
import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import timm

from mclclip.models.loading import load_towers
from tests.matrix import kept
from tests.unit.models.stages import vary

VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def config(backbone: str, **fields: Any) -> dict[str, Any]:
    return {"vision_cfg": {"backbone": backbone, "channels": 4, "image_size": 16, **fields}}


KINDS = {
    "timm resnet": config("timm:resnet18", stem="cifar"),
    "torchvision resnet": config("torchvision:resnet18", stem="cifar"),
    "its own stem": config("torchvision:resnet18", image_size=32),
    "small convolutions": config(
        "mclclip:small_conv", options={"widths": [8, 16, 32], "strides": [2, 2, 1]}
    ),
    "transformer": config("timm:vit_tiny_patch16_224", options=VIT),
}


@pytest.mark.parametrize("kind", kept([*KINDS], 0, 2, 3, 4))
def test_split_lock_and_export(kind: str, tmp_path: Path) -> None:
    model = load_towers(KINDS[kind], projector=[24, 12], seed=3)
    vary(model, 1)
    height, width = model.image_size, model.image_size
    images = torch.randn(3, 4, height, width, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    with torch.no_grad():
        whole = model.encode_image(images)
        for number in range(model.num_blocks + 1):
            parts = model.encode_tail(model.encode_trunk(images, number), number)
            torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    assert whole.shape == (3, model.embed_dim) and model.feature_dim == 12
    trained = model.lock(1, True, True)
    assert any(n.startswith("projector.") for n in trained)
    assert model.num_frozen_blocks == model.num_blocks - 1
    assert model.train()(image=images)["image_features"].shape == (3, 12)
    model.eval().save(tmp_path)
    found = mclclip.load_model(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(found.encode_image(images), model.encode_image(images, True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_small_stem_keeps_small_pictures() -> None:
    tower = load_towers(KINDS["timm resnet"], text=False).visual
    assert tower.trunk.conv1.kernel_size == (3, 3) and tower.trunk.conv1.in_channels == 4
    hidden = tower.trunk.layer1(tower.trunk.maxpool(tower.trunk.conv1(torch.zeros(1, 4, 16, 16))))
    assert hidden.shape[2:] == (16, 16)


def test_weights_of_timm_s_own_model_load(tmp_path: Path) -> None:
    """As timm publishes them, and as they are exported; others are refused in one line."""
    torch.manual_seed(0)
    options = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    own = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=16, **options).eval()
    given = {"vision_cfg": {"backbone": "timm:vit_tiny_patch16_224", "image_size": 16}}
    given["vision_cfg"]["options"] = VIT
    images = torch.randn(2, 3, 16, 16)
    state, file = own.state_dict(), tmp_path / "model.safetensors"
    for prefix in ("", "trunk.", "visual.trunk."):
        save_file({prefix + name: tensor for name, tensor in state.items()}, file)
        model = load_towers(given, str(file))
        with torch.no_grad():
            torch.testing.assert_close(model.encode_image(images), own(images))
    save_file({"other": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="the weights .* do not load .*Missing key"):
        load_towers(given, str(file))


def test_weights_depend_on_the_seed_alone() -> None:
    def first(seed: int) -> torch.Tensor:
        torch.rand(seed)  # the caller's generator does not matter
        return load_towers(
            KINDS["torchvision resnet"], seed=seed, text=False
        ).visual.trunk.conv1.weight

    before = torch.random.get_rng_state()
    torch.random.set_rng_state(before)
    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


def test_arrays_of_four_channels_become_views() -> None:
    model = load_towers(KINDS["timm resnet"], text=False)
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 4), np.uint8)
    view, plain = model.preprocess_train(image), model.preprocess_val(image)
    assert view.shape == plain.shape == (4, 16, 16)
    expected = (torch.from_numpy(image).permute(2, 0, 1) / 255 - 0.5) / 0.5
    torch.testing.assert_close(plain, expected)
