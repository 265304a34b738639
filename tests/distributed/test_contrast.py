"""Contrastive losses over real gloo processes equal the single process, in value and gradient."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mclclip.objectives.base import parse
from mclclip.ranks import collectives
from tests import contrast_loops as loops

ROWS = 12
TRAINED = {"learnable": True, "start": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "info_nce": {"kind": "info_nce", "temperature": TRAINED},
    "nt_xent": {"kind": "nt_xent", "temperature": TRAINED},
    "ifm": {"kind": "ifm", "epsilon": 0.3, "direction": "texts"},
    "ifm_views": {"kind": "ifm", "between": "views", "temperature": TRAINED},
    "hcl": {"kind": "hcl", "beta": 2.0},
    "hcl_views": {"kind": "hcl", "between": "views", "temperature": TRAINED, "tau_plus": 0.3},
    "supcon": {"kind": "supcon", "temperature": TRAINED, "attribute": "shape"},
    "supcon_1": {"kind": "supcon", "num_views": 1, "attribute": "shape"},
}


class Towers(torch.nn.Module):
    """Two linear towers, a scale, and the objective: enough for DDP to average something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name in ("first", "second"):
            weight = torch.randn(5, 6, generator=generator, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(weight))
        self.log_scale = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        setting: Any = SimpleNamespace(precision="float64")
        self.objective = parse(KINDS[kind]).build(setting)
        self.objective.tile = 5  # type: ignore[assignment]

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        first, second = (
            functional.normalize(batch[name] @ getattr(self, name).T, dim=-1)
            for name in ("first", "second")
        )
        features = {"image_features": first, "image_features_1": second, "text_features": second}
        marks = {name: batch[name] for name in ("labels", "sample_id", "classes")}
        parts: dict[str, Tensor] = self.objective(
            **features, logit_scale=self.log_scale.exp(), **marks
        )
        return parts


def one_step(kind: str) -> dict[str, Any]:
    """This rank's share of the global batch through DDP; the results that all ranks agree on."""
    module: torch.nn.Module = Towers(kind)
    world, rank = collectives.world_size(), collectives.rank()
    drawn = loops.draw(2, ROWS, groups=3, classes=3, repeated=True)
    own = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    batch = {
        "first": drawn.first.detach()[own],
        "second": drawn.second.detach()[own],
        "labels": drawn.labels[own, None],
        "sample_id": drawn.sample_id[own],
        "classes": drawn.classes[own, None],
    }
    run = DistributedDataParallel(module, find_unused_parameters=True) if world > 1 else module
    parts = run(batch)
    parts["loss"].backward()
    counts = {name: int(parts[name]) for name in parts if name.startswith("rows_without")}
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {
        "loss": collectives.all_reduce_sum(parts["loss"]).item() / world,
        "gradients": {n: g.tolist() for n, g in gradients.items() if bool((g != 0).any())},
        **counts,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_equal_one_process(ranks: Callable[..., list[Any]], kind: str) -> None:
    alone = one_step(kind)
    assert "first" in alone["gradients"]
    trained = KINDS[kind].get("temperature") is TRAINED
    assert ("objective.temperature.log_scale" in alone["gradients"]) == trained
    for world_size in (2, 4):
        for found in ranks(world_size, one_step, kind):
            assert found["loss"] == pytest.approx(alone["loss"], abs=1e-12)
            assert found["gradients"].keys() == alone["gradients"].keys()
            for name, gradient in alone["gradients"].items():
                loops.close(torch.tensor(found["gradients"][name]), torch.tensor(gradient))
            counts = alone.keys() - {"loss", "gradients"}
            assert {name: found[name] for name in counts} == {n: alone[n] for n in counts}
