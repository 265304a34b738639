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

# isort: split
import timm.optim


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


ELEMENTWISE = ["adamw", "lion", "timm:sgd", "timm:radam", "timm:lionc"]
WHOLE = ["lars", "timm:lamb", "timm:muon", "timm:adafactor", "timm:cadamw"]


@pytest.mark.parametrize("name", ELEMENTWISE + WHOLE)
def test_elementwise_is_what_may_be_cut(name: str) -> None:
    results = []
    for cut in (False, True):
        module = Halves(cut)
        optimizer = build_optimizer(module, name=name, weight_decay=0.1, lr=0.1)
        results.append(module.take(optimizer))
    assert not torch.allclose(results[0], torch.cat([*Halves(True).parts]))
    assert torch.allclose(results[0], results[1], rtol=1e-6) == (name in ELEMENTWISE)
    assert is_elementwise(name) == (name in ELEMENTWISE)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-4, "lr": 0.5}),
        ("lars", timm.optim.Lars, {"momentum": 0.7}),
        ("lion", timm.optim.Lion, {"betas": (0.8, 0.9)}),
        ("timm:lamb", timm.optim.Lamb, {"lr": 0.3}),
    ],
)
def test_names_give_their_optimizers_with_their_settings(
    vit: Model, name: str, kind: type, options: Any
) -> None:
    optimizer = build_optimizer(vit, name=name, weight_decay=0.1, **options)
    assert isinstance(optimizer, kind)
    for group in optimizer.param_groups:
        assert {key: group[key] for key in options} == options
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}


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


# --- upper bounds ----------------------------------------------------------------------------


def test_bounded_parameters_have_a_group_of_their_own(vit: Model) -> None:
    *others, last = build_optimizer(vit, weight_decay=0.2).param_groups
    assert not any("max_value" in group for group in others)
    assert [*map(id, last["params"])] == [id(vit.clip.logit_scale)]
    assert last["max_value"] == pytest.approx(math.log(100.0)) and last["weight_decay"] == 0.0
    vit.clip.logit_scale.requires_grad_(False)
    groups = build_optimizer(vit, weight_decay=0.2).param_groups
    assert not any("max_value" in group for group in groups)


@pytest.mark.parametrize("name", ["adamw", "lars"])
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


@pytest.mark.parametrize("name", ["adamw", "lion", "lars", "timm:nadamw"])
def test_no_optimizer_is_told_to_go_parameter_by_parameter(vit: Model, name: str) -> None:
    """torch and timm take whole lists of parameters on a GPU where nobody forbids it."""
    optimizer = build_optimizer(vit, name=name, weight_decay=0.1, lr=1e-3)
    for group in optimizer.param_groups:
        assert group.get("fused") if name == "adamw" else group["foreach"] is None
