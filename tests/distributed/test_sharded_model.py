"""Model in pieces: adapters, recomputed blocks, bounds and every optimizer on DTensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mclclip.models.loading import load_towers
from mclclip.models.lora import add_lora
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.models.patterns import ParameterConfig
from mclclip.ranks import collectives
from tests import tiny
from tests.matrix import kept

DECAY = [ParameterConfig("*", layer_decay=0.8)]


def build() -> Model:
    model = load_towers(tiny.of_few_ids(tiny.MODEL), seed=1).double()
    model.lock(2, image_norm=True, image_projection=True, text=False, logit_scale=True)
    add_lora(model, rank=2, alpha=4.0, seed=2)
    nn.init.constant_(model.clip.logit_scale, 4.6)
    model.set_grad_checkpointing()
    return model.train()


def steps(model: Model, name: str, rows: slice) -> list[float]:
    """Three steps on the given rows of a batch of four; the logit scales after each."""
    optimizer = build_optimizer(model, name=name, weight_decay=0.1, parameters=DECAY, lr=0.01)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * group["lr_scale"]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64)
    tokens = torch.randint(1, 400, (4, 20), generator=generator)
    scales = []
    for _ in range(3):
        optimizer.zero_grad()
        out = model(image=images[rows], text=tokens[rows])
        cosines = (out["image_features"] * out["text_features"]).sum(dim=1)
        (-out["logit_scale"] * (2.0 + cosines.mean())).backward()
        optimizer.step()
        scale = model.clip.logit_scale.detach()
        whole = scale.full_tensor() if isinstance(scale, DTensor) else scale
        scales.append(whole.item())
    return scales


def sharded(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = build()
    mesh = init_device_mesh("cpu", (collectives.world_size(),))
    for block in model.blocks():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rank = collectives.rank()
    scales = steps(model, name, slice(2 * rank, 2 * rank + 2))
    return scales, {n: whole(p) for n, p in model.named_parameters()}


def whole(parameter: Any) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


@pytest.mark.parametrize("name", kept(["adamw", "lion", "lars", "timm:lamb"], 2))
def test_sharded_steps_equal_whole_ones(ranks: Any, name: str) -> None:
    single = build()
    expected = steps(single, name, slice(0, 4))
    assert max(expected) == pytest.approx(math.log(100.0))  # the bound is reached
    for scales, parameters in ranks(2, sharded, name):
        assert scales == pytest.approx(expected, abs=1e-9)
        for parameter_name, parameter in single.named_parameters():
            wanted, found = (moved(t.detach()) for t in (parameter, parameters[parameter_name]))
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def moved(parameter: Tensor) -> Tensor:
    """Without the key biases, whose gradient is rounding noise; Lion takes its sign."""
    if parameter.ndim != 1 or parameter.shape[0] % 3:
        return parameter
    query, _, value = parameter.chunk(3)
    return torch.cat([query, value])
