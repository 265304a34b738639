"""Divides work among the ranks: the rows of a table, or items that differ in cost.

Rows are divided as DTensor divides them, so a table is saved as one tensor, which any other number
of ranks can load.
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
    """A table of ``num_rows`` rows of which this rank holds those from ``start`` up to, but not
    including, ``stop``.

    Each rank holds ceil(num_rows / world_size) rows; the last ranks may hold fewer or none. This is
    DTensor's division: of any other it would return wrong rows without an error.
    """

    def __init__(self, num_rows: int, context: Context) -> None:
        self.num_rows, self.context = num_rows, context
        self.start, self.stop = shard_of(num_rows, context.rank, context.world_size)

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        return make_mesh(self.context, self.context.world_size)

    def whole(self, local: Tensor) -> Tensor:
        """Returns the table [num_rows, ...], given this rank's rows ``local`` [stop - start, ...],
        which must be contiguous.

        The table is a DTensor; with one process it is ``local`` itself. All ranks call it together.
        """
        if self.context.world_size == 1:
            return local
        shape = torch.Size((self.num_rows, *local.shape[1:]))
        options: Any = {"run_check": False, "shape": shape, "stride": local.stride()}
        return DTensor.from_local(local, self._mesh, [Shard(0)], **options)

    @staticmethod
    def local(value: Tensor) -> Tensor:
        """Returns this rank's rows of a table that `whole` returned."""
        return value.to_local() if isinstance(value, DTensor) else value


def shard_of(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the first row of ``rank``, and the row after its last, see `ShardedRows`."""
    rows = -(-num_rows // world_size)
    return min(rank * rows, num_rows), min((rank + 1) * rows, num_rows)


def balance_by_cost(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Divides items among ranks so that each has about the same cost; ``costs``: one per item.

    Returns the list of items of each rank. The costliest item comes first, and each item goes to
    the rank with the least cost so far.
    """
    items_of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, rank = heapq.heappop(loads)
        items_of_rank[rank].append(item)
        heapq.heappush(loads, (load + costs[item], rank))
    return items_of_rank
