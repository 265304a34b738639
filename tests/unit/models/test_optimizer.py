"""Parameter groups, optimizers by name, upper bounds, and the learning rate."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mclclip.models.model import Model
from mclclip.models.optimizer import (
    build_optimizer,
    is_elementwise,
    learning_rate,
    parameter_groups,
)
from mclclip.models.patterns import ParameterConfig

# isort: split
import timm.optim

DECAY = [ParameterConfig("*", layer_decay=0.5)]


def test_norms_biases_and_the_scale_do_not_decay(vit: Model) -> None:
    vit.clip.transformer.requires_grad_(False)
    decayed, plain, scale = groups = parameter_groups(vit, 0.2)
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0, 0.0]
    names = {id(p): n for n, p in vit.named_parameters()}
    without = {names[id(p)] for p in [*plain["params"], *scale["params"]]}
    assert {"clip.logit_scale", "clip.visual.ln_post.weight", "clip.ln_final.bias"} <= without
    assert "clip.visual.class_embedding" in without
    assert all(p.ndim >= 2 for p in decayed["params"])
    listed = {names[id(p)] for group in groups for p in group["params"]}
    assert listed == {n for n, p in vit.named_parameters() if p.requires_grad}


def test_optimizer_takes_its_settings(vit: Model) -> None:
    optimizer = build_optimizer(vit, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-4, lr=0.5)
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.9), 1e-4, 0.5)


# --- optimizers by name ----------------------------------------------------------------------


class Halves(nn.Module):
    """Two equal parameters: whole in `both`, or cut into two."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        whole = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
        parts = whole.split(20) if cut else [whole]
        self.parts = nn.ParameterList(nn.Parameter(part.clone()) for part in parts)

    def take(self, optimizer: torch.optim.Optimizer) -> Tensor:
        for step in range(3):
            gradient = torch.randn(40, 20, generator=torch.Generator().manual_seed(step + 1))
            rows = gradient.split([len(part) for part in self.parts])
            for part, rows_of_part in zip(self.parts, rows, strict=True):
                part.grad = rows_of_part.clone()
            optimizer.step()
        return torch.cat([part.detach() for part in self.parts])


ELEMENTWISE = ["adamw", "lion", "timm:sgd", "timm:adam", "timm:nadamw", "timm:radam", "timm:lionc"]
WHOLE = ["lars", "timm:lamb", "timm:muon", "timm:adafactor", "timm:cadamw", "timm:adafactorbv"]


@pytest.mark.parametrize("name", ELEMENTWISE + WHOLE)
def test_elementwise_is_what_may_be_cut(name: str) -> None:
    results = []
    for cut in (False, True):
        module = Halves(cut)
        optimizer = build_optimizer(module, name=name, weight_decay=0.1, lr=0.1)
        results.append(module.take(optimizer))
        assert is_elementwise(optimizer) == is_elementwise(name) == (name in ELEMENTWISE)
    assert not torch.allclose(results[0], torch.cat([*Halves(True).parts]))
    assert torch.allclose(results[0], results[1], rtol=1e-6) == (name in ELEMENTWISE)


def test_an_unknown_optimizer_class_is_not_elementwise() -> None:
    assert not is_elementwise(torch.optim.Rprop([torch.ones(1)]))


def test_names_give_their_optimizers(vit: Model) -> None:
    assert isinstance(build_optimizer(vit, weight_decay=0.1), torch.optim.AdamW)
    lars = build_optimizer(vit, name="lars", weight_decay=0.1, momentum=0.7)
    assert isinstance(lars, timm.optim.Lars)
    assert {group["momentum"] for group in lars.param_groups} == {0.7}
    lion = build_optimizer(vit, name="lion", weight_decay=0.1, betas=(0.8, 0.9))
    assert isinstance(lion, timm.optim.Lion)
    assert {group["betas"] for group in lion.param_groups} == {(0.8, 0.9)}
    lamb = build_optimizer(vit, name="timm:lamb", weight_decay=0.1, lr=0.3)
    assert isinstance(lamb, timm.optim.Lamb)
    assert {group["lr"] for group in lamb.param_groups} == {0.3}
    assert {group["weight_decay"] for group in lamb.param_groups} == {0.0, 0.1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adam", "optimizer is 'adam', wanted adamw, lars, lion or timm:NAME .*adamw.*timm:adam"),
        ("timm:lamp", "nearest: .*timm:lamb"),
        ("timm:adahessian", "second derivatives"),
        ("timm:lookahead_adamw", "optimizer is 'timm:lookahead_adamw'"),
    ],
)
def test_names_that_cannot_be(vit: Model, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(vit, name=name, weight_decay=0.1)


# --- layer-wise decay ------------------------------------------------------------------------


class Trainee(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.objective = nn.Linear(2, 2)


def settings(optimizer: torch.optim.Optimizer, module: nn.Module, key: str) -> dict[str, Any]:
    names = {id(p): name for name, p in module.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(p)]: group.get(key) for group in groups for p in group["params"]}


def test_layers_decay_from_the_top(vit: Model) -> None:
    module = Trainee(vit)
    optimizer = build_optimizer(module, weight_decay=0.2, parameters=DECAY, lr=8.0)
    scales = settings(optimizer, module, "lr_scale")
    assert scales.keys() == {name for name, _ in module.named_parameters()}
    block = "transformer.resblocks"
    assert scales["objective.weight"] == scales["model.clip.logit_scale"] == 1.0
    assert scales["model.clip.visual.proj"] == scales["model.clip.text_projection"] == 1.0
    assert scales["model.clip.visual.ln_post.bias"] == scales["model.clip.ln_final.bias"] == 0.5
    assert scales[f"model.clip.visual.{block}.2.attn.in_proj_weight"] == 0.5
    assert scales[f"model.clip.visual.{block}.0.ln_1.weight"] == 0.125
    assert scales["model.clip.visual.conv1.weight"] == 0.0625
    assert scales[f"model.clip.{block}.0.ln_1.weight"] == 0.25
    assert scales["model.clip.token_embedding.weight"] == 0.125
    rates = settings(optimizer, module, "lr")
    assert all(rates[name] == 8.0 * scale for name, scale in scales.items())
    decays = settings(optimizer, module, "weight_decay")
    assert all(decays[n] == (0.2 if p.ndim >= 2 else 0.0) for n, p in module.named_parameters())
    pairs = [(group["lr_scale"], group["weight_decay"]) for group in optimizer.param_groups[:-1]]
    assert len(set(pairs)) == len(pairs) == 2 * 5


def test_without_decay_every_group_has_the_same_rate(vit: Model) -> None:
    optimizer = build_optimizer(vit, weight_decay=0.2, lr=8.0)
    assert {group["lr"] for group in optimizer.param_groups} == {8.0}
    assert {group["lr_scale"] for group in optimizer.param_groups} == {1.0}


# --- upper bounds ----------------------------------------------------------------------------


def test_bounded_parameters_have_a_group_of_their_own(vit: Model) -> None:
    module = Trainee(vit)
    optimizer = build_optimizer(module, weight_decay=0.2)
    bounds = settings(optimizer, module, "max_value")
    assert {n for n, bound in bounds.items() if bound} == {"model.clip.logit_scale"}
    assert optimizer.param_groups[-1]["max_value"] == pytest.approx(math.log(100.0))
    assert optimizer.param_groups[-1]["weight_decay"] == 0.0
    vit.clip.logit_scale.requires_grad_(False)
    groups = build_optimizer(module, weight_decay=0.2).param_groups
    assert not any("max_value" in group for group in groups)


@pytest.mark.parametrize("name", ["adamw", "lars", "lion", "timm:lamb"])
def test_bounds_hold_after_every_step(vit: Model, name: str) -> None:
    vit.lock(0, image_norm=True, image_projection=False, text=False, logit_scale=True)
    scale, other = vit.clip.logit_scale, vit.clip.visual.ln_post.weight
    nn.init.constant_(scale, 7.0)
    nn.init.constant_(other, 7.0)
    optimizer = build_optimizer(vit, name=name, weight_decay=0.0, lr=0.5)
    assert scale.item() == pytest.approx(math.log(100.0))  # before the first step
    for gradient, steps in ((-1.0, 5), (1.0, 40)):
        for _ in range(steps):
            for parameter in (scale, other):
                parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
            assert scale.item() <= torch.tensor(math.log(100.0)).item()
        if gradient < 0:
            assert scale.item() == pytest.approx(math.log(100.0))
            assert (other > 7.0).all()
    assert scale.item() < 4.6  # it can fall


def test_bounds_hold_for_what_an_engine_puts_in_the_group(vit: Model) -> None:
    """As ZeRO, which steps on flat shards, in groups that it swaps in one at a time."""
    optimizer = build_optimizer(vit, weight_decay=0.0, lr=1.0)
    shard = nn.Parameter(torch.tensor([0.0, 4.6, 9.0]))
    group = optimizer.param_groups[-1] | {"params": [shard]}
    optimizer.param_groups = [group]
    shard.grad = torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(shard.data, torch.tensor([0.0, 4.6, math.log(100.0)]))


# --- the learning rate ------------------------------------------------------------------------


def test_the_rate_rises_over_the_warm_up_and_falls_to_zero() -> None:
    assert [learning_rate(step, 100, 4, 1.0) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(0, 100, 0, 1.0) == 1.0
    rates = [learning_rate(step, 104, 4, 1.0, "cosine") for step in range(4, 104)]
    assert rates == sorted(rates, reverse=True)
    assert rates[50] == pytest.approx(0.5) and 0.0 < rates[-1] < 0.001
    assert {learning_rate(step, 50, 5, 0.3, "constant") for step in range(5, 50)} == {0.3}


@pytest.mark.parametrize("name", ["adamw", "lion", "lars", "timm:sgd", "timm:nadamw", "timm:adam"])
def test_no_optimizer_is_told_to_go_parameter_by_parameter(vit: Model, name: str) -> None:
    """torch and timm take whole lists of parameters on a GPU where nobody forbids it."""
    optimizer = build_optimizer(vit, name=name, weight_decay=0.1, lr=1e-3)
    for group in optimizer.param_groups:
        assert group.get("fused") if name == "adamw" else group["foreach"] is None


@pytest.mark.parametrize("name", ["lion", "lars", "timm:sgd"])
def test_whole_lists_of_parameters_give_nearly_the_same_weights(name: str) -> None:
    def trained(foreach: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        optimizer = build_optimizer(model, name=name, weight_decay=0.1, lr=1e-2)
        for group in optimizer.param_groups:
            group["foreach"] = foreach  # as on a GPU, and as on a CPU
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(trained(True), trained(False))
