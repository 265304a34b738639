"""Margins on the cosine of a sample and its positive class center.

References: CosFace (Wang et al., 2018), ArcFace (Deng et al., 2019). MLCD says "m = 0.3 for the
positive classes, following ArcFace" and no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_NEAR_ONE = 1.0 - 1e-4  # the angle's derivative has no bound at a cosine of 1


@dataclass(frozen=True)
class Margin:
    """phi(c), what takes the place of a positive cosine c, and its derivative.

    ``arc``: cos(arccos c + size), and c - size * sin(size) where the angle would pass pi, so that
    phi goes on falling with the angle; ``cos``: c - size; ``none``: c. ``gradient``:
    ``straight_through`` takes the derivative as 1, as PartialFC's code does. Arc's cosines are
    clamped to 1 - 1e-4. Raises ValueError for a size outside [0, pi / 2].
    """

    kind: Literal["arc", "cos", "none"] = "arc"
    size: float = 0.3
    gradient: Literal["exact", "straight_through"] = "exact"

    def __post_init__(self) -> None:
        if not 0.0 <= self.size <= math.pi / 2:
            raise ValueError(f"margin is {self.size}: wanted 0 to {math.pi / 2:.3f}, such as 0.3")

    def __call__(self, cosine: Tensor) -> Tensor:
        """phi of each cosine."""
        if self.kind == "none":
            return cosine
        if self.kind == "cos":
            return cosine - self.size
        c = cosine.clamp(-_NEAR_ONE, _NEAR_ONE)
        turned = c * math.cos(self.size) - (1.0 - c.square()).sqrt() * math.sin(self.size)
        return torch.where(self._passes(c), c - self.size * math.sin(self.size), turned)

    def derivative(self, cosine: Tensor) -> Tensor:
        """d phi / d c of each cosine."""
        if self.kind != "arc" or self.gradient == "straight_through":
            return torch.ones_like(cosine)
        c = cosine.clamp(-_NEAR_ONE, _NEAR_ONE)
        exact = math.cos(self.size) + c / (1.0 - c.square()).sqrt() * math.sin(self.size)
        slope = torch.where(self._passes(c), torch.ones_like(c), exact)
        return torch.where(cosine.abs() <= _NEAR_ONE, slope, torch.zeros_like(c))

    def _passes(self, cosine: Tensor) -> Tensor:
        """Where the angle with the margin is beyond pi."""
        return cosine < -math.cos(self.size)
