"""Shares of a rank: what is divided, what stays whole, what engines add."""

from __future__ import annotations

import pytest

from mclclip.engines import EngineConfig, TrainingBytes, per_rank

SIZES = TrainingBytes(
    parameters=1600, trained=800, moments=1600, average=800, outside=100, largest_block=120
)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed"])
def test_one_process_shares_nothing(name: str) -> None:
    parts = per_rank(SIZES, EngineConfig(name, zero_stage=3), 1)
    assert list(parts.values()) == [1600, 800, 1600, 800, 0]


def test_ddp_adds_its_buckets() -> None:
    assert per_rank(SIZES, EngineConfig("ddp"), 8) == per_rank(SIZES, EngineConfig("ddp"), 1) | {
        "engine": 800
    }


def test_fsdp_divides_all_and_gathers_blocks() -> None:
    parts = per_rank(SIZES, EngineConfig("fsdp"), 8)
    assert list(parts.values()) == [200, 100, 200, 100, 100 + 2 * 120 + 120]
    assert per_rank(SIZES, EngineConfig("fsdp"), 8, half=True)["engine"] == 100 + 120 + 120
    assert per_rank(SIZES, EngineConfig("fsdp", shard_ranks=2), 8)["parameters"] == 800
    assert per_rank(SIZES, EngineConfig("fsdp"), 8, caching=True)["gradients"] == 800


def test_zero_divides_more_at_every_stage() -> None:
    one, two, three = (
        per_rank(SIZES, EngineConfig("deepspeed", zero_stage=stage), 8) for stage in (1, 2, 3)
    )
    assert one["optimizer"] == two["optimizer"] == three["optimizer"] == (1600 + 800) // 8
    assert one["gradients"] == 800 and two["gradients"] == 100 + 800
    assert two["parameters"] == 1600 and three["parameters"] == 200
    assert two["ema"] == 800 and three["ema"] == 100
    assert three["engine"] == two["engine"] + 1600  # below its threshold it keeps all it gathered
