"""Gives an image tower another image size, and checks that patches divide it."""

from __future__ import annotations

from typing import Any

from timm.models.vision_transformer import VisionTransformer

from mclclip.models.towers import pair
from mclclip.util import files


def check_patches(visual: Any, image_size: int | None) -> None:
    """Raises ValueError if an image size is no multiple of the image tower's patches.

    The patches of open_clip's ResNets are the 32 x 32 pixels of a position in their last layer.
    Towers of convolutions with another pooling take pictures of any size.
    """
    patches = getattr(getattr(visual, "trunk", visual), "patch_embed", visual)
    sides = (32, 32) if hasattr(visual, "attnpool") else pair(getattr(patches, "patch_size", 1))
    if image_size is not None and any(image_size % side for side in sides):
        near = image_size - image_size % sides[0]
        raise ValueError(
            f"image_size is {image_size}, which patches of {sides[0]} pixels do not divide: give a "
            f"multiple, such as {near or sides[0]} or {near + sides[0]}"
        )


def allow_image_size(visual: Any, image_size: int) -> None:
    """Makes an image tower take pictures of another size than its own, beside its own.

    Raises ValueError if patches do not divide it, or if timm's tower takes pictures of one size.
    """
    check_patches(visual, image_size)
    trunk = getattr(visual, "trunk", None)
    patches = getattr(trunk, "patch_embed", None)
    if getattr(patches, "img_size", None) is None:
        return
    if getattr(type(trunk), "forward_features", None) is not VisionTransformer.forward_features:
        raise ValueError(
            f"image_size is {image_size}, and the image tower is a timm {type(trunk).__name__}, "
            "which is trained at its own size alone: leave image_size out"
        )
    patches.strict_img_size = False  # type: ignore[union-attr]


def set_image_size(visual: Any) -> None:
    """Builds the trunk of open_clip's `TimmModel` anew for pictures of the tower's `image_size`.

    open_clip builds it for the size that timm's name stands for. Raises ValueError if timm cannot
    change it.
    """
    trunk: Any = getattr(visual, "trunk", None)
    patches = getattr(trunk, "patch_embed", None)
    size = getattr(patches, "img_size", None)
    if size is None or getattr(trunk, "dynamic_img_size", False):
        return
    # A hybrid's convolutions (`backbone`) take any size; learned positions do not.
    strict = getattr(patches, "strict_img_size", True) and not hasattr(patches, "backbone")
    positions = getattr(trunk, "pos_embed", None) is not None
    if not (strict or positions) or tuple(size) == tuple(visual.image_size):
        return
    try:
        trunk.set_input_size(tuple(visual.image_size))
    except Exception as error:  # timm's towers fail in many ways, or have no such method
        raise ValueError(
            f"image_size is {visual.image_size[0]}, but timm's tower of this name takes {size[0]} "
            f"pixels only ({files.message_of(error, 120)}): leave image_size out, or name the "
            "tower of that size"
        ) from error
