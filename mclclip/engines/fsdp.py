"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mclclip.engines.engine import HALF, Engine, MakeOptimizer
from mclclip.ranks.process_group import Context
from mclclip.ranks.sharded_rows import choose_mesh


class FsdpEngine(Engine):
    """``fully_shard`` on each of ``blocks`` and on the rest; other arguments as for Engine.

    shard_ranks   ranks that share one copy; there are world_size / shard_ranks copies (None: one)

    Under bf16 and fp16 the blocks are gathered in that format and their gradients reduced in fp32.
    The rest is gathered in fp32: rounding a logarithmic logit scale of 4.6 to bf16 would change the
    scale by up to 1 %.
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
        world = context.world_size
        if shard_ranks is None or shard_ranks == world:
            self._mesh = choose_mesh(context)
        elif world % shard_ranks:
            raise ValueError(
                f"engine.shard_ranks={shard_ranks} does not divide the {world} ranks: give a "
                "divisor, such as the number of GPUs of a node"
            )
        else:
            shape, names = (world // shard_ranks, shard_ranks), ("copies", "shards")
            self._mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=names)
        half = HALF.get(precision)
        self._policy = MixedPrecisionPolicy(half, reduce_dtype=torch.float32 if half else None)
        super().__init__(module, make_optimizer, context, precision=precision, **options)

    def _set_up(self, make_optimizer: MakeOptimizer) -> tuple[Any, Any]:
        for block in self._blocks:
            fully_shard(block, mesh=self._mesh, mp_policy=self._policy)
        fully_shard(self.module, mesh=self._mesh)
        for block in self._blocks:
            # A block that no forward pass runs, such as one of an unused text tower, must have been
            # gathered once, or a backward pass that does not reduce fails in it.
            block.unshard()  # type: ignore[operator]
            block.reshard()  # type: ignore[operator]
        return make_optimizer(self.module), self.module

    @contextmanager
    def reducing(self, last: bool) -> Iterator[None]:
        """Only the last backward pass reduces; until then each rank keeps whole gradients."""
        root: Any = self.module
        root.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
