"""Batch norms over real gloo processes equal those of the single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
from timm.layers import BatchNormAct2d

from mclclip.engines.engine import synchronize_batch_norms
from mclclip.ranks import collectives

ROWS = 12


class Own(nn.BatchNorm2d):
    """A batch norm of somebody's own."""


def network(kind: str) -> nn.Module:
    torch.manual_seed(5)
    layers: dict[str, list[nn.Module]] = {
        "projector": [nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.ReLU()],
        "sequence": [nn.Flatten(2), nn.BatchNorm1d(3), nn.Flatten(), nn.ReLU()],
        "convolution": [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()],
        "with activation": [nn.Conv2d(3, 4, 3), BatchNormAct2d(4), nn.Flatten()],
    }
    return nn.Sequential(*layers[kind]).double()


def step(kind: str) -> dict[str, Any]:
    """Outputs of all rows, summed gradients and running statistics after two passes."""
    world, rank = collectives.world_size(), collectives.rank()
    module = network(kind)
    if world > 1:
        synchronize_batch_norms(module)
    images = torch.randn(ROWS, 3, 4, 4, dtype=torch.float64, generator=_generator(1))
    weights = torch.linspace(-1, 2, ROWS, dtype=torch.float64)[:, None]
    own = slice(ROWS // world * rank, ROWS // world * (rank + 1))
    module(images[own])
    outputs: Tensor = module(images[own] * 2 + 1)
    (weights[own] * outputs.square()).sum().backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {
        "outputs": collectives.gather(outputs.detach()).tolist(),
        "gradients": {n: collectives.all_reduce_sum(g).tolist() for n, g in gradients.items()},
        "buffers": {n: b.tolist() for n, b in module.named_buffers()},
    }


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ["projector", "sequence", "convolution", "with activation"])
def test_ranks_equal_one_process(ranks: Callable[..., list[Any]], kind: str) -> None:
    expected = step(kind)
    for found in ranks(3, step, kind):
        for part in ("gradients", "buffers"):
            assert found[part].keys() == expected[part].keys()
            for name, value in expected[part].items():
                torch.testing.assert_close(
                    torch.tensor(found[part][name]), torch.tensor(value), rtol=1e-9, atol=1e-11
                )
        torch.testing.assert_close(
            torch.tensor(found["outputs"]), torch.tensor(expected["outputs"]), rtol=1e-9, atol=1e-11
        )


def test_only_known_batch_norms_that_train_are_taken() -> None:
    resting = nn.Sequential(Own(3)).eval()
    synchronize_batch_norms(resting)
    assert type(resting[0]) is Own
    with pytest.raises(ValueError, match=r"has a .*Own, whose statistics"):
        synchronize_batch_norms(nn.Sequential(Own(3)))
