"""This rank's pieces of what ZeRO flattens and shares out, and the wholes they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mclclip.ranks import collectives


def is_shared(tensor: Tensor) -> bool:
    """Whether ZeRO-3 has shared this parameter among the ranks."""
    return hasattr(tensor, "ds_tensor")


def is_flat(value: Any) -> bool:
    """Whether a part of the optimizer's state has a value for every element."""
    return isinstance(value, Tensor) and value.ndim > 0


@dataclass
class Piece:
    """This rank's part of a flattened tensor: ``values``, which are live, from ``start`` on."""

    start: int
    values: Tensor

    def whole(self, parameter: Any) -> Tensor:
        """All ranks' pieces as one tensor, shaped as ``parameter``, in main memory."""
        shape = parameter.ds_shape if is_shared(parameter) else parameter.shape
        flat = self.values.new_zeros(shape.numel())
        flat[self.start : self.start + len(self.values)] = self.values
        return collectives.all_reduce_sum(flat).view(shape).cpu()

    def take(self, whole: Tensor) -> None:
        """Copies this piece of ``whole`` into it."""
        self.values.copy_(whole.reshape(-1)[self.start : self.start + len(self.values)])


def piece_of(shard: Tensor, parameter: Any) -> Piece:
    """ZeRO-3's shard, without what pads the last ones to equal size."""
    start = len(shard) * collectives.rank()
    return Piece(start, shard.detach()[: max(0, parameter.ds_numel - start)])
