"""A momentum copy of the model and a queue of its features (MoCo), without captions."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn
from torch.nn import functional

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
    encode,
)
from mclclip.ranks import collectives
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """MoCo with a small queue."""

    kind: Literal["toy_momentum"] = "toy_momentum"
    momentum: float = 0.9
    queue: int = 48

    @property
    def reads(self) -> Reads:
        return Reads(num_views=2, follows_weights=True)

    def build(self, inputs: ObjectiveInputs) -> Objective:
        return Momentum(inputs.model, self.momentum, self.queue)


class Momentum(Objective):
    """The first view against the momentum copy's second view and the queue of earlier ones."""

    queue: Tensor
    filled: Tensor

    def __init__(self, model: Any, momentum: float, size: int) -> None:
        super().__init__()
        self.copy: nn.Module = copy.deepcopy(model).requires_grad_(False)
        self.momentum = momentum
        start = functional.normalize(torch.randn(size, model.feature_dim, generator=_generator()))
        self.register_buffer("queue", start.to(next(self.copy.parameters()).dtype))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.keys: Tensor | None = None

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        with torch.no_grad():
            keys = self.copy(image=batch.views[1])["image_features"]
        return encode(model, batch, features, num_views=1) | {"keys": keys}

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        image_features, self.keys = features["image_features"], features["keys"].detach()
        positive = (image_features * self.keys).sum(dim=1, keepdim=True)
        logits = torch.cat([positive, image_features @ self.queue.T.clone()], dim=1) / 0.2
        return {"loss": functional.cross_entropy(logits, torch.zeros_like(logits[:, 0]).long())}

    def stepped(self, model: nn.Module) -> None:
        assert self.keys is not None
        with torch.no_grad():
            for old, new in zip(self.copy.parameters(), model.parameters(), strict=True):
                old.lerp_(new.to(old), 1.0 - self.momentum)
            keys = collectives.gather(self.keys)
            places = (torch.arange(len(keys)) + int(self.filled)) % len(self.queue)
            self.queue[places] = keys
            self.filled += len(keys)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)
