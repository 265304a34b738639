"""The momentum copy: its schedule, its weights by the formula, and what it leaves alone."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mclclip.models.loading import load_towers
from mclclip.models.lora import add_lora
from mclclip.models.model import Model
from mclclip.objectives.momentum import MomentumCopy, momentum_at
from tests import tiny

RESNET = Path(__file__).parents[2] / "configs" / "tiny_resnet.json"
LOCK: dict[str, Any] = {"image_norm": True, "image_projection": True, "text": False}
LOCK |= {"logit_scale": False}


def moved(model: nn.Module) -> None:
    """Moves all trained weights as an optimizer would."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter), alpha=0.1)


def pictures(number: int = 3) -> Tensor:
    return torch.randn(number, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("base", [0.0, 0.9, 0.99])
def test_schedules(base: float) -> None:
    assert [momentum_at(base, "constant", done, 4) for done in range(5)] == [base] * 5
    found = [momentum_at(base, "cosine", done, 100) for done in range(101)]
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
        follower.follow(model)
        share = 1.0 - 0.25 * (1.0 + math.cos(math.pi * (step + 1) / 4)) / 2.0
        for name in trained:
            new = model.get_parameter(name).detach()
            expected[name] = share * expected[name] + (1.0 - share) * new
    for name, parameter in follower.model.named_parameters():
        assert not parameter.requires_grad
        torch.testing.assert_close(parameter, expected[name], atol=1e-14, rtol=0)
    assert 0 < len(trained) < len(expected)


def test_a_copy_of_a_frozen_model_stays() -> None:
    model = load_towers(tiny.MODEL, seed=1).requires_grad_(False)
    follower = MomentumCopy(model, 0.5)
    before = [parameter.clone() for parameter in follower.model.parameters()]
    moved(model.requires_grad_(True))
    follower.follow(model.requires_grad_(False))
    assert all(map(torch.equal, follower.model.parameters(), before))
    assert not any(map(torch.equal, model.parameters(), before))


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
    follower.follow(model)  # moves no buffer
    assert all(torch.equal(follower.get_buffer(n), value) for n, value in first.items())
    follower(pictures() + 1.0)  # of its own batch
    assert first and not all(torch.equal(follower.get_buffer(n), b) for n, b in first.items())
    norms = [m for m in follower.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(norm.training for norm in norms)


def test_frozen_batch_norms_stay_in_eval_mode() -> None:
    model = load_towers(RESNET, seed=1)
    model.lock(2, **(LOCK | {"image_norm": False}))
    model.train()
    follower = MomentumCopy(model, 0.5).train()
    assert not any(m.training for m in follower.modules() if isinstance(m, nn.BatchNorm2d))


def adapted() -> Model:
    model = load_towers(tiny.MODEL, seed=1)
    model.lock(2, **LOCK)
    add_lora(model, rank=2, alpha=4.0, seed=2)
    return model.train()


def test_a_model_with_adapters_is_followed() -> None:
    model = adapted()
    follower = MomentumCopy(model, 0.0)
    moved(model)
    features = model(image=pictures())["image_features"].detach()
    assert not torch.allclose(follower(pictures()), features)
    follower.follow(model)  # momentum 0: the copy is the model
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
