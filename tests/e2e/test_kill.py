"""``kill -9`` at random moments of the pipeline, then the same command again, under torchrun.

The pipeline runs on two ranks. A moment is the making of one artifact (or of one model's rows): it
begins when all before it are finished. A kill waits for a moment that the running command reaches
by its own work, then for a random part of the time that the moment took undisturbed, and strikes
the launcher, one worker, or both. A round is one run directory: up to five kills, each followed by
the same command, until it finishes; then everything must be as in the undisturbed run, bit for bit.
Checkpoints of stage 0 are written while it trains on, those of later stages are not.

Three kills by default, sixty with ``MCLCLIP_SOAK=1``. ``MCLCLIP_SOAK_SEED`` strikes at other
moments. ``pytest -s`` shows a line per kill.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mclclip.checkpoint import step_files
from mclclip.run import artifacts
from mclclip.util import files
from tests import tiny
from tests.e2e.conftest import Started, rows_of, training_in
from tests.matrix import SOAK

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("MCLCLIP_SOAK_SEED", "0"))
TARGETS = ("launcher", "worker", "both")
KILLS_PER_ROUND = 5
NUM_KILLS = 60 if SOAK else 3
VERBS = ("train", "embed", "join", "cluster", "index", "export", "evaluate")  # aimed at in turn
NUM_VERBS = 6 if SOAK else 2  # that have to be hit: the shortest are missed by chance
RUN_S = 300.0
MOST_LOST = 2  # steps with a row but without a checkpoint: one is being written, one is under way
OPTIONS = (
    "data.num_workers=1",
    "data.index_workers=2",
    "base.log_every=1",
    "base.checkpoint={every: 1, asynchronous: true}",
    "train.lock.text=false",
    "train.log_every=1",
    "train.checkpoint.every=1",
    # A worker that comes up just as its launcher is killed cannot know of it: its limit ends it.
    "peer_timeout_s=60",
)


# --- moments ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """The making of ``what``: artifacts, or (``evaluate``) the rows of models."""

    verb: str
    what: tuple[str, ...]

    def over(self, run_dir: Path) -> bool:
        """True where all of it is finished."""
        if self.verb == "evaluate":
            return set(self.what) <= models_with_rows(run_dir)
        return all(artifacts.is_finished(run_dir / name) for name in self.what)


def moments() -> list[Moment]:
    """The pipeline's steps in order (two stages, no controls)."""
    joined = ("concat_raw", "concat_stage_norm", "soup_uniform")
    found = [Moment("index", ("index",)), *training_of(0)]
    for stage in (0, 1):
        embeddings = ("embeddings", "text_embeddings") if stage == 0 else ("embeddings",)
        labels = (f"stage_{stage}/clusters", f"stage_{stage + 1}/pseudo_labels")
        found += [
            Moment("embed", tuple(f"stage_{stage}/{name}" for name in embeddings)),
            Moment("cluster", labels),
            *training_of(stage + 1),
        ]
    exports = tuple(f"exports/{name}" for name in joined)
    return [*found, Moment("join", exports), Moment("evaluate", joined)]


def training_of(stage: int) -> list[Moment]:
    return [
        Moment("train", (f"stage_{stage}/train",)),
        Moment("export", (f"stage_{stage}/export",)),
        Moment("evaluate", (f"stage_{stage}",)),
    ]


MOMENTS = moments()


def models_with_rows(run_dir: Path) -> set[str]:
    return {row["model"] for row in tiny.rows(run_dir / "results.jsonl")}


def current(run_dir: Path, first: int = 0) -> int:
    """Number of the first moment from ``first`` on that is not over (len(MOMENTS): all are)."""
    number = first
    while number < len(MOMENTS) and MOMENTS[number].over(run_dir):
        number += 1
    return number


def start(config: Path, run_dir: Path, log: Path) -> Started:
    words = tiny.command("run", "--config", str(config), f"run_dir={run_dir}", ranks=2)
    return Started(words, run_dir, log)


def at_moment(run: Started, number: int) -> bool:
    """Waits until the run is at work and has come to moment ``number``; False if it ended."""
    deadline = time.monotonic() + RUN_S
    while not run.has_the_lock() or current(run.run_dir) < number:
        assert time.monotonic() < deadline, run.log.read_text()
        if run.launcher.poll() is not None:
            return False
        time.sleep(0.005)
    return True


# --- what must hold -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Before:
    """What there is when a command starts."""

    finished: set[str]
    models: set[str]

    @classmethod
    def of(cls, run_dir: Path) -> Before:
        return cls(
            {str(p.parent) for p in run_dir.rglob("manifest.json")}, models_with_rows(run_dir)
        )

    def check_log(self, log: str) -> None:
        """Only finished work was skipped, nothing was damaged, and the lock refused nobody."""
        assert "is in use by" not in log and "damaged" not in log, log
        assert set(re.findall(r"I (\S+) is finished: skipped", log)) <= self.finished
        assert set(re.findall(r"I (\S+) is evaluated already", log)) <= self.models


def saved_steps(run_dir: Path) -> dict[Path, int]:
    """The newest published checkpoint of every training."""
    found = {path: step_files.steps(path) for path in run_dir.rglob("checkpoints")}
    return {path: steps[-1] for path, steps in found.items() if steps}


def check_disk(run_dir: Path, saved_before: dict[Path, int]) -> None:
    """Whatever has its final name is whole, no published checkpoint is lost, and few steps are."""
    for path in [*run_dir.rglob("manifest.json"), *run_dir.rglob("shards.json")]:
        files.read_json(path)
    models_with_rows(run_dir)
    saved = saved_steps(run_dir)
    assert all(saved.get(path, 0) >= step for path, step in saved_before.items())
    for directory in run_dir.rglob("checkpoints"):
        for step in step_files.steps(directory):
            path = step_files.path_of(directory, step)
            entries = step_files.read_entries(path, step)
            assert len(entries) >= 3  # a file per rank, and what they hold
            assert files.records_of(path, *entries) == entries
        assert len(rows_of(directory.parent)) - saved.get(directory, 0) <= MOST_LOST, (
            f"{directory}: steps are lost"
        )


def state_of(run_dir: Path) -> dict[str, Any]:
    """All that a run leaves, but for times and the bytes of formats that hold them."""
    return {
        "exports": tiny.digests(run_dir, "**/*.safetensors"),
        "arrays": tiny.digests(run_dir, "**/*.npy"),
        "index": tiny.digests(run_dir, "index/*.arrow"),
        "trainings": {
            str(path.relative_to(run_dir)): training_in(path.parent)
            for path in run_dir.rglob("checkpoints")
        },
        "manifests": {
            str(path.relative_to(run_dir)): {
                **files.read_json(path),
                "finished": "",
                "checksum": "",
            }
            for path in run_dir.rglob("manifest.json")
        },
        "results": sorted((run_dir / "results.jsonl").read_text().splitlines()),
        "left over": [
            str(p) for name in ("*.tmp", "in_progress.json") for p in run_dir.rglob(name)
        ],
    }


# --- kills --------------------------------------------------------------------------------------


@dataclass
class Kill:
    number: int
    target: str
    verb: str
    what: str
    after_s: float
    gone_after_s: float

    def __str__(self) -> str:
        return (
            f"kill {self.number:2d}: {self.target:8s} during {self.verb:8s} ({self.what}), "
            f"{self.after_s:.2f} s into it, all processes gone after {self.gone_after_s:.2f} s"
        )


class Killer:
    """Strikes and checks; ``kills`` are those of all rounds."""

    def __init__(self, config: Path, durations_s: list[float]) -> None:
        self.config, self.durations_s = config, durations_s
        self.kills: list[Kill] = []

    def strike(self, run_dir: Path, log: Path) -> bool:
        """One start of the command and its kill; False where the run ended before the kill."""
        number = len(self.kills)
        rng = random.Random(f"{SEED} {number}")
        reached = current(run_dir)
        first = 0 if reached == 0 else reached + 1  # ahead: what is begun is not begun anew
        if first >= len(MOMENTS):
            return False
        aim = VERBS[number % len(VERBS)]
        ahead = [at for at in range(first, len(MOMENTS)) if MOMENTS[at].verb == aim]
        moment = min(ahead, default=first)
        before, target = Before.of(run_dir), TARGETS[number % len(TARGETS)]
        run = start(self.config, run_dir, log)
        try:
            if not at_moment(run, moment):
                return False
            after_s = rng.uniform(0.0, self.durations_s[moment])
            time.sleep(after_s)
            if run.launcher.poll() is not None or not (workers := run.workers()):
                return False
            saved = saved_steps(run_dir)
            victims = [run.launcher.pid] * (target != "worker")
            for pid in [*victims, *[rng.choice(workers)] * (target != "launcher")]:
                os.kill(pid, signal.SIGKILL)
            gone_after_s = run.gone_after_s()
        finally:
            run.end()
        before.check_log(log.read_text())
        check_disk(run_dir, saved)
        if (struck := current(run_dir)) == len(MOMENTS):
            return False
        during = MOMENTS[struck]
        kill = Kill(number, target, during.verb, during.what[0], after_s, gone_after_s)
        print(kill, flush=True)
        self.kills.append(kill)
        return True

    def play_round(self, run_dir: Path, reference: dict[str, Any]) -> None:
        """Kills until enough, lets the command finish, compares."""
        before = len(self.kills)
        logs = (run_dir.with_name(f"{run_dir.name}_{n:02d}.log") for n in range(100))
        for _ in range(min(KILLS_PER_ROUND, NUM_KILLS - before)):
            if not self.strike(run_dir, next(logs)):
                break
        assert len(self.kills) > before, "a whole round without a kill"
        finish(self.config, run_dir, next(logs))
        found = state_of(run_dir)
        for name, expected in reference.items():
            assert found[name] == expected, f"{name} after {list(map(str, self.kills[before:]))}"


def finish(config: Path, run_dir: Path, log: Path) -> list[float]:
    """Runs the command to its end; returns the seconds that each moment took."""
    before = Before.of(run_dir)
    run = start(config, run_dir, log)
    changes = [time.monotonic()] * (len(MOMENTS) + 1)
    seen, deadline = 0, time.monotonic() + RUN_S
    try:
        while run.launcher.poll() is None and time.monotonic() < deadline:
            now = current(run_dir, seen) if run.has_the_lock() or seen else 0
            changes[now:] = [time.monotonic()] * len(changes[now:])
            seen = now
            time.sleep(0.005)
        assert run.launcher.poll() == 0, log.read_text()
        run.gone_after_s()
    finally:
        run.end()
    before.check_log(log.read_text())
    return [after - begin for begin, after in zip(changes, changes[1:], strict=False)]


def test_killed_runs_end_as_the_undisturbed_one(tmp_path: Path) -> None:
    data = tiny.make_data(tmp_path / "data")
    config = tiny.write_config(tmp_path / "config.yaml", tmp_path / "reference", data, *OPTIONS)
    durations_s = finish(config, tmp_path / "reference", tmp_path / "reference.log")
    reference = state_of(tmp_path / "reference")
    assert len(reference["exports"]) >= 5 and not reference["left over"]
    assert len(reference["trainings"]) == 3
    killer = Killer(config, durations_s)
    while len(killer.kills) < NUM_KILLS:
        run_dir = tmp_path / f"round_{len(killer.kills):02d}"
        killer.play_round(run_dir, reference)
        shutil.rmtree(run_dir)
    report = "\n".join(map(str, killer.kills))
    assert len({kill.verb for kill in killer.kills}) >= NUM_VERBS, report
    assert {kill.target for kill in killer.kills} == set(TARGETS), report
