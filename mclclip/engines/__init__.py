"""Engines, which run a training step: DDP, FSDP2 and DeepSpeed behind one interface."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveInt
from torch import nn

from mclclip.engines.engine import Engine, MakeOptimizer
from mclclip.options import STRICT
from mclclip.ranks.process_group import Context


@checked_dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """How a step runs on the hardware: speed and memory, not results (a resume may change it)."""

    name: Literal["ddp", "fsdp", "deepspeed"] = "ddp"
    """``ddp``: whole copies; ``fsdp``: FSDP2, sharded by block; ``deepspeed``: ZeRO."""
    zero_stage: Literal[1, 2, 3] = 2
    """deepspeed: shards optimizer state (1), gradients too (2), parameters too (3)."""
    shard_ranks: PositiveInt | None = None
    """fsdp: ranks that share one copy, such as those of a node (null: all ranks)."""
    micro_batch: PositiveInt | None = None
    """Samples per rank and forward pass; a bigger local batch is computed by exact gradient
    caching, in two passes (null: the local batch at once)."""
    grad_checkpointing: bool = False
    """Recompute the blocks' activations in the backward pass instead of keeping them."""
    compile: Literal["off", "model", "step"] = "off"
    """torch.compile: ``model`` compiles each block, ``step`` the whole forward pass with the
    objective."""


def build_engine(
    name: str,
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    context: Context,
    *,
    blocks: Sequence[nn.Module] = (),
    shard_ranks: int | None = None,
    zero_stage: int = 2,
    elementwise: bool = True,
    **options: Any,
) -> Engine:
    """The engine ``ddp``, ``fsdp`` (shards ``blocks`` one by one) or ``deepspeed`` for ``module``.

    A single process gets the plain ``Engine`` whatever the name. ``elementwise``: the optimizer's
    update of an element depends on that element alone. ``options`` are arguments of ``Engine``.
    Raises ValueError for an unknown name, for combinations that an engine does not support, and for
    a missing package.
    """
    given = module, make_optimizer, context
    if name == "ddp" or context.world_size == 1:
        return Engine(*given, **options)
    if name == "fsdp":
        from mclclip.engines.fsdp import FsdpEngine

        return FsdpEngine(*given, blocks=blocks, shard_ranks=shard_ranks, **options)
    if name == "deepspeed":
        if importlib.util.find_spec("deepspeed") is None:
            raise ValueError(
                "engine.name=deepspeed needs deepspeed: pip install 'mclclip[deepspeed]'"
            )
        from mclclip.engines.zero import DeepspeedEngine

        return DeepspeedEngine(*given, zero_stage=zero_stage, elementwise=elementwise, **options)
    raise ValueError(f"engine.name is {name!r}: wanted ddp, fsdp or deepspeed")
