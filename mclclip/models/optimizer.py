"""Builds parameter groups and optimizers, and computes the learning rate of a step.

Parameter groups have three fields besides those that the optimizer reads:

    lr_scale     factor of the learning rate: the engine sets a group's rate to `lr * lr_scale`
    max_value    upper bound of the parameters, which are set back to it after every step
    start_decay  decay towards the first weights, which the engine keeps and applies

`models.parameters` says which parameter has which.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import timm.optim

from mclclip.models.parameters import settings
from mclclip.models.patterns import ParameterConfig
from mclclip.util.options import nearest

Schedule = Literal["cosine", "constant"]

_NAMES = ("adamw", "lars", "lion")
# Optimizers that, with default options, update every element independently of all others.
_ELEMENTWISE: tuple[Any, ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.SGD,
    timm.optim.Lion,
    timm.optim.NAdamW,
    timm.optim.SGDW,
)


# Checkpoints cannot store Kron's state, which has lists. MADGRAD changes weights even at a learning
# rate of zero.
_NOT_RESUMABLE = ("kron", "madgrad")


def parameter_groups(
    module: nn.Module,
    weight_decay: float,
    parameters: Sequence[ParameterConfig] = (),
    start_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Groups a module's trainable parameters by their settings (see `models.parameters`).

    Groups with weight decay come before those without, and slow ones before fast ones. Parameters
    with an upper bound have groups of their own, at the end. Raises ValueError if nothing is
    trainable.
    """
    members: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    all_settings = settings(module, weight_decay, parameters, start_decay)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            of = all_settings[name]
            key = (of.bound, of.lr_scale, not of.decays, of.start_decay, of.weight_decay)
            members.setdefault(key, []).append(parameter)
    if not members:
        raise ValueError("no parameter is trainable: lock or parameters freeze them all")
    groups = []
    for key in sorted(members, key=lambda key: (key[0] != math.inf, *key)):
        bound, scale, _, pull, decay = key
        group = {"params": members[key], "weight_decay": decay, "lr_scale": scale}
        group |= {"start_decay": pull} if start_decay else {}
        groups.append(group | ({} if bound == math.inf else {"max_value": bound}))
    return groups


def build_optimizer(
    module: nn.Module,
    *,
    name: str = "adamw",
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-6,
    momentum: float = 0.9,
    parameters: Sequence[ParameterConfig] = (),
    start_decay: float = 0.0,
    lr: float = 0.0,
) -> torch.optim.Optimizer:
    """Builds an optimizer of the trainable parameters of `module` (see `parameter_groups`).

    Call it when the parameters have their final form, for example after `fully_shard`. Parameters
    above their upper bound are set back to it here, and again after every step.

    Args:
        name: `adamw` (reads `betas`, `eps`), `lion` (`betas`), `lars` (`momentum`; it adapts only
            parameters with weight decay), or `timm:NAME` for any of timm's, with timm's settings.
        parameters: learning rates and weight decay by patterns of names.
        start_decay: field `start_decay` of groups with a model's parameters; other groups have 0.
        lr: the peak learning rate. The engine sets the rate at every step, but some of timm's
            optimizers store the first one.

    Raises ValueError for an unknown name, for an optimizer that cannot be resumed or is not
    installed, and if nothing is trainable.
    """
    groups = parameter_groups(module, weight_decay, parameters, start_decay)
    for group in groups:
        group["lr"] = lr * group["lr_scale"]
    optimizer: torch.optim.Optimizer
    if name == "adamw":
        # fused: one pass over the parameters; the default took a third of a small model's step.
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    elif name == "lars":
        optimizer = timm.optim.Lars(groups, lr=lr, momentum=momentum)
    elif name == "lion":
        optimizer = timm.optim.Lion(groups, lr=lr, betas=betas)
    else:
        optimizer = _from_timm(name, groups, lr)
    _hold_bounds(optimizer)
    optimizer.register_step_post_hook(_hold_bounds)
    return optimizer


def is_elementwise(name: str) -> bool:
    """Returns True if an element's update depends only on that element's value and gradients.

    Only such an optimizer computes the same on flat shards of parameters, as in ZeRO; LARS and LAMB
    take the norm of a whole parameter. `name` is one that `build_optimizer` takes. Returns False
    for classes that are not in a list here. Raises ValueError for an unknown name.
    """
    if name in _NAMES:
        return name != "lars"
    info = _timm_info(name)
    # A cautious update is scaled by the share of a parameter's elements that it changes.
    return info.opt_class in _ELEMENTWISE and not (info.defaults or {}).get("caution")


def _from_timm(name: str, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    info = _timm_info(name)
    if info.second_order or info.name.startswith(_NOT_RESUMABLE):
        reason = "needs second derivatives" if info.second_order else "does not resume exactly"
        raise ValueError(f"optimizer is {name!r}, which {reason}: take another")
    assert lr > 0.0, "some of timm's optimizers store the first learning rate"
    try:
        optimizer: torch.optim.Optimizer = timm.optim.create_optimizer_v2(
            groups, opt=info.name, lr=lr
        )
    except (ImportError, AssertionError) as error:
        raise ValueError(f"optimizer is {name!r}, which cannot be had here ({error})") from error
    return optimizer


def _timm_info(name: str) -> Any:
    listed = timm.optim.list_optimizers()
    if name.startswith("timm:") and name.removeprefix("timm:") in listed:
        return timm.optim.get_optimizer_info(name.removeprefix("timm:"))
    choices = [*_NAMES, *(f"timm:{other}" for other in listed)]
    raise ValueError(
        f"optimizer is {name!r}, wanted {', '.join(_NAMES)} or timm:NAME "
        f"(nearest: {', '.join(nearest(name, choices))})"
    )


def _hold_bounds(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Sets parameters above the `max_value` of their group back to it.

    The groups are read at every call, because an engine may have replaced the parameters by shards.
    """
    with torch.no_grad():
        for group in optimizer.param_groups:
            if "max_value" in group:
                for parameter in group["params"]:
                    parameter.clamp_(max=group["max_value"])


def learning_rate(
    step: int,
    total_steps: int,
    warmup_steps: int,
    lr: float,
    schedule: Schedule = "cosine",
) -> float:
    """Returns the learning rate of the update `step` (from 0) out of `total_steps`.

    It rises linearly over `warmup_steps` updates, the last of which has the full `lr`. Then it
    stays (`constant`) or falls along half a cosine towards 0.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return lr * 0.5 * (1.0 + math.cos(math.pi * progress))
