"""One step of training against the same step written out; what is compiled; shares of a rank."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import sysconfig
from itertools import product
from pathlib import Path

import pytest
import timm.optim
import torch
from torch import Tensor, nn

from mclclip.engines import EngineConfig, TrainingBytes, build, per_rank
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.ranks.process_group import SINGLE
from tests import tiny


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


BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def engine_of(model: Model, **options: object) -> Engine:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [p]} for p in module.parameters() if p.requires_grad]
        return torch.optim.SGD(groups, lr=1.0)

    return Engine(model, make, SINGLE, **options)  # type: ignore[arg-type]


def gradients(model: Model) -> tuple[Tensor, Tensor]:
    grad = torch.autograd.grad(model(BATCH)["loss"], [model.tail.weight, model.tail.bias])
    return grad[0], grad[1]


def test_a_step_moves_every_group_by_the_given_learning_rate() -> None:
    """And no gradient of the step before, and no frozen parameter. It returns detached parts."""
    model = Model()
    trunk, engine = model.trunk.weight.clone(), engine_of(model)
    engine.fix_reduction_order(BATCH)
    assert model.dtype is None  # one process has nothing to settle: the model was not run
    assert sorted(engine.local_parameters()) == ["tail.bias", "tail.weight"]
    engine.update(BATCH, lr=0.0)
    weight, bias = gradients(model)
    wanted = model.tail.weight - 0.01 * weight, model.tail.bias - 0.01 * bias
    parts = engine.update(BATCH, lr=0.01)
    torch.testing.assert_close((model.tail.weight, model.tail.bias), wanted)
    assert torch.equal(model.trunk.weight, trunk) and model.trunk.weight.grad is None
    assert sorted(parts) == ["grad_norm", "largest", "loss"]
    assert not any(part.requires_grad for part in parts.values())


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
    assert scale < 1.0 or torch.equal(model.tail.weight, before - weight)  # no bit changes
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


def test_asking_for_the_state_does_not_count_as_a_step() -> None:
    engine, other = (
        Engine(Model(), lambda module: torch.optim.AdamW(module.tail.parameters()), SINGLE)
        for _ in range(2)
    )
    engine.state_dict()
    for one in (engine, other):
        one.update(BATCH, lr=0.01)
    for name, tensor in engine.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    "name", ["adamw", "lion", "lars", *(f"timm:{name}" for name in timm.optim.list_optimizers())]
)
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
    assert name != "adamw" or float(state["optimizer.tail.weight.step"]) == 3
    other = Engine(Model(), make, SINGLE)
    assert other.state_dict().keys() == state.keys()
    other.load_state_dict(state)
    for one in (engine, other):
        for _ in range(2):
            one.update(BATCH, lr=1e-3)
    for key, parameter in engine.local_parameters().items():
        assert torch.equal(other.local_parameters()[key], parameter), key


LONG = 1e18  # operations
TIMM = {"timm_proj": "linear", "image_size": 32}
CONVOLUTIONS = tiny.MODEL | {"vision_cfg": {**TIMM, "timm_model_name": "test_efficientnet"}}
TIMM_VIT = tiny.MODEL | {"vision_cfg": {**TIMM, "timm_model_name": "test_vit"}}


def test_what_is_asked_for_is_done() -> None:
    for device, option in product(("cpu", "cuda"), ("none", "model", "step")):
        how: Any = EngineConfig(compile=option)  # type: ignore[arg-type]
        found = build.choose_compile(how, torch.device(device), [], 0.0, compiler=False)
        assert found == option


@pytest.mark.parametrize(
    ("device", "model", "operations", "compiler", "wanted"),
    [
        ("cuda", tiny.MODEL, LONG, True, "model"),
        ("cuda", TIMM_VIT, LONG, True, "model"),
        ("cuda", tiny.MODEL, LONG, False, "none"),
        ("cuda", tiny.MODEL, 1e16, True, "none"),
        ("cuda", tiny.RESNET, LONG, True, "none"),
        ("cuda", CONVOLUTIONS, LONG, True, "none"),
        ("cpu", tiny.MODEL, LONG, True, "none"),
    ],
)
def test_auto_is_for_long_trainings_of_transformers_on_a_gpu(
    device: str, model: Any, operations: float, compiler: bool, wanted: str
) -> None:
    blocks = load_towers(model, seed=0).blocks()
    for how in (EngineConfig(), EngineConfig("fsdp"), EngineConfig("deepspeed", 2)):
        on = torch.device(device)
        assert build.choose_compile(how, on, blocks, operations, compiler) == wanted
    zero_3 = EngineConfig("deepspeed", 3)
    assert build.choose_compile(zero_3, torch.device(device), blocks, LONG, True) == "none"


def test_without_a_compiler_a_line_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    blocks, device = load_towers(tiny.ONE_BLOCK, seed=0).blocks(), torch.device("cuda")
    for operations, said in ((1e16, False), (LONG, True)):
        build.choose_compile(EngineConfig(), device, blocks, operations, False)
        assert ("compile=auto" in caplog.text) == said
    # A model without known blocks is not compiled.
    assert build.choose_compile(EngineConfig(), device, [], LONG, True) == "none"


def test_a_compiler_is_needed_for_auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton builds its launchers by it: CC, or what is on the path."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        pytest.skip("this Python has no headers")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not build.can_compile(triton=True)
    for name, enough in (("cc", False), ("gcc", True)):  # which Triton looks for
        compiler = tmp_path / name
        compiler.write_text("#!/bin/sh\n")
        compiler.chmod(0o755)
        assert build.can_compile(triton=True) == enough
    assert not build.can_compile(triton=False)
    for name, enough in (("no-such-compiler", False), ("", False), ("cc", True)):
        monkeypatch.setenv("CC", name)
        assert build.can_compile(triton=True) == enough


SIZES = TrainingBytes(
    parameters=1600, trained=800, moments=1600, average=800, outside=100, largest_block=120
)


def test_one_process_shares_nothing_and_ddp_adds_its_buckets() -> None:
    for name in ("ddp", "fsdp", "deepspeed"):
        parts = per_rank(SIZES, EngineConfig(name, zero_stage=3), 1)
        assert list(parts.values()) == [1600, 800, 1600, 800, 0]
    ddp = EngineConfig("ddp")
    assert per_rank(SIZES, ddp, 8) == per_rank(SIZES, ddp, 1) | {"engine": 800}


def test_fsdp_divides_all_and_gathers_blocks() -> None:
    parts = per_rank(SIZES, EngineConfig("fsdp"), 8)
    assert list(parts.values()) == [200, 100, 200, 100, 100 + 2 * 120 + 120]
    assert per_rank(SIZES, EngineConfig("fsdp"), 8, half=True)["engine"] == 100 + 120 + 120
    assert per_rank(SIZES, EngineConfig("fsdp", shard_ranks=2), 8)["parameters"] == 800
    assert per_rank(SIZES, EngineConfig("fsdp"), 8, caching=True)["gradients"] == 800


def test_zero_divides_more_at_every_stage() -> None:
    one, two, three = (
        per_rank(SIZES, EngineConfig("deepspeed", zero_stage=stage), 8) for stage in (1, 2, 3)
    )
    assert one["optimizer"] == two["optimizer"] == three["optimizer"] == (1600 + 800) // 8
    assert one["gradients"] == 800 and two["gradients"] == 100 + 800
    assert two["parameters"] == 1600 and three["parameters"] == 200
    assert two["ema"] == 800 and three["ema"] == 100
    assert three["engine"] == two["engine"] + 1600  # below its threshold it keeps all it gathered
