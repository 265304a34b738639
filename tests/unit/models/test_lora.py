"""Adapters: what they compute, what they train, and that nothing is left of them in an export."""

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from mclclip.models.loading import load_towers
from mclclip.models.lora import LowRank, add_lora, merge_lora
from mclclip.models.model import Model
from mclclip.models.options import LoraConfig
from tests.unit.models.conftest import tiny_config

START = "clip.visual.transformer.resblocks."
WIDTH = 64  # of tiny_vit, whose MLP is 4 times as wide


def adapt(model: Model, **options: Any) -> list[str]:
    return add_lora(model, **({"rank": 4, "alpha": 8.0, "seed": 5} | options))


def disturb(model: Model) -> None:
    """Gives every B a value, as training does."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.1, generator=generator)


def adapters(model: Model) -> dict[str, LowRank]:
    """By the name of the weight they adapt, such as `0.attn.in_proj_weight`."""
    return {
        name.removeprefix(START).replace("parametrizations.", "").removesuffix(".0"): module
        for name, module in model.named_modules()
        if isinstance(module, LowRank)
    }


# --- what is computed ------------------------------------------------------------------------


def test_a_is_drawn_by_the_seed_alone(vit: Model) -> None:
    state, drawn = torch.get_rng_state(), []
    for seed in (7, 7, 8):
        model = copy.deepcopy(vit)
        model.lock(2)
        adapt(model, seed=seed)
        drawn.append({n: adapter.lora_a for n, adapter in adapters(model).items()})
        assert torch.equal(torch.get_rng_state(), state)
    first, same, other = (each["2.mlp.c_proj.weight"] for each in drawn)
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert first.abs().max() <= (4 * WIDTH) ** -0.5
    assert len({tuple(a.flatten()[:5].tolist()) for a in drawn[0].values()}) == len(drawn[0])


@pytest.mark.parametrize("kind", ["tiny_vit", "qk_norm"])
def test_the_weights_are_base_plus_product(kind: str, images: Tensor) -> None:
    config = tiny_config(vision={"qk_norm": kind == "qk_norm"})  # open_clip's own attention
    model = load_towers(config)
    expected = copy.deepcopy(model)
    model.lock(2)
    adapt(model, rank=4, alpha=6.0)
    disturb(model)
    for name, adapter in adapters(model).items():
        weight = expected.clip.visual.transformer.resblocks.get_parameter(name)
        with torch.no_grad():
            weight += 6.0 / 4 * adapter.lora_b @ adapter.lora_a
    found, wanted = model.encode_image(images), expected.encode_image(images)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert not torch.allclose(found, load_towers(config).encode_image(images), atol=1e-2)


def test_a_block_equals_pefts(vit: Model) -> None:
    """All but `out_proj`, whose adapter peft 0.21's forward adds twice."""
    peft = pytest.importorskip("peft")
    block = copy.deepcopy(vit.clip.visual.transformer.resblocks[2])
    vit.lock(1)
    adapt(vit, rank=4, alpha=6.0)
    disturb(vit)
    nn.init.zeros_(adapters(vit)["2.attn.out_proj.weight"].lora_b)
    options = peft.LoraConfig(
        r=4, lora_alpha=6.0, target_modules=["attn", "c_fc", "c_proj"], bias="none"
    )
    theirs = peft.inject_adapter_in_model(options, block)
    attention = theirs.attn
    places = {
        "attn.in_proj_weight": attention,
        "attn.out_proj.weight": attention.base_layer.out_proj,
        "mlp.c_fc.weight": theirs.mlp.c_fc,
        "mlp.c_proj.weight": theirs.mlp.c_proj,
    }
    for name, place in places.items():
        adapter = adapters(vit)[f"2.{name}"]
        place.lora_A["default"].weight.data = adapter.lora_a.data
        place.lora_B["default"].weight.data = adapter.lora_b.data
    hidden = torch.randn(2, 17, WIDTH, generator=torch.Generator().manual_seed(1))
    ours = vit.clip.visual.transformer.resblocks[2]
    torch.testing.assert_close(ours(hidden), theirs(hidden), rtol=1e-5, atol=1e-5)
    number = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert number == sum(p.numel() for p in ours.parameters() if p.requires_grad)


def test_autocast_keeps_the_weights_precision(vit: Model) -> None:
    vit.lock(2)
    adapt(vit)
    disturb(vit)
    block = vit.clip.visual.transformer.resblocks[2]
    weight = block.mlp.c_fc.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(block.mlp.c_fc.weight, weight)


def test_dropout_masks_input_features() -> None:
    adapter = LowRank(torch.zeros(6, 400), 2, 1.0, 0.25, torch.Generator().manual_seed(0))
    nn.init.normal_(adapter.lora_b)
    whole = adapter.eval()(torch.zeros(6, 400))
    torch.manual_seed(0)
    dropped = adapter.train()(torch.zeros(6, 400))
    mask = functional.dropout(torch.ones(400), 0.25)  # another draw: the share is what counts
    kept = dropped.abs().sum(dim=0) > 0
    assert 0.65 < kept.float().mean() < 0.85
    assert not torch.equal(kept, mask > 0)
    torch.testing.assert_close(dropped[:, kept], whole[:, kept] / 0.75)


# --- merging and saving ----------------------------------------------------------------------


def test_merging_keeps_the_output_and_restores_the_modules(vit: Model, images: Tensor) -> None:
    base = copy.deepcopy(vit.state_dict())
    kinds = {name: type(module) for name, module in vit.named_modules()}
    vit.lock(2)
    adapt(vit, dropout=0.5)
    disturb(vit)
    adapted = vit.eval().encode_image(images)
    merge_lora(vit.train())
    torch.testing.assert_close(vit.eval().encode_image(images), adapted, rtol=0, atol=1e-6)
    merged = vit.state_dict()
    assert merged.keys() == base.keys()
    weights = ("attn.in_proj_weight", "attn.out_proj.weight", "mlp.c_fc.weight")
    expected = {f"{START}{i}.{name}" for i in (1, 2) for name in (*weights, "mlp.c_proj.weight")}
    assert {name for name in base if not torch.equal(merged[name], base[name])} == expected
    assert {name: type(module) for name, module in vit.named_modules()} == kinds
    vit.lock(2)
    adapt(vit)  # and again
    assert len(adapters(vit)) == 8


@pytest.mark.parametrize("custom", [False, True])
def test_unlocked_blocks_of_a_text_tower_are_adapted_on_request(custom: bool) -> None:
    model = load_towers(tiny_config(custom_text=custom))
    tokens = model.tokenizer(["a red square", "nothing"])
    plain = model.encode_text(tokens)
    model.lock(0, text=True, text_blocks=1)
    names = adapt(model, text=True)
    assert len([n for n in names if "resblocks.1." in n and "lora_" in n]) == len(names) - 3 == 8
    assert {n.rsplit(".", 2)[-2] for n in names if "lora_" not in n} <= {"clip", "text", "ln_final"}
    torch.testing.assert_close(model.encode_text(tokens), plain)
    disturb(model)
    adapted = model.encode_text(tokens)
    assert not torch.allclose(adapted, plain, atol=1e-3)
    merge_lora(model)
    torch.testing.assert_close(model.encode_text(tokens), adapted, rtol=0, atol=1e-5)


# --- what is refused -------------------------------------------------------------------------


def test_numbers_out_of_range_and_a_model_without_unlocked_blocks(vit: Model) -> None:
    wrong: list[dict[str, Any]] = [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}]
    for options in [*wrong, {"targets": "text"}]:
        with pytest.raises(ValidationError, match=next(iter(options))):
            LoraConfig(**options)
    vit.lock(0, image_norm=True)
    with pytest.raises(ValueError, match="all are locked"):
        adapt(vit)
