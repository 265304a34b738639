"""Gradient caching: any micro-batch gives the gradient of the whole batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mclclip.data.batches import Batch
from mclclip.engines import gradient_cache
from mclclip.engines.engine import Engine
from mclclip.models.loading import load_towers
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks.process_group import SINGLE
from mclclip.train.loop import ModelWithObjective
from tests import tiny

GLOBAL_BATCH = 64


def batch() -> Batch:
    random = torch.Generator().manual_seed(0)
    return Batch(
        views=[torch.randn(GLOBAL_BATCH, 3, 32, 32, generator=random)],
        text=torch.randint(1, 400, (GLOBAL_BATCH, 20), generator=random),
        group_ids=torch.arange(GLOBAL_BATCH)[:, None] % 3,
        sample_id=torch.arange(GLOBAL_BATCH) // 2,  # every sample twice: masked
        step=0,
        group_size=GLOBAL_BATCH // 3,
    )


class WithParameters(InfoNCE):
    """An objective that owns a parameter, as the multi-label ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5]))

    def forward(self, features: Any, batch: Any) -> dict[str, Tensor]:
        scale = features["logit_scale"] * self.weight[0]
        return super().forward({**features, "logit_scale": scale}, batch)


def make_engine(objective: nn.Module, micro_batch: int | None = None) -> Engine:
    trainee = ModelWithObjective(load_towers(tiny.MODEL, seed=1).train(), objective)
    make = partial(build_optimizer, weight_decay=0.1)
    return Engine(trainee, make, SINGLE, micro_batch=micro_batch)


def gradient(engine: Engine) -> dict[str, Tensor]:
    return {n: p.grad for n, p in engine.module.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    """The gradient of the whole batch at once."""
    engine = make_engine(WithParameters())
    engine.backward(engine.wrapped(batch())["loss"])
    found = gradient(engine)
    assert "objective.weight" in found and len(found) > 40
    return found


@pytest.mark.parametrize("micro_batch", [8, 25])
def test_the_gradient_is_that_of_the_whole_batch(
    plain: dict[str, Tensor], micro_batch: int
) -> None:
    """1e-5 relative in fp32, by parameter, in the norm (the key bias's true gradient is zero)."""
    engine = make_engine(WithParameters(), micro_batch)
    parts = gradient_cache.backward(engine, batch(), micro_batch)
    assert torch.isfinite(parts["loss"])
    got = gradient(engine)
    assert got.keys() == plain.keys()
    total = torch.stack([g.norm() for g in plain.values()]).norm()
    for name, expected in plain.items():
        error = (got[name] - expected).norm()
        assert error <= 1e-5 * max(float(expected.norm()), 1e-3 * float(total)), name


def test_only_one_micro_batch_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd keeps shrinks with the micro-batch."""

    def peak(micro_batch: int | None) -> int:
        engine = make_engine(InfoNCE(), micro_batch)
        alive, highest = 0, 0

        class Kept:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal alive, highest
                self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
                alive += self.size
                highest = max(highest, alive)

            def __del__(self) -> None:
                nonlocal alive
                alive -= self.size

        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            engine.update(batch(), lr=1e-3)
        return highest

    whole, half, eighth = peak(None), peak(32), peak(8)
    assert half < 0.6 * whole and eighth < 0.2 * whole


def test_batch_norms_in_training_are_refused() -> None:
    model = load_towers(tiny.RESNET, seed=1)
    with pytest.raises(ValueError, match="engine.micro_batch with trained batch norms"):
        gradient_cache.check(model)
    model.lock(1, image_norm=False, image_projection=True, text=False, logit_scale=True)
    gradient_cache.check(model)
