"""open_clip's training transform on uint8 arrays: the same crop, resized by torch.

`FastTransform` draws the box that open_clip's transform draws from torch's global generator, and
resizes it with torch's antialiased bicubic filter on uint8. Its pixels differ from those of PIL by
at most 2 of 255 (`tests/unit/models/test_fast_pixels.py`, `tests/benchmarks/README.md`). They stay
uint8 until they are on the device, where `normalized` does what open_clip's transform does last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import PIL
import torch
from torch import Tensor
from torch.nn import functional

STEPS = ("RandomResizedCrop", "MaybeConvertMode", "MaybeToTensor", "Normalize")
"""The steps of open_clip's training transform, where no further augmentation is asked for."""
_TRIES = 10
Box = tuple[int, int, int, int]
RowsFirst = Literal["never", "shrunk"]


@dataclass(frozen=True)
class FastTransform:
    """A random crop, resized.

    size   height and width of the result in pixels
    scale  smallest and largest share of the picture that a crop covers
    ratio  smallest and largest width of a crop divided by its height
    rows   which crops are resized in their height first, see `choose_rows_first`
    """

    size: tuple[int, int]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    rows: RowsFirst
    reads_pixels: ClassVar[bool] = True
    draws_from_torch_alone: ClassVar[bool] = True

    def __call__(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """uint8 [H, W, 3] -> uint8 [3, height, width]; draws from torch's global generator."""
        height, width = pixels.shape[:2]
        top, left, high, wide = crop_box(height, width, self.scale, self.ratio)
        crop = torch.from_numpy(pixels[top : top + high, left : left + wide])
        images = crop.permute(2, 0, 1)[None]
        if rows_first((high, wide), self.size, self.rows):
            images = _resized(images, (self.size[0], wide))
        return _resized(images, self.size)[0]


def choose_rows_first(pillow: str) -> RowsFirst:
    """Which crops a version of Pillow resizes in their height before their width.

    Between its two passes it cuts pixels to 0 .. 255, so that the order shows where colours are
    extreme, by up to 28 of 255. Version 13 begins with the height where that shrinks much more.
    """
    return "shrunk" if int(pillow.split(".")[0]) >= 13 else "never"


def rows_first(have: tuple[int, int], wanted: tuple[int, int], rule: RowsFirst) -> bool:
    """Whether Pillow resizes the height first, from (height, width) to (height, width)."""
    lost = have[0] - wanted[0]
    return rule == "shrunk" and lost > 0 and lost > 2 * (have[1] - wanted[1])


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [b, 3, H, W] -> uint8 [b, 3, *size]; torch resizes the width first."""
    return functional.interpolate(images, size, mode="bicubic", antialias=True)


def crop_box(height: int, width: int, scale: Sequence[float], ratio: Sequence[float]) -> Box:
    """Top, left, height and width of the box that torchvision's RandomResizedCrop takes.

    It makes the same draws in the same order as its ``get_params``, in a third of the time.
    """
    if _nothing_fits(height, width, scale[0], ratio):
        torch.empty(2 * _TRIES).uniform_()  # the draws of all tries
    else:
        low, high = torch.log(torch.tensor(ratio)).tolist()
        drawn = torch.empty(2)
        share, shape = drawn[:1], drawn[1:]
        for _ in range(_TRIES):
            share.uniform_(scale[0], scale[1])
            shape.uniform_(low, high).exp_()
            area, w_by_h = drawn.tolist()
            area *= height * width
            w, h = int(round(math.sqrt(area * w_by_h))), int(round(math.sqrt(area / w_by_h)))
            if 0 < w <= width and 0 < h <= height:
                top = int(torch.randint(0, height - h + 1, size=(1,)).item())
                return top, int(torch.randint(0, width - w + 1, size=(1,)).item()), h, w
    w, h = width, height
    if width / height < min(ratio):
        h = int(round(w / min(ratio)))
    elif width / height > max(ratio):
        w = int(round(h * max(ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


def _nothing_fits(height: int, width: int, least: float, ratio: Sequence[float]) -> bool:
    """Whether no draw gives a box inside of the picture, as where 0.9 of one of 3:2 is wanted.

    A margin of a thousandth, which is more than draws are rounded by, is counted as fitting.
    """
    area = least * height * width
    is_too_tall = 0.999 * ratio[0] * area > (width + 0.5) ** 2
    return is_too_tall or area > 1.001 * ratio[1] * (height + 0.5) ** 2


def fast_transform(train: Callable[[Any], Tensor]) -> FastTransform:
    """The fast form of a model's training transform.

    Raises ValueError where that is not open_clip's own, or does more than to crop and to resize.
    """
    steps = getattr(train, "transforms", [train])
    found = tuple(type(step).__name__ for step in steps)
    if found != STEPS:
        raise ValueError(
            f"data.pixels=fast only crops and resizes, and the training transform is "
            f"{', '.join(found)}: set data.pixels=exact"
        )
    size, scale, ratio = (tuple(getattr(steps[0], name)) for name in ("size", "scale", "ratio"))
    return FastTransform(size, scale, ratio, choose_rows_first(PIL.__version__))


def normalized(pixels: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """uint8 [..., C, H, W] -> float32 (pixels / 255 - mean) / deviation, where the pixels lie.

    The operations are open_clip's, in its order, so that the bits are the same too. ``mean`` and
    ``deviation`` are [C, 1, 1] on the same device.
    """
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(deviation)
