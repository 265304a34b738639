"""The temperature of a contrastive loss: fixed, on a schedule, trained, or the model's own.

A loss multiplies cosines by the logit scale, which is one over the temperature. References for the
schedule: Kukleva et al., "Temperature Schedules for Self-Supervised Contrastive Methods on
Long-Tail Data" (2023), whose code counts epochs from 1; here the first one is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PlainValidator, SerializeAsAny, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveFloat
from torch import Tensor, nn

from mclclip.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class CosineSchedule:
    """The temperature falls from ``max`` to ``min`` and rises again, along a cosine."""

    schedule: Literal["cosine"] = "cosine"
    """Which schedule."""
    min: PositiveFloat = 0.1
    """Lowest temperature."""
    max: PositiveFloat = 1.0
    """Highest temperature, that of the start."""
    half_period: PositiveFloat = 200.0
    """Epochs from the highest to the lowest."""
    per: Literal["epoch", "step"] = "epoch"
    """Whether it moves once per epoch or at every step."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}: exchange them")

    def at(self, epoch: float) -> float:
        """The temperature after ``epoch`` epochs."""
        passed = epoch if self.per == "step" else math.floor(epoch)
        share = (1.0 + math.cos(math.pi * passed / self.half_period)) / 2.0
        return self.min + (self.max - self.min) * share


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Learnable:
    """The logarithm of the logit scale is a parameter of the objective."""

    learnable: Literal[True] = True
    """The temperature is trained."""
    start: PositiveFloat = 0.07
    """Temperature at the start."""
    max_scale: PositiveFloat = 100.0
    """Largest logit scale: the temperature never falls below one over it."""

    def __post_init__(self) -> None:
        if self.start * self.max_scale < 1.0:
            raise ValueError(
                f"start={self.start} is below 1 / max_scale={1.0 / self.max_scale:g}: raise one"
            )


_Fixed = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


def parse(value: Any) -> float | CosineSchedule | Learnable | None:
    """A temperature as it is written in a configuration, or ready options, checked."""
    if value is None or isinstance(value, CosineSchedule | Learnable):
        return value
    if isinstance(value, Mapping):
        if "schedule" in value:
            return TypeAdapter(CosineSchedule).validate_python(value)
        if "learnable" in value:
            return TypeAdapter(Learnable).validate_python(value)
    if isinstance(value, bool | Mapping):
        raise ValueError(
            "wanted a number such as 0.5, {schedule: cosine, min: 0.1, max: 1.0, "
            "half_period: 200}, {learnable: true, start: 0.07}, or null"
        )
    return TypeAdapter(_Fixed).validate_python(value)


AnyTemperature = SerializeAsAny[
    Annotated[float | CosineSchedule | Learnable | None, PlainValidator(parse)]
]
"""The type of an option that is a temperature."""


class Temperature(nn.Module):
    """One over the logit scale of a loss: a part of an objective.

    ``options`` are those of ``AnyTemperature``; None: the model's logit scale. ``dtype`` is that of
    the trained parameter. The parameter has shape [1], because FSDP and DeepSpeed refuse
    0-dimensional ones; the optimizer keeps it below ``max_scale`` (``upper_bounds``).
    """

    def __init__(
        self,
        options: float | CosineSchedule | Learnable | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.options = options
        self.now = options.at(0.0) if isinstance(options, CosineSchedule) else options
        self.upper_bounds: dict[str, float] = {}
        if isinstance(options, Learnable):
            start = torch.full((1,), -math.log(options.start), dtype=dtype)
            self.log_scale = nn.Parameter(start)
            self.upper_bounds["log_scale"] = math.log(options.max_scale)

    def begin(self, step: int, total: int, epoch: float) -> None:
        """Moves a scheduled temperature to its value after ``epoch`` epochs."""
        if isinstance(self.options, CosineSchedule):
            self.now = self.options.at(epoch)

    # A compiler would compile again whenever the number moves.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scale(self, features: Tensor, logit_scale: Tensor | None) -> Tensor:
        """The logit scale, 0-dimensional, with the type and device of ``features``.

        ``logit_scale`` is the model's; ValueError where that is wanted and there is none.
        """
        if isinstance(self.now, float):
            return features.new_full((), 1.0 / self.now)
        if isinstance(self.now, Learnable):
            return self.log_scale.exp().reshape(()).to(features.dtype)
        if logit_scale is None:
            raise ValueError(
                "temperature=null takes the logit scale of the model, which gives none: set "
                "temperature to a number, such as 0.5"
            )
        return logit_scale.to(features.dtype)
