"""Options of models: the encoder that stages start from, which parts are trained, what is exported.

The second part reads the architecture that a configuration describes, so that options that
contradict it are refused before anything runs, and not at the first training step after hours of
embedding. The configurations that open_clip ships are read as files; a tower of timm or a backbone
is built without values, and its blocks are counted.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.util import files, shipped
from mclclip.util.options import NO_RESULT, STRICT, BelowOne

Variant = Literal["raw", "stage_norm"]
"""How a concat joins the features of its stages (see ``encoder.join_image_features``)."""

Targets = Literal["attention", "mlp", "all"]
"""Weights within attention, all others, or both."""


@checked_dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The encoder that every stage starts from."""

    name: str | dict[str, Any] = "ViT-B-32"
    """An open_clip model name, ``local-dir:PATH``, the path of a JSON model config or the name of a
    shipped one (``tiny_clip``, ``tiny_vit``), or such a config in place (``embed_dim``,
    ``vision_cfg``, ``text_cfg``)."""
    pretrained: str | None = None
    """open_clip's tag of the weights, a file, or null (random weights from ``seed``)."""
    image_weights: str | None = field(default=None, metadata=NO_RESULT)  # but for what it holds
    """A safetensors file of the image tower's weights alone, with the names of timm, torchvision or
    open_clip, in place of ``pretrained``. The text tower, and a projection that the file lacks, are
    drawn by ``seed`` and have to be trained (``base``). Null: none."""
    text: bool = True
    """False: the image tower alone, for objectives that read no captions. A config without
    ``text_cfg`` has no text tower anyway; its ``vision_cfg`` may name a backbone of timm or
    torchvision."""
    image_size: PositiveInt | None = None
    """Height and width of the pictures in pixels, in place of the model's own. Position embeddings
    are resized to the new number of patches, in the image tower and in a ResNet's attention pool.
    Patches (a ResNet's 32 pixels) have to divide it. Null: the model's own."""
    long_context: bool = False
    """Stretch the context of open_clip's own text towers from 77 to 248 tokens, the most: the
    positions after the first 20 become four times as many (Long-CLIP). A text of up to 20 tokens
    keeps its features if the tower is causal, as CLIP's is."""
    text_rows: list[str] = field(default_factory=list, metadata=NO_RESULT)  # but for what they hold
    """Files of text embeddings of another encoder, of which a trained projection takes the place of
    the text tower: FILE.parquet with the columns ``embedding`` and ``text`` or ``key``, or FILE.npy
    beside FILE.jsonl with a line ``{"text": ...}`` or ``{"key": ...}`` per row; patterns such as
    ``rows/*.parquet`` too. Evaluations look their texts up in them."""
    projector: list[PositiveInt] = field(default_factory=list)
    """Widths of the projector's layers, on top of an image tower alone; trained, not exported."""
    augmentation: dict[str, Any] = field(default_factory=dict)
    """Fields of open_clip's AugmentationCfg, such as ``scale: [0.4, 1.0]`` (its own default:
    RandomResizedCrop with scale 0.9 to 1), or ``kind: simclr`` with its options, or
    ``kind: none``. The default is ``kind: simclr`` for backbones, else open_clip's."""

    def __post_init__(self) -> None:
        if isinstance(self.name, str):
            object.__setattr__(self, "name", shipped.model_config(self.name))
        if self.image_weights is not None and self.pretrained is not None:
            raise ValueError(
                f"image_weights={self.image_weights} and pretrained={self.pretrained} both bring "
                "the image tower's weights: leave one out"
            )
        if self.text_rows and (not self.text or self.long_context):
            option = "long_context=true" if self.long_context else "text=false"
            raise ValueError(
                f"text_rows stands in the place of the text tower, and {option} is about that "
                "tower: leave one out"
            )

    @property
    def tower_arguments(self) -> dict[str, Any]:
        """Arguments of ``load_towers`` that say which towers a model has, and in which shapes."""
        names = ("text", "long_context", "image_size", "text_rows")
        return {name: getattr(self, name) for name in names}


@checked_dataclass(frozen=True, config=STRICT)
class LockConfig:
    """Which parts of the model are trained; all others keep the weights that they start with."""

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
    """How many of the text tower's last blocks are trained, with its final norm and projection."""
    logit_scale: bool = True
    """Train the logit scale, and the logit bias if the model has one and the objective reads it."""

    @property
    def freezes_images(self) -> bool:
        """True if no part of the image tower is trained."""
        return not (self.image_blocks or self.image_norm or self.image_projection)

    def __post_init__(self) -> None:
        if self.text_blocks != "all" and not self.text:
            raise ValueError(
                f"text_blocks={self.text_blocks} names blocks of a text tower that text=false "
                "freezes: leave one of them out"
            )


@checked_dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters (LoRA) on linear layers of the image tower, whose weights are frozen."""

    rank: PositiveInt = 8
    """Rank of each adapter."""
    alpha: PositiveFloat = 16.0
    """An adapter's output is multiplied by alpha / rank."""
    dropout: BelowOne = 0.0
    """Dropout on an adapter's input."""
    targets: Targets = "all"
    """Which linear layers of the trained blocks (``lock.image_blocks``) get an adapter."""
    text: bool = False
    """Put adapters on the trained blocks of the text tower too."""


@checked_dataclass(frozen=True, config=STRICT)
class ExportConfig:
    """Which encoders ``export`` makes of all stages at the end."""

    concat: list[Variant] = field(default_factory=lambda: ["raw", "stage_norm"])
    """Variants of the concatenated encoder: ``raw`` joins features as they are, ``stage_norm`` each
    stage's at unit length."""
    soup: bool = True
    """Write the uniform soup of all stages."""
    ema: bool = True
    """Export the moving average of the weights if the training kept one (``ema_decay``)."""


# --- the architecture that a configuration describes ---------------------------------------------

# Fields of an augmentation that do more than to crop. `kind` names a transform of
# `models.transforms`; the others belong to open_clip's AugmentationCfg.
_MORE_THAN_CROPS = ("kind", "use_timm", "color_jitter_prob", "gray_scale_prob")


def architecture_of(model: ModelConfig) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns a model's ``model_cfg``, and its ``vision_cfg``.

    They are empty if they cannot be read here (a model on the hub, a directory that is yet to be
    written) or are no mapping; the loader of models reports errors.
    """
    config: Any = model.name
    if isinstance(config, str):
        path = Path(config.removeprefix("local-dir:"))
        try:
            if config.startswith("hf:"):
                from mclclip.models import clip, transformers_folder  # torch

                folder = transformers_folder.find(config, fetch=False)
                config, _, _ = clip.find(f"hf:{folder}", load_weights=False)
            else:
                if path.is_dir():
                    path = path / "open_clip_config.json"
                elif path.suffix != ".json":
                    package = find_spec("open_clip")
                    folders = package.submodule_search_locations if package else None
                    path = Path(next(iter(folders or []), "")) / "model_configs"
                    path = path / f"{config.replace('/', '-')}.json"
                config = files.read_model_json(path)
        except (OSError, ValueError):
            config = None
    config = config.get("model_cfg", config) if isinstance(config, Mapping) else {}
    config = config if isinstance(config, Mapping) else {}
    vision = config.get("vision_cfg")
    return config, vision if isinstance(vision, Mapping) else {}


def num_blocks(model: ModelConfig) -> int | None:
    """Returns the number of the image tower's blocks; a ResNet has its stem and residual blocks.

    None if the configuration does not say it, or the tower cannot be locked.
    """
    config, vision = architecture_of(model)
    if not vision:
        return None
    if vision.get("timm_model_name") or vision.get("backbone"):
        return _num_built_blocks(json.dumps(config, sort_keys=True))
    layers = vision.get("layers", 12)  # open_clip's default
    counts = [1, *layers] if isinstance(layers, list) else [layers]
    return sum(counts) if all(type(count) is int for count in counts) else None


@functools.cache
def _num_built_blocks(model_cfg: str) -> int | None:
    """Builds a tower of timm or a backbone without values, and returns the number of its blocks.

    None if the tower cannot be built or locked; the loader will say why. ``model_cfg`` is JSON.
    """
    from mclclip.models.memory import load_shapes  # seconds to import

    try:
        return load_shapes(files.parse_json(model_cfg, "the model"), text=False).num_blocks
    except (ValueError, OSError):
        return None


def more_than_crops(model: ModelConfig) -> list[str]:
    """Returns the fields of the model's augmentation that do more than to crop."""
    fields = [name for name in _MORE_THAN_CROPS if model.augmentation.get(name)]
    if not fields and "backbone" in architecture_of(model)[1]:
        return ["kind (simclr, the default of backbones)"]
    return fields
