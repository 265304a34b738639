"""Facts of a model's architecture that follow from its options, without its weights.

A lock of more blocks than there are is refused when options are read, not at the first training
step after hours of embedding. The configurations that open_clip ships are read as files; a tower of
timm or a backbone is built without values, and counted.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mclclip import files
from mclclip.models.options import ModelConfig

# Fields of an augmentation that do more than to crop: `kind` is one of `models.transforms`, the
# others are of open_clip's AugmentationCfg.
_MORE_THAN_CROPS = ("kind", "use_timm", "color_jitter_prob", "gray_scale_prob")


def architecture(model: ModelConfig) -> Mapping[str, Any]:
    """The configuration of the architecture; empty where it is not at hand (a model of the
    hub, a directory yet to be written)."""
    config = _read(model.name) if isinstance(model.name, str) else model.name
    config = config.get("model_cfg", config) if isinstance(config, Mapping) else {}
    return config if isinstance(config, Mapping) else {}


def num_blocks(model: ModelConfig) -> int | None:
    """Blocks of the image tower, of a ResNet the stem and the residual blocks; None where they
    are not known from the configuration, or where the tower cannot be locked."""
    vision = architecture(model).get("vision_cfg")
    if not isinstance(vision, Mapping):
        return None
    if vision.get("timm_model_name") or vision.get("backbone"):
        return _num_built_blocks(json.dumps(architecture(model), sort_keys=True))
    layers = vision.get("layers", 12)  # open_clip's default
    counts = [1, *layers] if isinstance(layers, list) else [layers]
    return sum(counts) if all(type(count) is int for count in counts) else None


def check_image_blocks(model: ModelConfig, option: str, number: int | str) -> None:
    """Raises ValueError where the dotted ``option`` asks for more blocks than there are.

    Where ``num_blocks`` is None it passes; such a lock is refused when the model is built.
    """
    if not isinstance(number, int) or not number or (blocks := num_blocks(model)) is None:
        return
    if number > blocks:
        layers = architecture(model)["vision_cfg"].get("layers")
        of = f" (the stem and {blocks - 1} residual blocks)" if isinstance(layers, list) else ""
        name = repr(model.name) if isinstance(model.name, str) else "the model"
        raise ValueError(
            f"{option} is {number}, but the image tower of {name} has {blocks} blocks{of}: "
            f"give 0 to {blocks}, or 'all'"
        )


def check_patch_dropout(
    model: ModelConfig, training: str, share: float, image_blocks: int | str
) -> None:
    """Raises ValueError where ``training`` (``base``, ``train``) cannot drop patches.

    The image tower is then no vision transformer of open_clip's own, or its first blocks are
    locked, which run as in evaluation. A model whose configuration is not at hand passes.
    """
    vision = architecture(model).get("vision_cfg")
    if not share or not isinstance(vision, Mapping):
        return
    layers = vision.get("layers", 12)
    other = vision.get("timm_model_name") or vision.get("backbone")
    if other or isinstance(layers, list):
        raise ValueError(
            f"{training}.patch_dropout is {share}, and the image tower is "
            f"{other or 'an open_clip ResNet'}: patches are dropped in open_clip's own vision "
            "transformers alone; leave it out"
        )
    if isinstance(image_blocks, int) and isinstance(layers, int) and image_blocks < layers:
        raise ValueError(
            f"{training}.patch_dropout is {share}, but {training}.lock.image_blocks="
            f"{image_blocks} locks the first {layers - image_blocks} of {layers} blocks, which "
            f"see whole pictures: set {training}.lock.image_blocks=all, or leave patch_dropout "
            "out"
        )


def more_than_crops(model: ModelConfig) -> list[str]:
    """Fields of the augmentation, as set or by default, that do more than to crop."""
    asked = [name for name in _MORE_THAN_CROPS if model.augmentation.get(name)]
    vision = architecture(model).get("vision_cfg")
    if not asked and isinstance(vision, Mapping) and "backbone" in vision:
        return ["kind (simclr, the default of backbones)"]
    return asked


@functools.cache
def _num_built_blocks(architecture: str) -> int | None:
    """Blocks of a tower of timm or a backbone, built without values; None where it cannot be built
    or locked, as the loader will say."""
    from mclclip.models.memory import load_shapes  # seconds to import

    try:
        return load_shapes(files.parse_json(architecture, "the model"), text=False).num_blocks
    except (ValueError, OSError):
        return None


def _read(name: str) -> Any:
    """The JSON configuration of a model by name, file or directory; None where there is none."""
    path = Path(name.removeprefix("local-dir:"))
    try:
        if path.is_dir():
            path = path / "open_clip_config.json"
        elif path.suffix != ".json":
            package = find_spec("open_clip")
            folders = package.submodule_search_locations if package else None
            path = Path(next(iter(folders or []), "")) / "model_configs"
            path = path / f"{name.replace('/', '-')}.json"
        return files.read_model_json(path)
    except (OSError, ValueError):  # the loader of models reports the error
        return None
