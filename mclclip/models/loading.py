"""Loads models of every kind, and compares the configurations of several."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mclclip.models import (
    backbones,
    clip,
    config_check,
    state_dicts,
    towers,
    transformers_folder,
    weights,
)
from mclclip.models.image_size import check_patches
from mclclip.models.model import Model
from mclclip.models.row_projection import WIDTH, build_on_rows
from mclclip.models.tokenizer import fetch_tokenizer
from mclclip.util import files
from mclclip.util.options import brief, prefix_errors

Name = str | Path | Mapping[str, Any]
_SMALLEST_TEXT = {"context_length": 1, "vocab_size": 1, "width": 8, "heads": 1, "layers": 1}


def load_towers(
    name: Name,
    pretrained: str | None = None,
    *,
    image_weights: str | None = None,
    text: bool = True,
    projector: Sequence[int] = (),
    seed: int = 0,
    augmentation: Mapping[str, Any] | None = None,
    load_weights: bool = True,
    long_context: bool = False,
    image_size: int | None = None,
    text_rows: Sequence[str] = (),
) -> Model:
    """Loads a model on the CPU in fp32, in eval mode, with nothing locked.

    Args:
        name: an open_clip name, a directory (`local-dir:PATH` or `PATH`), `hf-hub:ORG/NAME`, a CLIP
            or SigLIP of transformers (`hf:FOLDER`, `hf:ORG/NAME`), or a model config: a JSON file
            or a mapping with `embed_dim`, `vision_cfg` (open_clip's fields, or those of
            `backbones.Backbone`) and `text_cfg` (without it the model is an image tower alone).
        pretrained: open_clip's tag of the weights, or a file of weights; None draws the weights by
            `seed`. Directories and hub models bring their own weights and take no `pretrained`.
        image_weights: a safetensors file of the image tower's weights, for a model that brings
            none; everything else is drawn by `seed`.
        text: False loads the image tower alone, and fetches nothing for a text tower.
        projector: widths of linear layers on top of an image tower alone, drawn by `seed`.
        load_weights: False leaves a directory's model with random weights, to be filled later.
        augmentation: fields of open_clip's `AugmentationCfg`, or a `kind` of `transforms`.
        long_context: stretches the text tower's context, from 77 to 248 tokens (see `towers`).
        image_size: height and width of the pictures; positions are resized as open_clip does.
        text_rows: files of text embeddings (`data.text_rows`), whose projection is the text tower.

    Raises ValueError for a config that is unknown or could bring code (`config_check`), weights or
    an image size that do not fit, a projector beside a text tower, and a text tower that cannot be
    stretched; FileNotFoundError for missing files. Torch's global generators are not used.
    """
    config, file, directory = clip.find(name, pretrained, load_weights)
    if image_size is not None:
        vision = {**config["model_cfg"]["vision_cfg"], "image_size": image_size}
        config = {**config, "model_cfg": {**config["model_cfg"], "vision_cfg": vision}}
    model_cfg, tokenizer = config["model_cfg"], None
    if not text or not (text_rows or "text_cfg" in model_cfg):
        exported, model_cfg = _build_image_tower(config, file, seed, _where(name))
    else:
        _check_clip(name, model_cfg, projector)
        of = config, file, directory, seed, load_weights, long_context, text_rows
        exported, model_cfg, tokenizer = _build_both(_where(name), *of)
    check_patches(exported.visual, image_size)
    visual = exported.visual
    if image_weights is not None:
        if file is not None:
            raise ValueError(f"image_weights: {_where(name)} brings its own weights, leave it out")
        with prefix_errors("image_weights"):
            _fill_image_tower(visual, Path(image_weights))
    layout, pair = clip.layout_of(visual), clip.transforms_of(visual, augmentation)
    whole = {"model_cfg": model_cfg, "preprocess_cfg": dict(visual.preprocess_cfg)}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Model(exported, whole, layout, pair, tokenizer, projector).eval()


def _check_clip(name: Name, model_cfg: Mapping[str, Any], projector: Sequence[int] = ()) -> None:
    """Raises ValueError for a CoCa, and for a projector on a model with a text tower."""
    if "multimodal_cfg" in model_cfg:
        raise ValueError(f"{_where(name)} is a CoCa, which is not supported: use a CLIP model")
    if projector:
        raise ValueError(
            f"projector is {list(projector)}, but the model has a text tower, whose features "
            "images are compared with: set text=false for its image tower alone"
        )


def _build_both(
    where: str,
    config: dict[str, Any],
    file: Path | None,
    directory: Path | None,
    seed: int,
    load_weights: bool,
    long_context: bool,
    text_rows: Sequence[str],
) -> tuple[Any, dict[str, Any], Any]:
    """Builds a model of both towers and loads its weights from `file`, if there is one.

    Returns it with its model config and its tokenizer.
    """
    model_cfg = config["model_cfg"]
    if text_rows or WIDTH in model_cfg["text_cfg"]:
        return build_on_rows(_build_image_tower, text_rows, where, config, file, directory, seed)
    if long_context:
        model_cfg = towers.longer_config(model_cfg)
    exported = clip.build(config, seed, random_text=bool(file) or not load_weights)
    vocabulary = clip.vocabulary(exported)
    tokenizer = clip.tokenizer_of(model_cfg["text_cfg"], directory, vocabulary)
    if file:
        clip.fill(exported, file)
    if long_context:
        towers.stretch(exported)
    return exported, model_cfg, tokenizer


def _build_image_tower(
    config: Mapping[str, Any], file: Path | None, seed: int, where: str
) -> tuple[Any, dict[str, Any]]:
    """Builds an image tower alone and loads its weights from `file`, if there is one.

    Returns a module whose `visual` is the tower, and the model config that its export records.
    """
    model_cfg, module = config["model_cfg"], nn.Module()
    visual: Any
    if config_check.BACKBONE in model_cfg["vision_cfg"]:
        backbone = backbones.parse(model_cfg["vision_cfg"], where)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            visual = backbones.BackboneTower(backbone, where)
        if model_cfg.get("embed_dim", visual.embed_dim) != visual.embed_dim:
            raise ValueError(
                f"embed_dim of {where} is {model_cfg['embed_dim']}, but {backbone.backbone} gives "
                f"{visual.embed_dim}: leave it out"
            )
        image_cfg = {"embed_dim": visual.embed_dim, "vision_cfg": asdict(backbone)}
    else:
        names = ("embed_dim", "vision_cfg", "quick_gelu")
        image_cfg = {key: model_cfg[key] for key in names if key in model_cfg}
        of_clip = file is not None and "text_cfg" in model_cfg
        if not of_clip:
            config = {**config, "model_cfg": image_cfg | {"text_cfg": dict(_SMALLEST_TEXT)}}
        whole = clip.build(config, seed, random_text=True)
        if file is not None and of_clip:
            clip.fill(whole, file)
            file = None
        visual = whole.visual
    if file is not None:
        _fill_image_tower(visual, file)
    module.visual = visual
    return module, image_cfg


def _fill_image_tower(visual: nn.Module, file: Path) -> None:
    """Loads a safetensors file into an image tower.

    The file has either open_clip's names (`visual.trunk.conv_stem.weight`; only the image tower's
    are read) or those of the tower's library (`conv_stem.weight`; its classifier is left out). A
    file with the library's names lacks the projection that open_clip adds, which then stays as it
    was drawn. Raises ValueError if the file is no safetensors file, lacks a tensor, or has one that
    is not the tower's or has another shape or kind.
    """
    with weights.open_tensors(file) as opened:
        names = [*opened.keys()]
        names = [name for name in names if name.startswith("visual.")] or names
        tensors = {name.removeprefix("visual."): opened.get_tensor(name) for name in names}
    trunk, drawn = getattr(visual, "trunk", None), tuple[str, ...]()
    if trunk is not None and not any(name.startswith("trunk.") for name in tensors):
        classifier = getattr(trunk, "pretrained_cfg", {}).get("classifier") or "fc"
        left_out = (classifier,) if isinstance(classifier, str) else tuple(classifier)
        drawn = ("head", *(f"trunk.{name}" for name in left_out))
        tensors = {
            f"trunk.{name}": tensor
            for name, tensor in tensors.items()
            if not towers.belongs(name, left_out)
        }
    state_dicts.resize_picture_positions(visual, tensors, str(file))
    tower = f"{type(trunk or visual).__name__} by the names of timm, torchvision or open_clip"
    with prefix_errors(f"{file} does not fit the image tower ({tower})"):
        state_dicts.check_names(tensors, visual.state_dict(), drawn)
    visual.load_state_dict(tensors, strict=False)
    weights.refuse_not_finite(visual, str(file))


# --- what a name stands for ------------------------------------------------------------------


def has_texts(name: Name) -> bool:
    """Returns True if the named model has a text tower, or if its configuration is not on this
    disk."""
    if isinstance(name, Mapping) or str(name).endswith(".json"):
        return "text_cfg" in weights.read_model_config(name)["model_cfg"]
    return not weights.is_image_encoder(Path(str(name).removeprefix("local-dir:")))


def model_config(name: Name, pretrained: str | None = None) -> dict[str, Any]:
    """Returns open_clip's ``model_cfg`` of a model; an image encoder's has no ``text_cfg``.

    If ``pretrained`` names weights (a tag or a file), the names of their tensors may complete it;
    their values are not read. Raises the errors of ``load_towers``.
    """
    weights.refuse_joined(name)
    model_cfg: dict[str, Any] = clip.find(name, pretrained, load_weights=False)[0]["model_cfg"]
    if "text_cfg" in model_cfg:
        _check_clip(name, model_cfg)
    return model_cfg


def model_tokenizer(name: Name) -> Any:
    """Returns the tokenizer of a model, which has a ``context_length``; reads no weights.

    Raises FileNotFoundError or ValueError if it is missing or cannot be read, or the model has no
    text tower.
    """
    config, _, directory = clip.find(name, load_weights=False)
    if "text_cfg" not in config["model_cfg"]:
        raise ValueError(f"{_where(name)} has no text tower")
    return fetch_tokenizer(
        clip.tokenizer_of(config["model_cfg"]["text_cfg"], directory, sys.maxsize)
    )


def refuse_without_weights(name: str | Path) -> None:
    """Raises ValueError, which lists the tags of weights, if a name is that of an architecture
    alone. Errors of the configuration are raised first, also for a folder of transformers."""
    if str(name).startswith(transformers_folder.PREFIX):
        model_config(name)
    if clip.is_without_weights(name):
        model_config(name)
        raise ValueError(
            f"{name} names no weights: give {name}@TAG with a tag of open_clip's (tags: "
            f"{clip.tags(str(name))}), {name}@FILE with a file of weights, or {name}@random"
        )


def _where(name: Name) -> str:
    return "the model config" if isinstance(name, Mapping) else str(name)


def common_config(directories: Sequence[Path]) -> dict[str, Any]:
    """Returns the configuration that exported models have in common, to be joined or averaged.

    Other programs may write the same preprocessing in another way; if configurations differ, it is
    compared again after open_clip has filled in its defaults. Bases are not compared: the result
    has a `base_digest` only if all models have the same. Raises ValueError, naming the first field
    that differs.
    """
    first, *others = (weights.read_config(path) for path in directories)
    bases = {config.pop("base_digest", None) for config in (first, *others)}
    for path, config in zip(directories[1:], others, strict=True):
        if config == first:
            continue
        difference = _difference(first["model_cfg"], config["model_cfg"], "model_cfg")
        if not difference:
            sides = [
                load_towers(directory, load_weights=False).config["preprocess_cfg"]
                for directory in (directories[0], path)
            ]
            difference = _difference(sides[0], sides[1], "preprocess_cfg")
        if difference:
            raise ValueError(
                f"{path} has another {weights.CONFIG} than {directories[0]}, where {difference}: "
                "only models of one architecture and preprocessing can be joined"
            )
    base = bases.pop() if len(bases) == 1 else None
    return first | ({"base_digest": base} if base else {})


def _difference(first: Any, other: Any, name: str) -> str:
    """Describes the first difference of two configurations, for example "model_cfg.embed_dim is 512
    and not 768"; empty if they are equal."""
    first, other = files.as_json(first), files.as_json(other)
    if not isinstance(first, dict) or not isinstance(other, dict):
        return "" if first == other else f"{name} is {brief(first)} and not {brief(other)}"
    keys = sorted(first.keys() | other.keys())
    return next(
        filter(None, (_difference(first.get(k), other.get(k), f"{name}.{k}") for k in keys)), ""
    )
