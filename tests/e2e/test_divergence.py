"""A training that turns NaN ends with one line, and its last finite checkpoint is there."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mclclip.checkpoint import step_files
from mclclip.run import artifacts
from tests import tiny
from tests.e2e.conftest import Finished, Shell
from tests.matrix import in_soak, kept

CENTERS = "train.objective={kind: mlcd, labels_per_sample: 2, sample_rate: 0.5, margin: none}"


@dataclass(frozen=True)
class Spoil:
    """One pixel of one rank's batches is NaN, from step ``first`` (counted from 1) to ``last``.

    Every checkpoint takes ``writing_s`` seconds to be written.
    """

    first: int
    rank: int = 0
    last: int = 999
    writing_s: float = 0.0

    def __call__(self) -> None:
        from mclclip.checkpoint import step_files
        from mclclip.engines.engine import Engine

        original, write = Engine.update, step_files.write

        def slow(*args: Any, **options: Any) -> None:
            time.sleep(self.writing_s)
            write(*args, **options)

        def update(engine: Any, batch: Any, lr: float) -> Any:
            here = int(os.environ.get("RANK", "0")) == self.rank
            if here and self.first <= batch.step + 1 <= self.last:
                batch.views[0][0, 0, 3, 3] = float("nan")
            return original(engine, batch, lr)

        setattr(Engine, "update", update)  # noqa: B010
        setattr(step_files, "write", slow)  # noqa: B010


@pytest.fixture(scope="module")
def indexed(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run that is trained up to stage 1 by these tests, piece by piece."""
    folder = tmp_path_factory.mktemp("divergence")
    config = tiny.write_config(folder / "config.yaml", folder / "run", data, "base.steps=8")
    shell.ok("index", "--config", config)
    return config


def train(
    shell: Shell, config: Path, run_dir: Path, *options: object, stage: int = 0, **how: Any
) -> Finished:
    """Trains a stage in a run of its own, on the index that is there."""
    if not run_dir.exists():
        run_dir.mkdir()
        (run_dir / "index").symlink_to(config.parent / "run/index")
    named = ["--config", config, f"run_dir={run_dir}", *options]
    return shell("train", "--stage", stage, *named, **how)


def assert_diverged(finished: Finished, *words: str) -> None:
    line = finished.refusal()
    for word in ("directory, or --force", *words):
        assert word in line, line


def assert_good(directory: Path, steps: list[int]) -> None:
    assert [path.name for path in sorted(directory.iterdir())] == [
        f"step_{step:08d}" for step in steps
    ]
    state = step_files.load_model_state(directory, steps[-1])
    assert state and all(bool(torch.isfinite(value).all()) for value in state.values())


@pytest.mark.parametrize("ranks", kept([1, 2], 1))
@pytest.mark.parametrize("engine", kept(["ddp", "fsdp"], 0))
def test_every_rank_stops_where_one_of_them_has_nan(
    shell: Shell, indexed: Path, tmp_path: Path, engine: str, ranks: int
) -> None:
    """At the next row, though a checkpoint is still being written."""
    run_dir = tmp_path / "run"
    options = ("base.checkpoint.keep=1", f"base.engine.name={engine}", "base.log_every=1",
               "base.checkpoint.asynchronous=true")  # fmt: skip
    spoil = Spoil(first=3, rank=ranks - 1, writing_s=0.5)
    finished = train(shell, indexed, run_dir, *options, ranks=ranks, inside=spoil)
    directory = run_dir / "stage_0/train/checkpoints"
    words = ("not finite since step 3 (stage 0): lower lr (0.00", "or set clip_grad_norm")
    assert_diverged(finished, *words, f"is step 2 in {directory}")
    assert_good(directory, [2])
    rows = (run_dir / "stage_0/train/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]
    assert not artifacts.is_finished(run_dir / "stage_0/train")
    state = json.loads((run_dir / "run_state.json").read_text())
    assert (state["state"], state["exit_code"], state["requeue"]) == ("failed", 2, False)
    assert "not finite since step 3" in state["reason"]

    # The batch was to blame: the same command goes on. Other settings do what the line says.
    refused = train(shell, indexed, run_dir, *options, "base.lr=1e-4")
    assert_diverged(refused, "made with other settings: train.lr was")
    again = train(shell, indexed, run_dir, *options, ranks=ranks)
    assert again.code == 0, again.stderrs
    assert_good(directory, [8])


@pytest.mark.parametrize("ranks", kept([1, 2], 1))
@pytest.mark.parametrize("asynchronous", kept([False, True], 1))
@in_soak
def test_nan_between_two_rows_is_not_saved(
    shell: Shell, indexed: Path, tmp_path: Path, asynchronous: bool, ranks: int
) -> None:
    options = ("base.log_every=100", f"base.checkpoint.asynchronous={asynchronous}",
               "base.checkpoint.keep=1", "base.clip_grad_norm=2")  # fmt: skip
    spoil = Spoil(first=5, rank=ranks - 1, last=5)
    finished = train(shell, indexed, tmp_path / "run", *options, ranks=ranks, inside=spoil)
    directory = tmp_path / "run/stage_0/train/checkpoints"
    words = ("not finite since step 5 (stage 0)", "or clip_grad_norm (2)", "is step 4 in")
    assert_diverged(finished, *words)
    assert_good(directory, [4])


def test_a_rate_that_is_too_high_ends_the_training(
    shell: Shell, indexed: Path, tmp_path: Path
) -> None:
    """As it happens to a user, before anything was saved; --force makes it again."""
    options = ("base.lr=300", "base.checkpoint.every=100", "base.precision=bf16", "base.steps=40")
    finished = train(shell, indexed, tmp_path / "run", *options)
    assert_diverged(finished, "no checkpoint had been saved in", "lower lr (")
    lower = ("base.lr=1e-3", "base.checkpoint.every=100", "--force")
    assert train(shell, indexed, tmp_path / "run", *lower).code == 0
    assert artifacts.is_finished(tmp_path / "run/stage_0/train")


@in_soak
def test_class_centers_stop_too(shell: Shell, indexed: Path, tmp_path: Path) -> None:
    """Also where NaN has reached rows that later steps do not draw."""
    run_dir = tmp_path / "run"
    options = ("num_stages=1", "cluster.num_clusters=21", CENTERS, "train.log_every=100",
               "cluster.labels_per_sample=2", "train.checkpoint.keep=1")  # fmt: skip
    assert train(shell, indexed, run_dir).code == 0
    for verb in ("export", "embed", "cluster"):
        where = ("--stage", "0", "--config", indexed, f"run_dir={run_dir}", *options)
        shell.ok(verb, *where)
    finished = train(
        shell, indexed, run_dir, *options, stage=1, ranks=2, inside=Spoil(first=4, rank=1)
    )
    assert_diverged(finished, "not finite since step 4 (stage 1)", "is step 2 in")
    assert_good(run_dir / "stage_1/train/checkpoints", [2])


@in_soak
def test_zero_and_fp16_go_on(shell: Shell, indexed: Path, tmp_path: Path) -> None:
    """They leave the step out: its NaN reaches nothing."""
    pytest.importorskip("deepspeed")
    for number, option in enumerate(("base.engine.name=deepspeed", "base.precision=fp16")):
        run_dir = tmp_path / str(number)
        finished = train(shell, indexed, run_dir, option, ranks=2, inside=Spoil(3, 1, 4))
        assert finished.code == 0, finished.stderrs
        assert_good(run_dir / "stage_0/train/checkpoints", [8])


@in_soak
def test_leaving_out_all_steps_is_told(shell: Shell, indexed: Path, tmp_path: Path) -> None:
    options = ("base.precision=fp16", "base.steps=24", "base.log_every=12")
    finished = train(shell, indexed, tmp_path / "run", *options, inside=Spoil(first=5))
    assert finished.code == 0
    (line,) = [line for line in finished.stderr.splitlines() if "left out, since" in line]
    assert "the last 20 steps up to step 24 were left out" in line
    assert_good(tmp_path / "run/stage_0/train/checkpoints", [24])
