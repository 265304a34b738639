"""Losses between views against lightly's and pytorch-metric-learning's, in value and gradient.

Both are optional. lightly brings two frameworks (pytorch_lightning, hydra) for one loss, so that it
is no development dependency: `pip install --no-deps lightly tqdm` suffices for this test.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import mclclip.util.torchvision_fix  # noqa: F401  lightly imports torchvision
from mclclip.objectives.base import Objective
from mclclip.objectives.contrast import Temperature
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.supcon import SupervisedContrast
from tests import objective_loops as loops

TEMPERATURES = [0.1, 0.5]


def agree(batch: loops.Batch, objective: Objective, theirs: Any) -> None:
    """``theirs`` takes raw features of both views."""
    twin = batch.rows(slice(None))
    expected: Tensor = theirs(twin.first, twin.second)
    expected.backward()
    loops.close(batch.run(objective)["loss"].detach(), expected.detach(), 1e-10)
    for mine, other in zip(batch.gradients(), twin.gradients(), strict=True):
        loops.close(mine, other, 1e-10)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("tile", [1024, 7])
def test_nt_xent_is_that_of_lightly(temperature: float, tile: int) -> None:
    loss = pytest.importorskip("lightly.loss", reason="lightly is not installed")
    objective = InfoNCE("views", Temperature(temperature), tile=tile)
    theirs = loss.NTXentLoss(temperature, memory_bank_size=0)
    agree(loops.draw(0, rows=16, dim=8), objective, theirs)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_nt_xent_is_that_of_pytorch_metric_learning(temperature: float) -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    loss = losses.NTXentLoss(temperature)

    def theirs(first: Tensor, second: Tensor) -> Tensor:
        found: Tensor = loss(torch.cat([first, second]), torch.arange(len(first)).repeat(2))
        return found

    objective = InfoNCE("views", Temperature(temperature), tile=7)
    agree(loops.draw(1, rows=12, dim=8), objective, theirs)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("num_views", [1, 2])
def test_supcon_is_that_of_pytorch_metric_learning(temperature: float, num_views: int) -> None:
    """With one view some of the twelve rows have no positive: theirs leaves them out too."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    loss = losses.SupConLoss(temperature)
    batch = loops.draw(2, rows=12, classes=6, dim=8)
    classes = batch.classes.clone()
    assert len(classes.unique(return_counts=True)[1].unique()) > 1

    def theirs(first: Tensor, second: Tensor) -> Tensor:
        views = [first, second][:num_views]
        found: Tensor = loss(torch.cat(views), classes.repeat(num_views))
        return found

    objective = SupervisedContrast(num_views, temperature=Temperature(temperature))
    agree(batch, objective, theirs)
