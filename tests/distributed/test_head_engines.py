"""Class centers beside every engine: 20 steps of trunk and head equal the single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.data.batches import Batch
from mclclip.engines import build_engine
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers, prepare_model
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.class_centers.rows import HeadOptimizer, ShardedClassCenters, normal_rows
from mclclip.objectives.mlcd import ClassCenterLoss, NegativeDraw
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.train.loop import Trainee
from tests import tiny
from tests.distributed.test_engines import assert_close, whole
from tests.matrix import in_soak, kept

Ranks = Callable[..., list[Any]]
GLOBAL_BATCH, STEPS, NUM_CLASSES = 24, 20, 30
LOCK = {
    "image_blocks": "all",
    "image_norm": True,
    "image_projection": True,
    "text": False,
    "logit_scale": False,
}


def make_engine(name: str, precision: str, **options: Any) -> Engine:
    """A small ViT's image tower and 30 class centers under an engine."""
    torch.set_num_threads(1)
    context = Context(collectives.rank(), collectives.world_size())
    model = load_towers(tiny.MODEL, seed=1)
    prepare_model(
        model, lock=LOCK, lora=None, seed=0, precision=precision, grad_checkpointing=False
    )
    centers = ShardedClassCenters(
        NUM_CLASSES,
        model.embed_dim,
        normal_rows(model.embed_dim, seed=2),
        context=context,
        draw=NegativeDraw(NUM_CLASSES, 0.5, seed=4),
        optimizer=HeadOptimizer(lr_scale=5.0, lazy=options.pop("lazy", False)),
        dtype=torch.float64 if precision == "float64" else torch.float32,
    )
    engine = build_engine(
        name,
        Trainee(model, ClassCenterLoss(centers, scale=16.0, tile=9), precision),
        lambda module: build_optimizer(module, weight_decay=0.1),
        context,
        blocks=model.blocks(),
        precision=precision,
        outside=[centers],
        **options,
    )
    if engine.scaler.is_enabled():  # a scale at which no step overflows
        engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": 256.0})
    return engine


def batch_of(step: int, dtype: torch.dtype) -> Batch:
    """This rank's columns of a global batch that is a function of the step."""
    random = torch.Generator().manual_seed(step)
    image = torch.randn(GLOBAL_BATCH, 3, 32, 32, generator=random, dtype=torch.float64)
    labels = torch.randint(0, NUM_CLASSES, (GLOBAL_BATCH, 2), generator=random)
    labels[labels[:, 0] == labels[:, 1], 1] = -1
    local = GLOBAL_BATCH // collectives.world_size()
    batch = Batch(
        views=[image.to(dtype)],
        labels=torch.zeros(GLOBAL_BATCH, 1, dtype=torch.int64),
        classes=labels,
        sample_id=torch.arange(GLOBAL_BATCH),
        step=step,
        group_size=GLOBAL_BATCH,
    )
    return batch.rows(collectives.rank() * local, (collectives.rank() + 1) * local)


def run(
    name: str, precision: str, options: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses, gradient norms and the state after 20 steps."""
    engine = make_engine(name, precision, **options)
    dtype = torch.float64 if precision == "float64" else torch.float32
    engine.settle(batch_of(0, dtype))
    parts = [engine.update(batch_of(step, dtype), lr=1e-3) for step in range(STEPS)]
    losses, norms = ([float(part[n]) for part in parts] for n in ("loss", "grad_norm"))
    return losses, norms, whole(engine.state_dict())


CASES = [
    ("ddp", {}),
    ("ddp", {"clip_grad_norm": 1.0, "lazy": True}),
    ("ddp", {"micro_batch": 4, "clip_grad_norm": 1.0}),
    ("fsdp", {"clip_grad_norm": 1.0}),
    ("fsdp", {"micro_batch": 4, "ema_decay": 0.9}),
]


@pytest.mark.parametrize(("name", "options"), kept(CASES, 4), ids=str)
@pytest.mark.parametrize("world_size", kept([2, 3], 0))
def test_float64(ranks: Ranks, world_size: int, name: str, options: dict[str, Any]) -> None:
    alone = {n: v for n, v in options.items() if n != "micro_batch"}
    losses, norms, state = ranks(1, run, "ddp", "float64", alone)[0]
    if "clip_grad_norm" in options:
        assert max(norms) > 1.0, "nothing was clipped"
    for got_losses, got_norms, got in ranks(world_size, run, name, "float64", options):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-9)
        np.testing.assert_allclose(got_norms, norms, rtol=1e-9)
        assert_close(state, got, 1e-9)


@pytest.mark.parametrize("micro_batch", kept([None, 4], 1))
@pytest.mark.parametrize("name", kept(["ddp", "fsdp"], 1))
@in_soak
def test_fp16_leaves_the_head_unscaled(ranks: Ranks, name: str, micro_batch: int | None) -> None:
    """Rounded to fp16 the trunk differs; the head moves as far as under fp32."""
    options = {"micro_batch": micro_batch, "clip_grad_norm": 1.0}
    losses, norms, state = ranks(1, run, "ddp", "fp32", {"clip_grad_norm": 1.0})[0]
    got_losses, got_norms, got = ranks(2, run, name, "fp16", options)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-2)
    np.testing.assert_allclose(got_norms, norms, rtol=5e-2)
    rows = "class_centers.rows"
    moved = np.linalg.norm(state[rows] - got[rows]) / np.linalg.norm(state[rows])
    assert moved < 0.1


def run_one_bad(name: str, options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The states before and after a step in which one rank's pixels are infinite, and after one
    more good step."""
    engine = make_engine(name, "fp16", **options)
    states = []
    for step in range(3):
        batch = batch_of(step, torch.float32)
        if step == 0:
            engine.settle(batch)
        if step == 1 and collectives.rank() == 0:
            batch.views[0][0] = float("inf")
        engine.update(batch, lr=1e-3)
        states.append(whole(engine.state_dict()))
    return tuple(states)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddp", {"clip_grad_norm": 1.0, "lazy": True}),
        ("ddp", {"micro_batch": 4}),
        ("fsdp", {"clip_grad_norm": 1.0}),
        ("deepspeed", {"zero_stage": 2}),
    ],
    ids=str,
)
def test_a_step_that_is_left_out_leaves_the_head(
    ranks: Ranks, name: str, options: dict[str, Any]
) -> None:
    """Neither trunk nor class centers, nor their moments and counts, move by what overflowed."""
    if name == "deepspeed":
        pytest.importorskip("deepspeed", reason="deepspeed cannot be installed here")
    before, after, later = ranks(2, run_one_bad, name, options)[0]
    kept = [key for key in before if not key.startswith("scaler")]
    for key in kept:
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    assert not np.array_equal(later["class_centers.rows"], before["class_centers.rows"])
    assert later["class_centers.steps"].max() == 2


@pytest.mark.parametrize(("stage", "options"), kept([
    (1, {"clip_grad_norm": 1.0}), (2, {}), (2, {"clip_grad_norm": 1.0, "micro_batch": 4}),
    (3, {"clip_grad_norm": 1.0}),
], 2, 3))  # fmt: skip
@in_soak
def test_zero(ranks: Ranks, stage: int, options: dict[str, Any]) -> None:
    """In fp32, which DeepSpeed trains in; its clipping counts the class centers too."""
    pytest.importorskip("deepspeed", reason="deepspeed cannot be installed here")
    alone = {n: v for n, v in options.items() if n != "micro_batch"}
    losses, norms, state = ranks(1, run, "ddp", "fp32", alone)[0]
    how = options | {"zero_stage": stage}
    got_losses, got_norms, got = ranks(2, run, "deepspeed", "fp32", how)[0]
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    np.testing.assert_allclose(got_norms, norms, rtol=1e-4)
    for name, values in got.items():
        if "exp_avg" not in name:  # moments of the head are in the tens
            assert_close({name: state[name]}, {name: values}, 1e-5)
