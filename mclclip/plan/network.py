"""Counts the bytes that the ranks send each other in a step, by engine, and the time for them."""

from __future__ import annotations

from typing import Any

from mclclip.engines.engine import HALF
from mclclip.objectives.class_centers.cost import NETWORK_BYTES_PER_S
from mclclip.plan.machine import Machine
from mclclip.train.options import TrainConfig


def count(options: TrainConfig, measured: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """``collectives``, bytes of what all ranks together exchange by name, and ``seconds`` for them
    where nothing overlaps with the computation.

    Of n ranks each sends (n - 1) / n of an all-gather or a reduce-scatter, and twice that of an
    all-reduce. Objectives with class centers list the messages of the loss themselves. Both are
    empty or 0 for one rank.
    """
    if machine.ranks == 1:
        return {"collectives": {}, "seconds": 0.0}
    found = _of_engine(options, measured)
    if not measured["objective"]:
        batch, counted = measured["global_batch"], measured["operations"]
        found["all-gather of features"] = batch * counted["features"]
        found["reduce-scatter of their gradients"] = batch * counted["features_trained"]
    share = (machine.ranks - 1) / machine.ranks
    sent = sum(size * (2 if "all-reduce" in name else 1) for name, size in found.items())
    return {"collectives": found, "seconds": share * sent / NETWORK_BYTES_PER_S}


def _of_engine(options: TrainConfig, measured: dict[str, Any]) -> dict[str, int]:
    """Parameters are gathered for each forward and each backward pass, at most: those of frozen
    blocks have no backward pass."""
    how, trained, whole = options.engine, measured["trained"], measured["export"]
    if how.name == "ddp":
        return {"all-reduce of gradients": trained}
    if how.name == "deepspeed" and how.zero_stage < 3:
        return {"reduce-scatter of gradients": trained, "all-gather of parameters": trained}
    micro = measured["micro_batches"]
    passes = 2 if micro == 1 else 3 * micro
    half = how.name == "fsdp" and options.precision in HALF
    gathered = passes * whole // (2 if half else 1)
    return {"reduce-scatter of gradients": trained, "all-gather of parameters": gathered}
