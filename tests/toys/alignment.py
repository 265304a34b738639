"""How far images lie from their own captions: a term that is added to another objective."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from mclclip.objectives.base import (
    BatchFields,
    Features,
    Objective,
    ObjectiveInputs,
    ObjectiveOptions,
    Reads,
)
from mclclip.util.options import STRICT


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class Options(ObjectiveOptions):
    """One minus the cosine of image and caption."""

    kind: Literal["toy_alignment"] = "toy_alignment"

    @property
    def reads(self) -> Reads:
        return Reads(captions=True)

    def build(self, inputs: ObjectiveInputs) -> Objective:
        return Alignment()


class Alignment(Objective):
    """Mean of one minus the cosine."""

    def forward(self, features: Features, batch: BatchFields) -> dict[str, Tensor]:
        cosines = (features["image_features"] * features["text_features"]).sum(dim=1)
        return {"loss": 1.0 - cosines.mean()}
