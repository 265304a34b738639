"""One step of training, against the same step written out."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import pytest
import timm.optim
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mclclip.engines.engine import Engine
from mclclip.models.optimizer import build_optimizer
from mclclip.ranks.process_group import SINGLE


class Model(nn.Module):
    """A batch [b, 4] -> its loss; notes that it was run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 4).requires_grad_(False)
        self.tail = nn.Linear(4, 2)
        self.dtype: torch.dtype | None = None

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        out = self.tail(self.trunk(batch))
        self.dtype = out.dtype
        return {"loss": out.float().square().sum(), "largest": out.abs().max()}


def every_timm_optimizer() -> list[str]:
    return [f"timm:{name}" for name in timm.optim.list_optimizers()]


BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def engine_of(model: Model, **options: object) -> Engine:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [p]} for p in module.parameters() if p.requires_grad]
        return torch.optim.SGD(groups, lr=1.0)

    return Engine(model, make, SINGLE, **options)  # type: ignore[arg-type]


def adamw_of(model: Model) -> Engine:
    return Engine(model, lambda module: torch.optim.AdamW(model.tail.parameters()), SINGLE)


def gradients(model: Model) -> tuple[Tensor, Tensor]:
    grad = torch.autograd.grad(model(BATCH)["loss"], [model.tail.weight, model.tail.bias])
    return grad[0], grad[1]


def test_a_step_moves_every_group_by_the_given_learning_rate() -> None:
    model = Model()
    weight, bias = gradients(model)
    wanted = model.tail.weight - 0.01 * weight, model.tail.bias - 0.01 * bias
    engine_of(model).update(BATCH, lr=0.01)
    torch.testing.assert_close((model.tail.weight, model.tail.bias), wanted)


def test_a_step_returns_detached_parts_and_the_norm_of_the_gradient() -> None:
    model = Model()
    weight, bias = gradients(model)
    parts = engine_of(model).update(BATCH, lr=0.01)
    assert sorted(parts) == ["grad_norm", "largest", "loss"]
    assert not any(part.requires_grad for part in parts.values())
    norm = torch.cat([weight.flatten(), bias]).norm()
    torch.testing.assert_close(parts["grad_norm"], norm)


def test_gradients_do_not_add_up_over_steps() -> None:
    model, again = Model(), Model()
    engine = engine_of(model)
    engine.update(BATCH, lr=0.0)
    engine.update(BATCH, lr=0.01)
    engine_of(again).update(BATCH, lr=0.01)
    assert torch.equal(model.tail.weight, again.tail.weight)


@pytest.mark.parametrize("share", [0.5, 2.0, None], ids=["clipped", "short enough", "no limit"])
def test_clipping_scales_the_whole_gradient(share: float | None) -> None:
    model = Model()
    weight, bias = gradients(model)
    norm = float(torch.cat([weight.flatten(), bias]).norm())
    limit = None if share is None else share * norm
    before = model.tail.weight.clone()
    parts = engine_of(model, clip_grad_norm=limit).update(BATCH, lr=1.0)
    scale = 0.5 if share == 0.5 else 1.0
    torch.testing.assert_close(before - model.tail.weight, scale * weight)
    assert float(parts["grad_norm"]) == pytest.approx(norm)  # before clipping


@dataclass
class Step:
    """A batch that knows its step, as parameters outside are told."""

    pixels: Tensor
    step: int

    def __len__(self) -> int:
        return len(self.pixels)


class Shifted(Model):
    """Adds a tensor that it does not own: the engine trains it outside."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, batch: Step) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": (self.tail(self.trunk(batch.pixels)) + self.shift).square().sum()}


class Descent:
    """Trains a tensor outside of the engine, by plain gradient descent."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def begin(self, step: int, loss_scale: Tensor | float = 1.0) -> None:
        pass

    def zero_grad(self) -> None:
        self.tensor.grad = None

    def grad_square(self) -> Tensor:
        assert self.tensor.grad is not None
        return self.tensor.grad.double().square().sum()

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        assert self.tensor.grad is not None
        self.tensor.data -= lr * factor * self.tensor.grad


@pytest.mark.parametrize("limit", [1.0, 1e6, None], ids=["clipped", "short enough", "no limit"])
def test_parameters_outside_are_clipped_with_the_others(limit: float | None) -> None:
    """Against gradient descent written out: one norm of all, one factor for all."""
    model = Shifted(torch.tensor([3.0, -2.0], requires_grad=True))
    engine = engine_of(model, clip_grad_norm=limit, outside=[Descent(model.shift)])
    slow = Shifted(torch.tensor([3.0, -2.0], requires_grad=True))
    tensors = [slow.tail.weight, slow.tail.bias, slow.shift]
    for step in range(3):
        norm = engine.update(Step(BATCH, step), lr=0.01)["grad_norm"]
        grads = torch.autograd.grad(slow(Step(BATCH, step))["loss"], tensors)
        wanted = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        assert 1.0 < wanted < 1e6 and float(norm) == pytest.approx(wanted, rel=1e-5)
        factor = 1.0 if limit is None else min(1.0, limit / wanted)
        with torch.no_grad():
            for tensor, grad in zip(tensors, grads, strict=True):
                tensor -= 0.01 * factor * grad
        found = (model.tail.weight, model.tail.bias, model.shift)
        torch.testing.assert_close(found, tuple(tensors))


class Operations(TorchDispatchMode):
    """How often each operation was called within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def step_of(num_layers: int) -> Counter[str]:
    """Operations of a clipped step of AdamW after its gradients are there."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    engine = Engine(
        model,
        lambda module: build_optimizer(module, weight_decay=0.1),
        SINGLE,
        clip_grad_norm=1e-3,
    )
    for _ in range(2):  # the first one makes the moments
        engine.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        model(BATCH).square().sum().backward()
        with Operations() as operations:
            engine.step()
    return operations.called


def test_a_step_has_as_many_operations_for_few_parameters_as_for_many() -> None:
    """On a GPU an operation of a list is a few kernels; one per parameter would be hundreds."""
    few, many = step_of(2), step_of(20)
    assert {few[name] for name in ("_foreach_mul_", "_foreach_norm")} == {1}
    assert few["_fused_adamw_"] == 2  # with decay and without
    different = {n for n in few.keys() | many.keys() if few[n] != many[n]}
    assert different <= {"detach", "unbind"}  # they compute nothing


def test_without_a_limit_no_bit_of_the_gradient_changes() -> None:
    model = Model()
    weight, _ = gradients(model)
    before = model.tail.weight.clone()
    engine_of(model).update(BATCH, lr=1.0)
    assert torch.equal(model.tail.weight, before - weight)


def test_a_group_may_have_a_share_of_the_learning_rate() -> None:
    model, plain = Model(), Model()
    engine = engine_of(model)
    engine.optimizer.param_groups[1]["lr_scale"] = 0.5
    engine.update(BATCH, lr=0.01)
    engine_of(plain).update(BATCH, lr=0.005)
    assert torch.equal(model.tail.bias, plain.tail.bias)
    assert not torch.equal(model.tail.weight, plain.tail.weight)


def test_an_average_of_the_trained_weights_is_kept_and_saved() -> None:
    model = Model()
    before = model.tail.weight.detach().clone()
    engine, expected = engine_of(model, ema_decay=0.75), before
    for _ in range(3):
        engine.update(BATCH, lr=0.01)
        expected = 0.75 * expected + 0.25 * model.tail.weight.detach()
    state = engine.state_dict()
    averages = {name for name in state if name.startswith("ema.")}
    assert averages == {"ema.tail.weight", "ema.tail.bias"}
    torch.testing.assert_close(state["ema.tail.weight"], expected)
    other = engine_of(Model(), ema_decay=0.75)
    other.load_state_dict(state)
    other.update(BATCH, lr=0.01)
    expected = 0.75 * expected + 0.25 * other.module.tail.weight.detach()
    torch.testing.assert_close(other.state_dict()["ema.tail.weight"], expected)


def test_the_state_of_one_engine_is_taken_by_another() -> None:
    """Weights, buffers and moments; the next step is the same."""
    engine, other = adamw_of(Model()), adamw_of(Model())
    for _ in range(3):
        engine.update(BATCH, lr=0.01)
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    assert float(state["optimizer.tail.weight.step"]) == 3
    other.load_state_dict(state)
    for one in (engine, other):
        one.update(BATCH, lr=0.01)
    for name, tensor in engine.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_asking_for_the_state_does_not_count_as_a_step() -> None:
    engine, other = adamw_of(Model()), adamw_of(Model())
    engine.state_dict()
    for one in (engine, other):
        one.update(BATCH, lr=0.01)
    for name, tensor in engine.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@pytest.mark.parametrize("name", ["adamw", "lion", "lars", *every_timm_optimizer()])
def test_every_optimizer_resumes_exactly(name: str) -> None:
    """Also those of timm that count their steps in groups, or keep numbers that are no tensors."""

    def make(module: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(module, name=name, weight_decay=0.1, lr=1e-3)

    try:
        engine = Engine(Model(), make, SINGLE)
    except ValueError as refused:
        pytest.skip(str(refused))
    for _ in range(3):
        engine.update(BATCH, lr=1e-3)
    state = copy.deepcopy(engine.state_dict())
    other = Engine(Model(), make, SINGLE)
    assert other.state_dict().keys() == state.keys()
    other.load_state_dict(state)
    for one in (engine, other):
        for _ in range(2):
            one.update(BATCH, lr=1e-3)
    for name, parameter in engine.local_parameters().items():
        assert torch.equal(other.local_parameters()[name], parameter), name


def test_frozen_parameters_stay() -> None:
    model = Model()
    before = model.trunk.weight.clone()
    engine = engine_of(model)
    engine.update(BATCH, lr=0.5)
    assert torch.equal(model.trunk.weight, before) and model.trunk.weight.grad is None
    assert sorted(engine.local_parameters()) == ["tail.bias", "tail.weight"]


def test_one_process_has_nothing_to_settle() -> None:
    model = Model()
    engine_of(model).fix_reduction_order(BATCH)
    assert model.dtype is None  # it was not run
