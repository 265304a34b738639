"""Decay towards the first weights: the definition, and that it is resumed.

That N ranks equal one under every engine, and that it is left out with its step, is in
``test_engines`` and ``test_deepspeed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.contrast import Learnable, Temperature
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks.process_group import SINGLE
from mclclip.train.loop import ModelWithObjective
from tests import tiny
from tests.distributed.conftest import here
from tests.distributed.test_engines import assert_close, batch_of, train, whole
from tests.engines import build_engine
from tests.matrix import kept

Ranks = Callable[..., list[Any]]
DECAY, STEPS, LR = 40.0, 6, 1e-3


def make_engine(name: str, precision: str, decay: float = DECAY, **options: Any) -> Engine:
    """A small ViT with a trained temperature of the objective's own."""
    torch.set_num_threads(1)
    model = load_towers(tiny.of_few_ids(tiny.ONE_BLOCK), seed=1).train()
    model.clip.logit_scale.requires_grad_(False)  # the objective has its own
    dtype = torch.float64 if precision == "float64" else torch.float32
    objective = InfoNCE("captions", Temperature(Learnable(), dtype))
    engine = build_engine(
        name,
        ModelWithObjective(model, objective, precision).to(dtype),
        lambda module: build_optimizer(module, weight_decay=0.0, start_decay=decay),
        here(),
        blocks=model.blocks(),
        precision=precision,
        **options,
    )
    return engine


def test_it_is_the_definition_and_leaves_the_objective_alone() -> None:
    """w <- w - lr d (w - start) between gradient and step, written out beside torch's AdamW."""
    engine, other = make_engine("ddp", "float64"), make_engine("ddp", "float64", 0.0)
    start = {n: p.detach().clone() for n, p in other.module.named_parameters()}
    for group in other.optimizer.param_groups:
        group["lr"] = LR
    for step in range(STEPS):
        batch = batch_of(step, torch.float64)
        engine.update(batch, LR)
        other.zero_grad()
        other.backward(other.wrapped(batch)["loss"])
        with torch.no_grad():
            for name, parameter in other.module.named_parameters():
                if name.startswith("model."):
                    parameter -= LR * DECAY * (parameter - start[name])
        other.step()
    assert_close(whole(other.state_dict()), whole(engine.state_dict()), 1e-12)
    assert other.module.get_parameter("objective.temperature.log_scale").item() != 0.0


def resumed(name: str) -> bool:
    """Whether a training that goes on from the state of two steps gives the same bits."""
    engine = make_engine(name, "fp32")
    train(engine, range(2))
    state = {n: tensor.detach().clone() for n, tensor in engine.state_dict().items()}
    train(engine, range(2, STEPS))
    other = make_engine(name, "fp32")
    other.load_state_dict(state)
    train(other, range(2, STEPS))
    one, two = whole(engine.state_dict()), whole(other.state_dict())
    return all(np.array_equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize("name", kept(["fsdp", "ddp"], 0))
def test_a_state_goes_on_bit_for_bit(ranks: Ranks, name: str) -> None:
    assert all(ranks(2, resumed, name))


def test_without_it_groups_have_no_such_field() -> None:
    assert SINGLE.world_size == 1
    plain = build_optimizer(load_towers(tiny.of_few_ids(tiny.MODEL), seed=1), weight_decay=0.1)
    assert all("start_decay" not in group for group in plain.param_groups)
