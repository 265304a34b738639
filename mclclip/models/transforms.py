"""Transforms from images to tensors, for any number of channels: SimCLR's augmentations, and none.

An image is a PIL image or a uint8 array [H, W, C]; the result is float32 [C, H, W]. Crops and flips
act on all channels alike. Colours are changed in the first three channels only, if there are three
or more; otherwise the first channel is changed in brightness and contrast. Randomness comes from
torch's global generator alone, which the caller seeds for every view.

An augmentation with a `kind` selects one of these; otherwise open_clip's towers are trained with
open_clip's own transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

import mclclip.torchvision_fix  # noqa: F401

# isort: split
from torchvision.transforms.v2 import InterpolationMode, RandomResizedCrop
from torchvision.transforms.v2 import functional as ops

from mclclip.options import STRICT, Share, first_problem

KIND = "kind"
"""The field of an augmentation that names a transform of this file."""

Transform = Callable[[Any], Tensor]
Pair = tuple[Transform, Transform]
"""The transform of training and that of validation."""


@dataclass(frozen=True)
class Look:
    """Size and number format of a tower's images.

    size      height and width in pixels
    mean      subtracted from values between 0 and 1: one number, or one for each channel
    std       divides the difference: one number, or one for each channel
    channels  C
    """

    size: tuple[int, int]
    mean: Sequence[float]
    std: Sequence[float]
    channels: int = 3

    def pixels(self, image: Any) -> Tensor:
        """Returns float32 [C, H, W] between 0 and 1; ValueError for other channels than C."""
        array = np.asarray(image)
        if array.ndim != 3 or array.shape[2] != self.channels:
            found = array.shape[2] if array.ndim == 3 else 1
            raise ValueError(
                f"an image has {found} channels, but the model takes {self.channels}: set the "
                "model's channels, or take other shards"
            )
        return torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255.0

    def normalized(self, pixels: Tensor) -> Tensor:
        """[C, H, W] with values between 0 and 1 -> normalised by mean and std."""
        mean, std = (torch.tensor(v, dtype=torch.float32) for v in (self.mean, self.std))
        return (pixels - mean[:, None, None]) / std[:, None, None]


@dataclass(frozen=True)
class PlainTransform:
    """Resizes the image until it covers the tower's size, and cuts out the middle."""

    look: Look
    reads_arrays: ClassVar[bool] = True

    def __call__(self, image: Any) -> Tensor:
        """Image -> [C, H, W]."""
        pixels, (height, width) = self.look.pixels(image), self.look.size
        if pixels.shape[1:] != (height, width):
            _, high, wide = pixels.shape
            scale = max(height / high, width / wide)
            sides = [max(round(high * scale), height), max(round(wide * scale), width)]
            pixels = ops.resize(pixels, sides, InterpolationMode.BICUBIC, antialias=True)
            pixels = ops.center_crop(pixels, [height, width]).clamp(0.0, 1.0)
        return self.look.normalized(pixels)


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class SimCLROptions:
    """SimCLR's augmentations (Chen et al., 2020, appendix A); defaults are those for small
    pictures (appendix B.9: half the colour distortion, no blur)."""

    kind: Literal["simclr"] = "simclr"
    scale: tuple[Share, Share] = (0.08, 1.0)
    """Smallest and largest share of the picture that a crop covers."""
    flip: Share = 0.5
    """Probability of a mirrored picture."""
    jitter: Share = 0.8
    """Probability of a change of colours."""
    strength: Annotated[float, Field(ge=0.0, le=2.5)] = 0.5
    """Strength s: brightness, contrast and saturation change by up to 0.8 s, hue by 0.2 s."""
    grayscale: Share = 0.2
    """Probability that colours become grey."""
    blur: Share = 0.0
    """Probability of a Gaussian blur, sigma between 0.1 and 2 pixels, width a tenth of the side."""

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale is {self.scale}: wanted two shares, such as [0.2, 1.0]")


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class PlainOptions:
    """No augmentation: every view is the picture itself."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class SimCLRTransform:
    """A random crop, perhaps mirrored, with other colours; see `SimCLROptions`."""

    look: Look
    options: SimCLROptions
    reads_arrays: ClassVar[bool] = True

    def __call__(self, image: Any) -> Tensor:
        """Image -> [C, H, W]; draws from torch's global generator."""
        options, pixels = self.options, self.look.pixels(image)
        top, left, height, width = RandomResizedCrop.get_params(
            pixels, list(options.scale), [3 / 4, 4 / 3]
        )
        size = list(self.look.size)
        pixels = ops.resized_crop(
            pixels, top, left, height, width, size, InterpolationMode.BICUBIC, antialias=True
        ).clamp(0.0, 1.0)
        if _drawn(options.flip):
            pixels = ops.horizontal_flip(pixels)
        if _drawn(options.jitter):
            pixels = _on_colours(_jittered, pixels, options.strength)
        if _drawn(options.grayscale):
            pixels = _on_colours(_grey, pixels)
        if _drawn(options.blur):
            side = 2 * (min(size) // 20) + 1
            sigma = 0.1 + 1.9 * float(torch.rand(()))
            pixels = ops.gaussian_blur(pixels, [side, side], [sigma, sigma])
        return self.look.normalized(pixels)


def _drawn(probability: float) -> bool:
    return bool(torch.rand(()) < probability)


def _on_colours(change: Callable[..., Tensor], pixels: Tensor, *args: Any) -> Tensor:
    """Changes the first three channels, or the only one; the others stay as they are."""
    number = 3 if len(pixels) >= 3 else 1
    return torch.cat([change(pixels[:number], *args), pixels[number:]])


def _jittered(colours: Tensor, strength: float) -> Tensor:
    """Brightness, contrast, saturation and hue in a random order, as SimCLR's code draws them."""
    most = 0.8 * strength
    low, high = max(0.0, 1.0 - most), 1.0 + most
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: ops.adjust_brightness(x, _between(low, high)),
        lambda x: ops.adjust_contrast(x, _between(low, high)),
    ]
    if len(colours) == 3:
        hue = min(0.2 * strength, 0.5)
        changes += [
            lambda x: ops.adjust_saturation(x, _between(low, high)),
            lambda x: ops.adjust_hue(x, _between(-hue, hue)),
        ]
    for number in torch.randperm(len(changes)).tolist():
        colours = changes[number](colours)
    return colours


def _between(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def _grey(colours: Tensor) -> Tensor:
    return ops.rgb_to_grayscale(colours, num_output_channels=3) if len(colours) == 3 else colours


_KINDS: dict[str, tuple[type[Any], Callable[[Look, Any], Transform]]] = {
    "simclr": (SimCLROptions, SimCLRTransform),
    "none": (PlainOptions, lambda look, _: PlainTransform(look)),
}


def training(look: Look, augmentation: Mapping[str, Any]) -> Transform:
    """The training transform of an augmentation with a `kind`; ValueError for a wrong option."""
    kind = augmentation.get(KIND)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"there is no augmentation of kind {kind!r}: take {' or '.join(_KINDS)}, or leave kind "
            "out for open_clip's own"
        )
    options_class, make = _KINDS[kind]
    try:
        options = TypeAdapter(options_class).validate_python(dict(augmentation))
    except ValidationError as error:
        name, problem = first_problem(error)
        raise ValueError(f"{f'augmentation {name}'.strip()}: {problem}") from None
    return make(look, options)
