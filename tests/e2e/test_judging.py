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
from tests.e2e.conftest import KillAfter, Send, Shell, at_call
from tests.matrix import IN_SOAK, in_soak

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


@pytest.fixture(scope="module")
def indexed(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run that has its index, in ``run`` beside it; tests copy it."""
    folder = tmp_path_factory.mktemp("judged")
    config = tiny.write_config(folder / "config.yaml", folder / "run", data, "num_stages=0")
    shell.ok("index", "--config", config)
    return config


def command(indexed: Path, run_dir: Path, *options: str) -> list[object]:
    shutil.copytree(indexed.parent / "run" / "index", run_dir / "index")
    return ["train", "--stage", "0", "--config", indexed, f"run_dir={run_dir}", *options]


def rows(path: Path, *without: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in without} for row in found]


def assert_same_training(one: Path, other: Path) -> None:
    """The same steps with the same weights, figures and losses, bit for bit."""
    for name in (one, other):
        assert (name / TRAINING / "manifest.json").exists()
    kept = [step_files.steps(name / TRAINING / "checkpoints") for name in (one, other)]
    assert kept[0] == kept[1]
    for step in kept[0]:
        states = [
            step_files.load_model_state(name / TRAINING / "checkpoints", step)
            for name in (one, other)
        ]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    for file, times in (("metrics.jsonl", None), ("evaluations.jsonl", "eval_seconds")):
        if times is None:
            names = ("step", "loss", "lr", "grad_norm")
            found = [
                [{k: row[k] for k in names} for row in rows(d / TRAINING / file)]
                for d in (one, other)
            ]
        else:
            found = [rows(d / TRAINING / file, times) for d in (one, other)]
        assert found[0] == found[1]


@pytest.fixture(scope="module")
def judged(shell: Shell, indexed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an undisturbed training that ends early."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    shell.ok(*command(indexed, run_dir, *JUDGED))
    return run_dir


def test_it_ends_early_and_keeps_the_best(shell: Shell, judged: Path) -> None:
    found = rows(judged / TRAINING / "evaluations.jsonl")
    assert [row["step"] for row in found] == [2, 4]
    assert all({"pairs/average", "pairs/pooled", "pairs/shape"} <= row.keys() for row in found)
    counts = json.loads((judged / TRAINING / "manifest.json").read_text())["counts"]
    assert counts["steps"] == 4 and counts["exported_step"] == 2
    # One checkpoint is kept, and beside it the best one, which is exported.
    assert step_files.steps(judged / TRAINING / "checkpoints") == [2, 4]
    best = step_files.load_model_state(judged / TRAINING / "checkpoints", 2)
    exported = step_files.trained_state(judged / TRAINING, averaged=False)
    assert all(torch.equal(best[name], exported[name]) for name in best)


def test_the_benchmark_that_chose_the_checkpoint_belongs_to_the_training(
    shell: Shell, data: Path, indexed: Path, judged: Path, tmp_path: Path
) -> None:
    """The same benchmark may lie elsewhere; another is refused."""
    again = ["train", "--stage", "0", "--config", indexed, f"run_dir={judged}", *JUDGED]
    pairs = Path(shutil.copytree(data / "pairs", tmp_path / "pairs"))
    again += [f"eval.suite.pairs.path={pairs}"]
    before = (judged / TRAINING / "manifest.json").read_bytes()
    shell.ok(*again)
    next(path for path in sorted(pairs.rglob("*")) if path.suffix in (".png", ".jpg")).unlink()
    assert shell(*again).code == 2
    assert (judged / TRAINING / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("when", "count"),
    [
        ("during", 2),
        *(
            pytest.param(when, count, marks=IN_SOAK)
            for when, count in [
                ("before", 1), ("before", 2), ("during", 1), ("after", 1), ("after", 2),
            ]
        ),
    ],
)  # fmt: skip
def test_killed_around_an_evaluation_it_ends_as_an_undisturbed_one(
    shell: Shell, indexed: Path, judged: Path, tmp_path: Path, when: str, count: int
) -> None:
    again = command(indexed, tmp_path / "run", *JUDGED)
    assert shell(*again, inside=KillAround(when, count)).code == -9
    shell.ok(*again)
    assert_same_training(judged, tmp_path / "run")


@in_soak
def test_two_ranks_killed_at_every_save(shell: Shell, indexed: Path, tmp_path: Path) -> None:
    options = (*JUDGED, "base.evaluate.patience=2", "base.checkpoint.every=1")
    whole = command(indexed, tmp_path / "whole", *options)
    shell.ok(*whole, ranks=2)
    cut = command(indexed, tmp_path / "cut", *options)
    for _ in range(6):
        # A rank that has not come so far may end because the other is gone.
        assert -9 in shell(*cut, ranks=2, inside=KillAfter("save", 1)).codes
    shell.ok(*cut, ranks=2)
    assert_same_training(tmp_path / "whole", tmp_path / "cut")


@in_soak
def test_an_evaluation_changes_nothing_of_the_training(
    shell: Shell, indexed: Path, tmp_path: Path
) -> None:
    shell.ok(*command(indexed, tmp_path / "off"))
    shell.ok(*command(indexed, tmp_path / "on", *RECORDED))
    on, off = (tmp_path / name / TRAINING for name in ("on", "off"))
    assert not (off / "evaluations.jsonl").exists() and not (off / "evaluations").exists()
    assert [row["step"] for row in rows(on / "evaluations.jsonl")] == [2, 4, 6]
    digests = [json.loads((d / "manifest.json").read_text())["digest"] for d in (on, off)]
    assert digests[0] == digests[1]
    states = [step_files.load_model_state(d / "checkpoints", 6) for d in (on, off)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
