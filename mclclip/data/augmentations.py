"""SimCLR's augmentations and a plain resize, for pictures and arrays of any number of channels.

Geometry (crop, flip, resize) and blur treat all channels alike. Colour operations (jitter,
grayscale) act on the first three channels where there are three or more, and leave the others
alone. An image of one or two channels has no colour: brightness and contrast act on each channel,
saturation, hue and grayscale do nothing.

Randomness comes from torch's global generator only, which the caller seeds for each view: the same
seed gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

import mclclip.torchvision_fix  # noqa: F401

# isort: split
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional

Picture = Image.Image | npt.NDArray[np.uint8]
_RATIO = [3 / 4, 4 / 3]  # of width to height of a crop
_SIGMA = (0.1, 2.0)  # of the blur, in pixels


def to_tensor(image: Picture) -> Tensor:
    """float32 [C, H, W] in [0, 1] of a picture or of an array uint8 [H, W, C]."""
    pixels = np.asarray(image.convert("RGB") if isinstance(image, Image.Image) else image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3:
        raise ValueError(
            f"an image is {pixels.dtype} {list(pixels.shape)}: wanted uint8 [H, W, channels]"
        )
    return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255)


class PlainTransform:
    """Resizes the shorter side to ``size``, cuts out the middle square, and normalizes.

    Takes a PIL image or uint8 [H, W, C] to float32 [C, size, size]. ``mean`` and ``std`` have one
    number for all channels or one per channel; ValueError for any other length.
    """

    reads_arrays = True

    def __init__(
        self, size: int, *, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
    ) -> None:
        if size < 1:
            raise ValueError(f"the image size is {size}: wanted at least 1")
        if not mean or not std or min(std) <= 0:
            raise ValueError(f"mean is {mean} and std {std}: wanted numbers, and std above 0")
        self.size, self.mean, self.std = size, tuple(mean), tuple(std)

    def __call__(self, image: Picture) -> Tensor:
        resized = functional.resize(to_tensor(image), [self.size], antialias=True)
        return self._normalized(functional.center_crop(resized, [self.size, self.size]))

    def _normalized(self, image: Tensor) -> Tensor:
        channels = len(image)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise ValueError(
                    f"{name} has {len(values)} numbers and the image {channels} channels: "
                    "wanted one number, or one per channel"
                )
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (image - mean) / std


class SimCLRTransform(PlainTransform):
    """A random crop, flip, colour jitter, grayscale and blur (SimCLR, appendix A), normalized.

    size                 side of the result in pixels
    scale                smallest and largest share of the area that a crop keeps
    flip, grayscale      probabilities
    jitter               strengths of brightness, contrast, saturation and hue, in random order,
                         with jitter_probability
    blur_probability     of a Gaussian blur over a tenth of the size; 0 for small images
    mean, std            see `PlainTransform`

    The crop's shape is torchvision's RandomResizedCrop. Raises ValueError for what is out of range.
    """

    def __init__(
        self,
        size: int,
        *,
        scale: tuple[float, float] = (0.2, 1.0),
        flip: float = 0.5,
        jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1),
        jitter_probability: float = 0.8,
        grayscale: float = 0.2,
        blur_probability: float = 0.0,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__(size, mean=mean, std=std)
        chances = {"flip": flip, "jitter_probability": jitter_probability}
        chances |= {"grayscale": grayscale, "blur_probability": blur_probability}
        for name, chance in chances.items():
            if not 0 <= chance <= 1:
                raise ValueError(f"{name} is {chance}: wanted 0 to 1")
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"scale is {scale}: wanted 0 < smallest <= largest <= 1")
        if len(jitter) != 4 or min(jitter) < 0 or jitter[3] > 0.5:
            raise ValueError(f"jitter is {jitter}: wanted four numbers from 0, the last up to 0.5")
        self.scale, self.flip, self.jitter = scale, flip, jitter
        self.jitter_probability, self.grayscale = jitter_probability, grayscale
        self.blur_probability = blur_probability

    def __call__(self, image: Picture) -> Tensor:
        whole = to_tensor(image)
        crop = RandomResizedCrop.get_params(whole, list(self.scale), _RATIO)
        view = functional.resized_crop(whole, *crop, [self.size, self.size], antialias=True)
        if _happens(self.flip):
            view = functional.horizontal_flip(view)
        if _happens(self.jitter_probability):
            view = self._jittered(view)
        if _happens(self.grayscale) and len(view) >= 3:
            grey = functional.rgb_to_grayscale(view[:3], num_output_channels=3)
            view = torch.cat([grey, view[3:]])
        if _happens(self.blur_probability):
            kernel = max(3, self.size // 10 | 1)
            view = functional.gaussian_blur(view, [kernel, kernel], [_uniform(*_SIGMA)])
        return self._normalized(view)

    def _jittered(self, view: Tensor) -> Tensor:
        # One or two channels go as a batch of single ones: each has a contrast of its own.
        colours, others = (view[:3], view[3:]) if len(view) >= 3 else (view[:, None], view[:0])
        for number in torch.randperm(4).tolist():
            strength = self.jitter[number]
            if number == 3:
                factor = _uniform(-strength, strength)
            else:
                factor = _uniform(max(0.0, 1 - strength), 1 + strength)
            if strength and (len(view) >= 3 or number < 2):
                colours = _ADJUST[number](colours, factor)
        return torch.cat([colours, others]) if len(view) >= 3 else colours[:, 0]


_ADJUST = (
    functional.adjust_brightness,
    functional.adjust_contrast,
    functional.adjust_saturation,
    functional.adjust_hue,
)


def _happens(probability: float) -> bool:
    return float(torch.rand(())) < probability


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))
