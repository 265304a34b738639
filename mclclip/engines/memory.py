"""Memory of one rank under an engine: its share of the training's tensors, and buffers."""

from __future__ import annotations

from dataclasses import dataclass

from mclclip.engines.zero import BUCKET

_FP32 = 4
# deepspeed's default of stage3_max_live_parameters, in elements: below it, gathered parameters are
# not released.
_ZERO_3_LIVE = 1_000_000_000


@dataclass(frozen=True)
class Sizes:
    """Bytes of a whole training, before an engine divides them among the ranks."""

    parameters: int
    trained: int
    moments: int  # optimizer state
    average: int  # moving average of the weights
    outside: int  # the model's parameters outside of its blocks
    largest_block: int


def per_rank(
    sizes: Sizes,
    name: str,
    world_size: int,
    *,
    shard_ranks: int | None = None,
    zero_stage: int = 2,
    half: bool = False,
    caching: bool = False,
) -> dict[str, int]:
    """Bytes of one rank: parameters, gradients, optimizer, ema, engine (buffers of its own).

    name, shard_ranks, zero_stage   as for ``build_engine``
    half      blocks are gathered in half precision (fsdp)
    caching   gradient caching in several micro-batches: fsdp keeps whole gradients until the last
    """
    whole = {"parameters": sizes.parameters, "gradients": sizes.trained}
    whole |= {"optimizer": sizes.moments, "ema": sizes.average}
    if world_size == 1:
        return whole | {"engine": 0}
    if name == "ddp":  # its buckets are copies of the gradients
        return whole | {"engine": sizes.trained}
    if name == "fsdp":
        ranks = shard_ranks or world_size
        parts = {part: -(-size // ranks) for part, size in whole.items()}
        if caching:
            parts["gradients"] = sizes.trained
        # Two blocks, since the next one is gathered early; and one block's gradients in fp32.
        gathered = 2 * sizes.largest_block // (2 if half else 1)
        return parts | {"engine": sizes.outside + gathered + sizes.largest_block}
    bucket = min(BUCKET * _FP32, sizes.trained)
    # At every stage the optimizer works on a copy of this rank's part of the weights.
    parts = whole | {"optimizer": (sizes.moments + sizes.trained) // world_size}
    if zero_stage >= 2:
        parts["gradients"] = sizes.trained // world_size + bucket
    if zero_stage < 3:
        return parts | {"engine": bucket}
    parts |= {part: whole[part] // world_size for part in ("parameters", "ema")}
    return parts | {"engine": bucket + min(sizes.parameters, _ZERO_3_LIVE * _FP32)}
