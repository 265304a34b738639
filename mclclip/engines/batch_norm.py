"""Batch normalisation over the global batch, so that N ranks equal one.

torch.nn.SyncBatchNorm does the same on GPUs only; this one runs on every backend.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.ranks import collectives


class _GlobalStatistics(_BatchNorm):
    """A batch norm whose training statistics are those of the global batch.

    All ranks must pass the same shape. On one rank and in eval mode (frozen norms are in it) it is
    torch's batch norm.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[b, C, ...] -> the same shape, normalised over all ranks' b and all further axes."""
        if not self.training or collectives.world_size() == 1:
            return super().forward(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        axes = (0, *range(2, x.ndim))
        channel = (slice(None), *[None] * (x.ndim - 2))
        count = x.numel() // x.shape[1] * collectives.world_size()
        mean = collectives.all_reduce_with_grad(x.sum(dim=axes)) / count
        centred = x - mean[channel]
        # Two passes: E[x^2] - E[x]^2 would cancel in fp32.
        squares = centred.square().sum(dim=axes)
        variance = collectives.all_reduce_with_grad(squares) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        scale = torch.rsqrt(variance + self.eps)
        if self.affine:
            output = centred * (scale * self.weight)[channel] + self.bias[channel]
        else:
            output = centred * scale[channel]
        result: Tensor = output.to(input.dtype)
        if hasattr(self, "act"):  # timm's BatchNormAct2d: DropBlock and an activation after it
            activated: Any = self
            result = activated.act(activated.drop(result))
        return result

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Moves the running statistics as torch's batch norms do (unbiased variance)."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # only then is the number read, for which a device is waited for
            share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


@functools.cache
def _global_class(kind: Any) -> type[Any]:
    return type(f"Global{kind.__name__}", (_GlobalStatistics, kind), {})


def synchronize_batch_norms(module: nn.Module) -> None:
    """Turns every batch norm inside ``module`` into one over the global batch, in place.

    Parameters and buffers stay the same objects, so optimizers and names are not disturbed.
    Raises ValueError for a batch norm of an unknown kind that is in training mode.
    """
    for child in module.modules():
        kind: Any = type(child)
        if not isinstance(child, _BatchNorm) or isinstance(child, _GlobalStatistics):
            continue
        of_timm = kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm.")
        if of_timm or kind in (nn.BatchNorm1d, nn.BatchNorm2d):
            child.__class__ = _global_class(kind)
        elif child.training:
            raise ValueError(
                f"the model has a {kind.__module__}.{kind.__name__}, whose statistics cannot be "
                "taken over several ranks: train it on one rank, or lock it"
            )
