"""MoCo: its cross-entropies, the queue, the momentum copy, and what is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mclclip.models.loading import load_towers
from mclclip.models.lora import add_lora
from mclclip.objectives.base import ObjectiveInputs, parse
from mclclip.objectives.moco import MomentumCopy, new_predictor
from mclclip.ranks.process_group import SINGLE
from tests import tiny

DIM = 5
RESNET = Path(__file__).parents[2] / "configs" / "tiny_resnet.json"
LOCK: dict[str, Any] = {"image_norm": True, "image_projection": True, "text": False}
LOCK |= {"logit_scale": False}


class Model(nn.Module):
    """One linear layer; features of unit length."""

    feature_dim = DIM

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(DIM, 6, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(weight)

    def forward(self, image: Tensor, text: Any = None, text_features: Any = None) -> Any:
        return {"image_features": functional.normalize(image @ self.weight.T, dim=-1)}


def built(tree: dict[str, Any]) -> tuple[Model, Any]:
    model = Model()
    options = parse({"kind": "moco", **tree})
    setting = ObjectiveInputs(model=model, context=SINGLE, seed=3, precision="float64")
    return model, options.build(setting)


def test_the_predictor_is_drawn_by_the_seed() -> None:
    tree = {"version": "v3", "predictor": [16, DIM]}
    torch.manual_seed(0)
    _, one = built(tree)
    state = torch.random.get_rng_state()
    _, other = built(tree)
    assert torch.equal(torch.random.get_rng_state(), state)
    for mine, theirs in zip(one.predictor.parameters(), other.predictor.parameters(), strict=True):
        assert mine.requires_grad and torch.equal(mine, theirs)
    kinds = [type(layer).__name__ for layer in one.predictor]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    assert [p.shape for p in new_predictor(2, [4, 2], 0)[-1].parameters()] == []


# --- the momentum copy -------------------------------------------------------------------------


def moved(model: nn.Module) -> None:
    """Moves all trained weights as an optimizer would."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter), alpha=0.1)


def pictures() -> Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def test_schedules() -> None:
    base = 0.9

    def momenta(schedule: Any, total: int) -> list[float]:
        copied = MomentumCopy(Model(), base, schedule)
        found = []
        for done in range(total + 1):
            copied.begin(done - 1, total)
            found.append(copied.momentum)
        return found

    assert momenta("constant", 4) == [base] * 5
    found = momenta("cosine", 100)
    assert found[0] == pytest.approx(base, abs=1e-15) and found[-1] == 1.0
    assert found[50] == pytest.approx((1.0 + base) / 2.0)
    assert found == sorted(found)
    for done, value in enumerate(found):  # BYOL, appendix J
        assert value == pytest.approx(1 - (1 - base) * (math.cos(math.pi * done / 100) + 1) / 2)


def test_the_copy_is_the_moving_average_of_the_trained_weights() -> None:
    model = load_towers(tiny.MODEL, seed=1).double()
    model.lock(1, **LOCK)
    follower = MomentumCopy(model, 0.75, "cosine")
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    for step in range(3):
        moved(model)
        follower.begin(step, 4)
        follower.stepped(model)
        share = 1.0 - 0.25 * (1.0 + math.cos(math.pi * (step + 1) / 4)) / 2.0
        for name in trained:
            new = model.get_parameter(name).detach()
            expected[name] = share * expected[name] + (1.0 - share) * new
    for name, parameter in follower.model.named_parameters():
        assert not parameter.requires_grad
        torch.testing.assert_close(parameter, expected[name], atol=1e-14, rtol=0)
    assert 0 < len(trained) < len(expected)


def test_no_gradient_reaches_the_copy() -> None:
    model = load_towers(tiny.MODEL, seed=1)
    model.lock("all", **LOCK)
    follower = MomentumCopy(model, 0.9)
    keys = follower(pictures())
    assert not keys.requires_grad
    torch.testing.assert_close(keys, model(image=pictures())["image_features"].detach())
    assert all(not p.requires_grad for p in follower.parameters())
    assert any(p.requires_grad for p in model.parameters())


def test_batch_norms_of_the_copy_keep_statistics_of_their_own() -> None:
    model = load_towers(RESNET, seed=1)
    model.lock("all", **LOCK)
    model.train()
    follower = MomentumCopy(model, 0.5).train()
    first = {n: b.clone() for n, b in follower.named_buffers() if "running" in n}
    moved(model)
    model(image=pictures())
    follower.stepped(model)  # moves no buffer
    assert all(torch.equal(follower.get_buffer(n), value) for n, value in first.items())
    follower(pictures() + 1.0)  # of its own batch
    assert first and not all(torch.equal(follower.get_buffer(n), b) for n, b in first.items())
    norms = [m for m in follower.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(norm.training for norm in norms)
    model.lock(2, **(LOCK | {"image_norm": False}))
    frozen = MomentumCopy(model.train(), 0.5).train()
    assert not any(m.training for m in frozen.modules() if isinstance(m, nn.BatchNorm2d))


def test_a_model_with_adapters_is_followed() -> None:
    model = load_towers(tiny.MODEL, seed=1)
    model.lock(2, **LOCK)
    add_lora(model, rank=2, alpha=4.0, seed=2)
    model.train()
    follower = MomentumCopy(model, 0.0)
    moved(model)
    features = model(image=pictures())["image_features"].detach()
    assert not torch.allclose(follower(pictures()), features)
    follower.stepped(model)  # momentum 0: the copy is the model
    torch.testing.assert_close(follower(pictures()), features)
    assert [n for n, _ in follower.model.named_parameters()] == [
        n for n, _ in model.named_parameters()
    ]


def test_a_model_with_compiled_blocks_is_copied_uncompiled() -> None:
    model = load_towers(tiny.MODEL, seed=1)
    model.lock("all", **LOCK)
    model.compile_blocks(backend="eager")
    follower = MomentumCopy(model, 0.5)
    assert all(b._compiled_call_impl is None for b in follower.model.blocks())  # type: ignore[operator]
    plain = copy.deepcopy(follower.model)
    torch.testing.assert_close(follower(pictures()), plain(image=pictures())["image_features"])


def test_in_a_sum_the_copy_is_told_of_every_step() -> None:
    model = Model()
    views = [torch.randn(5, 6, dtype=torch.float64) for _ in range(2)]
    batch: Any = SimpleNamespace(
        views=views, text=None, text_features=None, prefix_length=0, classes=None, extras={},
        group_ids=torch.zeros(5, 1).long(), sample_id=torch.arange(5),
    )  # fmt: skip
    moco = {"kind": "moco", "queue_size": 8, "momentum": 0.5, "momentum_schedule": "cosine"}
    setting: Any = ObjectiveInputs(model=model, context=SINGLE, seed=0, precision="float64")
    objective: Any = parse([{"kind": "nt_xent"}, moco, {"kind": "nt_xent"}]).build(setting)
    wanted = model.weight.detach().clone()
    for step in range(3):
        objective.begin(step, 4, 0.0)
        objective(objective.features(model, batch, {}), batch)
        with torch.no_grad():
            model.weight += 1.0
        objective.stepped(model)
        kept = 1.0 - 0.5 * (1.0 + math.cos(math.pi * (step + 1) / 4)) / 2.0
        wanted = kept * wanted + (1.0 - kept) * model.weight.detach()
        torch.testing.assert_close(objective.terms[1].copy.model.weight, wanted)
