"""What a pre-empted and resumed training on two ranks leaves to look at: rows, points, traces."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.conftest import Send, Shell, at_call

STEPS, PREEMPTED = 8, 85
OPTIONS = (
    f"base.steps={STEPS}", "base.checkpoint.every=100", "base.log_every=1", "poll_s=0.01",
    "base.profile_steps=[2,40]",
)  # fmt: skip


@dataclass(frozen=True)
class LeaveAfter:
    """Keeps wandb from the network; after the n-th update the process is asked to leave."""

    count: int

    def __call__(self) -> None:
        from mclclip.engines.engine import Engine

        os.environ["WANDB_MODE"] = "offline"
        at_call(Engine, "update", self.count, Send(signal.SIGUSR1))


@pytest.fixture(scope="module")
def trained(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a training that was pre-empted once, and its whole log."""
    folder = tmp_path_factory.mktemp("observability")
    names = ("tensorboard", "wandb")
    installed = [name for name in names if importlib.util.find_spec(name) is not None]
    config = tiny.write_config(
        folder / "config.yaml", folder / "run", data, *OPTIONS, f"track={json.dumps(installed)}"
    )
    shell.ok("index", "--config", config)
    train = ["train", "--stage", 0, "--config", config]
    first = shell(*train, ranks=2, inside=LeaveAfter(4))
    assert first.code == PREEMPTED, first.stderrs
    second = shell.ok(*train, ranks=2, inside=LeaveAfter(0))
    return folder / "run" / "stage_0" / "train", first.stderr + second.stderr


def test_every_step_has_one_row_with_both_ranks_in_it(trained: tuple[Path, str]) -> None:
    found = tiny.rows(trained[0] / "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row in found:
        assert abs(row["samples_per_s"] - 2 * row["samples_per_s_per_rank"]) < 1
        assert row["memory_gib"] > 0 and 0 <= row["data_wait_share"] <= 1


def test_the_parts_of_an_epoch_join(trained: tuple[Path, str]) -> None:
    directory, log = trained
    first, second = tiny.rows(directory / "epochs.jsonl")
    left_after = first["step"]
    assert 4 <= left_after < STEPS and first["first_step"] == 0
    assert (second["first_step"], second["step"]) == (left_after, STEPS)
    losses = [row["loss"] for row in tiny.rows(directory / "metrics.jsonl")]
    assert first["loss"] == pytest.approx(sum(losses[:left_after]) / left_after)
    assert second["loss"] == pytest.approx(sum(losses[left_after:]) / (STEPS - left_after))
    assert f"stage 0: {left_after} of {STEPS}, epoch 1 of 1" in log
    assert f"stage 0: {STEPS} of {STEPS}, epoch 1 of 1" in log


def test_the_chosen_step_is_traced_on_one_rank(trained: tuple[Path, str]) -> None:
    directory, log = trained
    names = sorted(path.name for path in (directory / "profile").iterdir())
    assert names == ["step_00000002_rank0.json.gz", "step_00000002_rank0.txt"]
    assert "profile_steps: there is no step [40], the last is 7" in log


def test_tensorboard_shows_each_point_once(trained: tuple[Path, str]) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loading.EventAccumulator(str(trained[0] / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))


def test_wandb_has_one_run_whose_rows_are_on_disk(trained: tuple[Path, str]) -> None:
    pytest.importorskip("wandb")
    directory = trained[0] / "wandb"
    run_id = (directory / "run_id").read_text()
    files = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    left_after = tiny.rows(trained[0] / "epochs.jsonl")[0]["step"]
    counts = [path.read_bytes().count(b"samples_seen") for path in files]
    # A row each, and some more for the summary.
    assert counts[0] >= left_after and counts[1] >= STEPS - left_after


def test_nothing_was_lost(trained: tuple[Path, str]) -> None:
    log = trained[1]
    bad = ("cannot be written", "failed in all", "does not start", "was not done")
    assert not [words for words in bad if words in log]
