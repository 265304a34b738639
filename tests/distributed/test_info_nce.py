"""InfoNCE over real gloo processes equals the single process, in value and gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks import collectives

ROWS = 12


class Towers(torch.nn.Module):
    """Two linear towers and a scale: enough for DDP to average something."""

    def __init__(self, dtype: torch.dtype, tile: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name in ("image", "text"):
            weight = torch.randn(5, 6, generator=generator, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(weight.to(dtype)))
        self.log_scale = torch.nn.Parameter(torch.tensor(2.0, dtype=dtype))
        self.loss = InfoNCE(tile)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        image = functional.normalize(batch["image"] @ self.image.T, dim=-1)
        text = functional.normalize(batch["text"] @ self.text.T, dim=-1)
        output: dict[str, Tensor] = self.loss(
            image, text, self.log_scale.exp(), batch["labels"], batch["sample_id"]
        )
        return output


def global_batch(dtype: torch.dtype) -> dict[str, Tensor]:
    """Three groups, one of a single sample, and two repeated samples."""
    generator = torch.Generator().manual_seed(2)
    image, text = (torch.randn(ROWS, 6, generator=generator, dtype=torch.float64) for _ in "it")
    labels = torch.tensor([0, 0, 1, 1, 0, 2, 1, 0, 1, 0, 0, 1])[:, None]
    sample_id = torch.tensor([10, 11, 12, 13, 10, 15, 16, 17, 12, 19, 10, 21])
    batch = {"image": image.to(dtype), "text": text.to(dtype)}
    return batch | {"labels": labels, "sample_id": sample_id}


def one_step(dtype_name: str, tile: int) -> dict[str, Any]:
    """This rank's share of the global batch through DDP; the results that all ranks agree on."""
    dtype = getattr(torch, dtype_name)
    module: torch.nn.Module = Towers(dtype, tile)
    world, rank = collectives.world_size(), collectives.rank()
    rows = ROWS // world
    batch = {n: t[rank * rows : (rank + 1) * rows] for n, t in global_batch(dtype).items()}
    run = DistributedDataParallel(module) if world > 1 else module
    output = run(batch)
    output["loss"].backward()
    return {
        "loss": collectives.all_reduce_sum(output["loss"]).item() / world,
        "rows_without_negatives": int(output["rows_without_negatives"]),
        "gradients": {
            n: p.grad.tolist() for n, p in module.named_parameters() if p.grad is not None
        },
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("tile", [1024, 5, 1])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_equal_one_process(
    ranks: Callable[..., list[Any]], world_size: int, tile: int, dtype: str, tolerance: float
) -> None:
    alone = one_step(dtype, 1024)
    assert alone["rows_without_negatives"] == 1
    for found in ranks(world_size, one_step, dtype, tile):
        assert found["loss"] == pytest.approx(alone["loss"], abs=tolerance)
        assert found["rows_without_negatives"] == 1
        for name, gradient in alone["gradients"].items():
            torch.testing.assert_close(
                torch.tensor(found["gradients"][name], dtype=torch.float64),
                torch.tensor(gradient, dtype=torch.float64),
                atol=tolerance,
                rtol=tolerance,
            )
