"""Rows, warnings and ends of a training on several ranks: of all of them, and alike on each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mclclip.checkpoint import CheckpointConfig
from mclclip.checkpoint.checkpoints import Checkpoints
from mclclip.objectives.class_centers import ShardedClassCenters, normal_rows
from mclclip.ranks import collectives
from mclclip.run import recorder
from mclclip.run.recorder import NotFinite, Recorder
from tests import tiny
from tests.distributed.conftest import here
from tests.matrix import kept
from tests.unit.train.test_symptoms import NOTHING_LEARNED, figures, trained

Ranks = Callable[..., list[Any]]
WAIT_S = 0.2


def recorder_of(directory: Path, steps: int, **options: Any) -> Recorder:
    every: dict[str, Any] = {"track": [], "log_every": 1, "share_bad": len} | options
    return Recorder(
        directory, here(), name="stage 1", global_batch=8, start=0, total=steps,
        steps_per_epoch=steps, config={}, **every,
    )  # fmt: skip


def record(directory: Path, track: list[str]) -> None:
    """Two steps, one epoch; a rank holds 1 GiB, the next one 2 (processes are kept: put back)."""
    rank = collectives.rank()

    def batches() -> Iterator[Any]:
        for _ in range(2):
            time.sleep(WAIT_S * rank)  # the second rank reads slowly
            yield SimpleNamespace(group_size=4, replaced={})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "peak_bytes", lambda device: (1 + rank) * 2**30)
        patch.setitem(sys.modules, "wandb", None)
        patch.delitem(sys.modules, "mclclip.run.trackers.wandb", raising=False)
        records = recorder_of(directory, 2, track=track)
        for done, _ in enumerate(records.read_batches(batches()), start=1):
            parts = {"loss": torch.tensor(1.0 + rank), "logit_scale": torch.tensor(3)}
            parts["grad_norm"] = torch.tensor(2.0)
            records.take(done, parts, lr=0.1)
            records.end_epoch(done)
        records.close()


def test_rows_are_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """The mean loss, the fullest rank's memory, the slowest one's waiting."""
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
        ranks(2, record, tmp_path, ["wandb"])
    assert len(caught.value.__notes__) == 2


# Gradients are cached under ddp.
@pytest.mark.slow
@pytest.mark.parametrize("engine", kept(["name=fsdp", "micro_batch=5"], 1))
def test_two_ranks_warn_as_one(ranks: Ranks, tmp_path: Path, engine: str) -> None:
    data = tiny.make_data(tmp_path / "data", num_samples=48)
    options = (data, *NOTHING_LEARNED, "precision=float64")
    one = trained(tmp_path / "one", *options)
    two = ranks(2, trained, tmp_path / "two", *options, f"engine.{engine}")[0]
    for expected, found in zip(figures(one), figures(two), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    told = [tiny.rows(directory / "warnings.jsonl") for directory in (one, two)]
    assert told[0] == told[1] and len(told[0]) == 1


# --- what is not finite on one rank alone ------------------------------------------------------


class Saved:
    """Weights that all ranks hold, and class centers of which each holds some rows."""

    def __init__(self) -> None:
        self.head = ShardedClassCenters(7, 4, normal_rows(4, seed=1), context=here())
        self.weights = {f"model.p{n}": torch.full((n + 1,), 1.0) for n in range(6)}

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights | self.head.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights = {name: state[name] for name in self.weights}
        self.head.load_state_dict(state)


def save(directory: Path, what: str, asynchronous: bool) -> tuple[str, int, list[str]]:
    """Saves a state and then one that is spoiled in a row or a moment of one rank's class centers,
    or in the weights, as DDP keeps them, of all: what was raised, and what a resume finds."""
    config = CheckpointConfig(keep=1, asynchronous=asynchronous)
    checkpoints, source, line = Checkpoints(directory, config), Saved(), ""
    checkpoints.save(1, source)
    if what == "weights":
        source.weights["model.p2"][1] = float("inf")
    elif collectives.rank() == 1:
        getattr(source.head, what)[-1, 2] = float("nan")
    try:
        checkpoints.save(2, source)
    except NotFinite as error:
        line = str(error)
    checkpoints.wait()
    step = Checkpoints(directory, CheckpointConfig(keep=1)).resume(again := Saved())
    assert bool(torch.isfinite(again.head.rows).all())
    collectives.barrier()
    return line, step, sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("what", "asynchronous"), [("rows", False), ("exp_avg", True), ("weights", False)]
)
def test_no_rank_saves_what_is_not_finite(
    ranks: Ranks, tmp_path: Path, what: str, asynchronous: bool
) -> None:
    first, *others = ranks(3, save, tmp_path / "checkpoints", what, asynchronous)
    name = "model.p2" if what == "weights" else f"class_centers.{what}"
    assert first == (f"what was trained ({name}) is not finite after step 2", 1, ["step_00000001"])
    assert others == [first, first]


def take_eight(directory: Path) -> list[str]:
    """Rows every four steps; the last rank's loss is infinite in its sixth step alone."""
    records, raised = recorder_of(directory, 12, log_every=4, share_bad=lambda _: 0), []
    for done in range(1, 9):
        bad = done == 6 and collectives.rank() == collectives.world_size() - 1
        parts = {"loss": torch.tensor(float("inf") if bad else 1.0), "grad_norm": torch.tensor(2.0)}
        try:
            records.take(done, parts, lr=0.1)
            if done == 7:  # as where a checkpoint is due between two rows
                records.raise_if_diverged(done)
        except NotFinite as error:
            raised.append(f"{done}: {error}")
    records.close()
    return raised


def test_one_rank_alone_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    line = "the loss or its gradient is not finite since step 6"
    assert ranks(3, take_eight, tmp_path) == [[f"7: {line}", f"8: {line}"]] * 3
