"""An image tower alone: trained with a projector, exported without, read by the one loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mclclip
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
    vit: Model, encoder: Model, images: Tensor
) -> None:
    state = torch.get_rng_state()
    assert torch.equal(encoder.encode_image(images), vit.encode_image(images))
    again = load_towers(TINY, seed=1, projector=(48, 16), text=False)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert sum(p.numel() for p in encoder.tower.parameters()) == sum(
        p.numel() for p in vit.visual.parameters()
    )


def test_text_tower_and_tokenizer_of_a_configuration_are_not_asked_for() -> None:
    """Both would have to be fetched."""
    config = json.loads(TINY.read_text())
    config["text_cfg"] = {"hf_model_name": "roberta-base", "hf_tokenizer_name": "roberta-base"}
    assert load_towers(config, text=False).embed_dim == 32
    assert (
        load_towers(config | {"multimodal_cfg": {}}, text=False).embed_dim == 32
    )  # a CoCa's tower


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


def test_projector_is_linear_layers_with_batch_norms_between(encoder: Model) -> None:
    assert (encoder.embed_dim, encoder.feature_dim) == (32, 16)
    kinds = [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in encoder.projector] == kinds  # type: ignore[arg-type]
    plain = load_towers(TINY, text=False)
    assert len(list(plain.projector.parameters())) == 0 and plain.feature_dim == 32


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


def test_a_clip_gives_its_image_tower(vit: Model, images: Tensor, tmp_path: Path) -> None:
    vary(vit, 3)
    vit.save(tmp_path)
    assert torch.equal(
        load_towers(tmp_path, text=False).encode_image(images), vit.encode_image(images)
    )


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


def test_damaged_and_foreign_directories(encoder: Model, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(FileNotFoundError, match="has no open_clip_config.json"):
        load_model(tmp_path)
    encoder.save(tmp_path)
    weights.write_tensors(tmp_path / weights.IMAGE_WEIGHTS, {"visual.proj": torch.ones(1)})
    with pytest.raises(ValueError, match="model.safetensors do not load") as raised:
        load_model(tmp_path)
    assert "\n" not in str(raised.value)
