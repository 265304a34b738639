"""Prototypes of clusters: parameters that no engine wraps, with an optimizer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
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
from mclclip.ranks.collectives import UnwrappedParameters
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """Cross-entropy over the clusters of the stage before."""

    kind: Literal["toy_prototypes"] = "toy_prototypes"

    @property
    def reads(self) -> Reads:
        return Reads(clusters=1)

    def build(self, inputs: ObjectiveInputs) -> Objective:
        assert inputs.classes is not None
        rows = torch.empty(inputs.classes.num_classes, inputs.model.feature_dim)
        if not inputs.shapes_only:
            rows = torch.from_numpy(np.array(inputs.classes.centroids()))
        wide = torch.float64 if inputs.precision == "float64" else torch.float32
        return Prototypes(Rows(rows.to(inputs.context.device, wide)))


class Rows:
    """Rows [K, D], whole on every rank, moved by plain gradient descent."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.requires_grad_(True)
        self.mean: Tensor | None = None

    def begin(self, step: int, loss_scale: float = 1.0) -> None:
        assert loss_scale == 1.0

    def zero_grad(self) -> None:
        self.rows.grad = self.mean = None

    def grad_square(self) -> Tensor:
        assert self.rows.grad is not None
        self.mean = collectives.all_reduce_sum(self.rows.grad) / collectives.world_size()
        return self.mean.double().square().sum()

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        assert self.mean is not None
        with torch.no_grad():
            self.rows.sub_(self.mean * factor, alpha=10.0 * lr)

    def state_dict(self) -> dict[str, Tensor]:
        return {"prototypes.rows": self.rows.detach()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.rows.copy_(state["prototypes.rows"])


class Prototypes(Objective):
    """Softmax over the prototypes, with the nearest cluster as the class."""

    def __init__(self, prototypes: Rows) -> None:
        super().__init__()
        self.prototypes = prototypes

    def outside(self) -> Sequence[UnwrappedParameters]:
        return [self.prototypes]

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        assert batch.classes is not None
        logits = 4.0 * features["image_features"] @ self.prototypes.rows.T
        return {"loss": functional.cross_entropy(logits, batch.classes[:, 0].to(logits.device))}
