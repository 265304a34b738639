"""Engines, which run a training step: DDP, FSDP2 and DeepSpeed behind one interface; and the memory
of one rank under each."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveInt
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from mclclip.engines.engine import Engine, FsdpEngine, MakeOptimizer
from mclclip.engines.zero import BUCKET, DeepspeedEngine
from mclclip.ranks.process_group import Context
from mclclip.util.options import STRICT

Compiled = Literal["auto", "none", "model", "step"]

# deepspeed's default of stage3_max_live_parameters, in elements: below it, gathered parameters are
# not released.
_ZERO_3_LIVE = 1_000_000_000
_WORTH_COMPILING = 1e17  # floating-point operations


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
    compile: Compiled = "auto"
    """torch.compile: ``model`` compiles each block, ``step`` the whole forward pass with the
    objective, ``none`` nothing. ``auto``: ``model`` for transformers on a GPU, if the training is
    longer than some minutes and Triton finds a C compiler and Python's headers. It takes half a
    minute at the start, some seconds where torch's cache has the blocks, and a step of a ViT-L-14
    then 0.82 of its time (one H200)."""


def choose_compile(
    option: Compiled,
    device: torch.device,
    blocks: Sequence[nn.Module],
    operations: float,
    compiler: bool | None = None,
) -> Literal["none", "model", "step"]:
    """Chooses what torch compiles: the option, and for ``auto`` each of a model's ``blocks`` on a
    GPU, if all are transformers' and Triton can compile (``compiler``; None: what is installed).

    Blocks with convolutions gain little, and batch norms of several ranks wait for each other
    inside. A training of fewer than 1e17 ``operations`` of this rank, five minutes of an H100, would
    not win back the time that compiling takes.
    """
    if option != "auto":
        return option
    if device.type != "cuda" or not blocks or operations < _WORTH_COMPILING:
        return "none"
    if any(isinstance(m, _BatchNorm | _ConvNd) for block in blocks for m in block.modules()):
        return "none"
    return "model" if (can_compile() if compiler is None else compiler) else "none"


def can_compile(triton: bool | None = None) -> bool:
    """Returns True if Triton is there (``triton``; None: what is installed) and finds what it builds
    its launchers with: a C compiler and Python's headers."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if triton is None:
        triton = importlib.util.find_spec("triton") is not None
    return triton and headers.exists() and any(shutil.which(name) for name in names)


def build_engine(
    how: EngineConfig,
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    context: Context,
    *,
    blocks: Sequence[nn.Module] = (),
    **options: Any,
) -> Engine:
    """The engine ``ddp``, ``fsdp`` (shards ``blocks`` one by one) or ``deepspeed`` for ``module``.

    A single process gets the plain ``Engine`` whatever the name. ``options`` are arguments of
    ``Engine``. Raises ValueError for a missing package.
    """
    needed, options = (module, make_optimizer, context), options | {"micro_batch": how.micro_batch}
    if how.name == "ddp" or context.world_size == 1:
        return Engine(*needed, **options)
    if how.name == "fsdp":
        return FsdpEngine(*needed, blocks=blocks, shard_ranks=how.shard_ranks, **options)
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("engine.name=deepspeed needs deepspeed: pip install 'mclclip[deepspeed]'")
    return DeepspeedEngine(*needed, zero_stage=how.zero_stage, **options)


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes of a whole training, before an engine divides them among the ranks."""

    parameters: int
    trained: int
    moments: int  # optimizer state
    average: int  # moving average of the weights
    outside: int  # the model's parameters outside of its blocks
    largest_block: int
    start: int = 0  # the trained weights as they were, which ``start_decay`` leads back to


def per_rank(
    sizes: TrainingBytes,
    how: EngineConfig,
    world_size: int,
    *,
    half: bool = False,
    caching: bool = False,
) -> dict[str, int]:
    """Bytes of one rank: parameters, gradients, optimizer, ema, engine (buffers of its own).

    half      blocks are gathered in half precision (fsdp)
    caching   gradient caching in several micro-batches: fsdp keeps whole gradients until the last
    """
    whole = {"parameters": sizes.parameters, "gradients": sizes.trained}
    whole |= {"optimizer": sizes.moments + sizes.start, "ema": sizes.average}
    if world_size == 1:
        return whole | {"engine": 0}
    if how.name == "ddp":  # its buckets are copies of the gradients
        return whole | {"engine": sizes.trained}
    if how.name == "fsdp":
        ranks = how.shard_ranks or world_size
        parts = {part: -(-size // ranks) for part, size in whole.items()}
        if caching:
            parts["gradients"] = sizes.trained
        # Two blocks, since the next one is gathered early; and one block's gradients in fp32.
        gathered = 2 * sizes.largest_block // (2 if half else 1)
        return parts | {"engine": sizes.outside + gathered + sizes.largest_block}
    bucket = min(4 * BUCKET, sizes.trained)
    # At every stage the optimizer works on a copy of this rank's part of the weights.
    parts = whole | {"optimizer": (whole["optimizer"] + sizes.trained) // world_size}
    if how.zero_stage >= 2:
        parts["gradients"] = sizes.trained // world_size + bucket
    if how.zero_stage < 3:
        return parts | {"engine": bucket}
    parts |= {part: whole[part] // world_size for part in ("parameters", "ema")}
    return parts | {"engine": bucket + min(sizes.parameters, 4 * _ZERO_3_LIVE)}
