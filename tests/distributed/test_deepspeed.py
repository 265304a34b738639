"""ZeRO's stages equal the single process, and their state is everybody's."""

from __future__ import annotations

import gc
import importlib.util
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from mclclip.engines import zero as deepspeed_engine
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.info_nce import InfoNCE
from mclclip.train.loop import ModelWithObjective
from tests import tiny
from tests.distributed import test_engines
from tests.distributed.conftest import here
from tests.distributed.test_engines import (
    EVERYTHING,
    SHORT,
    assert_close,
    batch_of,
    make_engine,
    run,
    train,
    whole,
)
from tests.engines import build_engine
from tests.matrix import in_soak, kept

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

Ranks = Callable[..., list[Any]]
STAGES = (1, 2, 3)
SCALE = "model.model.clip.logit_scale"


def zero(function: Callable[..., Any], *args: Any) -> Any:
    """The function's result where ZeRO-3 shares even the smallest parameters.

    ZeRO-3 counts a process's modules and parameters on and on, and compares the numbers with other
    ranks', some of which have run fewer of these tests.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    with patch.object(deepspeed_engine, "KEPT_WHOLE", 0):
        return function(*args)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal states of fp32 runs, as far as rounding lets AdamW: losses are what is promised."""
    assert one.keys() == other.keys()
    for start, atol in (("model.", 3e-5), ("ema.", 3e-5), ("optimizer.", 5e-5)):
        first, second = (
            {n: v for n, v in state.items() if n.startswith(start)} for state in (one, other)
        )
        assert_close(first, second, atol)


# --- as the single process ---------------------------------------------------------------------


@pytest.mark.parametrize("stage", kept(STAGES, 2))
@pytest.mark.parametrize("options", kept([{}, EVERYTHING], 1), ids=str)
def test_two_ranks_equal_one(ranks: Ranks, single: Any, stage: int, options: Any) -> None:
    losses, state = single("fp32", **options)
    results = ranks(2, zero, run, "deepspeed", "fp32", {"zero_stage": stage, **options})
    for got_losses, got in results:
        np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
        assert_same(state, got)


@pytest.mark.parametrize("stage", kept(STAGES, 2))
@in_soak
def test_gradient_caching_equals_the_whole_batch(ranks: Ranks, single: Any, stage: int) -> None:
    """In micro-batches of unequal size (12 = 5 + 5 + 2)."""
    losses, state = single("fp32", SHORT)
    options = {"zero_stage": stage, "micro_batch": 5}
    got_losses, got = ranks(2, zero, run, "deepspeed", "fp32", options, SHORT)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    assert_same(state, got)


@in_soak
def test_three_ranks_that_divide_no_parameter(ranks: Ranks, single: Any) -> None:
    """Also with more than one bucket of gradients, and some larger than a bucket."""
    losses, state = single("fp32", SHORT, ema_decay=0.9)
    options = {"zero_stage": 3, "ema_decay": 0.9}
    got_losses, got = ranks(3, in_small_buckets, "deepspeed", "fp32", options, SHORT)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    assert_same(state, got)


def in_small_buckets(*args: Any) -> Any:
    with patch.object(deepspeed_engine, "BUCKET", 5000):
        return zero(run, *args)


@in_soak
def test_zero_3_with_small_parameters_kept_whole(ranks: Ranks, single: Any) -> None:
    losses, state = single("fp32")
    got_losses, got = ranks(2, run, "deepspeed", "fp32", {"zero_stage": 3})[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    assert_same(state, got)


# --- norms and gradient ------------------------------------------------------------------------


def norms(name: str, options: dict[str, Any]) -> list[float]:
    engine = make_engine(name, clip_grad_norm=0.1, **options)
    return [float(engine.update(batch_of(step), lr=1e-3)["grad_norm"]) for step in range(3)]


@pytest.mark.parametrize("stage", kept(STAGES, 1))
def test_gradient_norm_is_that_before_clipping(ranks: Ranks, stage: int) -> None:
    expected = ranks(1, norms, "ddp", {})[0]
    assert min(expected) > 0.2
    for got in ranks(2, zero, norms, "deepspeed", {"zero_stage": stage}):
        np.testing.assert_allclose(got, expected, rtol=1e-4)


# --- half precision ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", kept(STAGES, 1))
@pytest.mark.parametrize("precision", kept(["bf16", "fp16"], 0))
def test_half_precision_agrees(ranks: Ranks, single: Any, precision: str, stage: int) -> None:
    exact, _ = single("fp32", SHORT, deep=True)
    losses, state = single(precision, SHORT, deep=True)
    options = {"zero_stage": stage, "deep": True}
    got, other = ranks(2, zero, run, "deepspeed", precision, options, SHORT)[0]
    np.testing.assert_allclose(got, losses, rtol=1e-2)
    assert max(abs(a - b) for a, b in zip(got, exact, strict=True)) > 1e-4  # it was half precision
    assert state.keys() == other.keys()
    if precision == "fp16":
        assert state["scaler.scale"] == other["scaler.scale"]
        assert state["scaler.growth_tracker"] == other["scaler.growth_tracker"]


def overflow(stage: int) -> Any:
    engine = partial(make_engine, zero_stage=stage)
    with patch.object(test_engines, "make_engine", engine):
        return zero(test_engines.overflow, "deepspeed")


@pytest.mark.parametrize("stage", kept(STAGES, 2))
def test_a_step_that_overflows_anywhere_is_left_out_everywhere(ranks: Ranks, stage: int) -> None:
    for result in ranks(2, overflow, stage):
        test_engines.assert_left_out(result)


# --- bounds ------------------------------------------------------------------------------------


def bounded(stage: int) -> list[float]:
    """The logit scale, set above its bound, after each of three steps."""
    engine = make_engine("deepspeed", zero_stage=stage)
    state = engine.state_dict()
    state[SCALE] = torch.full_like(state[SCALE], 6.0)
    engine.load_state_dict(state)
    values = []
    for step in range(3):
        engine.update(batch_of(step), lr=1e-3)
        values.append(engine.state_dict()[SCALE].item())
    return values


@pytest.mark.parametrize("stage", kept(STAGES, 2))
@in_soak
def test_the_logit_scale_stays_below_its_bound(ranks: Ranks, stage: int) -> None:
    bound = float(np.float32(math.log(100.0)))
    for values in ranks(2, zero, bounded, stage):
        assert values[0] == bound
        assert all(bound - 0.01 < value <= bound for value in values)


# --- state -------------------------------------------------------------------------------------


def fill(engine: Engine, arrays: dict[str, np.ndarray]) -> None:
    """Loads the arrays as a checkpoint would: into what the engine's state offers."""
    state = engine.state_dict()
    assert state.keys() == arrays.keys()
    for name, value in state.items():
        array = torch.as_tensor(arrays[name]).to(value.dtype)
        if isinstance(value, DTensor):
            array = distribute_tensor(array, value.device_mesh, value.placements)
        state[name] = array
    engine.load_state_dict(state)


def some_steps(
    name: str, options: dict[str, Any], steps: range, arrays: dict[str, np.ndarray] | None
) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses of the steps, the state after loading, and the state after the steps."""
    engine = make_engine(name, ema_decay=0.9, **options)
    if arrays is not None:
        fill(engine, arrays)
    loaded = {} if arrays is None else whole(engine.state_dict())
    return train(engine, steps), loaded, whole(engine.state_dict())


@pytest.mark.parametrize("stage", kept(STAGES, 1))
@in_soak
def test_state_goes_from_engine_to_engine(ranks: Ranks, single: Any, stage: int) -> None:
    expected, end = single("fp32", ema_decay=0.9)
    losses, _, state = ranks(1, some_steps, "ddp", {}, range(5), None)[0]
    for number, (world_size, name, options) in enumerate(
        [(2, "deepspeed", {"zero_stage": stage}), (2, "fsdp", {}), (1, "ddp", {})], start=1
    ):
        steps = range(5 * number, 5 * number + 5)
        results = ranks(world_size, zero, some_steps, name, options, steps, state)
        for _, loaded, _ in results:
            assert_close(state, loaded, 0.0)
        more, _, state = results[0]
        losses += more
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same(end, state)
    assert state["optimizer.model.clip.visual.proj.step"] == 20


@pytest.mark.parametrize("stage", kept(STAGES, 2))
@in_soak
def test_a_resumed_run_repeats_the_undisturbed_one(ranks: Ranks, stage: int) -> None:
    """Bit for bit on the same ranks; and looking at the state of a fresh engine changes nothing."""
    options = {"zero_stage": stage}
    losses, _, state = ranks(3, zero, some_steps, "deepspeed", options, range(3), None)[0]
    more, loaded, end = ranks(3, zero, some_steps, "deepspeed", options, range(3, 6), state)[0]
    assert_close(state, loaded, 0.0)
    whole_losses, undisturbed = ranks(3, zero, undisturbed_steps, stage)[0]
    assert losses + more == whole_losses
    assert_close(undisturbed, end, 0.0)


def undisturbed_steps(stage: int) -> tuple[list[float], dict[str, Any]]:
    engine = make_engine("deepspeed", ema_decay=0.9, zero_stage=stage)
    engine.state_dict()
    return train(engine, range(6)), whole(engine.state_dict())


# --- other models ------------------------------------------------------------------------------


def resnet(name: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Any], list[str]]:
    """Five steps of a ResNet beside a frozen text tower."""
    torch.set_num_threads(1)
    context = here()
    trainee = ModelWithObjective(load_towers(tiny.RESNET, seed=1).train(), InfoNCE())
    for part, parameter in trainee.named_parameters():
        parameter.requires_grad_("visual" in part or "logit_scale" in part)
    make = partial(build_optimizer, weight_decay=0.1, name="lion")
    engine = build_engine(name, trainee, make, context, **options)
    losses = train(engine, range(5))
    return losses, whole(engine.state_dict()), list(engine.local_parameters())


@in_soak
@pytest.mark.parametrize("stage", STAGES)
def test_resnet_with_a_frozen_tower(ranks: Ranks, stage: int) -> None:
    losses, state, trained = ranks(1, resnet, "ddp", {})[0]
    got_losses, got, got_trained = ranks(2, zero, resnet, "deepspeed", {"zero_stage": stage})[0]
    assert trained == got_trained
    assert "model.model.clip.visual.bn1.running_mean" in got
    assert "optimizer.model.clip.token_embedding.weight.exp_avg" not in got
    np.testing.assert_allclose(got_losses[:2], losses[:2], rtol=1e-5)
    assert state.keys() == got.keys()
    for name in ("model.model.clip.token_embedding.weight", "model.model.clip.text_projection"):
        np.testing.assert_array_equal(got[name], state[name])


# --- an engine's end ---------------------------------------------------------------------------


def left_over(stage: int) -> list[Any]:
    """Of an engine that is gone: whether its weights, its optimizer's state and its own linear
    layer are gone, too."""
    engine: Any = make_engine("deepspeed", zero_stage=stage)
    train(engine, range(2))
    parameter = next(engine.module.parameters())
    moments = next(iter(engine.optimizer.state.values()))["exp_avg"]
    held = [parameter.ds_tensor if stage == 3 else parameter, moments]
    references = [weakref.ref(item) for item in held]
    del engine, parameter, moments, held
    gc.collect()
    own = torch.nn.functional.linear is torch._C._nn.linear
    return [own, *(reference() is None for reference in references)]


@pytest.mark.parametrize("stage", kept(STAGES, 2))
def test_an_engine_that_is_gone_leaves_nothing(ranks: Ranks, stage: int) -> None:
    """What the process computes later must not depend on a training having run in it."""
    for result in ranks(2, zero, left_over, stage):
        assert result == [True, True, True]
