"""Steps and epochs give rows, and nothing waits for the device between rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mclclip.ranks.process_group import Context
from mclclip.run.recorder import NotFinite, Recorder, Work
from tests import tiny
from tests.device_waits import Readings

CPU = torch.device("cpu")
# What the page on conventions wants of every row.
WANTED = {
    "step", "epoch", "samples_seen", "loss", "lr", "logit_scale", "grad_norm",
    "rows_without_negatives", "samples_per_s", "samples_per_s_per_rank", "data_wait_share",
    "memory_gib", "group_size", "bad_samples", "seconds",
}  # fmt: skip


@dataclass
class Batch:
    group_size: int = 8
    replaced: dict[int, str] = field(default_factory=dict)


def parts_of(done: int) -> dict[str, Tensor]:
    names = ("logit_scale", "grad_norm", "rows_without_negatives")
    return {"loss": torch.tensor(float(done))} | {name: torch.tensor(2) for name in names}


def make(directory: Path, **options: Any) -> Recorder:
    """Makes the recorder of a training of 10 steps, with 4 steps per epoch and a row every 5."""
    settled: dict[str, Any] = {
        "name": "stage 1", "global_batch": 8, "start": 0, "total": 10, "steps_per_epoch": 4,
        "log_every": 5, "share_bad": lambda found: len(found), "track": [], "config": {},
    }  # fmt: skip
    return Recorder(directory, Context(), **(settled | options))


def go(recorder: Recorder, stop: int = 10, batch: Batch | None = None) -> None:
    """Records the steps that are left up to ``stop``, as the training loop does."""
    batches = [batch or Batch()] * (stop - recorder.start)
    for done, _ in enumerate(recorder.read_batches(batches), start=recorder.start + 1):
        recorder.take(done, parts_of(done), lr=0.1)
        recorder.end_epoch(done)
    if stop < recorder.total:
        recorder.end_epoch(stop, leaving=True)
    recorder.close()


def test_rows_have_all_that_is_promised(tmp_path: Path) -> None:
    go(make(tmp_path, share_bad=lambda found: 7), batch=Batch(group_size=3))
    five, ten = tiny.rows(tmp_path / "metrics.jsonl")
    assert WANTED <= set(five)
    assert (five["step"], five["epoch"], five["samples_seen"]) == (5, 1.25, 40)
    assert (ten["step"], ten["epoch"], ten["samples_seen"], ten["loss"]) == (10, 2.5, 80, 10.0)
    assert five["group_size"] == 3 and five["bad_samples"] == 7 and five["lr"] == 0.1


def test_every_epoch_has_a_row(tmp_path: Path) -> None:
    go(make(tmp_path))
    first, second, part = tiny.rows(tmp_path / "epochs.jsonl")
    assert [(row["step"], row["first_step"], row["steps"]) for row in (first, second, part)] == [
        (4, 0, 4), (8, 4, 4), (10, 8, 2)
    ]  # fmt: skip
    assert (first["loss"], second["loss"], part["loss"]) == (2.5, 6.5, 9.5)
    assert first["seconds"] >= 0 and first["memory_gib"] > 0 and first["epoch"] == 1.0


@pytest.mark.parametrize("stop", [6, 8])
def test_leaving_and_going_on_cuts_an_epoch_in_parts(tmp_path: Path, stop: int) -> None:
    go(make(tmp_path), stop)
    go(make(tmp_path, start=stop))
    found = [(row["first_step"], row["step"]) for row in tiny.rows(tmp_path / "epochs.jsonl")]
    assert found == {6: [(0, 4), (4, 6), (6, 8), (8, 10)], 8: [(0, 4), (4, 8), (8, 10)]}[stop]


def test_a_kill_leaves_no_row_twice(tmp_path: Path) -> None:
    go(make(tmp_path))  # killed at its end, with a checkpoint of step 5
    go(make(tmp_path, start=5))
    assert [row["step"] for row in tiny.rows(tmp_path / "metrics.jsonl")] == [5, 10]
    found = [(row["first_step"], row["step"]) for row in tiny.rows(tmp_path / "epochs.jsonl")]
    assert found == [(0, 4), (5, 8), (8, 10)]


def test_replaced_samples_are_shared_at_each_row(tmp_path: Path) -> None:
    shared: list[Mapping[int, str]] = []

    def share(found: Mapping[int, str]) -> int:
        shared.append(dict(found))
        return 1

    go(make(tmp_path, share_bad=share, steps_per_epoch=10), batch=Batch(replaced={3: "torn"}))
    assert shared == [{3: "torn"}, {3: "torn"}, {}]  # two rows of steps, then the epoch's


def test_nothing_waits_for_the_device_between_rows(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    batches = recorder.read_batches([Batch()] * 5)
    with Readings() as readings:
        for done in range(1, 5):
            next(batches)
            recorder.take(done, parts_of(done), lr=0.1)
        assert readings.count == 0
        float(recorder.loss_sum)
        assert readings.count == 1  # it would have been seen
    assert not tiny.rows(tmp_path / "metrics.jsonl")


def test_a_training_that_has_diverged_ends_at_the_row_that_tells(tmp_path: Path) -> None:
    recorder = make(tmp_path)

    def take(done: int) -> None:
        parts = parts_of(done)
        if done == 3:  # and is finite again: a row of the class centers is not in every step
            parts["grad_norm"] = torch.tensor(float("nan"))
        recorder.take(done, parts, lr=0.1)

    for done in range(1, 5):
        take(done)
    with pytest.raises(NotFinite, match="since step 3"):
        recorder.raise_if_diverged(4)
    with pytest.raises(NotFinite, match="since step 3"):
        take(5)
    recorder.close()
    (row,) = tiny.rows(tmp_path / "metrics.jsonl")
    assert row["step"] == 5 and not [name for name in row if name.startswith("max_")]


def test_steps_that_are_left_out_do_not_end_it(tmp_path: Path) -> None:
    recorder = make(tmp_path, leaves_out=True)
    for done in range(1, 11):
        recorder.take(done, parts_of(done) | {"loss": torch.tensor(float("inf"))}, lr=0.1)
    recorder.raise_if_diverged(10)
    recorder.close()
    assert [row["step"] for row in tiny.rows(tmp_path / "metrics.jsonl")] == [5, 10]


def test_a_line_of_the_log_shows_speed_and_waiting(tmp_path: Path) -> None:
    for work, words in (
        (Work([(0, 10**9)], 100.0), ["MFU", "waiting", "samples/s"]),
        (Work([(0, 10**9)], None), ["GFLOP/s", "waiting", "samples/s"]),
        (Work(), ["waiting", "samples/s"]),
    ):
        recorder = make(tmp_path / f"{words[0]}_{len(words)}", work=work, log_every=1)
        recorder.take(1, parts_of(1), lr=0.1)
        line = recorder.latest()
        assert all(word in line for word in words)
        recorder.close()
