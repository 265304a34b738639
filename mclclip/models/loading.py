"""One model of either kind, a CLIP model or an image encoder, and its state for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mclclip import files
from mclclip.models import clip, weights
from mclclip.models.clip import load_clip, load_image_encoder
from mclclip.models.clip_model import ClipModel
from mclclip.models.image_encoder import ImageEncoder
from mclclip.models.lora import add_lora
from mclclip.models.patch_dropout import drop_patches
from mclclip.models.transformers_encoder import PREFIX
from mclclip.options import shown

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
    _refuse_transformers(name)
    if text and has_texts(name):
        if projector:
            raise ValueError(
                f"projector is {list(projector)}, but the model has a text tower, whose features "
                "images are compared with: set text=false for its image tower alone"
            )
        return load_clip(name, pretrained, **options)
    return load_image_encoder(name, pretrained, projector=projector, **options)


def check_tokenizer(name: str | Path | Mapping[str, Any]) -> None:
    """Raises FileNotFoundError or ValueError where the tokenizer of a model that is to be trained
    cannot be had; reads no weights."""
    _refuse_transformers(name)
    clip.check_tokenizer(name)


def _refuse_transformers(name: object) -> None:
    if str(name).startswith(PREFIX):
        raise ValueError(
            f"{name} is a model of transformers, which can be evaluated but not trained or joined: "
            "use the same model's name in open_clip, or hf-hub:ORG/NAME of its open_clip weights"
        )


def prepare_model(
    model: AnyModel,
    *,
    lock: Mapping[str, Any],
    lora: Mapping[str, Any] | None,
    seed: int,
    precision: str,
    grad_checkpointing: bool,
    patch_dropout: float = 0.0,
) -> None:
    """Prepares a model for training, in place: locks, adapters, precision, recomputation, patches.

    ``lock`` and ``lora`` are the arguments of ClipModel.lock and add_lora; ``seed`` draws adapters.
    """
    model.lock(**lock)
    if lora is not None:
        add_lora(model, **lora, seed=seed)
    drop_patches(model, patch_dropout)
    if precision == "float64" and next(model.parameters()).dtype != torch.float64:
        model.double()  # tensors without values cannot be converted here, and come so (`plan`)
    model.train()
    if grad_checkpointing:
        model.set_grad_checkpointing(True)


def common_config(directories: Sequence[Path]) -> dict[str, Any]:
    """The configuration that exported models share, to be joined or averaged.

    Others may write the same preprocessing in another way, so where they differ it is compared
    after open_clip has filled in its defaults. Bases are not compared: the result has a
    `base_digest` only if all have the same. Raises ValueError, naming the field, where one differs.
    """
    first, *others = (weights.read_config(path) for path in directories)
    bases = {config.pop("base_digest", None) for config in (first, *others)}
    for path, config in zip(directories[1:], others, strict=True):
        if config == first:
            continue
        found = _difference(first["model_cfg"], config["model_cfg"], "model_cfg")
        if not found:
            sides = [
                load_any(one, load_weights=False).config["preprocess_cfg"]
                for one in (directories[0], path)
            ]
            found = _difference(sides[0], sides[1], "preprocess_cfg")
        if found:
            raise ValueError(
                f"{path} has another {weights.CONFIG} than {directories[0]}, where {found}: only "
                "models of one architecture and preprocessing can be joined"
            )
    base = bases.pop() if len(bases) == 1 else None
    return first | ({"base_digest": base} if base else {})


def _difference(first: Any, other: Any, name: str) -> str:
    """The first field in which two configurations differ, in words; empty where there is none."""
    first, other = files.as_json(first), files.as_json(other)
    if not isinstance(first, dict) or not isinstance(other, dict):
        return "" if first == other else f"{name} is {shown(first)} and not {shown(other)}"
    keys = sorted(first.keys() | other.keys())
    return next(
        filter(None, (_difference(first.get(k), other.get(k), f"{name}.{k}") for k in keys)), ""
    )
