"""Freezing, the trunk/tail split, and what an objective is given."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import _dynamo as dynamo
from torch._dynamo.testing import CompileCounterWithBackend

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
from open_clip.hf_model import HFTextEncoder

from mclclip.models.encoder import Encoder
from mclclip.models.loading import load_towers
from mclclip.models.lora import add_lora
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.models.patterns import ParameterConfig
from tests.matrix import kept
from tests.unit.models.conftest import tiny_config

DECAY = [ParameterConfig("*", layer_decay=0.5)]


def expected(model: Model, *prefixes: str) -> list[str]:
    return sorted(n for n, _ in model.named_parameters() if n.startswith(prefixes))


# --- locking a transformer -------------------------------------------------------------------


def test_a_text_tower_and_the_scale_are_unlocked_by_name(vit: Model) -> None:
    parts = ("transformer.", "token_embedding.", "positional_embedding", "ln_final.")
    assert vit.lock(logit_scale=True) == ["clip.logit_scale"]
    names = vit.lock(text=True)
    assert names == expected(vit, *(f"clip.{n}" for n in (*parts, "text_projection")))
    assert names == sorted(n for n, p in vit.named_parameters() if p.requires_grad)


def test_frozen_modules_stay_in_eval_mode(vit: Model) -> None:
    vit.lock(1)
    vit.train()
    assert not vit.clip.transformer.training
    blocks = vit.clip.visual.transformer.resblocks
    assert [block.training for block in blocks] == [False, False, True]
    vit.eval()
    assert not any(module.training for module in vit.modules())


def test_a_logit_bias_is_an_output_and_trained_where_it_is_named(images: Tensor) -> None:
    assert "logit_bias" not in load_towers(tiny_config())(image=images)
    model = load_towers(tiny_config(init_logit_bias=-10.0))
    assert model(image=images)["logit_bias"].item() == -10.0
    assert model.lock(logit_scale=True) == ["clip.logit_scale"]
    assert model.lock(logit_bias=True) == ["clip.logit_bias"]


# --- locking a text tower --------------------------------------------------------------------


def hugging_face_text() -> Model:
    """A text tower as open_clip makes it of a Hugging Face model, which it would fetch."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.RobertaConfig(num_hidden_layers=3, vocab_size=64, **small)
    model = load_towers(tiny_config(custom_text=True))
    model.clip.text = HFTextEncoder("roberta", 32, config=config, proj_type="linear")
    model.clip.text.transformer.pooler = None  # open_clip leaves it out where nothing uses it
    return model.eval()


TEXT_TOWERS = {
    "plain": ("clip.", "transformer.resblocks.", 2, ("ln_final.", "text_projection")),
    "custom": ("clip.text.", "transformer.resblocks.", 2, ("ln_final.", "text_projection")),
    "hugging": ("clip.text.", "transformer.encoder.layer.", 3, ("proj.",)),
}


def with_text(kind: str) -> Model:
    if kind == "hugging":
        return hugging_face_text()
    return load_towers(tiny_config(custom_text=kind == "custom"))


@pytest.mark.parametrize("kind", TEXT_TOWERS)
def test_the_last_blocks_of_a_text_tower_are_unlocked_and_a_step_moves_them_alone(
    kind: str,
) -> None:
    model = with_text(kind)
    start, blocks, count, top = TEXT_TOWERS[kind]
    top = tuple(f"{start}{name}" for name in top)
    assert model.lock(text=True, text_blocks=0) == expected(model, *top)
    names = model.lock(text=True, text_blocks=count)
    assert names == expected(model, *top, f"{start}{blocks}")
    whole = model.lock(text=True)
    assert whole == model.lock(text=True, text_blocks="all")
    assert {n for n in whole if "embedding" in n} == set(whole) - set(names) != set()
    assert model.lock(text=False, text_blocks=1) == []
    with pytest.raises(ValueError, match=f"text_blocks is 4, but the text tower has {count} blo"):
        model.lock(text=True, text_blocks=4)
    names = model.lock(text=True, text_blocks=1)
    assert names == expected(model, *top, f"{start}{blocks}{count - 1}.")
    frozen, trained = model.text_layout.block_modules(model.text_tower)[-2:]
    model.train()
    assert (frozen.training, trained.training) == (False, True)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = build_optimizer(model, weight_decay=0.1, lr=0.01, parameters=DECAY)
    tokens = torch.tensor([[2, 5, 7, 60, 1, 1], [2, 9, 8, 6, 61, 1]])
    tokens = torch.nn.functional.pad(tokens, (0, 0 if kind == "hugging" else 10))
    model(text=tokens)["text_features"][:, :5].pow(2).sum().backward()
    optimizer.step()
    moved = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved == set(names)


# --- locking a ResNet ------------------------------------------------------------------------


def running_means(model: Model) -> dict[str, Tensor]:
    state = model.clip.visual.state_dict()
    return {n: t.clone() for n, t in state.items() if n.endswith("running_mean")}


@pytest.mark.parametrize("image_norm", [True, False])
def test_batch_norms_of_frozen_blocks_keep_their_statistics(
    images: Tensor, image_norm: bool
) -> None:
    """Also those of the same layer as trained blocks."""
    model = deeper_resnet()
    names = model.lock(2, image_norm=image_norm)
    assert any("bn" in name or "downsample.1" in name for name in names) == image_norm
    before = running_means(model)
    model.train()
    model.encode_image(images)
    moved = {n for n, t in running_means(model).items() if not torch.equal(t, before[n])}
    trained = {n for n in before if n.startswith(("layer4.1.", "layer4.2."))}
    assert trained and moved == (trained if image_norm else set())


# --- trunk and tail --------------------------------------------------------------------------


def gradients(model: Model, images: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(image=images)["image_features"][:, 0].sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def deeper_resnet() -> Model:
    """Layers of several residual blocks, which a lock cuts apart."""
    return load_towers(tiny_config("tiny_resnet", {"layers": [2, 1, 1, 3]}), seed=1)


def text_and_image_gradients(
    model: Model, images: Tensor, tokens: Tensor, precision: torch.dtype
) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
        features = model(image=images, text=tokens)
    (features["image_features"] * features["text_features"]).sum().backward()
    torch.rand(1)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


CHECKPOINTED = [*product([torch.float32, torch.bfloat16], [False, True], [False, True], [2, "all"])]


# Every pair of values is in one of the quick cells.
@pytest.mark.parametrize(
    ("precision", "custom", "lora", "image_blocks"), kept(CHECKPOINTED, 0, 7, 11, 13, 14)
)
def test_gradient_checkpointing_changes_nothing(
    images: Tensor, precision: torch.dtype, custom: bool, lora: bool, image_blocks: Any
) -> None:
    model = load_towers(tiny_config(vision={"patch_dropout": 0.5}, custom_text=custom)).train()
    names = model.lock(image_blocks, text=True, image_norm=True, image_projection=True)
    if lora:
        names = add_lora(model, rank=2, alpha=4.0, dropout=0.5)
        for name in (name for name in names if name.endswith("lora_b")):
            nn.init.normal_(model.get_parameter(name))
    tokens = model.tokenizer(["a red square", "two blue dots", "nothing"])
    plain = text_and_image_gradients(model, images, tokens, precision)
    assert sorted(plain) == names
    state = torch.get_rng_state()
    model.set_grad_checkpointing()
    calls = count_calls(model.blocks())
    found = text_and_image_gradients(model, images, tokens, precision)
    assert torch.equal(torch.get_rng_state(), state)
    frozen = model.num_frozen_blocks
    assert calls == [1] * frozen + [2] * (5 - frozen)
    for name in names:
        assert torch.equal(found[name], plain[name]), name
    model.set_grad_checkpointing(False)
    text_and_image_gradients(model, images, tokens, precision)
    assert calls == [2] * frozen + [3] * (5 - frozen)


def count_calls(modules: list[nn.Module]) -> list[int]:
    calls = [0] * len(modules)

    def count(module: nn.Module, arguments: Any) -> None:
        calls[modules.index(module)] += 1

    for module in modules:
        module.register_forward_pre_hook(count)
    return calls


def test_an_attention_pool_of_open_clips_own_transformer(images: Tensor) -> None:
    model = load_towers(tiny_config(vision={"attentional_pool": True, "attn_pooler_heads": 4}))
    with torch.no_grad():
        whole = model.encode_image(images)
        assert torch.equal(model.encode_tail(model.encode_trunk(images, 2), 2), whole)
    assert model.lock(image_projection=True) == expected(
        model, "clip.visual.attn_pool", "clip.visual.proj"
    )


# --- what an objective is given --------------------------------------------------------------


def test_forward_gives_unit_features(vit: Model, images: Tensor, tokens: Tensor) -> None:
    for half in (False, True):  # in fp32 under autocast too
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            output = vit(image=images, text=tokens)
        assert output.keys() == {"image_features", "text_features", "logit_scale"}
        for name in ("image_features", "text_features"):
            assert output[name].dtype == torch.float32
            torch.testing.assert_close(output[name].norm(dim=-1), torch.ones(3))
    output = vit(image=images, text=tokens)
    cached = vit(image=images, text_features=output["text_features"].detach())
    torch.testing.assert_close(cached["text_features"], output["text_features"])
    assert vit(text=tokens).keys() == {"text_features", "logit_scale"}
    output = vit.double()(image=images.double(), text=tokens)
    assert {value.dtype for value in output.values()} == {torch.float64}


def test_a_published_logit_scale_above_100_stays_and_is_the_bound_of_training(
    images: Tensor, tokens: Tensor
) -> None:
    """As that of ViT-SO400M-14-SigLIP-384."""
    vit = load_towers(tiny_config(init_logit_scale=math.log(112.33)))
    start = vit.clip.logit_scale.item()
    assert vit.logit_scale().item() == pytest.approx(112.33)
    assert Encoder([vit]).logit_scale == pytest.approx(112.33)
    vit.lock(1, logit_scale=True)
    optimizer = build_optimizer(vit, weight_decay=0.0, lr=0.5)
    output = vit(image=images, text=tokens)
    assert output["logit_scale"].item() == pytest.approx(112.33)
    (-output["logit_scale"] - output["image_features"].sum()).backward()  # drives it up
    optimizer.step()
    assert vit.clip.logit_scale.item() == start


# --- what engines ask for --------------------------------------------------------------------


@pytest.mark.slow
@dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True)
def test_compiled_blocks_keep_names_and_results_in_every_kind_of_pass(
    vit: Model, images: Tensor, tokens: Tensor
) -> None:
    dynamo.reset()
    vit.lock(2, text=True)
    vit.train()
    names, plain, text = list(vit.state_dict()), gradients(vit, images), vit.encode_text(tokens)
    counter = CompileCounterWithBackend("aot_eager")
    vit.compile_blocks(backend=counter)
    assert list(vit.state_dict()) == names
    for name, gradient in gradients(vit, images).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(vit.encode_text(tokens), text)
    # One graph for frozen image blocks, one or two for trained ones (the first one's input needs
    # no gradient), as many for text blocks: not one for each block.
    assert 3 <= counter.frame_count <= 5
    for training, size, with_grad in product((True, False), (3, 2), (True, False)):
        with torch.set_grad_enabled(with_grad):
            vit.train(training)(image=images[:size], text=tokens[:size])
