"""SimLAP over real gloo processes equals the single process, in value and gradient, and trains."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mclclip import cluster, config, embed, export, index
from mclclip.engines.batch_norm import synchronize_batch_norms
from mclclip.objectives.label_filter import LabelFilter, OpenGates
from mclclip.objectives.simlap import SimLAP
from mclclip.objectives.temperature import Learnable, Temperature
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.train import verb as train
from tests import tiny
from tests.matrix import in_soak, kept

Ranks = Callable[..., list[Any]]
ROWS = 12
STEPS = 4


class Tower(nn.Module):
    """A linear tower under the loss: enough for DDP to average something."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(5, 6, generator=generator, dtype=torch.float64))
        sizes = {"label_dim": 3, "hidden_dim": 4, "dtype": torch.float64}
        given = options.get("gates") == "open"
        gates = OpenGates(4, 5, torch.float64) if given else LabelFilter(4, 5, **sizes)
        norm = nn.LayerNorm(5, dtype=torch.float64)
        temperature = Temperature(Learnable(start=0.3), torch.float64)
        options = {"temperature": temperature} | {n: options[n] for n in options if n != "gates"}
        self.loss = SimLAP(gates, seed=1, norm=norm, tile=5, **options)
        self.loss.begin(2, 10, 0.0)

    def forward(self, batch: dict[str, Tensor], momentum: bool) -> dict[str, Tensor]:
        names = ("image_features", "image_features_1")
        views = {n: functional.normalize(batch[n] @ self.weight.T, dim=1) for n in names}
        if momentum:
            views |= {"keys": views[names[0]].detach(), "keys_1": views[names[1]].detach()}
        rest = {n: batch[n] for n in ("labels", "sample_id", "classes")}
        output: dict[str, Tensor] = self.loss(**views, **rest)
        return output


def global_batch() -> dict[str, Tensor]:
    """Four classes, one of a single sample, a repeated sample, and a group of two."""
    generator = torch.Generator().manual_seed(2)
    views = [torch.randn(ROWS, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    return {
        "image_features": views[0],
        "image_features_1": views[1],
        "labels": torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1])[:, None],
        "classes": torch.tensor([0, 1, 2, 0, 3, 2, 1, 0, 0, 1, 2, 1])[:, None],
        "sample_id": torch.tensor([10, 11, 12, 13, 14, 15, 16, 17, 10, 19, 20, 21]),
    }


def one_step(options: dict[str, Any], momentum: bool) -> dict[str, Any]:
    """This rank's share of the global batch through DDP; the results that all ranks agree on."""
    torch.set_num_threads(1)
    module: nn.Module = Tower(options)
    world, rank = collectives.world_size(), collectives.rank()
    if world > 1:
        synchronize_batch_norms(module)
    rows = ROWS // world
    batch = {n: t[rank * rows : (rank + 1) * rows] for n, t in global_batch().items()}
    run = DistributedDataParallel(module) if world > 1 else module
    output = run(batch, momentum)
    output["loss"].backward()
    found = {name: float(value.detach()) for name, value in output.items()}
    for name in ("loss", "open_gates"):
        found[name] = collectives.all_reduce_sum(output[name]).item() / world
    gradients = {n: p.grad.tolist() for n, p in module.named_parameters() if p.grad is not None}
    return {"parts": found, "gradients": gradients}


CASES: list[tuple[dict[str, Any], bool]] = [
    ({"pairs": "arbitrary", "penalty_weight": 0.2}, False),
    ({"pairs": "distinct", "score": "code"}, False),
    ({"pairs": "arbitrary", "gates": "open"}, False),
    ({"pairs": "n_closest", "num_closest": 1}, True),
]


@pytest.mark.parametrize(("options", "momentum"), CASES)
@pytest.mark.parametrize("world_size", kept([2, 4], 1))
def test_ranks_equal_one_process(
    ranks: Ranks, world_size: int, options: dict[str, Any], momentum: bool
) -> None:
    alone = one_step(options, momentum)
    assert alone["parts"]["rows_without_positives"] < ROWS and alone["parts"]["loss"] > 0.0
    for found in ranks(world_size, one_step, options, momentum):
        assert found["parts"] == pytest.approx(alone["parts"], abs=1e-12)
        assert found["gradients"].keys() == alone["gradients"].keys()
        for name, gradient in alone["gradients"].items():
            np.testing.assert_allclose(found["gradients"][name], gradient, atol=1e-12, err_msg=name)


def train_on_this_rank(tree: dict[str, Any]) -> list[float]:
    """Trains stage 1 on the clusters of stage 0; returns the losses."""
    torch.set_num_threads(1)
    context = Context(collectives.rank(), collectives.world_size())
    options = config.from_tree(tree)
    index.run(options, context)
    export.stage(options, context, stage=0)
    embed.run(options, context, stage=0)
    cluster.run(options, context, stage=0)
    directory = train.run(options, context, stage=1)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


def tree_of(run_dir: Path, data: Path, engine: str, attribute: str | None) -> dict[str, Any]:
    tree = tiny.tree(run_dir, data)
    tree["data"]["sources"]["patterns"]["attributes"] = ["shape"]
    tree["train"] |= {
        "precision": "float64",
        "steps": STEPS,
        "log_every": 1,
        "lock": {},
        "engine": {"name": engine},
        "objective": {
            "kind": "simlap",
            "label_dim": 8,
            "hidden_dim": 8,
            "attribute": attribute,
            "momentum": 0.9,
            "temperature": {"learnable": True, "start": 0.1},
        },
    }
    return tree | {"num_stages": 1, "base": None}


@pytest.mark.parametrize(
    ("engine", "attribute"),
    [("ddp", None), ("fsdp", "shape")],
)
@in_soak
def test_any_number_of_ranks_trains_the_same(
    ranks: Ranks, tmp_path: Path, engine: str, attribute: str | None
) -> None:
    """On pseudo labels and on an attribute; and a training goes on where it was stopped."""
    data = tiny.make_data(tmp_path / "data", num_samples=48)
    trees = {n: tree_of(tmp_path / str(n), data, engine, attribute) for n in (1, 2)}
    alone, two = (ranks(n, train_on_this_rank, tree)[0] for n, tree in trees.items())
    assert len(alone) == STEPS and len(set(alone)) == STEPS
    np.testing.assert_allclose(two, alone, rtol=1e-9)
    directory = tmp_path / "1/stage_1/train"
    shutil.rmtree(directory / f"checkpoints/step_{STEPS:08d}")
    (directory / "manifest.json").rename(directory / "in_progress.json")
    assert ranks(1, train_on_this_rank, trees[1])[0] == alone
