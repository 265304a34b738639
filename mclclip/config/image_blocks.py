"""Counts the blocks of an image tower from its configuration alone.

A lock of more blocks than there are is refused when options are read, not at the first training
step after hours of embedding. The model configurations that open_clip ships are read as files,
without torch; only where the image tower is one of timm's or a backbone, it is built without values
and counted.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mclclip import files


def check_image_blocks(option: str, number: int | str, name: str | Mapping[str, Any]) -> None:
    """Raises ValueError where ``number`` blocks are more than the model ``name`` has.

    ``option`` is the dotted option that asks for them. Models whose configuration is not at hand
    (the hub, a directory yet to be written) and towers that cannot be locked at all pass here; they
    are refused when the model is built.
    """
    if not isinstance(number, int) or not number or (layers := _layers(name)) is None:
        return
    blocks = _counted(layers)
    if number > blocks:
        what = f" (the stem and {blocks - 1} residual blocks)" if isinstance(layers, list) else ""
        model = repr(name) if isinstance(name, str) else "the model"
        raise ValueError(
            f"{option} is {number}, but the image tower of {model} has {blocks} blocks{what}: "
            f"give 0 to {blocks}, or 'all'"
        )


def num_blocks(name: str | Mapping[str, Any]) -> int | None:
    """Blocks of the image tower of the model ``name``; None where they are not known here."""
    layers = _layers(name)
    return None if layers is None else _counted(layers)


def _counted(layers: int | list[int]) -> int:
    """A ResNet's stem is a block too."""
    return 1 + sum(layers) if isinstance(layers, list) else layers


def check_patch_dropout(
    training: str, share: float, image_blocks: int | str, name: str | Mapping[str, Any]
) -> None:
    """Raises ValueError where ``training`` (``base``, ``train``) cannot drop a share of patches.

    The image tower is then no vision transformer of open_clip's own, or its first blocks are
    locked, which run as in evaluation. As above, a model whose configuration is not at hand passes.
    """
    vision = config_of(name).get("vision_cfg")
    if not share or not isinstance(vision, Mapping):
        return
    layers = vision.get("layers", 12)
    if vision.get("timm_model_name") or vision.get("backbone") or isinstance(layers, list):
        what = vision.get("timm_model_name") or vision.get("backbone") or "an open_clip ResNet"
        raise ValueError(
            f"{training}.patch_dropout is {share}, and the image tower is {what}: patches are "
            "dropped in open_clip's own vision transformers alone; leave it out"
        )
    if isinstance(image_blocks, int) and isinstance(layers, int) and image_blocks < layers:
        raise ValueError(
            f"{training}.patch_dropout is {share}, but {training}.lock.image_blocks={image_blocks} "
            f"locks the first {layers - image_blocks} of {layers} blocks, which see whole "
            f"pictures: set {training}.lock.image_blocks=all, or leave patch_dropout out"
        )


def config_of(name: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The architecture of a model; empty where it is not at hand."""
    config = _read(name) if isinstance(name, str) else name
    config = config.get("model_cfg", config) if isinstance(config, Mapping) else {}
    return config if isinstance(config, Mapping) else {}


def _layers(name: str | Mapping[str, Any]) -> int | list[int] | None:
    """``layers`` of the image tower: blocks of a transformer, or those of each ResNet layer."""
    config = config_of(name)
    vision = config.get("vision_cfg")
    if not isinstance(vision, Mapping):
        return None
    if vision.get("timm_model_name") or vision.get("backbone"):
        return _built(json.dumps(config, sort_keys=True))
    layers = vision.get("layers", 12)  # open_clip's default
    whole = all(type(n) is int for n in (layers if isinstance(layers, list) else [layers]))
    return layers if whole else None


@functools.cache
def _built(config: str) -> int | None:
    """Blocks of such a tower; None where it cannot be built or locked, as the loader will say."""
    from mclclip.models.memory import load_image_shapes  # seconds to import

    try:
        return load_image_shapes(files.parse_json(config, "the model")).num_blocks
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
