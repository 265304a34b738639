"""Options of the encoders that are made of all stages."""

from __future__ import annotations

from dataclasses import field

from pydantic.dataclasses import dataclass as checked_dataclass

from mclclip.models.stage_weights import StageWeightsConfig, Variant
from mclclip.options import STRICT


@checked_dataclass(frozen=True, config=STRICT)
class ExportConfig:
    """Encoders that ``export`` makes of all stages at the end."""

    concat: list[Variant] = field(default_factory=lambda: ["raw", "stage_norm"])
    """Variants of the concatenated encoder: features as they are, each stage's at unit length, or
    ``weighted`` by weights that are fitted on held-out pairs."""
    weights: StageWeightsConfig = StageWeightsConfig()
    """The pairs that ``weighted`` is fitted on."""
    soup: bool = True
    """Write the uniform soup of all stages."""
    ema: bool = True
    """Export the moving average of the weights where the training kept one."""

    def __post_init__(self) -> None:
        if "weighted" in self.concat and self.weights.held_out is None:
            raise ValueError(
                "concat has weighted, whose weights are fitted on held-out pairs: set "
                "export.weights.held_out=FOLDER, with shards that neither a training nor a "
                "benchmark reads"
            )
