"""Feature dropout on real gloo processes under every engine: N ranks equal one, adversary included,
and a state goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.data.batches import Batch
from mclclip.engines import build_engine
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers, prepare_model
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.base import Setting, parse
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.train.loop import Trainee
from tests import tiny
from tests.distributed.test_engines import assert_close, whole
from tests.distributed.test_head_engines import LOCK
from tests.matrix import in_soak, kept

Ranks = Callable[..., list[Any]]
GLOBAL_BATCH, STEPS = 8, 5
TREE = {"kind": "feature_dropout", "width": 2, "residual_blocks": 1}
TREES = {"plain": TREE, "learnable": TREE | {"temperature": {"learnable": True}}}
TREES |= {"frozen": TREE, "resnet": TREE}
RESNET = Path(__file__).parents[1] / "configs" / "tiny_resnet.json"


def make_engine(name: str, method: str, precision: str, **options: Any) -> Engine:
    """A small image tower and its adversary under an engine; ``frozen``: but for the last block."""
    torch.set_num_threads(1)
    context = Context(collectives.rank(), collectives.world_size())
    model = load_towers(RESNET if method == "resnet" else tiny.MODEL, seed=1)
    lock = LOCK | ({"image_blocks": 1} if method == "frozen" else {})
    prepare_model(
        model, lock=lock, lora=None, seed=0, precision=precision, grad_checkpointing=False
    )
    assert bool(model.num_frozen_blocks) == (method == "frozen")
    objective = parse(TREES[method]).build(
        Setting(model=model, context=context, seed=3, precision=precision)
    )
    engine = build_engine(
        name,
        Trainee(model, objective, precision),
        lambda module: build_optimizer(module, weight_decay=0.1),
        context,
        blocks=model.blocks(),
        precision=precision,
        outside=objective.outside(),
        **options,
    )
    if engine.scaler.is_enabled():  # a scale at which no step overflows
        engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": 256.0})
    return engine


def batch_of(step: int, dtype: torch.dtype) -> Batch:
    """This rank's columns of a global batch of two views, in two groups, with repeats."""
    generator = torch.Generator().manual_seed(step)
    shape = GLOBAL_BATCH, 3, 32, 32
    views = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    local = GLOBAL_BATCH // collectives.world_size()
    batch = Batch(
        views=[view.to(dtype) for view in views],
        labels=torch.randint(0, 2, (GLOBAL_BATCH, 1), generator=generator),
        sample_id=torch.randint(0, 12, (GLOBAL_BATCH,), generator=generator),
        step=step,
        group_size=GLOBAL_BATCH,
    )
    return batch.rows(collectives.rank() * local, (collectives.rank() + 1) * local)


def train(engine: Engine, steps: range, dtype: torch.dtype) -> list[tuple[float, float, float]]:
    """Global loss, norm of the gradient, and mean change of the views, of each step."""
    module: Any = engine.module
    found = []
    for step in steps:
        batch = batch_of(step, dtype)
        if step == steps.start:
            engine.settle(batch)
        module.objective.begin(step, STEPS, 0.0)
        parts = engine.update(batch, lr=1e-2)
        loss, change = (
            float(collectives.all_reduce_sum(parts[name])) / collectives.world_size()
            for name in ("loss", "view_change")
        )
        found.append((loss, float(parts["grad_norm"]), change))
    return found


def run(name: str, method: str, precision: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """What the steps give on this rank, and the state after them."""
    engine = make_engine(name, method, precision, **options)
    dtype = torch.float64 if precision == "float64" else torch.float32
    return train(engine, range(STEPS), dtype), whole(engine.state_dict())


CASES = [
    (2, "ddp", "plain", {"clip_grad_norm": 0.5}),
    (4, "fsdp", "frozen", {}),
    (4, "ddp", "learnable", {}),
    (2, "fsdp", "learnable", {"clip_grad_norm": 0.5}),
    (4, "fsdp", "plain", {"shard_ranks": 2}),
    (2, "ddp", "plain", {"micro_batch": 3}),
    (2, "fsdp", "frozen", {"micro_batch": 2}),
    (2, "ddp", "resnet", {}),
]


@pytest.mark.parametrize(("world_size", "name", "method", "options"), kept(CASES, 1))
def test_ranks_equal_one_process(
    ranks: Ranks, world_size: int, name: str, method: str, options: dict[str, Any]
) -> None:
    """Losses, norms, changes, weights, and the adversary with its moments, in float64."""
    alone = {n: v for n, v in options.items() if n == "clip_grad_norm"}
    figures, state = ranks(1, run, "ddp", method, "float64", alone)[0]
    assert any(n.startswith("adversary.exp_avg.") and values.any() for n, values in state.items())
    for got_figures, got in ranks(world_size, run, name, method, "float64", options):
        if "micro_batch" in options:  # the change is that of the part that it was cut into
            figures, got_figures = ([row[:2] for row in rows] for rows in (figures, got_figures))
        np.testing.assert_allclose(got_figures, figures, rtol=1e-9)
        assert_close(state, got, 1e-9)


@pytest.mark.parametrize("stage", kept([2, 1, 3]))
def test_zero(ranks: Ranks, stage: int) -> None:
    """In fp32, which DeepSpeed trains in."""
    pytest.importorskip("deepspeed", reason="deepspeed cannot be installed here")
    figures, state = ranks(1, run, "ddp", "plain", "fp32", {})[0]
    how = {"zero_stage": stage}
    got_figures, got = ranks(2, run, "deepspeed", "plain", "fp32", how)[0]
    np.testing.assert_allclose(got_figures, figures, rtol=1e-4)
    assert state.keys() == got.keys()


@pytest.mark.parametrize("name", kept(["ddp", "fsdp"], 0))
@in_soak
def test_fp16_leaves_the_adversary_unscaled(ranks: Ranks, name: str) -> None:
    """The first gradient of the adversary is that under fp32, but for rounding."""
    found = {}
    for precision, engine in (("fp32", "ddp"), ("fp16", name)):
        figures, state = ranks(2, run, engine, "plain", precision, {})[0]
        moments = [
            v.ravel() for n, v in sorted(state.items()) if n.startswith("adversary.exp_avg_sq.")
        ]
        found[precision] = figures[0][1], float(np.concatenate(moments).sum())
    np.testing.assert_allclose(found["fp16"], found["fp32"], rtol=0.2)


def resumed(name: str, method: str) -> bool:
    """Whether a training that goes on from the state after three steps gives the same bits."""
    engine = make_engine(name, method, "fp32")
    train(engine, range(3), torch.float32)
    state = {n: tensor.detach().clone() for n, tensor in engine.state_dict().items()}
    figures = train(engine, range(3, STEPS), torch.float32)
    other = make_engine(name, method, "fp32")
    other.load_state_dict(state)
    assert train(other, range(3, STEPS), torch.float32) == figures
    one, two = whole(engine.state_dict()), whole(other.state_dict())
    return all(np.array_equal(one[n], two[n]) for n in one) and one.keys() == two.keys()


RESUMED = [("fsdp", "learnable"), ("ddp", "plain"), ("ddp", "resnet")]


@pytest.mark.parametrize(("name", "method"), kept(RESUMED, 0))
@in_soak
def test_a_state_goes_on_bit_for_bit(ranks: Ranks, name: str, method: str) -> None:
    assert all(ranks(2, resumed, name, method))
