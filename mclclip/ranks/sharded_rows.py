"""Shares of the ranks: rows of a table (cut as DTensor cuts), or items (balanced by cost).

A table cut like this is saved as one tensor, which any other number of ranks can load.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mclclip.ranks.process_group import Context, make_mesh


class ShardedRows:
    """This rank's share of ``num_rows`` rows: from ``start`` up to, but without, ``stop``.

    Every rank but the last ones has ceil(num_rows / world_size) rows; the last ranks may have fewer
    or none. (A DTensor returns other splits wrongly, without an error.)
    """

    def __init__(self, num_rows: int, context: Context) -> None:
        self.num_rows, self.context = num_rows, context
        self.start, self.stop = shard_of(num_rows, context.rank, context.world_size)

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        return make_mesh(self.context, self.context.world_size)

    def whole(self, local: Tensor) -> Tensor:
        """The tensor of all rows, made of each rank's contiguous ``local`` [stop - start, ...].

        It is a DTensor, or ``local`` itself where there is one process. All ranks call it together.
        """
        if self.context.world_size == 1:
            return local
        shape = torch.Size((self.num_rows, *local.shape[1:]))
        options: Any = {"run_check": False, "shape": shape, "stride": local.stride()}
        return DTensor.from_local(local, self._mesh, [Shard(0)], **options)

    @staticmethod
    def local(value: Tensor) -> Tensor:
        """This rank's rows of a tensor that ``whole`` returned."""
        return value.to_local() if isinstance(value, DTensor) else value


def shard_of(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """The first row of ``rank``, and the row after its last."""
    rows = -(-num_rows // world_size)
    return min(rank * rows, num_rows), min((rank + 1) * rows, num_rows)


def balance_by_cost(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The items of each rank. Costly items are given first, each to the rank with the least cost so
    far."""
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(item)
        heapq.heappush(loads, (load + costs[item], rank))
    return dealt
