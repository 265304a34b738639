"""Two views of an image against those of all others, without captions (NT-Xent, SimCLR)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
)
from mclclip.ranks import collectives
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """NT-Xent."""

    kind: Literal["toy_two_views"] = "toy_two_views"
    temperature: float = 0.5

    @property
    def reads(self) -> Reads:
        return Reads(num_views=2)

    def build(self, inputs: ObjectiveInputs) -> Objective:
        return TwoViews(self.temperature)


class TwoViews(Objective):
    """Mean over both views of the cross-entropy of the other view among all other images."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        views = features["image_features"], features["image_features_1"]
        every = [collectives.gather_with_grad(view) for view in views]
        own = torch.arange(len(views[0]), device=views[0].device)
        own = own + collectives.rank() * len(views[0])
        losses = []
        for first, second in ((0, 1), (1, 0)):
            to_same = views[first] @ every[first].T / self.temperature
            to_same = to_same.scatter(1, own[:, None], float("-inf"))
            to_other = views[first] @ every[second].T / self.temperature
            losses.append(functional.cross_entropy(torch.cat([to_other, to_same], dim=1), own))
        return {"loss": (losses[0] + losses[1]) / 2}
