"""Freezing, the trunk/tail split, and what an objective is given."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mclclip.models.clip import ClipModel, load_clip
from tests.unit.models.conftest import CONFIGS

BLOCK = "clip.visual.transformer.resblocks."
EMBEDDING = ("conv1", "class_embedding", "positional_embedding", "ln_pre")


def lock(model: ClipModel, image_blocks: Any = 0, **parts: bool) -> list[str]:
    flags = dict.fromkeys(("image_norm", "image_projection", "text", "logit_scale"), False)
    return model.lock(image_blocks, **(flags | parts))


def expected(model: ClipModel, *prefixes: str) -> list[str]:
    return sorted(n for n, _ in model.named_parameters() if n.startswith(prefixes))


# --- locking a transformer -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "prefixes"),
    [
        ({}, ("nothing",)),
        ({"image_blocks": 1}, (f"{BLOCK}2.",)),
        ({"image_blocks": 2}, (f"{BLOCK}1.", f"{BLOCK}2.")),
        ({"image_blocks": 3}, (BLOCK,)),
        ({"image_blocks": "all"}, (BLOCK, *(f"clip.visual.{n}" for n in EMBEDDING))),
        ({"image_norm": True}, ("clip.visual.ln_post.",)),
        ({"image_projection": True}, ("clip.visual.proj",)),
        ({"logit_scale": True}, ("clip.logit_scale",)),
        (
            {"text": True},
            (
                "clip.transformer.",
                "clip.token_embedding.",
                "clip.positional_embedding",
                "clip.ln_final.",
                "clip.text_projection",
            ),
        ),
    ],
)
def test_lock_names_exactly_what_it_unlocks(
    vit: ClipModel, arguments: dict[str, Any], prefixes: tuple[str, ...]
) -> None:
    names = lock(vit, **arguments)
    assert names == expected(vit, *prefixes)
    assert names == sorted(n for n, p in vit.named_parameters() if p.requires_grad)


def test_lock_replaces_the_lock_before(vit: ClipModel) -> None:
    lock(vit, 1)
    everything = {"image_norm", "image_projection", "text", "logit_scale"}
    names = lock(vit, "all", **dict.fromkeys(everything, True))
    assert names == expected(vit, "clip.")


@pytest.mark.parametrize("number", [4, -1])
def test_more_blocks_than_there_are(vit: ClipModel, number: int) -> None:
    with pytest.raises(ValueError, match="has 3 blocks"):
        lock(vit, number)


def test_frozen_modules_stay_in_eval_mode(vit: ClipModel) -> None:
    lock(vit, 1)
    vit.train()
    assert not vit.clip.transformer.training
    blocks = vit.clip.visual.transformer.resblocks
    assert [block.training for block in blocks] == [False, False, True]
    vit.eval()
    assert not any(module.training for module in vit.modules())


@pytest.mark.parametrize(("number", "frozen"), [(0, 3), (1, 2), (3, 0), ("all", 0)])
def test_frozen_trunk_is_found(vit: ClipModel, number: Any, frozen: int) -> None:
    lock(vit, number)
    assert vit.num_frozen_blocks == frozen


def test_fixed_positions_stay_fixed() -> None:
    config = json.loads((CONFIGS / "tiny_vit.json").read_text())
    config["vision_cfg"]["pos_embed_type"] = "sin_cos_2d"
    assert "clip.visual.positional_embedding" not in lock(load_clip(config), "all")


def test_patch_dropout_rests_in_a_frozen_trunk(images: Tensor) -> None:
    model = load_clip(CONFIGS / "tiny_vit.json", patch_dropout=0.5)
    lock(model, 1)
    model.train()
    hidden = model.encode_trunk(images, 2)
    assert hidden.shape == (3, 17, 64)


def test_logit_bias_is_never_trained() -> None:
    config = json.loads((CONFIGS / "tiny_vit.json").read_text()) | {"init_logit_bias": -10.0}
    model = load_clip(config)
    assert lock(model, logit_scale=True) == ["clip.logit_scale"]


# --- locking a ResNet ------------------------------------------------------------------------


def test_resnet_blocks_count_from_the_stem(resnet: ClipModel) -> None:
    assert resnet.num_blocks == 5
    names = lock(resnet, 1, image_norm=True)
    assert names == expected(resnet, "clip.visual.layer4.")
    assert resnet.num_frozen_blocks == 4
    names = lock(resnet, 5, image_norm=True, image_projection=True)
    assert names == expected(resnet, "clip.visual.")
    assert names == lock(resnet, "all", image_norm=True, image_projection=True)
    names = lock(resnet, image_projection=True)
    assert names == expected(resnet, "clip.visual.attnpool.")
    with pytest.raises(ValueError, match="has 5 blocks"):
        lock(resnet, 6)


def running_means(model: ClipModel) -> dict[str, Tensor]:
    state = model.clip.visual.state_dict()
    return {n: t.clone() for n, t in state.items() if n.endswith("running_mean")}


@pytest.mark.parametrize("image_norm", [True, False])
def test_frozen_batch_norms_keep_their_statistics(
    resnet: ClipModel, images: Tensor, image_norm: bool
) -> None:
    names = lock(resnet, 1, image_norm=image_norm)
    norms = [name for name in names if "bn" in name or "downsample.1" in name]
    assert bool(norms) == image_norm
    before = running_means(resnet)
    resnet.train()
    resnet.encode_image(images)
    moved = {n for n, t in running_means(resnet).items() if not torch.equal(t, before[n])}
    layer4 = {n for n in before if n.startswith("layer4.")}
    assert moved == (layer4 if image_norm else set())


# --- trunk and tail --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny_vit", {}),
        ("tiny_vit", {"pool_type": "avg"}),
        ("tiny_vit", {"final_ln_after_pool": True, "no_ln_pre": True, "ls_init_value": 0.1}),
        ("tiny_vit", {"qk_norm": True}),
        ("tiny_resnet", {}),
    ],
)
def test_trunk_and_tail_are_the_tower(name: str, changes: dict[str, Any], images: Tensor) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config["vision_cfg"] |= changes
    model = load_clip(config)
    with torch.no_grad():
        whole = model.clip.encode_image(images)
        for number in range(model.num_blocks + 1):
            hidden = model.encode_trunk(images, number)
            kept = hidden.clone()
            assert torch.equal(model.encode_tail(hidden, number), whole)
            assert torch.equal(hidden, kept)  # several tails may read it
    with pytest.raises(ValueError, match=f"has {model.num_blocks} blocks"):
        model.encode_trunk(images, model.num_blocks + 1)


def test_pooled_features_lie_before_the_projection(
    vit: ClipModel, resnet: ClipModel, images: Tensor
) -> None:
    with torch.no_grad():
        pooled = vit.encode_tail(images, 0, project=False)
        assert pooled.shape == (3, 64)
        assert torch.equal(pooled @ vit.clip.visual.proj, vit.encode_image(images))
        with pytest.raises(ValueError, match="no features before its projection"):
            resnet.encode_tail(images, 0, project=False)


def gradients(model: ClipModel, images: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(image=images)["image_features"][:, 0].sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_frozen_trunk_gives_the_whole_towers_gradients(
    kind: str, request: pytest.FixtureRequest, images: Tensor
) -> None:
    model: ClipModel = request.getfixturevalue(kind).double()
    images = images.double()
    whole = gradients(model, images)
    names = lock(model, 2, image_norm=True, image_projection=True)
    assert model.num_frozen_blocks > 0
    found = gradients(model, images)
    assert sorted(found) == names
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-9, atol=1e-12)


def test_gradient_reaches_images_through_a_frozen_trunk(vit: ClipModel, images: Tensor) -> None:
    lock(vit, 1)
    images.requires_grad_()
    vit.encode_image(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0


def test_gradient_checkpointing_changes_nothing(vit: ClipModel, images: Tensor) -> None:
    vit.double()
    lock(vit, 2)
    plain = gradients(vit, images.double())
    vit.clip.set_grad_checkpointing(True)
    for name, gradient in gradients(vit, images.double()).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-12, atol=1e-15)


def test_towers_that_are_not_understood_encode_but_do_not_split(images: Tensor) -> None:
    config = json.loads((CONFIGS / "tiny_vit.json").read_text())
    config["vision_cfg"] |= {"attentional_pool": True, "attn_pooler_heads": 4}
    model = load_clip(config)
    assert model.encode_image(images).shape == (3, 32)
    for use in (lambda: lock(model, 1), lambda: model.encode_trunk(images, 1)):
        with pytest.raises(ValueError, match="cannot be split or locked"):
            use()
    model._layout = "the image tower is a TimmModel"
    with pytest.raises(ValueError, match="TimmModel"):
        lock(model, 1)


# --- what an objective is given --------------------------------------------------------------


def test_forward_gives_unit_features(vit: ClipModel, images: Tensor, tokens: Tensor) -> None:
    output = vit(image=images, text=tokens)
    assert output.keys() == {"image_features", "text_features", "logit_scale"}
    for name in ("image_features", "text_features"):
        assert output[name].dtype == torch.float32
        torch.testing.assert_close(output[name].norm(dim=-1), torch.ones(3))
    cached = vit(image=images, text_features=output["text_features"].detach())
    torch.testing.assert_close(cached["text_features"], output["text_features"])
    assert vit(text=tokens).keys() == {"text_features", "logit_scale"}


def test_features_are_fp32_under_autocast(vit: ClipModel, images: Tensor, tokens: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = vit(image=images, text=tokens)
    for name in ("image_features", "text_features"):
        assert output[name].dtype == torch.float32
        torch.testing.assert_close(output[name].norm(dim=-1), torch.ones(3))


def test_features_stay_float64(vit: ClipModel, images: Tensor, tokens: Tensor) -> None:
    output = vit.double()(image=images.double(), text=tokens)
    assert {value.dtype for value in output.values()} == {torch.float64}


def test_logit_scale_is_capped_but_can_fall(vit: ClipModel) -> None:
    parameter: nn.Parameter = vit.clip.logit_scale
    nn.init.constant_(parameter, math.log(100.0))  # in fp32 it exponentiates to above 100
    scale = vit.logit_scale()
    assert scale.item() == 100.0
    scale.backward()
    assert parameter.grad is not None
    assert parameter.grad.item() == pytest.approx(100.0)
    nn.init.constant_(parameter, 5.0)
    assert vit.logit_scale().item() == pytest.approx(100.0)


@pytest.mark.parametrize("trained", [True, False])
def test_learned_scale_is_set_back_in_training(
    vit: ClipModel, images: Tensor, trained: bool
) -> None:
    lock(vit, 1, logit_scale=trained)
    nn.init.constant_(vit.clip.logit_scale, 5.0)
    vit.eval()(image=images)
    assert vit.clip.logit_scale.item() == 5.0
    vit.train()(image=images)
    assert vit.clip.logit_scale.item() == pytest.approx(math.log(100.0) if trained else 5.0)
