"""Collectives of a background thread, apart from those of the training."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from mclclip.ranks import collectives
from mclclip.ranks.process_group import TIMEOUT

T = TypeVar("T")


class SideGroup:
    """All ranks on a gloo group of their own.

    Collectives of two threads on one group would meet in any order, and NCCL groups move no
    objects of the CPU. Opened by all ranks at the same point of their main threads.
    """

    def __init__(self) -> None:
        alone = collectives.world_size() == 1
        self.group: Any = None if alone else dist.new_group(backend="gloo", timeout=TIMEOUT)

    def gather_objects(self, item: T) -> list[T]:
        """Each rank's picklable object, in rank order, on every rank."""
        if self.group is None:
            return [item]
        items: list[Any] = [None] * collectives.world_size()
        dist.all_gather_object(items, item, group=self.group)
        return items
