"""A momentum copy of the model: its weights follow those of the model as a moving average.

Sources: MoCo (He et al., 2020, section 3.2, "Momentum update"); BYOL (Grill et al., 2020) and
MoCo-v3 (Chen, Xie and He, 2021) for the momentum that rises to 1 by a cosine.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor, nn

from mclclip.objectives.base import Facts

Schedule = Literal["constant", "cosine"]


def momentum_at(base: float, schedule: Schedule, done: int, total: int) -> float:
    """Share of itself that the copy keeps at the update after ``done`` of ``total`` steps.

    ``constant``: ``base``; ``cosine``: 1 - (1 - base) (1 + cos(pi done / total)) / 2, which rises
    from ``base`` to 1. MoCo-v3's code moves the copy before a step and counts the steps before it,
    which is the same sequence.
    """
    if schedule == "constant":
        return base
    return 1.0 - (1.0 - base) * (1.0 + math.cos(math.pi * done / total)) / 2.0


def check_engine(facts: Facts) -> None:
    """Raises ValueError where ranks hold parameters neither whole nor as a DTensor: ZeRO-3."""
    if facts.engine == "deepspeed" and facts.zero_stage == 3:
        raise ValueError(
            "engine.zero_stage=3 shares out the parameters that a momentum copy has to follow: set "
            "engine.zero_stage to 1 or 2, or engine.name=fsdp"
        )


class MomentumCopy(nn.Module):
    """A copy of ``model`` (an encoder with its projector) that no gradient reaches.

    It is a submodule of an objective, so that checkpoints hold it. The objective calls ``begin``
    before a step, the copy itself for features, and ``follow`` once the optimizer has moved the
    model: ``weight <- m * weight + (1 - m) * model's weight``, for every trained parameter.

    Buffers are neither copied nor averaged, as in MoCo's code: the batch norms of the copy are in
    the mode of the model's, so where those are trained the copy normalises by the statistics of its
    own batch, and its running statistics are of its own features. MoCo shuffles the samples over
    the GPUs, since statistics of one GPU alone would tell a query its key. Here engines compute the
    statistics of all batch norms, the copy's too, over the global batch of all ranks, as MoCo-v3
    does, and nothing is shuffled.

    Frozen parameters are copied too, and so is a text tower, which is never run. Adapters (LoRA)
    are averaged factor by factor. Blocks that torch has compiled run uncompiled in the copy. Under
    FSDP2 the copy is sharded as the rest of the model outside of its blocks is: in one piece, whole
    on every rank while a step runs. See ``check_engine`` for what cannot carry it.
    """

    def __init__(self, model: nn.Module, base: float, schedule: Schedule = "constant") -> None:
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.base, self.schedule = base, schedule
        self.momentum = base

    def train(self, mode: bool = True) -> Self:
        """Leaves the modules of the copy in the modes that the model's had when it was copied."""
        self.training = mode
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """[b, C, H, W] -> [b, D], unit length, without gradient."""
        features: Tensor = self.model(image=images)["image_features"]
        return features

    def keys(self, views: Sequence[Tensor]) -> dict[str, Tensor]:
        """The features [b, D] of two views as ``keys`` and ``keys_1``, without gradient."""
        first, second = views
        return {"keys": self(first), "keys_1": self(second)}

    def begin(self, step: int, total: int) -> None:
        """Sets the momentum of the update after ``step``, of which there are ``total``."""
        self.momentum = momentum_at(self.base, self.schedule, step + 1, total)

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        """Moves the copy towards the weights of ``model``, from which it was copied."""
        both = zip(self.model.parameters(), model.parameters(), strict=True)
        moved = [(old, new) for old, new in both if new.requires_grad]
        if moved:
            old, new = map(list, zip(*moved, strict=True))
            torch._foreach_lerp_(old, new, 1.0 - self.momentum)
