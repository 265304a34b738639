"""A training that evaluates itself: figures, early end, best checkpoint, and kills in between."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mclclip.checkpoint import step_files
from tests import tiny
from tests.e2e.conftest import Send, Shell, at_call, training_in
from tests.matrix import in_soak, kept

TRAINING = "stage_0/train"
RECORDED = ("base.evaluate.every=2",)
# The figures of these few steps are all zero: the first one is the best, and the second, which is
# not better, ends the training at step 4 of 6.
JUDGED = (
    *RECORDED,
    "base.evaluate.metric=pairs/average",
    "base.evaluate.patience=1",
    "base.evaluate.best=true",
    "base.checkpoint.keep=1",
)


@dataclass(frozen=True)
class KillAround:
    """The process kills itself with -9 before, in the midst of or after its n-th evaluation."""

    when: str
    count: int

    def __call__(self) -> None:
        from mclclip.run.recorder import Recorder
        from mclclip.verbs import eval as evaluation
        from mclclip.verbs import export

        owners: dict[str, tuple[Any, str]] = {
            "before": (export, "write_step"),
            "during": (evaluation.SuiteJudge, "measure"),
            "after": (Recorder, "write_evaluation"),
        }
        kill = Send(signal.SIGKILL)
        at_call(*owners[self.when], self.count, kill, before=self.when == "before")


OPTIONS = ("num_stages=0",)


def command(indexed: tuple[Path, Path], run_dir: Path, *options: str) -> list[object]:
    shutil.copytree(indexed[1] / "index", run_dir / "index")
    return ["train", "--stage", "0", "--config", indexed[0], f"run_dir={run_dir}", *options]


def saved_in(run_dir: Path) -> list[int]:
    return step_files.steps(run_dir / TRAINING / "checkpoints")


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return tiny.rows(run_dir / TRAINING / "evaluations.jsonl")


@pytest.fixture(scope="module")
def judged(
    shell: Shell, indexed: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run directory of an undisturbed training that ends early."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    shell.ok(*command(indexed, run_dir, *JUDGED))
    return run_dir


def test_it_ends_early_and_keeps_the_best(shell: Shell, judged: Path) -> None:
    found = evaluations(judged)
    assert [row["step"] for row in found] == [2, 4]
    assert all({"pairs/average", "pairs/pooled", "pairs/shape"} <= row.keys() for row in found)
    counts = json.loads((judged / TRAINING / "manifest.json").read_text())["counts"]
    assert counts["steps"] == 4 and counts["exported_step"] == 2
    # One checkpoint is kept, and beside it the best one, which is exported.
    assert saved_in(judged) == [2, 4]
    best = step_files.load_model_state(judged / TRAINING / "checkpoints", 2)
    exported = step_files.trained_state(judged / TRAINING, averaged=False)
    assert all(torch.equal(best[name], exported[name]) for name in best)


def test_the_benchmark_that_chose_the_checkpoint_belongs_to_the_training(
    shell: Shell, data: Path, indexed: tuple[Path, Path], judged: Path, tmp_path: Path
) -> None:
    """The same benchmark may lie elsewhere; another is refused."""
    again = ["train", "--stage", "0", "--config", indexed[0], f"run_dir={judged}", *JUDGED]
    pairs = Path(shutil.copytree(data / "pairs", tmp_path / "pairs"))
    again += [f"eval.suite.pairs.path={pairs}"]
    before = (judged / TRAINING / "manifest.json").read_bytes()
    shell.ok(*again)
    next(path for path in sorted(pairs.rglob("*")) if path.suffix in (".png", ".jpg")).unlink()
    assert shell(*again).code == 2
    assert (judged / TRAINING / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("when", "count"), kept([("during", 2), ("before", 1), ("before", 2), ("after", 2)], 0)
)
def test_killed_around_an_evaluation_it_ends_as_an_undisturbed_one(
    shell: Shell, indexed: tuple[Path, Path], judged: Path, tmp_path: Path, when: str, count: int
) -> None:
    again = command(indexed, tmp_path / "run", *JUDGED)
    assert shell(*again, inside=KillAround(when, count)).code == -9
    shell.ok(*again)
    one, other = judged, tmp_path / "run"
    assert training_in(one / TRAINING) == training_in(other / TRAINING)
    assert saved_in(one) == saved_in(other)
    figures = [
        [row | {"eval_seconds": 0} for row in evaluations(run_dir)] for run_dir in (one, other)
    ]
    assert figures[0] == figures[1]


@in_soak
def test_an_evaluation_changes_nothing_of_the_training(
    shell: Shell, indexed: tuple[Path, Path], tmp_path: Path
) -> None:
    shell.ok(*command(indexed, tmp_path / "off"))
    shell.ok(*command(indexed, tmp_path / "on", *RECORDED))
    on, off = tmp_path / "on", tmp_path / "off"
    assert not [*(off / TRAINING).glob("evaluations*")]
    assert [row["step"] for row in evaluations(on)] == [2, 4, 6]
    digests = [
        json.loads((d / TRAINING / "manifest.json").read_text())["digest"] for d in (on, off)
    ]
    assert digests[0] == digests[1]
    assert training_in(on / TRAINING) == training_in(off / TRAINING)
