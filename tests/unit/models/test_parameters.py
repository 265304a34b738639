"""Learning rates, weight decay and freezing by patterns of parameters' names."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from mclclip.models.loading import load_towers
from mclclip.models.memory import load_shapes
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer, parameter_groups
from mclclip.models.parameters import describe_groups, freeze_objective, settings
from mclclip.models.patterns import ParameterConfig, refuse_unmatched
from mclclip.models.preparing import prepare_model
from tests import tiny
from tests.unit.models.conftest import tiny_config
from tests.unit.models.tiny_towers import fresh

# isort: split
from timm.optim import param_groups_layer_decay

UNLOCKED = {"image_blocks": "all", "image_norm": True, "image_projection": True, "text": True}


def entry(match: str, **properties: Any) -> ParameterConfig:
    return ParameterConfig(match, **properties)


class WithObjective(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.objective = model, nn.Linear(4, 3)


def prepare(model: Model, *parameters: ParameterConfig, **options: Any) -> Model:
    lock = {**UNLOCKED, "logit_scale": True}
    same = {"lora": None, "seed": 0, "precision": "fp32", "grad_checkpointing": False}
    prepare_model(model, lock=lock, **{**same, **options}, parameters=parameters)
    return model


# --- patterns ----------------------------------------------------------------------------------


def test_the_first_entry_that_states_a_property_counts(vit: Model) -> None:
    parameters = [
        entry("image.*", lr_scale=0.1),
        entry("*positional_embedding|*.in_proj_weight", weight_decay=0.0),
        entry("visual.proj", lr_scale=5.0, weight_decay=0.3),
        entry("text.*", lr_scale=2.0, weight_decay=0.4),
    ]
    found = settings(vit, 0.2, parameters)

    def of(name: str) -> tuple[float, float]:
        return found[f"clip.{name}"].lr_scale, found[f"clip.{name}"].weight_decay

    assert of("visual.conv1.weight") == (0.1, 0.2)
    assert of("visual.proj") == (0.1, 0.3)
    assert of("visual.positional_embedding") == (0.1, 0.0)
    assert of("positional_embedding") == (2.0, 0.0)
    assert of("transformer.resblocks.0.attn.in_proj_weight") == (2.0, 0.0)
    assert of("text_projection") == (2.0, 0.4)
    assert of("ln_final.bias") == (2.0, 0.0)  # what has one dimension never decays
    assert of("logit_scale") == (1.0, 0.0)


@pytest.mark.parametrize("vision", [{}, {"timm_model_name": "test_vit", "timm_proj": "linear"}])
def test_the_text_tower_has_one_name_in_models_of_both_kinds(vision: dict[str, Any]) -> None:
    model = load_towers(tiny_config(vision=vision, custom_text=bool(vision)), seed=1)
    found = settings(model, 0.2, [entry("text.ln_final.*", lr_scale=3.0)])
    scaled = {name for name, of in found.items() if of.lr_scale == 3.0}
    start = "clip.text." if vision else "clip."
    assert scaled == {f"{start}ln_final.weight", f"{start}ln_final.bias"}


def test_adapters_are_found_by_the_weight_that_they_adapt(vit: Model) -> None:
    lora = {"rank": 2, "alpha": 4.0}
    parameters = [entry("*.lora_b", lr_scale=16.0), entry("image.*in_proj_weight*", lr_scale=2.0)]
    model = prepare(vit, *parameters, lora=lora)
    scales = {n: of.lr_scale for n, of in settings(model, 0.2, parameters).items()}
    adapters = {n: scale for n, scale in scales.items() if "lora_" in n}
    assert {16.0, 2.0, 1.0} == {*adapters.values()}
    for name, scale in adapters.items():
        other = 2.0 if "in_proj_weight" in name else 1.0
        assert scale == (16.0 if name.endswith("lora_b") else other)
    # An adapter lies in the layer of its weight.
    decay = settings(model, 0.2, [entry("*", layer_decay=0.5)])
    block = "clip.visual.transformer.resblocks.0."
    assert {of.lr_scale for n, of in decay.items() if n.startswith(block) and "lora" in n} == {
        0.125
    }


@pytest.mark.parametrize(
    ("match", "near"),
    [
        ("imgae.*", "image.*"),
        ("visual.conv.weight", "visual.conv1.weight"),
        ("", ""),
        ("Image.*", "image.*"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest(
    vit: Model, match: str, near: str
) -> None:
    with pytest.raises(ValueError, match=r"parameters.match") as caught:
        prepare(vit, entry(match, lr_scale=0.5))
    message = str(caught.value)
    assert repr(match) in message and near in message and "\n" not in message
    with pytest.raises(ValueError, match="match"):
        entry(match)  # without a property


def test_a_pattern_of_the_objective_is_looked_for_in_the_objective(vit: Model) -> None:
    known, unknown = entry("objective.*", lr_scale=2.0), entry("objective.head.*", lr_scale=2.0)
    module = WithObjective(prepare(vit, known, unknown))
    rows = describe_groups(module, 0.5, [known], 0.1)
    assert {tuple(row["lr"]) for row in rows if row["name"] == "objective"} == {(1.0, 1.0)}
    with pytest.raises(ValueError, match=r"objective\.head"):
        describe_groups(module, 0.5, [unknown], 0.1)
    # One alternative suffices, also one of the model; if none is there, the pattern is refused.
    mixed = entry("objective.head.*|image.*", lr_scale=0.5)
    none = entry("objective.head.*|imag.*", lr_scale=0.5)
    module = WithObjective(prepare(vit, mixed, none))
    rows = describe_groups(module, 0.5, [mixed], 0.1)
    assert {tuple(row["lr"]) for row in rows if row["name"] == "image"} == {(0.25, 0.25)}
    with pytest.raises(ValueError, match=r"imag\.\*"):
        describe_groups(module, 0.5, [none], 0.1)


def test_a_frozen_part_of_an_objective_has_no_gradient(vit: Model) -> None:
    parameters = [entry("objective.weight", lr_scale=0.0)]
    module = WithObjective(prepare(vit, entry("image.*", lr_scale=0.5)))
    freeze_objective(module.objective, parameters)
    module.objective(torch.ones(1, 4)).sum().backward()
    assert module.objective.weight.grad is None and module.objective.bias.grad is not None
    rows = {row["name"]: row for row in describe_groups(module, 0.5, parameters, 0.1)}
    assert rows["objective, frozen"]["weights"] == 12 and rows["objective"]["weights"] == 3


def test_the_entries_of_the_page_match_a_model() -> None:
    page = (tiny.ROOT / "docs" / "pages" / "how-to" / "rates.md").read_text()
    table = page.partition("| wish | entries |")[2].partition("\n\n")[0].replace(r"\|", "|")
    entries = [
        ParameterConfig(**each)
        for text in re.findall(r"`(\{.*\})`", table)
        for each in yaml.safe_load(f"[{text}]")
    ]
    assert len(entries) == 7
    models = [load_shapes("ViT-B-32"), load_shapes("ViT-B-16-SigLIP")]
    names = [model.tensor_names(name) for model in models for name, _ in model.named_parameters()]
    refuse_unmatched(entries, names)
    # The first six blocks of a ViT and what lies below them.
    assert prepare(models[0], entries[4]).num_frozen_blocks == 6


# --- groups ------------------------------------------------------------------------------------


def test_neutral_entries_change_no_group(vit: Model) -> None:
    neutral = [entry("*", lr_scale=1.0, layer_decay=1.0), entry("image.*", weight_decay=0.2)]
    plain, same = parameter_groups(vit, 0.2), parameter_groups(vit, 0.2, neutral)
    assert len(plain) == len(same)
    for one, other in zip(plain, same, strict=True):
        assert [id(p) for p in one.pop("params")] == [id(p) for p in other.pop("params")]
        assert one == other


def test_a_scale_of_zero_freezes(vit: Model) -> None:
    first = ("conv1", "class_embedding", "positional_embedding", "ln_pre")
    blocks = "image.transformer.resblocks.[01].*"
    stem = "|".join(f"image.{name}*" for name in first)
    model = prepare(vit, entry(f"{stem}|{blocks}", lr_scale=0.0), entry("logit*", lr_scale=0.0))
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert "clip.logit_scale" in frozen
    assert {name.split(".")[2] for name in frozen if "visual" in name} == {*first, "transformer"}
    # These blocks run without a graph, as if `lock` had frozen them.
    assert model.num_frozen_blocks == 2
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, weight_decay=0.1, lr=0.1)
    out = model(image=torch.randn(2, 3, 32, 32), text=model.tokenizer(["a red square", "two dots"]))
    loss = (out["image_features"] * out["text_features"].flip(0)).sum() * out["logit_scale"]
    loss.backward()
    optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and not moved & frozen


def test_all_groups_are_described_and_counted(vit: Model) -> None:
    parameters = [entry("image.*", lr_scale=0.1, layer_decay=0.5), entry("text.token*", lr_scale=0)]
    module = WithObjective(prepare(vit, *parameters))
    rows = describe_groups(module, 2.0, parameters, 0.2)
    of = {(row["name"], row["weight_decay"]): row for row in rows}
    assert {name for name, _ in of} == {
        "image", "text", "text, frozen", "logit_scale", "objective"
    }  # fmt: skip
    lowest, highest = of["image", 0.2]["lr"]
    assert highest == 0.2 and lowest == pytest.approx(0.2 * 0.5**4)
    assert of["text", 0.2]["lr"] == of["objective", 0.2]["lr"] == [2.0, 2.0]
    assert of["text, frozen", 0.0]["tensors"] == 1
    assert sum(row["weights"] for row in rows) == sum(p.numel() for p in module.parameters())
    assert sum(row["tensors"] for row in rows) == len([*module.parameters()])


# --- layer-wise decay --------------------------------------------------------------------------


def rates(model: Model, match: str, tower: nn.Module) -> dict[str, tuple[float, float]]:
    """Returns the factor of the rate and the weight decay of each parameter of a tower."""
    found = settings(model, 0.05, [entry(match, layer_decay=0.7)])
    names = {id(p): n for n, p in model.named_parameters()}
    of = {n: found[names[id(p)]] for n, p in tower.named_parameters()}
    return {n: (each.lr_scale, each.weight_decay) for n, each in of.items()}


@pytest.mark.parametrize("kind", ["token", "mean", "attention", "convnext", "resnet"])
def test_layers_of_timm_towers_are_those_of_timm(kind: str) -> None:
    """timm's own groups; behind them open_clip's head is one layer more where it has weights."""
    model = fresh(kind)
    ours = rates(model, "image.*", model.visual)
    has_head = any(True for _ in model.visual.head.parameters())
    names = {id(p): n for n, p in model.visual.named_parameters()}
    for group in param_groups_layer_decay(model.visual.trunk, 0.05, layer_decay=0.7):
        for parameter in group["params"]:
            scale, decay = ours.pop(names[id(parameter)])
            assert scale == pytest.approx(group["lr_scale"] * 0.7**has_head)
            assert decay == group["weight_decay"]
    assert {scale for scale, _ in ours.values()} == ({1.0} if has_head else set())
    others = {n: of.lr_scale for n, of in settings(model, 0.05).items() if ".visual." not in n}
    assert {*others.values()} == {1.0}


# The layers of open_clip's `layer_groups`: embedding, blocks, projection; the final norm is in the
# last block's layer.
IMAGE = ("ln_post", "proj", ["conv1", "class_embedding", "positional_embedding", "ln_pre"])
TEXT = ("ln_final", "text_projection", ["token_embedding", "positional_embedding"])


@pytest.mark.parametrize("custom_text", [False, True])
def test_layers_of_transformers_are_those_of_open_clip(custom_text: bool) -> None:
    model = load_towers(tiny_config(custom_text=custom_text), seed=1)
    names = {id(p): n for n, p in model.named_parameters()}
    for part, tower, (norm, projection, stem) in (
        ("image", model.visual, IMAGE), ("text", model.text_tower, TEXT)
    ):  # fmt: skip
        layers = [[getattr(tower, name) for name in stem]]
        layers += [[block] for block in tower.transformer.resblocks]
        layers[-1].append(getattr(tower, norm))
        layers.append([getattr(tower, projection)])
        found = settings(model, 0.05, [entry(f"{part}.*", layer_decay=0.7)])
        for above, members in enumerate(reversed(layers)):
            for member in members:
                each = [member] if isinstance(member, nn.Parameter) else member.parameters()
                for parameter in each:
                    of = found.pop(names[id(parameter)])
                    assert of.lr_scale == pytest.approx(0.7**above)
        assert found and {of.lr_scale for of in found.values()} == {1.0}  # the other tower


def test_layers_of_a_resnet_are_its_stages(resnet: Model) -> None:
    ours = rates(resnet, "visual.*", resnet.visual)
    stages = {
        "conv": 5, "bn": 5, "layer1": 4, "layer2": 3, "layer3": 2, "layer4": 1, "attnpool": 0,
    }  # fmt: skip
    for name, (scale, _) in ours.items():
        above = next(number for start, number in stages.items() if name.startswith(start))
        assert scale == pytest.approx(0.7**above), name
