"""Every engine on several ranks equals the single process: losses, weights, moments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mclclip.data.batches import Batch
from mclclip.engines import gradient_cache
from mclclip.engines.engine import Engine, synchronize_batch_norms
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.contrast import Learnable, Temperature
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks import collectives, process_group
from mclclip.train.loop import ModelWithObjective
from tests import tiny
from tests.distributed.conftest import here
from tests.engines import build_engine
from tests.matrix import kept

Ranks = Callable[..., list[Any]]
GLOBAL_BATCH, STEPS, SHORT = 24, 20, 8
DECAY = 40.0  # towards the first weights: 0.04 of the way in a step at a rate of 1e-3


def make_engine(
    name: str,
    precision: str = "fp32",
    start_decay: float = 0.0,
    objective: InfoNCE | None = None,
    model_config: Any = tiny.ONE_BLOCK,
    deep: bool = False,
    channels_last: bool = False,
    **options: Any,
) -> Engine:
    """A small CLIP, of one block or (``deep``) three, under an engine, the same on every number of
    ranks."""
    torch.set_num_threads(1)
    model_config = tiny.MODEL if deep else model_config
    model = load_towers(tiny.of_few_ids(model_config), seed=1).train()
    model.memory_format = "channels_last" if channels_last else "contiguous"
    trainee = ModelWithObjective(model, objective or InfoNCE(), precision)
    if precision == "float64":
        trainee.double()
    engine = build_engine(
        name,
        trainee,
        lambda module: build_optimizer(module, weight_decay=0.1, start_decay=start_decay),
        here(),
        blocks=model.blocks(),
        precision=precision,
        **options,
    )
    if engine.scaler.is_enabled():  # a scale at which no step overflows
        engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": 256.0})
    return engine


def batch_of(step: int, dtype: torch.dtype = torch.float32) -> Batch:
    """This rank's columns of a global batch that is a function of the step."""
    random = torch.Generator().manual_seed(step)
    image = torch.randn(GLOBAL_BATCH, 3, 32, 32, generator=random, dtype=torch.float64)
    text = torch.randint(1, 400, (GLOBAL_BATCH, 20), generator=random)
    local = GLOBAL_BATCH // collectives.world_size()
    whole = Batch(
        views=[image.to(dtype)],
        text=text,
        group_ids=torch.arange(GLOBAL_BATCH)[:, None] % 2,
        sample_id=torch.arange(GLOBAL_BATCH),
        step=step,
        group_size=GLOBAL_BATCH // 2,
    )
    return whole.slice(collectives.rank() * local, (collectives.rank() + 1) * local)


def train(engine: Engine, steps: range, dtype: torch.dtype = torch.float32) -> list[float]:
    """Global losses of the steps."""
    losses = []
    for step in steps:
        loss = engine.update(batch_of(step, dtype), lr=1e-3)["loss"]
        losses.append(float(collectives.all_reduce_sum(loss)) / collectives.world_size())
    return losses


def whole(state: dict[str, Any]) -> dict[str, np.ndarray]:
    """The state as arrays."""
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in full.items()}


def run(
    name: str, precision: str, options: dict[str, Any], steps: int = STEPS
) -> tuple[list[float], dict[str, Any]]:
    """Steps on this rank: losses and state."""
    engine = make_engine(name, precision, **options)
    dtype = torch.float64 if precision == "float64" else torch.float32
    return train(engine, range(steps), dtype), whole(engine.state_dict())


def assert_close(one: dict[str, Any], other: dict[str, Any], atol: float) -> None:
    """Equal names, equal values, in relation to a tensor's largest where it is above 1; except the
    key bias, whose zero gradient AdamW makes noise of."""
    assert one.keys() == other.keys()
    for name, values in one.items():
        got = other[name]
        if atol > 1e-8 and "attn.in_proj_bias" in name and values.ndim:
            third = len(values) // 3
            keep = np.r_[0:third, 2 * third : 3 * third]
            values, got = values[keep], got[keep]
        largest = max(1.0, float(np.abs(values).max(initial=0.0)))
        np.testing.assert_allclose(got, values, atol=atol * largest, rtol=0, err_msg=name)


EVERYTHING = {"clip_grad_norm": 0.5, "ema_decay": 0.9, "start_decay": DECAY}


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_ranks_equal_one(ranks: Ranks, single: Any, name: str) -> None:
    losses, state = single("float64", **EVERYTHING)
    got_losses, got = ranks(2, run, name, "float64", EVERYTHING)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-9)
    assert_close(state, got, 1e-9)
    losses, state = single("fp32", **EVERYTHING)
    got_losses, got = ranks(2, run, name, "fp32", EVERYTHING)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    # Where a gradient is near AdamW's eps, rounding moves a weight: losses are what is promised.
    assert_close(state, got, 3e-5)


# --- gradient caching --------------------------------------------------------------------------


@pytest.mark.parametrize("name", kept(["ddp", "fsdp"], 0))
def test_gradient_caching_equals_the_whole_batch(ranks: Ranks, single: Any, name: str) -> None:
    """In micro-batches of unequal size (12 = 5 + 5 + 2)."""
    losses, state = single("float64", **EVERYTHING)
    got_losses, got = ranks(2, run, name, "float64", EVERYTHING | {"micro_batch": 5})[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-9)
    assert_close(state, got, 1e-9)


def gradient_with_dropout(micro_batch: int | None, seed: int = 0) -> dict[str, np.ndarray]:
    """Gradient of one step of a model that drops patches at random."""
    vision = tiny.MODEL["vision_cfg"] | {"patch_dropout": 0.5}
    config = tiny.MODEL | {"vision_cfg": vision}
    engine = make_engine("ddp", "float64", model_config=config, micro_batch=micro_batch)
    batch = batch_of(0, torch.float64)
    torch.manual_seed(seed)
    if micro_batch:
        gradient_cache.backward(engine, batch, micro_batch)
    else:  # the same draws, the whole graph kept
        pieces = [batch.slice(start, start + 4) for start in range(0, len(batch), 4)]
        found = [engine.module(piece, dict) for piece in pieces]
        features = {
            n: torch.cat([piece[n] for piece in found]) if value.ndim else value
            for n, value in found[0].items()
        }
        engine.module.forward(batch, features=features)["loss"].backward()
    return whole({n: p.grad for n, p in engine.module.named_parameters() if p.grad is not None})


def test_dropout_is_replayed(ranks: Ranks) -> None:
    """The second pass drops the patches that the first one dropped."""
    plain = ranks(1, gradient_with_dropout, None)[0]
    assert_close(plain, ranks(1, gradient_with_dropout, 4)[0], 1e-12)
    with pytest.raises(AssertionError):  # other draws: the check can fail
        assert_close(plain, ranks(1, gradient_with_dropout, 4, 1)[0], 1e-6)


# --- half precision ----------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "name"), kept([("bf16", "ddp"), ("fp16", "fsdp")], 0))
def test_half_precision_agrees(ranks: Ranks, single: Any, precision: str, name: str) -> None:
    exact, _ = single("fp32", SHORT, deep=True)
    losses, state = single(precision, SHORT, deep=True)
    np.testing.assert_allclose(losses, exact, rtol=2e-2)
    got, other = ranks(2, run, name, precision, {"micro_batch": 6, "deep": True}, SHORT)[0]
    np.testing.assert_allclose(got[:5], losses[:5], rtol=1e-2)
    np.testing.assert_allclose(got, losses, rtol=2e-2)  # by now as far as from fp32
    assert state.keys() == other.keys()
    assert ("scaler.scale" in state) == (precision == "fp16")


# --- decay towards the first weights -----------------------------------------------------------


def test_start_decay_is_the_definition_and_leaves_the_objective_alone() -> None:
    """w <- w - lr d (w - start) between gradient and step, written out beside torch's AdamW."""
    objectives = (InfoNCE("captions", Temperature(Learnable(), torch.float64)) for _ in range(2))
    engine, other = (
        make_engine("ddp", "float64", decay, objective)
        for decay, objective in zip((DECAY, 0.0), objectives, strict=True)
    )
    start = {n: p.detach().clone() for n, p in other.module.named_parameters()}
    for group in other.optimizer.param_groups:
        group["lr"] = 1e-3
    for step in range(6):
        batch = batch_of(step, torch.float64)
        engine.update(batch, 1e-3)
        other.zero_grad()
        other.backward(other.wrapped(batch)["loss"])
        with torch.no_grad():
            for name, parameter in other.module.named_parameters():
                if name.startswith("model."):
                    parameter -= 1e-3 * DECAY * (parameter - start[name])
        other.step()
    assert_close(whole(other.state_dict()), whole(engine.state_dict()), 1e-12)
    assert other.module.get_parameter("objective.temperature.log_scale").item() != 0.0


def resumed(name: str) -> bool:
    """Whether a training with decay goes on from the state of two steps with the same bits."""
    engine, other = (make_engine(name, start_decay=DECAY) for _ in range(2))
    train(engine, range(2))
    state = {n: tensor.detach().clone() for n, tensor in engine.state_dict().items()}
    train(engine, range(2, 5))
    other.load_state_dict(state)
    train(other, range(2, 5))
    one, two = whole(engine.state_dict()), whole(other.state_dict())
    return all(np.array_equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize("name", kept(["fsdp", "ddp"], 0))
def test_start_decay_goes_on_bit_for_bit(ranks: Ranks, name: str) -> None:
    assert all(ranks(2, resumed, name))


# --- convolutions ------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, Any] = tiny.MODEL | {  # with depthwise ones
    "vision_cfg": {
        "timm_model_name": "test_efficientnet", "timm_proj": "linear", "image_size": 32
    }
}  # fmt: skip


def convolved(name: str, channels_last: bool) -> tuple[list[float], dict[str, Any], list[str]]:
    """Losses of three steps in float64, the state after them, and warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = make_engine(
            name, "float64", model_config=CONVOLUTIONS, channels_last=channels_last
        )
        losses = train(engine, range(3), torch.float64)
    state = {n: v for n, v in whole(engine.state_dict()).items() if n.startswith("model.")}
    return losses, state, [str(warning.message) for warning in told]


@pytest.mark.parametrize("name", kept(["ddp", "fsdp"], 0))
def test_channels_last_on_two_ranks_is_contiguous_on_one(ranks: Ranks, name: str) -> None:
    """Also for batch norms with an activation, which timm has."""
    losses, state, _ = ranks(1, convolved, "ddp", False)[0]
    assert any("running_var" in n for n in state)
    got_losses, got, told = ranks(2, convolved, name, True)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-9)
    assert_close(state, got, 1e-9)
    assert not [message for message in told if "Grad strides" in message]


class Own(nn.BatchNorm2d):
    """A batch norm of somebody's own."""


def test_only_known_batch_norms_that_train_are_taken() -> None:
    resting = nn.Sequential(Own(3)).eval()
    synchronize_batch_norms(resting)
    assert type(resting[0]) is Own
    with pytest.raises(ValueError, match=r"has a .*Own, whose statistics"):
        synchronize_batch_norms(nn.Sequential(Own(3)))


# --- copies of shards --------------------------------------------------------------------------


def limits_of_meshes() -> list[list[float]]:
    """Seconds that collectives of the groups of copies and of shards may take: before, in and after
    a block without a limit."""
    groups = process_group.make_mesh(here(), 2, 2).get_all_groups()

    def limits() -> list[float]:
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return [backend.options._timeout.total_seconds() for backend in backends]

    before = limits()
    with process_group.without_limit():
        lifted = limits()
    return [before, lifted, limits()]


def test_ranks_that_share_copies_wait_as_long_as_all(ranks: Ranks) -> None:
    day = process_group.TIMEOUT.total_seconds()
    for found in ranks(4, limits_of_meshes, timeout_s=77.0):
        assert found == [[77.0, 77.0], [day, day], [77.0, 77.0]]
