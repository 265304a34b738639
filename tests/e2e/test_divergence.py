"""A training that turns NaN ends with one line, and its last finite checkpoint is there."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mclclip.checkpoint import step_files
from mclclip.run import artifacts
from tests.e2e.conftest import Finished, Shell, rows_of, state_of
from tests.matrix import kept


@dataclass(frozen=True)
class Spoil:
    """One pixel of the last rank's batches is NaN from step 3 on (counted from 1), and every
    checkpoint takes half a second to be written."""

    def __call__(self) -> None:
        from mclclip.checkpoint import step_files
        from mclclip.engines.engine import Engine

        original, write = Engine.update, step_files.write

        def slow(*args: Any, **options: Any) -> None:
            time.sleep(0.5)
            write(*args, **options)

        def update(engine: Any, batch: Any, lr: float) -> Any:
            if os.environ["RANK"] == "1" and batch.step >= 2:
                batch.views[0][0, 0, 3, 3] = float("nan")
            return original(engine, batch, lr)

        setattr(Engine, "update", update)  # noqa: B010
        setattr(step_files, "write", slow)  # noqa: B010


OPTIONS = ("base.steps=6",)


def train(
    shell: Shell, indexed: tuple[Path, Path], run_dir: Path, *options: object, **how: Any
) -> Finished:
    """Trains stage 0 in a run of its own, on the index that is there."""
    if not run_dir.exists():
        run_dir.mkdir()
        (run_dir / "index").symlink_to(indexed[1] / "index")
    command = ("train", "--stage", 0, "--config", indexed[0], f"run_dir={run_dir}", *options)
    return shell(*command, **how)


def assert_diverged(finished: Finished, *words: str) -> None:
    line = finished.refusal()
    for word in ("directory, or --force", *words):
        assert word in line, line


def assert_good(directory: Path, step: int) -> None:
    assert [path.name for path in directory.iterdir()] == [f"step_{step:08d}"]
    state = step_files.load_model_state(directory, step)
    assert state and all(bool(torch.isfinite(value).all()) for value in state.values())


@pytest.mark.parametrize("engine", kept(["ddp", "fsdp"], 0))
def test_every_rank_stops_where_one_of_them_has_nan(
    shell: Shell, indexed: tuple[Path, Path], tmp_path: Path, engine: str
) -> None:
    """At the next row, though a checkpoint is still being written."""
    run_dir = tmp_path / "run"
    options = ("base.checkpoint.keep=1", f"base.engine.name={engine}", "base.log_every=1",
               "base.checkpoint.asynchronous=true")  # fmt: skip
    finished = train(shell, indexed, run_dir, *options, ranks=2, inside=Spoil())
    directory = run_dir / "stage_0/train/checkpoints"
    words = ("not finite since step 3 (stage 0): lower lr (0.00", "or set clip_grad_norm")
    assert_diverged(finished, *words, f"is step 2 in {directory}")
    assert_good(directory, 2)
    assert [row["step"] for row in rows_of(run_dir / "stage_0/train")] == [1, 2, 3]
    assert not artifacts.is_finished(run_dir / "stage_0/train")
    state = state_of(run_dir)
    assert (state["state"], state["exit_code"], state["requeue"]) == ("failed", 2, False)
    assert "not finite since step 3" in state["reason"]
    # The batch was to blame: the same command goes on.
    again = train(shell, indexed, run_dir, *options, ranks=2)
    assert again.code == 0, again.stderrs
    assert_good(directory, 6)


def test_a_rate_that_is_too_high_ends_the_training(
    shell: Shell, indexed: tuple[Path, Path], tmp_path: Path
) -> None:
    """As it happens to a user, before anything was saved; --force makes it again."""
    options = ("base.lr=300", "base.checkpoint.every=100", "base.precision=bf16", "base.steps=20")
    finished = train(shell, indexed, tmp_path / "run", *options)
    assert_diverged(finished, "no checkpoint had been saved in", "lower lr (")
    lower = ("base.lr=1e-3", "base.checkpoint.every=100", "--force")
    assert train(shell, indexed, tmp_path / "run", *lower).code == 0
    assert artifacts.is_finished(tmp_path / "run/stage_0/train")
