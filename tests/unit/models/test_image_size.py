"""Models at another image size: against open_clip and timm, from weights of every kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import open_clip
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from mclclip.models.loading import load_towers
from mclclip.models.memory import load_shapes
from mclclip.models.model import Model
from mclclip.models.preparing import prepare_model
from mclclip.models.towers import resize_positions
from tests.matrix import kept
from tests.unit.models.tiny_towers import TOWERS, config_of, make

SIZE = 64  # the towers' own is 32
QUICK = ("vit", "rn", "attention")


def quick(*left_out: str) -> list[Any]:
    """The kinds of towers but for some; most are left to the soak."""
    kinds = [kind for kind in TOWERS if kind not in left_out]
    return kept(kinds, *map(kinds.index, QUICK))


def pictures(size: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed))


def weights_of(kind: str, folder: Path) -> str:
    """A file of the weights of a small model at its own size."""
    path = folder / f"{kind}.pt"
    torch.save(make(kind).clip.state_dict(), path)
    return str(path)


@torch.no_grad()
@pytest.mark.parametrize("kind", kept(["vit", "attention", "token", "pe"], 0, 1))
def test_features_equal_those_of_open_clips_forced_size(kind: str, tmp_path: Path) -> None:
    make(kind).save(tmp_path / "own")
    plain = open_clip.create_model(f"local-dir:{tmp_path / 'own'}", force_image_size=SIZE).eval()
    model = load_towers(config_of(kind), weights_of(kind, tmp_path), image_size=SIZE)
    assert model.image_size == SIZE
    found, wanted = model.encode_image(pictures(SIZE)), plain.encode_image(pictures(SIZE))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert model.preprocess_val(_picture()).shape == (3, SIZE, SIZE)
    assert model.preprocess_train(_picture()).shape == (3, SIZE, SIZE)


@torch.no_grad()
def test_a_resnets_attention_pool_is_resized(tmp_path: Path) -> None:
    """open_clip builds a ResNet of any size, and refuses weights of another."""
    file, own = weights_of("rn", tmp_path), make("rn").visual.attnpool.positional_embedding
    model = load_towers(config_of("rn"), file, image_size=SIZE)
    model.save(tmp_path / "larger")
    plain = open_clip.create_model(f"local-dir:{tmp_path / 'larger'}").eval()
    found, wanted = model.encode_image(pictures(SIZE)), plain.encode_image(pictures(SIZE))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    resized = model.visual.attnpool.positional_embedding
    assert len(own) == 2 and torch.equal(resized[0], own[0])  # the mean's, and one place's
    torch.testing.assert_close(resized[1:], own[1:].expand(4, -1), atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_timm_tower_equals_timms_own_of_that_size(tmp_path: Path) -> None:
    """timm resizes the positions of its own weights when it reads them."""
    name = "test_vit3"
    own = timm.create_model(name, num_classes=0)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    file, size = tmp_path / "timm.safetensors", 192
    save_file(own.state_dict(), file)
    there = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay={"file": str(file)}, num_classes=0,
        img_size=size,
    ).eval()  # fmt: skip
    side = own.default_cfg["input_size"][1]
    tree = {"vision_cfg": {"backbone": f"timm:{name}", "image_size": side}}
    model = load_towers(tree, image_weights=str(file), image_size=size)
    found, wanted = model.encode_image(pictures(size)), there(pictures(size))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", quick("swin"))  # whose windows do not fit these few pixels
def test_an_export_has_the_size(kind: str, tmp_path: Path) -> None:
    """Also that of an image tower alone; and the whole tower equals its blocks in turn."""
    for text in (True, False):
        model = load_towers(config_of(kind), image_size=SIZE, text=text, seed=3)
        model.save(tmp_path / str(text))
        again = load_towers(tmp_path / str(text))
        assert again.image_size == model.image_size == SIZE
        wanted = model.encode_image(pictures(SIZE))
        assert torch.equal(again.encode_image(pictures(SIZE)), wanted)
        trunk = again.encode_trunk(pictures(SIZE), 1)
        torch.testing.assert_close(again.encode_tail(trunk, 1), wanted, atol=1e-5, rtol=1e-5)
    smaller = load_towers(tmp_path / "True", image_size=32)
    assert smaller.encode_image(pictures(32)).shape == (2, 32)


def prepared(model: Model) -> None:
    """Prepares a model for a training of all its parts, partly on pictures of another size."""
    prepare_model(
        model,
        lock={"image_blocks": "all", "image_norm": True, "image_projection": True},
        lora=None,
        seed=0,
        precision="fp32",
        grad_checkpointing=False,
        image_sizes=[SIZE],
    )


# fastvit: on a CPU torch 2.13 crashes in the backward pass of its depthwise kernels at 64 pixels.
@pytest.mark.parametrize("kind", quick("pe", "eva", "relpos", "swin", "fastvit"))
def test_a_model_takes_pictures_of_another_size(kind: str, tmp_path: Path) -> None:
    """As one does whose positions were resized for good; and they get the gradient of all."""
    model = make(kind)
    prepared(model)
    model.eval()
    own, before = model.encode_image(pictures(32)), dict(model.state_dict())
    assert torch.equal(own, make(kind).encode_image(pictures(32)))
    features = model.encode_image(pictures(SIZE))
    sized = load_towers(config_of(kind), weights_of(kind, tmp_path), image_size=SIZE)
    torch.testing.assert_close(features, sized.encode_image(pictures(SIZE)), atol=1e-5, rtol=1e-5)
    features.square().sum().backward()
    for name, parameter in model.visual.named_parameters():
        if name.endswith(("positional_embedding", "pos_embed")):
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.encode_image(pictures(32)), own)


@pytest.mark.parametrize("kind", ["pe", "swin"])
def test_towers_that_train_at_one_size_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"image_size is {SIZE}, and the image tower is a timm"):
        prepared(make(kind))


def test_positions_of_the_same_grid_stay() -> None:
    rows = torch.randn(1 + 6, 5)
    assert resize_positions(rows, (2, 3), (2, 3)) is rows
    larger = resize_positions(rows, (2, 3), (4, 6))
    assert larger.shape == (25, 5) and torch.equal(larger[0], rows[0])
    flat = resize_positions(torch.ones(6, 5), (2, 3), (5, 4))
    torch.testing.assert_close(flat, torch.ones(20, 5))


def test_a_size_that_a_tower_does_not_take_is_refused() -> None:
    """Whose patches do not divide it, or which is made for one size."""
    vision = {"timm_model_name": "cait_xxs24_224", "timm_pool": "", "image_size": 224}
    cases: list[tuple[Any, int, str]] = [
        (config_of("vit"), 36, "image_size is 36.*32 or 40"),
        (config_of("rn"), 48, "image_size is 48.*32 or 64"),
        (config_of("token"), 40, "image_size is 40.*32 or 48"),
        (config_of("vit"), 4, "image_size is 4.*8"),
        (config_of("vit", vision_cfg=vision), SIZE, "image_size is 64, but timm's tower"),
    ]
    for config, size, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            load_shapes(config, image_size=size)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="image_size is 36"):
        load_towers(config_of("vit"), image_size=36)


def _picture() -> Any:
    from PIL import Image

    return Image.new("RGB", (90, 70), (200, 10, 90))
