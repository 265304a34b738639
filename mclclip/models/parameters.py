"""Says which learning rate and weight decay each parameter of a training has, and what is frozen.

They follow from the option `train.parameters` (`models.patterns`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mclclip.models.model import Model
from mclclip.models.patterns import ParameterConfig, find_value, refuse_unmatched

_OBJECTIVE = "objective."  # begins the names of an objective's own parameters


@dataclass(frozen=True)
class ParameterSettings:
    """The settings of one parameter in an optimizer.

    part          "image", "text", "projector", "objective", or its name if it lies in none of them
    lr_scale      factor of the learning rate; 0 if the parameter is frozen
    weight_decay  decay towards zero
    start_decay   decay towards the first weights
    decays        False for parameters with fewer than two dimensions: norms, biases, the class
                  token, the logit scale
    bound         largest value; infinity: none
    """

    part: str
    lr_scale: float
    weight_decay: float
    start_decay: float
    decays: bool
    bound: float


def settings(
    module: nn.Module,
    weight_decay: float,
    parameters: Sequence[ParameterConfig] = (),
    start_decay: float = 0.0,
) -> dict[str, ParameterSettings]:
    """Returns the settings of each parameter of `module`, by name.

    `weight_decay` is that of parameters with two and more dimensions for which no entry of
    `parameters` states another; `start_decay` is that of models, and objectives have none.
    """
    inside = {f"{name}." if name else "": inner for name, inner in module.named_modules()}
    bounds = {
        f"{prefix}{name}": value
        for prefix, inner in inside.items()
        for name, value in getattr(inner, "upper_bounds", {}).items()
    }
    models = {prefix: inner for prefix, inner in inside.items() if isinstance(inner, Model)}
    all_settings = {}
    for name, parameter in module.named_parameters():
        prefix = next(filter(name.startswith, models), None)
        model = None if prefix is None else models[prefix]
        of_model = name.removeprefix(prefix or "")
        names = (name, name) if model is None else model.tensor_names(of_model)
        scale = find_value(parameters, names, "lr_scale", 1.0) * parameter.requires_grad
        decay = find_value(parameters, names, "layer_decay", 1.0)
        if model is not None and scale and decay < 1.0:
            scale *= decay ** model.layers_above(of_model)
        part = "objective" if name.startswith(_OBJECTIVE) else names[1].partition(".")[0]
        decays = parameter.ndim >= 2
        own_decay = find_value(parameters, names, "weight_decay", weight_decay)
        all_settings[name] = ParameterSettings(
            part=part,
            lr_scale=scale,
            weight_decay=own_decay * decays,
            start_decay=0.0 if model is None else start_decay,
            decays=decays,
            bound=bounds.get(name, math.inf),
        )
    return all_settings


def _names_objective(entry: ParameterConfig) -> bool:
    """Returns True if one of a pattern's alternatives names parameters of the objective."""
    return any(part.strip().startswith(_OBJECTIVE) for part in entry.match.split("|"))


def freeze(model: Model, parameters: Sequence[ParameterConfig]) -> None:
    """Freezes the parameters of `model` that have an `lr_scale` of 0.

    Raises ValueError for a pattern that matches no parameter, unless it names the objective's,
    whose parameters are not known here.
    """
    all_names = {name: model.tensor_names(name) for name, _ in model.named_parameters()}
    patterns = [entry for entry in parameters if not _names_objective(entry)]
    refuse_unmatched(patterns, all_names.values())
    for name, parameter in model.named_parameters():
        if find_value(parameters, all_names[name], "lr_scale", 1.0) == 0.0:
            parameter.requires_grad_(False)
    if parameters:
        model.update_frozen()


def freeze_objective(objective: nn.Module, parameters: Sequence[ParameterConfig]) -> None:
    """Freezes the parameters of an objective that have an `lr_scale` of 0."""
    for name, parameter in objective.named_parameters():
        if find_value(parameters, [f"{_OBJECTIVE}{name}"], "lr_scale", 1.0) == 0.0:
            parameter.requires_grad_(False)


def describe_groups(
    module: nn.Module, lr: float, parameters: Sequence[ParameterConfig], weight_decay: float
) -> list[dict[str, Any]]:
    """Returns what is trained how, as a row for each part of `module` and each weight decay in it.

    `module` holds model and objective. A row has `name` (the part, followed by ", frozen" for what
    has no gradient), `lr` as [lowest, highest], at its peak, `weight_decay`, and the numbers of
    `tensors` and of `weights`. Raises ValueError for a pattern that names the objective and matches
    no parameter.
    """
    patterns = [entry for entry in parameters if _names_objective(entry)]
    all_names: list[tuple[str, ...]] = [
        (name,) for name, _ in module.named_parameters() if name.startswith(_OBJECTIVE)
    ]
    models = [inner for inner in module.modules() if isinstance(inner, Model)]
    all_names += [m.tensor_names(name) for m in models for name, _ in m.named_parameters()]
    refuse_unmatched(patterns, all_names)
    all_settings = settings(module, weight_decay, parameters)
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        of, rate = all_settings[name], lr * all_settings[name].lr_scale
        part, decay = f"{of.part}, frozen", 0.0
        if parameter.requires_grad:
            part, decay = of.part, of.weight_decay
        first = {"name": part, "lr": [rate, rate], "weight_decay": decay}
        row = rows.setdefault((part, decay), first | {"tensors": 0, "weights": 0})
        row["lr"] = [min(row["lr"][0], rate), max(row["lr"][1], rate)]
        row["tensors"] += 1
        row["weights"] += parameter.numel()
    return sorted(rows.values(), key=lambda row: (row["name"], -row["weight_decay"]))
