"""Batch normalisation over the global batch, so that N ranks equal one (ResNet towers).

torch.nn.SyncBatchNorm does the same on GPUs only; this one runs on every backend.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mclclip.ranks import collectives


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d whose training statistics are those of the global batch.

    All ranks must pass the same shape. In eval mode (frozen norms too) it is BatchNorm2d itself.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[b, C, H, W] -> the same shape, normalised over (all ranks' b, H, W)."""
        if not self.training or collectives.world_size() == 1:
            return super().forward(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count = x.numel() // x.shape[1] * collectives.world_size()
        mean = collectives.all_reduce_with_grad(x.sum(dim=(0, 2, 3))) / count
        centred = x - mean[:, None, None]
        # Two passes: E[x^2] - E[x]^2 would cancel in fp32.
        squares = centred.square().sum(dim=(0, 2, 3))
        variance = collectives.all_reduce_with_grad(squares) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        scale = torch.rsqrt(variance + self.eps)
        if not self.affine:
            return (centred * scale[:, None, None]).to(input.dtype)
        output = centred * (scale * self.weight)[:, None, None] + self.bias[:, None, None]
        return output.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Moves the running statistics as BatchNorm2d does (unbiased variance)."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        number = float(self.num_batches_tracked)
        share = 1.0 / number if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def synchronize_batch_norms(module: nn.Module) -> None:
    """Turns every BatchNorm2d inside ``module`` into a GlobalBatchNorm2d, in place.

    Parameters and buffers stay the same objects, so optimizers and names are not disturbed.
    """
    for child in module.modules():
        if type(child) is nn.BatchNorm2d:
            child.__class__ = GlobalBatchNorm2d
