"""An adversary: a pattern that is added to all pictures, and learns to make the loss larger."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
    encode,
)
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks import collectives
from mclclip.ranks.collectives import UnwrappedParameters
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """CLIP's loss of pictures that an adversary changes."""

    kind: Literal["toy_adversary"] = "toy_adversary"
    size: float = 0.1

    @property
    def reads(self) -> Reads:
        return Reads(captions=True, logit_scale=True, groups=True, changes_pixels=True)

    def build(self, inputs: ObjectiveInputs) -> Objective:
        wide = torch.float64 if inputs.precision == "float64" else torch.float32
        return Adversary(self.size, Pattern(inputs.context.device, wide))


class Pattern:
    """A picture [3, 32, 32] that climbs the loss by gradient ascent with momentum."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.pixels = torch.zeros(3, 32, 32, device=device, dtype=dtype, requires_grad=True)
        self.speed = torch.zeros_like(self.pixels)
        self.mean: Tensor | None = None

    def begin(self, step: int, loss_scale: float = 1.0) -> None:
        assert loss_scale == 1.0

    def zero_grad(self) -> None:
        self.pixels.grad = self.mean = None

    def grad_square(self) -> Tensor:
        assert self.pixels.grad is not None
        self.mean = collectives.all_reduce_sum(self.pixels.grad) / collectives.world_size()
        return self.mean.double().square().sum()

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        if self.mean is None:  # nobody asked for the norm
            self.grad_square()
        assert self.mean is not None
        with torch.no_grad():
            self.speed.mul_(0.9).add_(self.mean * factor)
            self.pixels.add_(self.speed, alpha=100.0 * lr)

    def state_dict(self) -> dict[str, Tensor]:
        return {"pattern.pixels": self.pixels.detach(), "pattern.speed": self.speed}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.pixels.copy_(state["pattern.pixels"])
            self.speed.copy_(state["pattern.speed"])


class Adversary(Objective):
    """InfoNCE of changed pictures."""

    def __init__(self, size: float, pattern: Pattern) -> None:
        super().__init__()
        self.size, self.pattern, self.inner = size, pattern, InfoNCE()

    def outside(self) -> Sequence[UnwrappedParameters]:
        return [self.pattern]

    def features(
        self, model: nn.Module, batch: BatchFields, features: Features
    ) -> dict[str, Tensor]:
        changed = copy.copy(batch)
        changed.views = [batch.views[0] + self.size * torch.tanh(self.pattern.pixels)]
        return encode(model, changed, features)

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        largest = self.pattern.pixels.detach().abs().max()
        found: dict[str, Tensor] = self.inner(features, batch)
        return found | {"max_pattern": largest}
