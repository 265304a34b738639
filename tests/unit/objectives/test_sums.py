"""Lists of objectives of which one makes features of its own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.base import ObjectiveInputs, parse
from mclclip.ranks.process_group import SINGLE

MOCO = {"kind": "moco", "queue_size": 8}
VIEWS = {"kind": "nt_xent"}


class Model(nn.Module):
    feature_dim = 3
    has_logit_bias = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, image: Tensor, **texts: None) -> dict[str, Tensor]:
        return {"image_features": functional.normalize(self.layer(image), dim=1)}


def built(model: Model, *terms: dict[str, Any]) -> Any:
    return parse(terms).build(ObjectiveInputs(model=model, context=SINGLE, seed=0))


def drawn() -> tuple[Model, Any]:
    """A model and a batch of two views."""
    torch.manual_seed(0)
    model, views = Model(), [torch.randn(5, 4), torch.randn(5, 4)]
    return model, SimpleNamespace(
        views=views, text=None, text_features=None, prefix_length=0, classes=None, extras={},
        group_ids=torch.zeros(5, 1).long(), sample_id=torch.arange(5),
    )  # fmt: skip


@pytest.mark.parametrize("terms", [(MOCO, VIEWS), (VIEWS, MOCO)])
def test_a_momentum_copy_leaves_both_views_to_the_other_term(terms: tuple[Any, ...]) -> None:
    model, batch = drawn()

    def losses(*terms: Any) -> float:
        objective = built(model, *terms)
        return float(objective(objective.features(model, batch, {}), batch)["loss"])

    alone = losses(MOCO) + losses(VIEWS)
    assert losses(*terms) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_term_is_told_of_every_step(place: int) -> None:
    """A momentum copy moves in whichever term it is, as the formula says."""
    model, batch = drawn()
    momentum = {"momentum": 0.5, "momentum_schedule": "cosine"}
    terms: list[dict[str, Any]] = [VIEWS, VIEWS]
    terms.insert(place, MOCO | momentum)
    objective = built(model, *terms)
    wanted = model.layer.weight.detach().clone()
    for step in range(3):
        objective.begin(step, 4, 0.0)
        objective(objective.features(model, batch, {}), batch)
        with torch.no_grad():
            model.layer.weight += 1.0
        objective.stepped(model)
        kept = 1.0 - 0.5 * (1.0 + math.cos(math.pi * (step + 1) / 4)) / 2.0
        wanted = kept * wanted + (1.0 - kept) * model.layer.weight.detach()
        torch.testing.assert_close(objective.terms[place].copy.model.layer.weight, wanted)
