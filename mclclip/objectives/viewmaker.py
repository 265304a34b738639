"""The viewmaker: a network that changes images a little, differently for every noise.

Sources: Tamkin, Wu and Goodman, "Viewmaker Networks: Learning Views for Unsupervised Representation
Learning" (2021), section 3; its layers are those of style transfer (Johnson, Alahi and Fei-Fei,
2016), with a channel of noise beside the image and one more before every residual block.

Departures. Noise is keyed by the sample, so that neither ranks nor resuming change it. Images of
any size keep it; the paper's are multiples of four pixels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from mclclip.randomness import mix_tensors

SMALLEST_SIDE = 5
"""Pixels of an image's side: the first layer mirrors four at each border."""

_KERNEL = 9  # of the first and the last layer
_NOISE_BITS = 24  # fp32 holds so many


class Viewmaker(nn.Module):
    """Pixels [b, C, H, W] and noise [b, `num_noise`] -> [b, C, H, W], not yet `bounded`.

    width            channels of the first layer; twice as many at half the size, and again
    residual_blocks  at a quarter of the size; each gets a channel of noise of its own
    """

    def __init__(
        self,
        num_channels: int,
        width: int = 32,
        residual_blocks: int = 3,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.residual_blocks = residual_blocks
        inner = 4 * width
        self.down = nn.Sequential(
            _Layer(num_channels + 1, width, _KERNEL, dtype),
            _Layer(width, 2 * width, 3, dtype, stride=2),
            _Layer(2 * width, inner, 3, dtype, stride=2),
        )
        channels = [inner + number for number in range(1, residual_blocks + 1)]
        self.blocks = nn.ModuleList(_Residual(number, dtype) for number in channels)
        self.to_half = _Layer(inner + residual_blocks, 2 * width, 3, dtype)
        self.to_whole = _Layer(2 * width, width, 3, dtype)
        self.last = _Mirrored(width, num_channels, _KERNEL, dtype=dtype)

    def num_noise(self, height: int, width: int) -> int:
        """Numbers of noise for an image of this size."""
        return sum(high * wide for high, wide in self._noise_sizes(height, width))

    def _noise_sizes(self, height: int, width: int) -> Iterator[tuple[int, int]]:
        yield height, width
        for _ in range(self.residual_blocks):
            yield _half(_half(height)), _half(_half(width))

    def forward(self, pixels: Tensor, noise: Tensor) -> Tensor:
        """See above; the sides are at least `SMALLEST_SIDE`."""
        height, width = pixels.shape[-2:]
        sizes = list(self._noise_sizes(height, width))
        parts = torch.split(noise, [high * wide for high, wide in sizes], dim=1)
        first, *others = (
            part.reshape(-1, 1, *size) for part, size in zip(parts, sizes, strict=True)
        )
        hidden = self.down(torch.cat([pixels, first], dim=1))
        for block, channel in zip(self.blocks, others, strict=True):
            hidden = block(torch.cat([hidden, channel], dim=1))
        hidden = self.to_half(_enlarged(hidden, _half(height), _half(width)))
        changes: Tensor = self.last(self.to_whole(_enlarged(hidden, height, width)))
        return changes


def bounded(raw: Tensor, epsilon: float) -> Tensor:
    """Changes of pixels whose mean size is at most ``epsilon`` in each image.

    tanh(raw) epsilon / (mean |tanh(raw)| + 1e-4), [b, C, H, W]: a mean just below ``epsilon``
    wherever the tanh is not small.
    """
    changes = torch.tanh(raw)
    means = changes.abs().mean(dim=(1, 2, 3), keepdim=True)
    return changes * (epsilon / (means + 1e-4))


def keyed_noise(seed: int, step: int, view: int, sample_id: Tensor, count: int) -> Tensor:
    """float32 [b, count], uniform in [0, 1): a function of (seed, step, view, sample_id, place).

    It is drawn where ``sample_id`` [b] lies, and is the same on every device.
    """
    step_word, view_word = (torch.full_like(sample_id[:1], word) for word in (step, view))
    places = torch.arange(count, device=sample_id.device)
    bits = mix_tensors(seed, step_word, view_word, sample_id[:, None], places)
    high = (bits >> (64 - _NOISE_BITS)) & ((1 << _NOISE_BITS) - 1)
    numbers: Tensor = high.to(torch.float32) / (1 << _NOISE_BITS)
    return numbers


class _Mirrored(nn.Conv2d):
    """A convolution over an image that is mirrored at its borders."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_mirrored(input, self.kernel_size[0] // 2))


class _Layer(nn.Sequential):
    """Convolution, instance norm, ReLU: [b, C, H, W] -> [b, D, H / stride, W / stride], rounded
    up."""

    def __init__(
        self, before: int, after: int, kernel: int, dtype: torch.dtype, stride: int = 1
    ) -> None:
        convolution = _Mirrored(before, after, kernel, stride, dtype=dtype)
        norm = nn.InstanceNorm2d(after, affine=True, dtype=dtype)
        super().__init__(convolution, norm, nn.ReLU())


class _Residual(nn.Module):
    """Two convolutions, whose result is added to their input."""

    def __init__(self, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _Layer(channels, channels, 3, dtype),
            _Mirrored(channels, channels, 3, dtype=dtype),
            nn.InstanceNorm2d(channels, affine=True, dtype=dtype),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.layers(hidden)
        return result


def _mirrored(images: Tensor, border: int) -> Tensor:
    """As torch's reflection padding, whose gradient on a GPU differs from run to run."""
    for axis in (-2, -1):
        size = images.shape[axis]
        before = images.narrow(axis, 1, border).flip(axis)
        after = images.narrow(axis, size - 1 - border, border).flip(axis)
        images = torch.cat([before, images, after], dim=axis)
    return images


def _half(side: int) -> int:
    return (side + 1) // 2


def _enlarged(images: Tensor, height: int, width: int) -> Tensor:
    larger: Tensor = functional.interpolate(images, size=(height, width), mode="nearest")
    return larger
