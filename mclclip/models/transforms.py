"""Transforms from images to tensors: SimCLR's augmentations, none, and a fast form of open_clip's.

An image is a PIL image or a uint8 array [H, W, C]; the result is float32 [C, H, W]. Crops and flips
act on all channels alike. Colours are changed in the first three channels only, if there are three
or more; otherwise the first channel is changed in brightness and contrast. Channels listed in
`plain_channels` are only resized. All randomness comes from torch's global generator, which the
caller seeds for every view.

The option `model.augmentation.kind` selects SimCLR's augmentations or none, for any number of
channels. Without it open_clip's towers are trained with open_clip's own transforms, or with
`FastTransform`. That draws the same box as open_clip's transform, and resizes it with torch's
antialiased bicubic filter on uint8. Its pixels differ from those of PIL by at most 2 of 255
(`tests/unit/models/test_fast_pixels.py`, `tests/benchmarks/README.md`). They stay uint8 until they
are on the device, where `normalize` does the last step of open_clip's transform. So do the pixels
of embedding and evaluation (`PixelTransform`), which are open_clip's own, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import PIL
import torch
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor
from torch.nn import functional

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as ops

from mclclip.data.picture_transform import PictureTransform, as_transform
from mclclip.util.options import STRICT, Share, first_problem

# The steps of open_clip's training transform if its augmentation only crops.
_FAST_STEPS = ("RandomResizedCrop", "MaybeConvertMode", "MaybeToTensor", "Normalize")
_TRIES = 10
_AT_ONCE = 400_000  # numbers in the views whose colours change together; they fit into a cache
Box = tuple[int, int, int, int]
RowsFirst = Literal["never", "shrunk"]

KIND = "kind"
"""The field of an augmentation that selects a transform of this file: "simclr" or "none"."""

Transform = Callable[[Any], Tensor]
Change = Callable[[Tensor, Tensor], Tensor]
"""Changes colours [N, 3, H, W], each picture by its factor [N, 1, 1, 1]."""
Pair = tuple[Transform, Transform]
"""The transform of training and that of validation."""


@dataclass(frozen=True)
class PixelFormat:
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
        """Returns an image as float32 [C, H, W] between 0 and 1.

        Raises ValueError if it has another number of channels.
        """
        array = np.asarray(image)
        if array.ndim != 3 or array.shape[2] != self.channels:
            channels = array.shape[2] if array.ndim == 3 else 1
            raise ValueError(
                f"an image has {channels} channels, but the model takes {self.channels}: set the "
                "model's channels, or take other shards"
            )
        return torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255.0

    def normalize(self, pixels: Tensor) -> Tensor:
        """Subtracts the mean from pixels [..., C, H, W] between 0 and 1, and divides by std."""
        return normalize(pixels, self.mean, self.std)


@dataclass(frozen=True)
class PlainTransform(PictureTransform):
    """Resizes the image until it covers the tower's size, and cuts out the middle."""

    format: PixelFormat
    reads_arrays: ClassVar[bool] = True

    def __call__(self, image: Any) -> Tensor:
        """Image -> [C, H, W]."""
        return self.format.normalize(self.resize_and_crop(self.format.pixels(image)))

    def resize_and_crop(self, pixels: Tensor) -> Tensor:
        """[C, high, wide] with values between 0 and 1 -> [C, H, W], the tower's size."""
        _, high, wide = pixels.shape
        height, width = self.format.size
        if (high, wide) == (height, width):
            return pixels
        scale = max(height / high, width / wide)
        sides = [max(round(high * scale), height), max(round(wide * scale), width)]
        pixels = ops.resize(pixels, sides, InterpolationMode.BICUBIC, antialias=True)
        cut: Tensor = ops.center_crop(pixels, [height, width]).clamp(0.0, 1.0)
        return cut


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class SimCLROptions:
    """SimCLR's augmentations (Chen et al., 2020, appendix A). The defaults are for small pictures
    (appendix B.9: half the colour distortion, no blur)."""

    kind: Literal["simclr"] = "simclr"
    scale: tuple[Share, Share] = (0.08, 1.0)
    """Smallest and largest share of the picture that a crop covers."""
    flip: Share = 0.5
    """Probability that the picture is mirrored."""
    jitter: Share = 0.8
    """Probability that colours are changed."""
    strength: Annotated[float, Field(ge=0.0, le=2.5)] = 0.5
    """Strength s: brightness, contrast and saturation change by up to 0.8 s, hue by 0.2 s."""
    grayscale: Share = 0.2
    """Probability that colours become grey."""
    blur: Share = 0.0
    """Probability of a Gaussian blur, sigma between 0.1 and 2 pixels, width a tenth of the side."""
    plain_channels: list[NonNegativeInt] = field(default_factory=list)
    """Numbers (from 0) of channels that are only resized, as for evaluation: they are neither
    cropped at random nor mirrored, recoloured or blurred."""

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale is {self.scale}: wanted two shares, such as [0.2, 1.0]")


@dataclass(frozen=True)
class Crop:
    """A cropped view with all that was drawn for it; `finish` then changes its colours.

    pixels   float32 [C, H, W] between 0 and 1, cropped and perhaps mirrored
    plain    float32 [n, H, W], the n `plain_channels`
    changes  changes of colour in their order, each with its factor
    is_grey  True if the colours become grey
    sigma    width of the Gaussian blur in pixels; 0: no blur
    """

    pixels: Tensor
    plain: Tensor
    changes: Sequence[tuple[Change, float]]
    is_grey: bool
    sigma: float


@dataclass(frozen=True)
class SimCLRTransform(PictureTransform):
    """Makes a random crop, perhaps mirrored, with changed colours; see `SimCLROptions`.

    Loaders call `draw` for every view and `finish` for a batch, which takes half the time. The
    pixels of a view are the same in any batch.
    """

    format: PixelFormat
    options: SimCLROptions
    reads_arrays: ClassVar[bool] = True
    draws_from_torch_alone: ClassVar[bool] = True

    def __call__(self, image: Any) -> Tensor:
        """Image -> [C, H, W]; draws from torch's global generator."""
        return self.finish([self.draw(image)])[0]

    def draw(self, image: Any) -> Crop:
        """Draws everything that is random, and crops."""
        options, picture = self.options, self.format.pixels(image)
        _, high, wide = picture.shape
        box = crop_box(high, wide, options.scale, (3 / 4, 4 / 3))
        pixels = ops.resized_crop(
            picture, *box, list(self.format.size), InterpolationMode.BICUBIC, antialias=True
        ).clamp_(0.0, 1.0)
        if torch.rand(()) < options.flip:
            pixels = ops.horizontal_flip(pixels)
        changes: list[tuple[Change, float]] = []
        if torch.rand(()) < options.jitter:
            most, hue = 0.8 * options.strength, min(0.2 * options.strength, 0.5)
            factor = (max(0.0, 1.0 - most), 1.0 + most)
            ranges = (factor, factor, factor, (-hue, hue))
            for number in torch.randperm(4 if len(pixels) >= 3 else 2).tolist():
                least, largest = ranges[number]
                amount = least + (largest - least) * float(torch.rand(()))
                changes.append((_CHANGES[number], amount))
        is_grey = bool(torch.rand(()) < options.grayscale) and len(pixels) >= 3
        is_blurred = bool(torch.rand(()) < options.blur)
        sigma = 0.1 + 1.9 * float(torch.rand(())) if is_blurred else 0.0
        plain = PlainTransform(self.format).resize_and_crop(picture[options.plain_channels])
        return Crop(pixels, plain, changes, is_grey, sigma)

    def finish(self, crops: Sequence[Crop]) -> Tensor:
        """Changes the colours of N crops, blurs and normalises them -> [N, C, H, W]."""
        most = max(1, _AT_ONCE // crops[0].pixels.numel())
        if len(crops) > most:
            parts = (crops[start : start + most] for start in range(0, len(crops), most))
            return torch.cat([self.finish(part) for part in parts])
        pixels = torch.stack([crop.pixels for crop in crops])
        # Without three channels, the first one is changed in brightness and contrast.
        colours = pixels[:, : 3 if pixels.shape[1] >= 3 else 1]
        for place in range(len(_CHANGES)):
            for change in _CHANGES:
                changed = [
                    (row, crop.changes[place][1])
                    for row, crop in enumerate(crops)
                    if place < len(crop.changes) and crop.changes[place][0] is change
                ]
                if changed:
                    rows, factors = (torch.tensor(column) for column in zip(*changed, strict=True))
                    colours[rows] = change(colours[rows], factors[:, None, None, None])
        if grey := [row for row, crop in enumerate(crops) if crop.is_grey]:
            colours[grey] = ops.rgb_to_grayscale(colours[grey], num_output_channels=3)
        side = 2 * (min(self.format.size) // 20) + 1
        for row, crop in enumerate(crops):
            if crop.sigma:
                # Weights beyond 7 sigma are below 1e-10. Still farther out they are denormal
                # numbers, which made a blur over 23 pixels ten times as slow.
                width = min(side, 2 * math.ceil(7 * crop.sigma) + 1)
                pixels[row] = ops.gaussian_blur(pixels[row], [width] * 2, [crop.sigma] * 2)
        pixels[:, self.options.plain_channels] = torch.stack([crop.plain for crop in crops])
        return self.format.normalize(pixels)


# These change N pictures [N, 3, H, W] (or [N, 1, H, W]) by N factors [N, 1, 1, 1]. torchvision's
# functions of the same names take one picture and one factor; results agree within 2e-6.


def adjust_brightness(colours: Tensor, factor: Tensor) -> Tensor:
    return (colours * factor).clamp_(0.0, 1.0)


def adjust_contrast(colours: Tensor, factor: Tensor) -> Tensor:
    grey = ops.rgb_to_grayscale(colours) if colours.shape[1] == 3 else colours
    # The mean of rows comes first. With it at once, threads would share the sum of one picture but
    # not those of many, and a view's bits would depend on its batch.
    mean = grey.mean(dim=3, keepdim=True).mean(dim=(1, 2), keepdim=True)
    return _blend(colours, mean, factor)


def adjust_saturation(colours: Tensor, factor: Tensor) -> Tensor:
    return _blend(colours, ops.rgb_to_grayscale(colours), factor)


def _blend(colours: Tensor, others: Tensor, factor: Tensor) -> Tensor:
    return (colours * factor + others * (1.0 - factor)).clamp_(0.0, 1.0)


def adjust_hue(colours: Tensor, shift: Tensor) -> Tensor:
    """Turns hues by ``shift``, a share of a whole turn; saturation and value stay."""
    red, green, blue = colours.unbind(1)
    value, least = colours.amax(1), colours.amin(1)
    chroma = value - least
    # The hue in sixths of a turn. Where there is no chroma it does not matter.
    hue = torch.where(
        value == red,
        green - blue,
        torch.where(value == green, blue - red + 2 * chroma, red - green + 4 * chroma),
    ) / chroma.clamp(min=1e-12)
    hue += 6 * shift[:, 0]
    # How far each channel lies below the value, as a share of the chroma.
    below = torch.stack([hue + 5, hue + 3, hue + 1], dim=1).remainder_(6)
    below = torch.minimum(below, 4 - below).clamp_(0.0, 1.0)
    return value[:, None] - below * chroma[:, None]


_CHANGES: tuple[Change, ...] = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


def training(format: PixelFormat, augmentation: Mapping[str, Any]) -> Transform:
    """Returns the training transform of an augmentation with a `kind`.

    Raises ValueError for a wrong option.
    """
    if augmentation == {KIND: "none"}:  # every view is the picture itself
        return PlainTransform(format)
    try:
        options = TypeAdapter(SimCLROptions).validate_python(dict(augmentation))
    except ValidationError as error:
        name, problem = first_problem(error)
        if name == KIND:
            problem += "; 'none' takes no options, and without a kind open_clip's own is taken"
        raise ValueError(f"{f'augmentation {name}'.strip()}: {problem}") from None
    if absent := [number for number in options.plain_channels if number >= format.channels]:
        raise ValueError(
            f"augmentation plain_channels: got {absent[0]}, and the pictures have "
            f"{format.channels} channels: wanted numbers from 0 to {format.channels - 1}"
        )
    return SimCLRTransform(format, options)


# --- open_clip's training transform on uint8 arrays ---------------------------------------------


@dataclass(frozen=True)
class FastTransform(PictureTransform):
    """Makes a random crop and resizes it.

    size   height and width of the result in pixels
    scale  smallest and largest share of the picture that a crop covers
    ratio  smallest and largest width of a crop divided by its height
    rows   which crops are resized in their height before their width, see `choose_rows_first`
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
            images = functional.interpolate(
                images, (self.size[0], wide), mode="bicubic", antialias=True
            )
        # torch resizes the width first.
        return functional.interpolate(images, self.size, mode="bicubic", antialias=True)[0]


def choose_rows_first(pillow: str) -> RowsFirst:
    """Returns which crops this version of Pillow resizes in their height before their width.

    Pillow cuts pixels to 0 .. 255 between the two passes, so the order changes extreme colours by
    up to 28 of 255. From version 13 on it begins with the height if that shrinks much more.
    """
    return "shrunk" if int(pillow.split(".")[0]) >= 13 else "never"


def rows_first(have: tuple[int, int], size: tuple[int, int], rule: RowsFirst) -> bool:
    """Returns True if Pillow begins with the height when it resizes `have` to `size`.

    Both are (height, width); `rule` is what `choose_rows_first` returned.
    """
    lost = have[0] - size[0]
    return rule == "shrunk" and lost > 0 and lost > 2 * (have[1] - size[1])


def crop_box(height: int, width: int, scale: Sequence[float], ratio: Sequence[float]) -> Box:
    """Returns top, left, height and width of the box that torchvision's RandomResizedCrop takes.

    Where no box fits, the ten tries of its ``get_params``, which take half a millisecond, are left
    out, and their draws made at once.
    """
    if not no_box_fits(height, width, scale[0], ratio):
        picture = torch.empty(1, height, width, device="meta")
        box: Box = RandomResizedCrop.get_params(picture, [*scale], [*ratio])
        return box
    torch.empty(2 * _TRIES).uniform_()
    w, h = width, height
    if width / height < min(ratio):
        h = int(round(w / min(ratio)))
    elif width / height > max(ratio):
        w = int(round(h * max(ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


def no_box_fits(height: int, width: int, least: float, ratio: Sequence[float]) -> bool:
    """Returns True if no draw can give a box inside the picture.

    For example, no box with 0.9 of the area of a 3:2 picture fits into it. Boxes that are too large
    by less than a thousandth, which is more than draws are rounded by, count as fitting.
    """
    area = least * height * width
    is_too_tall = 0.999 * ratio[0] * area > (width + 0.5) ** 2
    return is_too_tall or area > 1.001 * ratio[1] * (height + 0.5) ** 2


def fast_transform(train: Callable[[Any], Tensor]) -> FastTransform:
    """Returns the fast form of a model's training transform.

    Raises ValueError if that is not open_clip's own, or does more than crop and resize.
    """
    steps = getattr(train, "transforms", [train])
    names = tuple(type(step).__name__ for step in steps)
    if names != _FAST_STEPS:
        raise ValueError(
            f"data.pixels=fast only crops and resizes, and the training transform is "
            f"{', '.join(names)}: set data.pixels=exact"
        )
    size, scale, ratio = (tuple(getattr(steps[0], name)) for name in ("size", "scale", "ratio"))
    return FastTransform(size, scale, ratio, choose_rows_first(PIL.__version__))


# --- the last steps of open_clip's transforms, on the device ------------------------------------


def normalize(pixels: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """[..., C, H, W], uint8 or float32 between 0 and 1 -> float32 (pixels - mean) / deviation.

    It runs on the pixels' device. The operations and their order are open_clip's, so the bits are
    too.
    """
    if pixels.dtype == torch.uint8:
        pixels = pixels.to(torch.float32).div_(255)
    first, second = planes_on(tuple(mean), tuple(deviation), pixels.device)
    return (pixels - first).div_(second)


def as_planes(
    mean: Sequence[float], deviation: Sequence[float], device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Returns both as float32 [C, 1, 1], or [1, 1, 1] of one number."""
    first, second = (
        torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)
        for values in (mean, deviation)
    )
    return first, second


@cache
def planes_on(
    mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns ``as_planes``; once for all batches, since a GPU waits for it."""
    with torch.inference_mode(False):  # a gradient may pass them in a later call
        return as_planes(mean, deviation, device)


@dataclass(frozen=True)
class PixelTransform(PictureTransform):
    """A transform that ends in ToTensor and Normalize, without these two.

    Loaders so send a quarter of the bytes, and a GPU divides. `to_floats` does the rest of the
    transform, with the same bits on a CPU.

    steps            those before the two; they return RGB pictures (PIL)
    mean, deviation  one number for each channel, of values between 0 and 1
    """

    steps: Sequence[Callable[[Any], Any]]
    mean: Sequence[float]
    deviation: Sequence[float]

    def __call__(self, picture: Any) -> Tensor:
        """Upright RGB picture (PIL) -> uint8 [3, H, W]."""
        for step in self.steps:
            picture = step(picture)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

    def to_floats(self, views: Tensor) -> Tensor:
        """uint8 [n, 3, H, W] -> float32, normalised."""
        return normalize(views, self.mean, self.deviation)


def defer_normalization(transform: Callable[[Any], Tensor]) -> PictureTransform:
    """Returns a transform of which the device does the last steps (`to_floats`), if these are
    open_clip's ToTensor and Normalize; else the transform as it is."""
    steps: list[Any] = [*getattr(transform, "transforms", ())]
    if [type(step).__name__ for step in steps[-2:]] != ["MaybeToTensor", "Normalize"]:
        return as_transform(transform)
    last = steps[-1]
    return PixelTransform(steps[:-2], last.mean, last.std)
