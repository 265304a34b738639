"""An image tower alone: trained with a projector, exported without, read by the one loader; also
towers of timm and torchvision, with channels and stems of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import mclclip
import mclclip.util.torchvision_fix
from mclclip.models import weights
from mclclip.models.encoder import Encoder, load_model, save_concat
from mclclip.models.loading import load_towers
from mclclip.models.lora import add_lora, merge_lora
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.models.patterns import ParameterConfig
from mclclip.models.soup import save_uniform_soup
from tests.unit.models.conftest import CONFIGS
from tests.unit.models.stages import vary

DECAY = [ParameterConfig("*", layer_decay=0.5)]

TINY = CONFIGS / "tiny_vit.json"
NO_TEXT = "the model is an image encoder without a text tower: take a CLIP model"


@pytest.fixture
def encoder() -> Model:
    return load_towers(TINY, seed=1, projector=(48, 16), text=False)


def test_tower_is_that_of_the_clip_of_the_same_seed(
    vit: Model, encoder: Model, images: Tensor, tmp_path: Path
) -> None:
    state = torch.get_rng_state()
    assert torch.equal(encoder.encode_image(images), vit.encode_image(images))
    again = load_towers(TINY, seed=1, projector=(48, 16), text=False)
    kinds = [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in encoder.projector] == kinds  # type: ignore[arg-type]
    assert (encoder.embed_dim, encoder.feature_dim) == (32, 16)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert len([*encoder.tower.parameters()]) == len([*vit.visual.parameters()])
    vit.save(tmp_path)
    given = load_towers(tmp_path, text=False)  # a CLIP gives its image tower
    assert torch.equal(given.encode_image(images), vit.encode_image(images))


def test_text_tower_and_tokenizer_of_a_configuration_are_not_asked_for() -> None:
    """Both would have to be fetched."""
    config = json.loads(TINY.read_text())
    config["text_cfg"] = {"hf_model_name": "roberta-base", "hf_tokenizer_name": "roberta-base"}
    plain = load_towers(config, text=False)
    assert plain.embed_dim == plain.feature_dim == 32 and not [*plain.projector.parameters()]
    coca = load_towers(config | {"multimodal_cfg": {}}, text=False)
    assert coca.embed_dim == 32


def test_objective_sees_the_projector_and_a_step_moves_what_is_unlocked(
    encoder: Model, images: Tensor
) -> None:
    names = encoder.lock(1, image_norm=True, image_projection=True)
    projector = {n for n, _ in encoder.named_parameters() if n.startswith("projector.")}
    block = "tower.visual.transformer.resblocks.2."
    tops = {"tower.visual.ln_post.weight", "tower.visual.ln_post.bias", "tower.visual.proj"}
    assert {n for n in names if not n.startswith(block)} == projector | tops
    assert encoder.num_frozen_blocks == 2
    assert [encoder.layers_above(n) for n in ("projector.0.weight", f"{block}ln_1.bias")] == [0, 1]
    output = encoder.train()(image=images)
    assert output.keys() == {"image_features"}
    assert output["image_features"].shape == (3, 16)
    torch.testing.assert_close(output["image_features"].norm(dim=1), torch.ones(3))
    before = {name: t.clone() for name, t in encoder.named_parameters()}
    optimizer = build_optimizer(encoder, weight_decay=0.1, lr=0.01, parameters=DECAY)
    output["image_features"][:, 0].sum().backward()
    optimizer.step()
    moved = {n for n, t in encoder.named_parameters() if not torch.equal(t, before[n])}
    # A batch norm takes away what the bias before it adds.
    assert set(names) - {"projector.0.bias"} <= moved <= set(names)


def test_export_is_read_back_as_an_encoder_without_texts(
    encoder: Model, images: Tensor, tmp_path: Path
) -> None:
    vary(encoder, 3)
    encoder.requires_grad_(False)
    encoder.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    found = mclclip.load_model(tmp_path)
    assert isinstance(found, Encoder) and found.embed_dim == 32
    expected = encoder.encode_image(images, normalize=True)
    assert torch.equal(found.encode_image(images), expected)
    assert torch.equal(
        load_towers(tmp_path, text=False).requires_grad_(False).encode_image(images, True), expected
    )
    for use in (lambda: found.encode_text(torch.zeros(1, 16)), lambda: found.tokenizer(["a dog"])):
        with pytest.raises(ValueError, match=NO_TEXT) as raised:
            use()
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=NO_TEXT):
        encoder(image=images, text=torch.zeros(3, 16))
    assert not load_towers(tmp_path).reads_texts


def test_encoders_of_one_base_join(encoder: Model, images: Tensor, tmp_path: Path) -> None:
    encoder.lock(1, image_norm=True, image_projection=True)
    encoder.save(tmp_path / "a")
    add_lora(encoder, rank=2, alpha=4.0)
    vary(encoder, 1)
    merge_lora(encoder)
    encoder.save(tmp_path / "b", weights.base_digest(tmp_path / "a"))
    paths = [tmp_path / "a", tmp_path / "b"]
    alone = [load_model(path).encode_image(images) for path in paths]
    assert not torch.allclose(*alone, atol=1e-3)
    record = save_concat(paths, "stage_norm", tmp_path / "concat")
    joined = load_model(tmp_path / "concat")
    assert isinstance(joined, Encoder) and record["num_trunk_blocks"] == 2
    expected = torch.cat(alone, dim=1) / 2**0.5
    torch.testing.assert_close(joined.encode_image(images), expected)
    with pytest.raises(ValueError, match=NO_TEXT):
        joined.encode_text(torch.zeros(1, 16))
    assert save_uniform_soup(paths, tmp_path / "soup") > 0
    assert load_model(tmp_path / "soup").encode_image(images).shape == (3, 32)


VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def config(backbone: str, **fields: Any) -> dict[str, Any]:
    own = {"channels": 4, "image_size": 16}
    return {"vision_cfg": {"backbone": backbone, **own, **fields}}


KINDS = {
    "timm resnet": config(
        "timm:resnet18", stem="cifar", options={"channels": [8] * 4, "layers": [1] * 4}
    ),
    "its own stem": config("torchvision:resnet18", image_size=32),
    "small convolutions": config(
        "mclclip:small_conv", options={"widths": [8, 16, 32], "strides": [2, 2, 1]}
    ),
    "transformer": config("timm:vit_tiny_patch16_224", options=VIT),
}


@pytest.mark.parametrize("kind", KINDS)
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


def test_a_small_stem_keeps_small_pictures_of_four_channels() -> None:
    model = load_towers(KINDS["timm resnet"], text=False)
    trunk = model.visual.trunk
    assert trunk.conv1.kernel_size == (3, 3) and trunk.conv1.in_channels == 4
    hidden = trunk.layer1(trunk.maxpool(trunk.conv1(torch.zeros(1, 4, 16, 16))))
    assert hidden.shape[2:] == (16, 16)
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 4), np.uint8)
    view, plain = model.preprocess_train(image), model.preprocess_val(image)
    assert view.shape == plain.shape == (4, 16, 16)
    expected = (torch.from_numpy(image).permute(2, 0, 1) / 255 - 0.5) / 0.5
    torch.testing.assert_close(plain, expected)


def test_weights_of_timm_s_own_model_load(tmp_path: Path) -> None:
    """As timm publishes them, and as they are exported; others are refused in one line."""
    torch.manual_seed(0)
    own = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=16, **VIT).eval()
    given = config("timm:vit_tiny_patch16_224", channels=3, options=VIT)
    images = torch.randn(2, 3, 16, 16)
    state, file = own.state_dict(), tmp_path / "model.safetensors"
    for prefix in ("", "trunk.", "visual.trunk."):
        save_file({prefix + name: tensor for name, tensor in state.items()}, file)
        model = load_towers(given, str(file))
        with torch.no_grad():
            torch.testing.assert_close(model.encode_image(images), own(images))
    save_file({"other": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="model.safetensors does not fit .*trunk.other"):
        load_towers(given, str(file))
