"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mclclip.engines.engine import Engine, MakeOptimizer
from mclclip.ranks.process_group import Context

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FsdpEngine(Engine):
    """``fully_shard`` on each of ``blocks`` and on the rest; other arguments as for Engine.

    shard_ranks   ranks that share one copy; there are world_size / shard_ranks copies (None: one)

    Under bf16 and fp16 the blocks are gathered in that format and their gradients reduced in fp32.
    The rest is gathered in fp32: rounded to bf16 a logit scale of 4.6 would be off by 1 %.
    Raises ValueError where shard_ranks does not divide the number of ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        context: Context,
        *,
        blocks: Sequence[nn.Module],
        shard_ranks: int | None = None,
        precision: str = "fp32",
        **options: Any,
    ) -> None:
        self._blocks = list(blocks)
        self._mesh = _mesh(context, shard_ranks)
        half = _HALF.get(precision)
        self._policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        if half is None:
            self._policy = MixedPrecisionPolicy()
        super().__init__(module, make_optimizer, context, precision=precision, **options)

    def _set_up(self, make_optimizer: MakeOptimizer) -> tuple[Any, Callable[..., Any]]:
        for block in self._blocks:
            fully_shard(block, mesh=self._mesh, mp_policy=self._policy)
        fully_shard(self.module, mesh=self._mesh)
        for block in self._blocks:
            # A block that no forward runs, such as one of an unused text tower, fails in a backward
            # that does not reduce unless it has been gathered once.
            block.unshard()  # type: ignore[operator]
            block.reshard()  # type: ignore[operator]
        return make_optimizer(self.module), self.module

    def reducing(self, last: bool) -> AbstractContextManager[Any]:
        """Only the last of several backwards reduces; until then gradients are kept whole."""
        return contextlib.nullcontext() if last else self._kept()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        root: Any = self.module
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)


def _mesh(context: Context, shard_ranks: int | None) -> DeviceMesh:
    """One axis of all ranks, or copies x shards."""
    world, kind = context.world_size, context.device.type
    if shard_ranks is None or shard_ranks == world:
        return init_device_mesh(kind, (world,))
    if world % shard_ranks:
        raise ValueError(
            f"engine.shard_ranks={shard_ranks} does not divide the {world} ranks: give a divisor, "
            "such as the number of GPUs of a node"
        )
    return init_device_mesh(
        kind, (world // shard_ranks, shard_ranks), mesh_dim_names=("copies", "shards")
    )
