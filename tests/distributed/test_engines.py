"""Every engine on several ranks equals the single process: losses, weights, moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from mclclip.data.batches import Batch
from mclclip.engines import gradient_cache
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
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
    deep: bool = False,
    **options: Any,
) -> Engine:
    """A small ViT of one or (``deep``) three blocks under an engine, the same on every number of
    ranks."""
    torch.set_num_threads(1)
    context = here()
    model = load_towers(tiny.of_few_ids(tiny.MODEL if deep else tiny.ONE_BLOCK), seed=1).train()
    trainee = ModelWithObjective(model, InfoNCE(), precision)
    if precision == "float64":
        trainee.double()
    engine = build_engine(
        name,
        trainee,
        lambda module: build_optimizer(module, weight_decay=0.1, start_decay=start_decay),
        context,
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


@pytest.mark.parametrize("options", kept([{}, EVERYTHING], 1), ids=str)
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_ranks_equal_one(ranks: Ranks, single: Any, name: str, options: Any) -> None:
    losses, state = single("float64", **options)
    got_losses, got = ranks(2, run, name, "float64", options)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-9)
    assert_close(state, got, 1e-9)
    losses, state = single("fp32", **options)
    got_losses, got = ranks(2, run, name, "fp32", options)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    # Where a gradient is near AdamW's eps, rounding moves a weight: losses are what is promised.
    assert_close(state, got, 3e-5)


# --- gradient caching --------------------------------------------------------------------------


@pytest.mark.parametrize("name", kept(["ddp", "fsdp"], 0))
@pytest.mark.parametrize("micro_batch", kept([3, 5], 1))
def test_gradient_caching_equals_the_whole_batch(
    ranks: Ranks, single: Any, name: str, micro_batch: int
) -> None:
    """Also where micro-batches are of unequal size (12 = 5 + 5 + 2)."""
    losses, state = single("float64", **EVERYTHING)
    options = EVERYTHING | {"micro_batch": micro_batch}
    got_losses, got = ranks(2, run, name, "float64", options)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-9)
    assert_close(state, got, 1e-9)


def gradient_with_dropout(micro_batch: int | None, seed: int = 0) -> dict[str, np.ndarray]:
    """Gradient of one step of a model that drops patches at random."""
    vision = tiny.MODEL["vision_cfg"] | {"patch_dropout": 0.5}
    model = load_towers(tiny.of_few_ids(tiny.MODEL) | {"vision_cfg": vision}, seed=1).train()
    context = here()
    engine = build_engine(
        "ddp",
        ModelWithObjective(model, InfoNCE()).double(),
        lambda module: build_optimizer(module, weight_decay=0.1),
        context,
        blocks=model.blocks(),
        micro_batch=micro_batch,
    )
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


@pytest.mark.parametrize("name", kept(["ddp", "fsdp"], 0))
@pytest.mark.parametrize("precision", kept(["bf16", "fp16"], 0))
def test_half_precision_agrees(ranks: Ranks, single: Any, name: str, precision: str) -> None:
    exact, _ = single("fp32", SHORT, deep=True)
    losses, state = single(precision, SHORT, deep=True)
    np.testing.assert_allclose(losses, exact, rtol=2e-2)
    got, other = ranks(2, run, name, precision, {"micro_batch": 6, "deep": True}, SHORT)[0]
    np.testing.assert_allclose(got[:5], losses[:5], rtol=1e-2)
    np.testing.assert_allclose(got, losses, rtol=2e-2)  # by now as far as from fp32
    assert state.keys() == other.keys()
    assert ("scaler.scale" in state) == (precision == "fp16")


def overflow(name: str) -> dict[str, Any]:
    """A step at a loss scale that overflows on the last rank only, then one that does not."""
    engine = make_engine(name, "fp16", start_decay=DECAY)
    train(engine, range(1))
    before, scale = whole(engine.state_dict()), engine.scaler.get_scale()
    batch = batch_of(1)
    if collectives.rank() == collectives.world_size() - 1:
        batch.views[0][0] = float("inf")
    engine.update(batch, lr=1e-3)
    after = whole(engine.state_dict())
    lowered = engine.scaler.get_scale() / scale
    engine.update(batch_of(2), lr=1e-3)
    moved = whole(engine.state_dict())
    return {"before": before, "after": after, "lowered": lowered, "moved": moved}


def assert_left_out(result: dict[str, Any]) -> None:
    """What ``overflow`` gives: nothing moved but the scale, and the next step went on."""
    assert result["lowered"] == 0.5
    for part, values in result["before"].items():
        if not part.startswith("scaler."):
            np.testing.assert_array_equal(result["after"][part], values, err_msg=part)
    weights = "model.model.clip.visual.proj"
    assert not np.array_equal(result["moved"][weights], result["after"][weights])


@pytest.mark.parametrize("name", kept(["ddp", "fsdp"], 1))
def test_a_step_that_overflows_anywhere_is_left_out_everywhere(ranks: Ranks, name: str) -> None:
    for result in ranks(2, overflow, name):
        assert_left_out(result)


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
