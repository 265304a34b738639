"""MoCo on real gloo processes under every engine: N ranks equal one, queue and copy included."""

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
V2 = {"kind": "moco", "queue_size": 12, "momentum": 0.7}
V3 = {"kind": "moco", "version": "v3", "predictor": [6, 8], "momentum": 0.7}
TREES = {"v2": V2, "v3": V3, "resnet": V2 | {"epsilon": 0.1}}
RESNET = Path(__file__).parents[1] / "configs" / "tiny_resnet.json"


def make_engine(name: str, method: str, precision: str, **options: Any) -> Engine:
    """A small image tower with its momentum copy under an engine."""
    torch.set_num_threads(1)
    context = Context(collectives.rank(), collectives.world_size())
    model = load_towers(RESNET if method == "resnet" else tiny.MODEL, seed=1)
    prepare_model(
        model, lock=LOCK, lora=None, seed=0, precision=precision, grad_checkpointing=False
    )
    objective = parse(TREES[method]).build(
        Setting(model=model, context=context, seed=3, precision=precision)
    )
    return build_engine(
        name,
        Trainee(model, objective, precision),
        lambda module: build_optimizer(module, weight_decay=0.1),
        context,
        blocks=model.blocks(),
        precision=precision,
        **options,
    )


def batch_of(step: int, dtype: torch.dtype) -> Batch:
    """This rank's columns of a global batch of two views, in two groups, with repeats."""
    generator = torch.Generator().manual_seed(step)
    views = [
        torch.randn(GLOBAL_BATCH, 3, 32, 32, generator=generator, dtype=torch.float64)
        for _ in range(2)
    ]
    local = GLOBAL_BATCH // collectives.world_size()
    batch = Batch(
        views=[view.to(dtype) for view in views],
        labels=torch.randint(0, 2, (GLOBAL_BATCH, 1), generator=generator),
        sample_id=torch.randint(0, 12, (GLOBAL_BATCH,), generator=generator),
        step=step,
        group_size=GLOBAL_BATCH,
        prefix_length=step // 3,
    )
    return batch.rows(collectives.rank() * local, (collectives.rank() + 1) * local)


def train(engine: Engine, steps: range, dtype: torch.dtype) -> list[tuple[float, int]]:
    """Global loss, and rows without negatives, of each step."""
    module: Any = engine.module
    found = []
    for step in steps:
        batch = batch_of(step, dtype)
        if step == steps.start:
            engine.settle(batch)
        module.objective.begin(step, STEPS, 0.0)
        parts = engine.update(batch, lr=1e-2)
        module.objective.stepped(module.model)
        loss = float(collectives.all_reduce_sum(parts["loss"])) / collectives.world_size()
        found.append((loss, int(parts["rows_without_negatives"])))
    return found


def run(name: str, method: str, precision: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """What the steps give on this rank, and the state after them."""
    engine = make_engine(name, method, precision, **options)
    dtype = torch.float64 if precision == "float64" else torch.float32
    return train(engine, range(STEPS), dtype), whole(engine.state_dict())


CASES = [
    (2, "ddp", "v2", {}),
    (2, "ddp", "v3", {}),
    (4, "ddp", "v2", {}),
    (4, "ddp", "v3", {}),
    (2, "ddp", "v2", {"micro_batch": 3}),
    (2, "fsdp", "v2", {}),
    (2, "fsdp", "v3", {}),
    (4, "fsdp", "v3", {"shard_ranks": 2}),
    (2, "fsdp", "v2", {"micro_batch": 3}),
    (2, "ddp", "resnet", {}),
]


@pytest.mark.parametrize(("world_size", "name", "method", "options"), kept(CASES, 8))
def test_ranks_equal_one_process(
    ranks: Ranks, world_size: int, name: str, method: str, options: dict[str, Any]
) -> None:
    """Losses, weights, copy, queue and the order of its keys, in float64; statistics of the batch
    norms of copy and predictor too."""
    figures, state = ranks(1, run, "ddp", method, "float64", {})[0]
    for got_figures, got in ranks(world_size, run, name, method, "float64", options):
        np.testing.assert_allclose(got_figures, figures, rtol=1e-9)
        assert_close(state, got, 1e-9)


ZERO = [("v2", 1), ("v3", 2), ("v2", 2), ("v3", 1)]


@pytest.mark.parametrize(("method", "stage"), kept(ZERO, 0))
@in_soak
def test_zero(ranks: Ranks, method: str, stage: int) -> None:
    """In fp32, which DeepSpeed trains in."""
    pytest.importorskip("deepspeed", reason="deepspeed cannot be installed here")
    figures, state = ranks(1, run, "ddp", method, "fp32", {})[0]
    how = {"zero_stage": stage}
    got_figures, got = ranks(2, run, "deepspeed", method, "fp32", how)[0]
    np.testing.assert_allclose(got_figures, figures, rtol=1e-4)
    assert_close(state, got, 1e-4)


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


RESUMED = [("ddp", "v2"), ("fsdp", "v3"), ("ddp", "v3"), ("fsdp", "v2")]


@pytest.mark.parametrize(("name", "method"), kept(RESUMED, 0))
def test_a_state_goes_on_bit_for_bit(ranks: Ranks, name: str, method: str) -> None:
    assert all(ranks(2, resumed, name, method))
