"""How a training makes pixels, settled from its options alone, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mclclip.config.image_blocks import config_of
from mclclip.data.decode import Pixels

# Fields of an augmentation that do more than to crop: `kind` is one of `models.transforms`, the
# others are of open_clip's AugmentationCfg.
_MORE = ("kind", "use_timm", "color_jitter_prob", "gray_scale_prob")


def settle(
    pixels: Pixels | Literal["auto"], augmentation: Mapping[str, Any], name: str | Mapping[str, Any]
) -> Pixels:
    """``auto`` is ``fast`` where the training transform of the model ``name`` only crops.

    Raises ValueError, one line, for ``fast`` where it does more.
    """
    asked = _unlike_crops(augmentation, name)
    if pixels == "auto":
        return "exact" if asked else "fast"
    if pixels == "fast" and asked:
        raise ValueError(
            f"data.pixels=fast only crops and resizes, and the augmentation asks for "
            f"{', '.join(asked)}: set data.pixels=exact, or leave that out of model.augmentation"
        )
    return pixels


def _unlike_crops(augmentation: Mapping[str, Any], name: str | Mapping[str, Any]) -> list[str]:
    asked = [field for field in _MORE if augmentation.get(field)]
    vision = config_of(name).get("vision_cfg")
    if not asked and isinstance(vision, Mapping) and "backbone" in vision:
        return ["kind (simclr, the default of backbones)"]
    return asked
