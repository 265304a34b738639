"""Options of models: the encoder that stages start from, what of it is trained or exported."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.models.stage_weights import StageWeightsConfig, Variant
from mclclip.options import STRICT, BelowOne

Targets = Literal["attention", "mlp", "all"]
"""Weights within attention, all others, or both."""


@checked_dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The encoder that every stage starts from."""

    name: str | dict[str, Any] = "ViT-B-32"
    """An open_clip model name, ``local-dir:PATH``, the path of a JSON model config, or such a
    config in place (``embed_dim``, ``vision_cfg``, ``text_cfg``)."""
    pretrained: str | None = None
    """open_clip's tag of the weights, a file, or null (random weights from ``seed``)."""
    text: bool = True
    """False: the image tower alone, for objectives that read no captions. A config without
    ``text_cfg`` has no text tower anyway; its ``vision_cfg`` may name a backbone of timm or
    torchvision."""
    projector: list[PositiveInt] = field(default_factory=list)
    """Widths of the projector's layers, on top of an image tower alone; trained, not exported."""
    augmentation: dict[str, Any] = field(default_factory=dict)
    """Fields of open_clip's AugmentationCfg, such as ``scale: [0.4, 1.0]`` (its own default:
    RandomResizedCrop with scale 0.9 to 1), or ``kind: simclr`` with its options, or
    ``kind: none``. The default is ``kind: simclr`` for backbones, else open_clip's."""


@checked_dataclass(frozen=True, config=STRICT)
class LockConfig:
    """Parts of the model that are trained; everything else stays at its first weights."""

    image_blocks: NonNegativeInt | Literal["all"] = "all"
    """How many of the image tower's last blocks are trained (a ResNet's are the stem and the
    residual blocks: 1 + 16 in an RN50)."""
    image_norm: bool = True
    """Train the final norm of the image tower (ResNet: batch norms of trained blocks)."""
    image_projection: bool = True
    """Train the image projection (ResNet: the attention pool)."""
    text: bool = True
    """Train the text tower; false: frozen, its embeddings are computed once by ``embed``."""
    text_blocks: NonNegativeInt | Literal["all"] = "all"
    """How many of the text tower's last blocks are trained; its final norm and projection are
    too."""
    logit_scale: bool = True
    """Train the logit scale, and with it the logit bias where the model has one and the objective
    reads it."""

    def __post_init__(self) -> None:
        if self.text_blocks != "all" and not self.text:
            raise ValueError(
                f"text_blocks={self.text_blocks} names blocks of a text tower that text=false "
                "freezes: leave one of them out"
            )


@checked_dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters (LoRA) on the image tower: only they are trained in its linear layers."""

    rank: PositiveInt = 8
    """Rank of each adapter."""
    alpha: PositiveFloat = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    dropout: BelowOne = 0.0
    """Dropout on an adapter's input."""
    targets: Targets = "all"
    """Linear layers of the blocks ``lock.image_blocks`` that get an adapter."""
    text: bool = False
    """Adapters on the unlocked blocks of the text tower too."""


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
