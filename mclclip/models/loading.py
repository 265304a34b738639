"""One model of either kind, a CLIP model or an image encoder, and its state for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mclclip.models import weights
from mclclip.models.clip import load_clip, load_image_encoder
from mclclip.models.clip_model import ClipModel
from mclclip.models.image_encoder import ImageEncoder
from mclclip.models.lora import add_lora
from mclclip.models.transformers_encoder import PREFIX

AnyModel = ClipModel | ImageEncoder


def has_texts(name: str | Path | Mapping[str, Any]) -> bool:
    """Whether the named model has a text tower; True if its configuration is not on this disk."""
    if isinstance(name, Mapping) or str(name).endswith(".json"):
        return "text_cfg" in weights.read_model_config(name)["model_cfg"]
    return not weights.is_image_encoder(Path(str(name).removeprefix("local-dir:")))


def load_any(
    name: str | Path | Mapping[str, Any],
    pretrained: str | None = None,
    *,
    text: bool = True,
    projector: Sequence[int] = (),
    **options: Any,
) -> AnyModel:
    """The named CLIP model or image encoder; raises the errors of `load_clip`.

    `text=False` takes the image tower alone; `projector` has the widths of its projector. `options`
    are those that `load_clip` and `load_image_encoder` share. Raises ValueError for a projector on
    a model with a text tower.
    """
    if str(name).startswith(PREFIX):
        raise ValueError(
            f"{name} is a model of transformers, which can be evaluated but not trained or joined: "
            "use the same model's name in open_clip, or hf-hub:ORG/NAME of its open_clip weights"
        )
    if text and has_texts(name):
        if projector:
            raise ValueError(
                f"projector is {list(projector)}, but the model has a text tower, whose features "
                "images are compared with: set text=false for its image tower alone"
            )
        return load_clip(name, pretrained, **options)
    return load_image_encoder(name, pretrained, projector=projector, **options)


def prepare_model(
    model: AnyModel,
    *,
    lock: Mapping[str, Any],
    lora: Mapping[str, Any] | None,
    seed: int,
    precision: str,
    grad_checkpointing: bool,
) -> None:
    """Prepares a model for training, in place: locks, adapters, precision, recomputation.

    ``lock`` and ``lora`` are the arguments of ClipModel.lock and add_lora; ``seed`` draws adapters.
    """
    model.lock(**lock)
    if lora is not None:
        add_lora(model, **lora, seed=seed)
    if precision == "float64":
        model.double()
    model.train()
    if grad_checkpointing:
        model.set_grad_checkpointing(True)
