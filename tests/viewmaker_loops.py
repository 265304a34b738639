"""Feature dropout written out with loops, from the formulas of the papers: noise, network, budget,
views, loss. Everything is differentiable by autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mclclip.randomness import mix

Weights = Mapping[str, Tensor]


def reflected(position: int, size: int) -> int:
    """The place in [0, size) that a mirror at the first and the last pixel shows."""
    if position < 0:
        return -position
    return position if position < size else 2 * (size - 1) - position


def convolution(image: Tensor, weight: Tensor, bias: Tensor, stride: int = 1) -> Tensor:
    """[C, H, W] -> [D, H / stride, W / stride], rounded up; one place of the kernel at a time."""
    kernel, (_, height, width) = weight.shape[-1], image.shape
    total: Tensor = bias[:, None, None]
    for down in range(kernel):
        for right in range(kernel):
            rows = [reflected(y + down - kernel // 2, height) for y in range(0, height, stride)]
            columns = [reflected(x + right - kernel // 2, width) for x in range(0, width, stride)]
            seen = image[:, rows][:, :, columns]
            total = total + torch.einsum("dc,chw->dhw", weight[:, :, down, right], seen)
    return total


def instance_norm(image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each channel of one image with mean 0 and deviation 1, then scaled and shifted."""
    channels = []
    for number, channel in enumerate(image):
        centred = channel - channel.mean()
        deviation = (centred.square().mean() + 1e-5).sqrt()
        channels.append(centred / deviation * weight[number] + bias[number])
    return torch.stack(channels)


def enlarged(image: Tensor, height: int, width: int) -> Tensor:
    rows = [y * image.shape[1] // height for y in range(height)]
    columns = [x * image.shape[2] // width for x in range(width)]
    return image[:, rows][:, :, columns]


def network(weights: Weights, pixels: Tensor, noise: Sequence[float] | Tensor) -> Tensor:
    """The viewmaker of one image [C, H, W] with its noise [n]."""
    _, height, width = pixels.shape
    half, quarter = (-(-height // 2), -(-width // 2)), (-(-height // 4), -(-width // 4))
    rest = torch.as_tensor(noise, dtype=pixels.dtype)

    def layer(name: str, hidden: Tensor, stride: int = 1, relu: bool = True) -> Tensor:
        conv = convolution(hidden, weights[f"{name}.0.weight"], weights[f"{name}.0.bias"], stride)
        normed = instance_norm(conv, weights[f"{name}.1.weight"], weights[f"{name}.1.bias"])
        return normed.clamp_min(0) if relu else normed

    def with_noise(hidden: Tensor) -> Tensor:
        nonlocal rest
        high, wide = hidden.shape[1:]
        channel, rest = rest[: high * wide].reshape(1, high, wide), rest[high * wide :]
        return torch.cat([hidden, channel])

    hidden = layer("down.0", with_noise(pixels))
    hidden = layer("down.2", layer("down.1", hidden, stride=2), stride=2)
    assert hidden.shape[1:] == quarter
    number = 0
    while f"blocks.{number}.layers.1.weight" in weights:
        hidden, name = with_noise(hidden), f"blocks.{number}.layers"
        inside = layer(f"{name}.0", hidden)
        inside = convolution(inside, weights[f"{name}.1.weight"], weights[f"{name}.1.bias"])
        hidden = hidden + instance_norm(
            inside, weights[f"{name}.2.weight"], weights[f"{name}.2.bias"]
        )
        number += 1
    assert len(rest) == 0
    hidden = layer("to_half", enlarged(hidden, *half))
    hidden = layer("to_whole", enlarged(hidden, height, width))
    return convolution(hidden, weights["last.weight"], weights["last.bias"])


def noise_of(seed: int, step: int, view: int, sample_id: int, count: int) -> list[float]:
    """Upper 24 of the 64 bits of a hash of the key and the place."""
    bits = [int(mix(seed, step, view, sample_id, place)) for place in range(count)]
    return [(number >> 40) / 2**24 for number in bits]


def view_of(
    weights: Weights, pixels: Tensor, noise: Sequence[float], epsilon: float
) -> tuple[Tensor, Tensor]:
    """The change of one image [C, H, W] under the budget, and the image with it, cut to [0, 1]."""
    raw = network(weights, pixels, noise).tanh()
    change = raw * epsilon / (raw.abs().sum() / raw.numel() + 1e-4)
    return change, (pixels + change).clamp(0, 1)


def nt_xent(first: Sequence[Tensor], second: Sequence[Tensor], temperature: float) -> Tensor:
    """Mean over all views of the cross-entropy of the own pair among all other views."""
    every, losses = [*first, *second], []
    for place, row in enumerate(every):
        scores = [row @ other / temperature for other in every]
        own = scores[(place + len(first)) % len(every)]
        total = sum(score.exp() for n, score in enumerate(scores) if n != place)
        losses.append(torch.as_tensor(total).log() - own)
    return torch.stack(losses).mean()
