"""Batch normalisation over the global batch, so that N ranks equal one (ResNet towers, projectors).

torch.nn.SyncBatchNorm does the same on GPUs only; this one runs on every backend.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.ranks import collectives


class _GlobalBatchNorm(_BatchNorm):
    """Batch norm whose training statistics are those of the global batch.

    All ranks must pass the same shape. In eval mode (frozen norms too) it is torch's.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[b, C, ...] -> the same shape, normalised over (all ranks' b, ...)."""
        if not self.training or collectives.world_size() == 1:
            return super().forward(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        others = (0, *range(2, x.ndim))
        each = (-1, *[1] * (x.ndim - 2))  # shape of one number per channel
        count = x.numel() // x.shape[1] * collectives.world_size()
        mean = collectives.all_reduce_with_grad(x.sum(dim=others)) / count
        centred = x - mean.view(each)
        # Two passes: E[x^2] - E[x]^2 would cancel in fp32.
        squares = centred.square().sum(dim=others)
        variance = collectives.all_reduce_with_grad(squares) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        scale = torch.rsqrt(variance + self.eps)
        if not self.affine:
            return (centred * scale.view(each)).to(input.dtype)
        output = centred * (scale * self.weight).view(each) + self.bias.view(each)
        return output.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Moves the running statistics as torch's batch norm does (unbiased variance)."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        number = float(self.num_batches_tracked)
        share = 1.0 / number if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class GlobalBatchNorm1d(_GlobalBatchNorm, nn.BatchNorm1d):
    """BatchNorm1d over the global batch: of projectors and predictors."""


class GlobalBatchNorm2d(_GlobalBatchNorm, nn.BatchNorm2d):
    """BatchNorm2d over the global batch."""


_GLOBAL: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
}


def synchronize_batch_norms(module: nn.Module) -> None:
    """Turns every BatchNorm1d and BatchNorm2d inside ``module`` into a global one, in place.

    Parameters and buffers stay the same objects, so optimizers and names are not disturbed.
    """
    for child in module.modules():
        if (kind := _GLOBAL.get(type(child))) is not None:
            child.__class__ = kind
