"""Parameter groups, AdamW, and the learning rate as a function of the step."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

Schedule = Literal["cosine", "constant"]


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: with weight decay, and without (the second).

    Norms, biases, the class token and the logit scale (everything with fewer than two dimensions)
    do not decay. Raises ValueError where nothing is trainable.
    """
    trainable = [p for _, p in named_parameters if p.requires_grad]
    if not trainable:
        raise ValueError("no parameter is trainable: unlock a part of the model")
    decayed = [p for p in trainable if p.ndim >= 2]
    plain = [p for p in trainable if p.ndim < 2]
    groups = [(decayed, weight_decay), (plain, 0.0)]
    return [{"params": group, "weight_decay": value} for group, value in groups if group]


def build_optimizer(
    module: nn.Module,
    *,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-6,
    lr: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of `module` (see `parameter_groups`).

    `lr` matters only to a caller who does not set the learning rate at every step.
    """
    groups = parameter_groups(module.named_parameters(), weight_decay)
    # fused: one pass over the parameters; the default took a third of a small model's step.
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def learning_rate(
    step: int,
    total_steps: int,
    warmup_steps: int,
    lr: float,
    schedule: Schedule = "cosine",
    final: float = 0.0,
) -> float:
    """Learning rate of the update `step` (from 0) out of `total_steps`.

    It rises linearly over `warmup_steps` updates, of which the last has the full `lr`, then stays
    (`constant`) or falls along half a cosine towards `final`. Raises ValueError for a step outside
    the run and for a warm-up longer than the run.
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step is {step}, outside the {total_steps} steps of the run")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps is {warmup_steps}, the run has {total_steps} steps")
    if schedule not in ("cosine", "constant"):
        raise ValueError(f"schedule is {schedule!r}: give 'cosine' or 'constant'")
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return final + (lr - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
