"""What a training minimises: the options of each objective, told apart by ``kind``."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, PositiveFloat, PositiveInt

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Cosine = Annotated[float, Field(ge=-1.0, le=1.0)]


@checked_dataclass(frozen=True, config=STRICT)
class InfoNceConfig:
    """CLIP's contrastive loss with MCL's mask: images against captions."""

    kind: Literal["info_nce"] = "info_nce"
    """Which objective."""


@checked_dataclass(frozen=True, config=STRICT)
class ClassCentersConfig:
    """Images against the centers of the clusters of the stage before; captions are not read."""

    kind: Literal["mlcd", "mlc", "single_label"] = "mlcd"
    """``mlcd``: positive and negative classes in terms of their own (MLCD, Eq. 5 and 6); ``mlc``:
    coupled (Eq. 4); ``single_label``: softmax over the nearest class (UNICOM, PartialFC)."""
    labels_per_sample: PositiveInt = 8
    """l: nearest clusters that are a sample's positives."""
    threshold: Cosine | None = None
    """Only clusters of at least this similarity are positives, and the nearest in any case."""
    scale: Annotated[float, Field(gt=0.0, le=256.0)] = 64.0
    """Multiplier of cosines in the loss, at most 256."""
    margin: Literal["arc", "cos", "none"] = "arc"
    """Margin of positives: on the angle (ArcFace), on the cosine (CosFace), or none."""
    margin_size: Annotated[float, Field(ge=0.0, le=math.pi / 2)] = 0.3
    """Radians (``arc``) or cosine (``cos``)."""
    margin_gradient: Literal["exact", "straight_through"] = "exact"
    """``straight_through`` takes the margin's derivative as 1, as PartialFC's code does."""
    sample_rate: Share = 0.1
    """r: share of the classes that are drawn as negatives of a step."""
    negatives: Literal["two_path", "exclude_positives", "partial_fc"] = "two_path"
    """``two_path``: what is drawn, but for a row's own positives; ``exclude_positives``: without
    classes that are positive for any row; ``partial_fc``: the batch's positives, filled up to r."""
    centers: Literal["centroids", "normal"] = "centroids"
    """Class centers at the start: the clusters' centroids, or drawn with a deviation of 0.01."""
    lazy: bool = False
    """Only class centers that a step touches move, each with its own step count; false: all move,
    as under any AdamW."""
    lr_scale: PositiveFloat = 1.0
    """Factor of the learning rate for class centers."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of class centers (their length does not matter to the loss)."""
    kernel: Literal["plain", "triton"] = "plain"
    """What multiplies with the negatives: torch in tiles, or fused Triton kernels (GPUs only; under
    ``bf16`` and ``fp16`` of inputs rounded so, summed in fp32; not yet run on one)."""

    def __post_init__(self) -> None:
        if self.kind != "mlcd" and self.sample_rate == 0.0:
            raise ValueError(f"{self.kind} without negatives has no gradient: raise sample_rate")


Objective = Annotated[InfoNceConfig | ClassCentersConfig, Field(discriminator="kind")]
"""The registry of objectives."""
