"""Data sets of robust and of non-robust features of an encoder, made by small FGSM steps.

Source: IFM (Robinson et al., 2021), section 4.3, after Ilyas et al. (2019). Every image is moved
until a linear readout of the encoder says another class t: with the true label y it belongs to the
robust set D_R, with t to the non-robust set D_NR. Readouts are then fitted to each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mclclip.randomness import mix


@dataclass(frozen=True)
class AdversarialSets:
    """D_R is (images, labels) and D_NR (images, targets), both of the rows that are ``reached``.

    images    [N, ...] in [0, 1], moved
    labels    [N] int64, y
    targets   [N] int64, t
    steps     [N] int64 that each image was moved
    reached   bool [N], the readout says t
    """

    images: Tensor
    labels: Tensor
    targets: Tensor
    steps: Tensor
    reached: Tensor


def draw_targets(labels: Tensor, num_classes: int, seed: int, exclude_own: bool = False) -> Tensor:
    """[N] int64: a class for each sample, uniformly, keyed by (seed, row).

    ``exclude_own`` leaves out a sample's own class, which the paper does not.
    """
    choices = num_classes - exclude_own
    drawn = mix(seed, np.arange(len(labels))) % np.uint64(choices)
    targets = torch.from_numpy(np.asarray(drawn).astype(np.int64)).to(labels.device)
    return targets + (targets >= labels).long() if exclude_own else targets


def adversarial_sets(
    encoder: Callable[[Tensor], Tensor],
    weight: Tensor,
    bias: Tensor,
    images: Tensor,
    labels: Tensor,
    *,
    targets: Tensor,
    eps: float = 0.01,
    max_steps: int = 50,
    batch_size: int = 256,
) -> AdversarialSets:
    """Moves every image until the readout says its target, at most ``max_steps`` times.

    encoder         images [n, ...] -> features [n, D], differentiable; in eval mode
    weight, bias    [C, D] and [C] of the linear readout
    images          [N, ...] in [0, 1]
    labels          [N] int64
    targets         [N] int64, as ``draw_targets`` gives them
    eps             each step adds -eps * sign of the gradient of the cross-entropy with the target,
                    and cuts pixels to [0, 1]

    An image whose target the readout says already stays as it is. Raises ValueError for an encoder
    in training mode, whose batch norms would mix the images.
    """
    if isinstance(encoder, nn.Module) and encoder.training:
        raise ValueError("the encoder is in training mode: call eval() on it first")

    def readout(x: Tensor) -> Tensor:
        return functional.linear(encoder(x), weight, bias)

    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, len(images), batch_size):
        rows = slice(start, start + batch_size)
        chosen = images[rows].detach().clone()
        found.append(_move(readout, chosen, targets[rows], eps, max_steps))
    moved, steps, reached = (torch.cat(parts) for parts in zip(*found, strict=True))
    return AdversarialSets(moved, labels, targets, steps, reached)


def _move(
    readout: Callable[[Tensor], Tensor], images: Tensor, targets: Tensor, eps: float, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One batch: the images as they are moved, their steps, and whether they reached the target."""
    steps = torch.zeros_like(targets)
    with torch.no_grad():
        reached = readout(images).argmax(dim=1) == targets
    for _ in range(most):
        going = (~reached).nonzero()[:, 0]
        if not len(going):
            break
        x = images[going].requires_grad_()
        with torch.enable_grad():
            loss = functional.cross_entropy(readout(x), targets[going], reduction="sum")
            (gradient,) = torch.autograd.grad(loss, x)
        with torch.no_grad():
            images[going] = (x - eps * gradient.sign()).clamp(0.0, 1.0)
            steps[going] += 1
            reached[going] = readout(images[going]).argmax(dim=1) == targets[going]
    return images, steps, reached
