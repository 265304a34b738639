"""Engines, which run a training step: DDP, FSDP2 and DeepSpeed behind one interface. Here are their
options, and the memory of one rank under each; ``engines.build`` makes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveInt

from mclclip.util.options import STRICT

BUCKET = 50_000_000  # elements reduced at once; DeepSpeed's default would take a buffer of 2 GB

# deepspeed's default of stage3_max_live_parameters, in elements: below it, gathered parameters are
# not released.
_ZERO_3_LIVE = 1_000_000_000


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
    compile: Literal["auto", "none", "model", "step"] = "auto"
    """torch.compile: ``model`` compiles each block, ``step`` the whole forward pass with the
    objective, ``none`` nothing. ``auto``: ``model`` for transformers on a GPU, if the training is
    longer than some minutes and Triton finds a C compiler and Python's headers. It takes half a
    minute at the start, some seconds where torch's cache has the blocks, and a step of a ViT-L-14
    then 0.82 of its time (one H200)."""


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
