"""Rows of several ranks: the mean loss, the fullest rank's memory, the slowest one's waiting."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import recorder
from mclclip.run.recorder import Recorder
from tests import tiny

Ranks = Callable[..., list[Any]]
WAIT_S = 0.2


def record(directory: Path, track: list[str]) -> None:
    """Two steps, one epoch; a rank holds 1 GiB, the next one 2 (processes are kept: put back)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "peak_bytes", lambda device: (1 + collectives.rank()) * 2**30)
        take_two_steps(directory, track)


def take_two_steps(directory: Path, track: list[str]) -> None:
    rank = collectives.rank()
    records = Recorder(
        directory, Context(rank, collectives.world_size()), name="stage 1", global_batch=8,
        start=0, total=2, steps_per_epoch=2, log_every=1, share_bad=len, track=track, config={},
    )  # fmt: skip

    def batches() -> Iterator[Any]:
        for _ in range(2):
            time.sleep(WAIT_S * rank)  # the second rank reads slowly
            yield SimpleNamespace(group_size=4, replaced={})

    for done, _ in enumerate(records.read_batches(batches()), start=1):
        parts = {"loss": torch.tensor(1.0 + rank), "logit_scale": torch.tensor(3)}
        parts["grad_norm"] = torch.tensor(2.0)
        records.take(done, parts, lr=0.1)
        records.end_epoch(done)
    records.close()


def record_without_wandb(directory: Path) -> None:
    """The same, where the package of a tracker is missing (processes are kept: put back)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        patch.delitem(sys.modules, "mclclip.run.trackers.wandb", raising=False)
        record(directory, ["wandb"])


def test_rows_are_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, record, tmp_path, [])
    found = tiny.rows(tmp_path / "metrics.jsonl")
    epoch = tiny.rows(tmp_path / "epochs.jsonl")[0]
    for row in (*found, epoch):
        assert row["loss"] == 1.5
        assert row["data_wait_share"] * row["seconds"] >= 0.9 * WAIT_S
    assert found[0]["logit_scale"] == 3.0 and epoch["steps"] == 2
    assert epoch["memory_gib"] == 2.0


def test_a_missing_tracker_fails_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Only the first rank opens trackers; the others must not wait for it."""
    with pytest.raises(ValueError, match="not installed") as caught:
        ranks(2, record_without_wandb, tmp_path)
    assert len(caught.value.__notes__) == 2
