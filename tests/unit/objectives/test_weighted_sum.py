"""Sums of objectives of which one makes features of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.base import parse
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
    options = parse({"kind": "weighted_sum", "terms": [{"objective": t} for t in terms]})
    setting: Any = SimpleNamespace(model=model, context=SINGLE, seed=0, precision="fp32")
    return options.build(setting)


@pytest.mark.parametrize(
    "terms",
    [
        (MOCO, VIEWS),
        (VIEWS, MOCO),
        ({"kind": "weighted_sum", "terms": [{"objective": MOCO}]}, VIEWS),
    ],
)
def test_a_momentum_copy_leaves_both_views_to_the_other_term(terms: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    model, views = Model(), [torch.randn(5, 4), torch.randn(5, 4)]
    batch: Any = SimpleNamespace(views=views, text=None, text_features=None, prefix_length=0)
    marks = {"labels": torch.zeros(5, 1, dtype=torch.int64), "sample_id": torch.arange(5)}

    def losses(*terms: Any) -> float:
        objective = built(model, *terms)
        return float(objective(**objective.features(model, batch), **marks)["loss"])

    alone = losses(MOCO) + losses(VIEWS)
    assert losses(*terms) == pytest.approx(alone, rel=1e-5)


def test_two_copies_are_refused_when_they_are_built() -> None:
    with pytest.raises(ValueError, match="0_moco and 2_weighted_sum of weighted_sum each make"):
        built(Model(), MOCO, VIEWS, {"kind": "weighted_sum", "terms": [{"objective": MOCO}]})
