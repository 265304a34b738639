"""The sigmoid loss on real gloo processes equals the single process, in value and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mclclip.data.batches import Batch
from mclclip.engines import build_engine
from mclclip.models.loading import load_towers, prepare_model
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.base import Setting, parse
from mclclip.objectives.sigmoid import Sigmoid
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.train.loop import Trainee
from tests import tiny
from tests.distributed.test_engines import assert_close, whole
from tests.distributed.test_head_engines import LOCK
from tests.distributed.test_info_nce import ROWS, global_batch
from tests.matrix import kept

Ranks = Callable[..., list[Any]]


class Towers(torch.nn.Module):
    """Two linear towers, a scale and a bias; ``frozen``: texts have no gradient."""

    def __init__(self, dtype: torch.dtype, tile: int, frozen: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name in ("image", "text"):
            weight = torch.randn(5, 6, generator=generator, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(weight.to(dtype)))
        self.get_parameter("text").requires_grad_(not frozen)
        self.log_scale = torch.nn.Parameter(torch.tensor(2.0, dtype=dtype))
        self.loss = Sigmoid(own_bias=True, tile=tile).to(dtype)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        image = functional.normalize(batch["image"] @ self.image.T, dim=-1)
        text = functional.normalize(batch["text"] @ self.text.T, dim=-1)
        output: dict[str, Tensor] = self.loss(
            image,
            batch["labels"],
            batch["sample_id"],
            text_features=text,
            logit_scale=self.log_scale.exp(),
        )
        return output


def one_step(dtype_name: str, tile: int, frozen: bool) -> dict[str, Any]:
    """This rank's share of the global batch through DDP; the results that all ranks agree on."""
    dtype = getattr(torch, dtype_name)
    module: torch.nn.Module = Towers(dtype, tile, frozen)
    world, rank = collectives.world_size(), collectives.rank()
    rows = ROWS // world
    batch = {n: t[rank * rows : (rank + 1) * rows] for n, t in global_batch(dtype).items()}
    run = DistributedDataParallel(module) if world > 1 else module
    output = run(batch)
    output["loss"].backward()
    return {
        "loss": collectives.all_reduce_sum(output["loss"]).item() / world,
        "rows_without_negatives": int(output["rows_without_negatives"]),
        "gradients": {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize(("dtype", "tolerance"), kept([("float32", 1e-5), ("float64", 1e-12)], 1))
@pytest.mark.parametrize("frozen", kept([False, True], 0))
@pytest.mark.parametrize("world_size", kept([2, 3, 4], 0, 1))
def test_ranks_equal_one_process(
    ranks: Ranks, world_size: int, frozen: bool, dtype: str, tolerance: float
) -> None:
    alone = one_step(dtype, 1024, frozen)
    assert alone["rows_without_negatives"] == 1
    assert len(alone["gradients"]) == (3 if frozen else 4)
    for tile in (1024, 2):
        for found in ranks(world_size, one_step, dtype, tile, frozen):
            assert found["loss"] == pytest.approx(alone["loss"], rel=tolerance)
            assert found["rows_without_negatives"] == 1
            for name, gradient in alone["gradients"].items():
                torch.testing.assert_close(
                    found["gradients"][name], gradient, atol=tolerance, rtol=tolerance
                )


def train(name: str, between: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Losses and state of four steps of a small CLIP under an engine, in float64."""
    torch.set_num_threads(1)
    context = Context(collectives.rank(), collectives.world_size())
    model = load_towers(tiny.MODEL, seed=1)
    captions = between == "captions"
    lock = LOCK | {"text": captions, "logit_scale": captions, "logit_bias": captions}
    prepare_model(
        model, lock=lock, lora=None, seed=0, precision="float64", grad_checkpointing=False
    )
    objective = parse({"kind": "sigmoid", "between": between}).build(
        Setting(model=model, context=context, seed=3, precision="float64")
    )
    engine = build_engine(
        name,
        Trainee(model, objective, "float64"),
        lambda module: build_optimizer(module, weight_decay=0.1),
        context,
        blocks=model.blocks(),
        **options,
    )
    losses = []
    for step in range(4):
        batch = batch_of(step, captions)
        if step == 0:
            engine.settle(batch)
        loss = engine.update(batch, lr=1e-2)["loss"]
        losses.append(float(collectives.all_reduce_sum(loss)) / collectives.world_size())
    return losses, whole(engine.state_dict())


def batch_of(step: int, captions: bool) -> Batch:
    """This rank's columns of a global batch of eight samples in two groups."""
    generator = torch.Generator().manual_seed(step)
    views = [
        torch.randn(8, 3, 32, 32, generator=generator, dtype=torch.float64)
        for _ in range(1 if captions else 2)
    ]
    local = 8 // collectives.world_size()
    batch = Batch(
        views=views,
        text=torch.randint(1, 400, (8, 20), generator=generator) if captions else None,
        labels=torch.randint(0, 2, (8, 1), generator=generator),
        sample_id=torch.randint(0, 12, (8,), generator=generator),
        step=step,
        group_size=8,
    )
    return batch.rows(collectives.rank() * local, (collectives.rank() + 1) * local)


ENGINES = [
    ("ddp", "captions", {}),
    ("fsdp", "captions", {"micro_batch": 3}),
    ("fsdp", "views", {}),
    ("ddp", "views", {"micro_batch": 3}),
]


@pytest.mark.parametrize(("name", "between", "options"), kept(ENGINES, 1))
def test_engines_train_the_same(
    ranks: Ranks, name: str, between: str, options: dict[str, Any]
) -> None:
    """The bias and the scale of the objective too."""
    losses, state = ranks(1, train, "ddp", between, {})[0]
    assert state["model.objective.bias"] != -10.0
    for got_losses, got in ranks(2, train, name, between, options):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-9)
        assert_close(state, got, 1e-9)
