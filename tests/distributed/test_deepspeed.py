"""ZeRO's stages equal the single process, and their state is everybody's."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from mclclip.engines import zero as deepspeed_engine
from mclclip.engines.engine import Engine
from tests.distributed.test_class_centers import assert_left_out, run_one_bad
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
from tests.matrix import in_soak, kept

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

Ranks = Callable[..., list[Any]]
STAGES = (1, 2, 3)


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
def test_two_ranks_equal_one(ranks: Ranks, single: Any, stage: int) -> None:
    losses, state = single("fp32", **EVERYTHING)
    options = {"zero_stage": stage, **EVERYTHING}
    for got_losses, got in ranks(2, zero, run, "deepspeed", "fp32", options):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
        assert_same(state, got)


@in_soak
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_cached_and_no_parameter_divided(
    ranks: Ranks, single: Any, stage: int
) -> None:
    """Three ranks, micro-batches of unequal size (8 = 5 + 3), and buckets of gradients that are
    smaller than some of these."""
    losses, state = single("fp32", SHORT)
    options = {"zero_stage": stage, "micro_batch": 5}
    got_losses, got = ranks(3, in_small_buckets, "deepspeed", "fp32", options, SHORT)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    assert_same(state, got)


def in_small_buckets(*args: Any) -> Any:
    with patch.object(deepspeed_engine, "BUCKET", 5000):
        return zero(run, *args)


def norms(name: str, options: dict[str, Any]) -> list[float]:
    engine = make_engine(name, clip_grad_norm=0.1, **options)
    return [float(engine.update(batch_of(step), lr=1e-3)["grad_norm"]) for step in range(3)]


@pytest.mark.parametrize("stage", kept(STAGES, 1))
def test_gradient_norm_is_that_before_clipping(ranks: Ranks, stage: int) -> None:
    expected = ranks(1, norms, "ddp", {})[0]
    assert min(expected) > 0.2
    for got in ranks(2, zero, norms, "deepspeed", {"zero_stage": stage}):
        np.testing.assert_allclose(got, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("precision", "stage"), kept([("bf16", 2), ("bf16", 3), ("fp16", 1), ("fp16", 3)], 0)
)
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


def test_a_step_that_overflows_anywhere_is_left_out_everywhere(ranks: Ranks) -> None:
    for result in ranks(2, zero, run_one_bad, "deepspeed", {"zero_stage": 3}):
        assert_left_out(*result)


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
    """Losses of the steps, the state before them, and the state after them."""
    engine = make_engine(name, ema_decay=0.9, **options)
    if arrays is not None:
        fill(engine, arrays)
    loaded = whole(engine.state_dict())
    return train(engine, steps), loaded, whole(engine.state_dict())


@pytest.mark.parametrize("stage", kept(STAGES, 2))
@in_soak
def test_a_resumed_run_repeats_the_undisturbed_one(ranks: Ranks, stage: int) -> None:
    """Bit for bit on the same ranks; and looking at the state of a fresh engine changes nothing."""

    def steps(of: range, arrays: Any = None) -> Any:
        return ranks(3, zero, some_steps, "deepspeed", {"zero_stage": stage}, of, arrays)[0]

    losses, _, state = steps(range(3))
    more, loaded, end = steps(range(3, 6), state)
    assert_close(state, loaded, 0.0)
    whole_losses, _, undisturbed = steps(range(6))
    assert losses + more == whole_losses
    assert_close(undisturbed, end, 0.0)


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
