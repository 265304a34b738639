"""``kill -9`` at random moments of one training under torchrun, then the same command again.

Stage 0 trains on two ranks with a checkpoint every step or two, written while it trains on or not.
A start is struck a random part of a step after a random number of new checkpoints, or while it
comes up: the launcher, a worker, or both. A round is one run directory: a few kills, each followed
by the same command, until it finishes. No published checkpoint may be lost or unreadable, no more
steps than those since the last one, and the end must be that of an undisturbed training, bit for
bit: weights, moments and rows.

Three kills by default. ``MCLCLIP_SOAK=1``: a hundred; finished rounds are kept in
``.soak/train_kills_KIND.json``, so that an interrupted soak goes on with the remaining ones.
Another ``MCLCLIP_SOAK_SEED`` strikes at other moments. ``pytest -s`` shows a line per kill.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mclclip.checkpoint import step_files
from mclclip.checkpoint.step_files import path_of
from mclclip.util import files
from tests import tiny
from tests.e2e.conftest import Shell, Started
from tests.e2e.soak import SEED, TARGETS, Record, hit
from tests.e2e.started import TRAINING, result_of, rows_of, steps_of
from tests.matrix import SOAK, kept
from tests.unit.test_texts import write_rows

pytestmark = pytest.mark.slow

NUM_KILLS = 100 if SOAK else 3
KILLS_PER_ROUND = 5 if SOAK else 3
STEPS = 40
MOST_STEPS = 8  # new checkpoints before a kill
STEP_S, START_S = 0.15, 6.0  # about what a step with its checkpoint, and a start, takes
PART_AT_START = 0.15  # of the kills
RUN_S = 300.0
TEACHER = "tiny_clip@random"
TAUGHT = (
    "[{kind: info_nce}, "
    f"{{kind: distill, teacher: {TEACHER}, exact: true, between: images, end_factor: 0.5}}]"
)
# A worker that comes up just as its launcher is killed cannot know of it: its limit ends it.
PEER_TIMEOUT_S = 60
OPTIONS = (
    f"base.steps={STEPS}", "base.log_every=1", "data.num_workers=1",
    f"peer_timeout_s={PEER_TIMEOUT_S}",
)  # fmt: skip


@dataclass(frozen=True)
class Saving:
    """How the trainings of a round save."""

    every: int
    asynchronous: bool

    @property
    def options(self) -> list[str]:
        return [
            f"base.checkpoint.every={self.every}",
            f"base.checkpoint.asynchronous={str(self.asynchronous).lower()}",
        ]

    @property
    def most_lost(self) -> int:
        """Steps with a row but without a checkpoint, at most."""
        return self.every * (2 if self.asynchronous else 1)


SAVINGS = (Saving(2, True), Saving(1, False), Saving(1, True), Saving(2, False))


@dataclass
class Kill:
    number: int
    target: str
    during: str  # start, training
    every: int
    asynchronous: bool
    row: int
    saved: int
    gone_after_s: float
    took_s: float

    def __str__(self) -> str:
        saving = f"every {self.every}{' asynchronously' if self.asynchronous else ''}"
        return (
            f"kill {self.number:3d}: {self.target:8s} during {self.during:8s} after step "
            f"{self.row:2d}, saved {self.saved:2d} ({saving}), all processes gone after "
            f"{self.gone_after_s:.2f} s; {self.took_s:.1f} s in all"
        )


# --- what must hold -----------------------------------------------------------------------------


def check_disk(run_dir: Path) -> list[int]:
    """The steps that lie on disk, every one of them whole; none was found damaged."""
    directory = run_dir / TRAINING / "checkpoints"
    assert not list(directory.glob(".damaged_step_*"))
    saved = steps_of(run_dir)
    for step in saved:
        path = path_of(directory, step)
        entries = step_files.read_entries(path, step)
        assert len(entries) >= 3  # a file per rank, and what they hold
        assert files.records_of(path, *entries) == entries
    return saved


def last(steps: list[int]) -> int:
    return steps[-1] if steps else 0


def check_start(log: str, saved: int) -> None:
    """A start that came as far as its first step went on from ``saved``."""
    assert "is in use by" not in log and "damaged" not in log, log
    assert set(re.findall(r"(\d+) steps from (\d+),", log)) <= {(str(STEPS), str(saved))}, log
    resumed = re.findall(r"resumed from \S+step_0*(\d+)\n", log)
    assert set(resumed) <= {str(saved)}, log


# --- kills --------------------------------------------------------------------------------------


class Round:
    """One run directory: trainings that are killed, and one that finishes."""

    def __init__(self, config: Path, run_dir: Path, saving: Saving) -> None:
        self.config, self.run_dir, self.saving = config, run_dir, saving
        self.kills: list[Kill] = []
        self.starts = 0

    def start(self) -> Started:
        self.starts += 1
        words = ["train", "--stage", "0", "--config", str(self.config), f"run_dir={self.run_dir}"]
        log = self.run_dir.with_name(f"{self.run_dir.name}_{self.starts:02d}.log")
        return Started(tiny.command(*words, *self.saving.options, ranks=2), self.run_dir, log)

    def strike(self, number: int) -> bool:
        """One start and its kill; False where the training ended before the kill."""
        rng = random.Random(f"{SEED} {number}")
        target, begin = TARGETS[number % len(TARGETS)], time.monotonic()
        before = last(steps_of(self.run_dir))
        run = self.start()
        try:
            during = self.wait_for_moment(run, before, rng)
            if run.launcher.poll() is not None or not run.workers():
                return False
            at_kill = last(steps_of(self.run_dir))
            hit(run, target, rng)
            gone_after_s = run.gone_after_s()
        finally:
            run.end()
        check_start(run.log.read_text(), before)
        saved, row = last(check_disk(self.run_dir)), len(rows_of(self.run_dir))
        assert saved >= at_kill >= before, "a published checkpoint is lost"
        if saved == STEPS:
            return False
        assert row - saved <= self.saving.most_lost, f"steps {saved + 1} to {row} are lost"
        took_s, how = time.monotonic() - begin, (self.saving.every, self.saving.asynchronous)
        kill = Kill(number, target, during, *how, row, saved, gone_after_s, took_s)
        print(kill, flush=True)
        self.kills.append(kill)
        return True

    def wait_for_moment(self, run: Started, before: int, rng: random.Random) -> str:
        """Until the moment of the kill, or the end; returns what is under way then."""
        deadline = time.monotonic() + RUN_S
        at_start = rng.random() < PART_AT_START
        wanted = 0 if at_start else rng.randint(1, MOST_STEPS)
        part_s = rng.uniform(0.0, START_S if at_start else STEP_S)
        while not run.workers() or (wanted and last(steps_of(self.run_dir)) < before + wanted):
            assert time.monotonic() < deadline, run.log.read_text()
            if run.launcher.poll() is not None:
                assert run.launcher.returncode == 0, run.log.read_text()
                return ""
            time.sleep(0.005)
        time.sleep(part_s)
        return "training" if " steps from " in run.log.read_text() else "start"

    def finish(self) -> None:
        """The same command once more, to its end."""
        before = last(steps_of(self.run_dir))
        run = self.start()
        try:
            assert run.launcher.wait(RUN_S) == 0, run.log.read_text()
            run.gone_after_s()
        finally:
            run.end()
        check_start(run.log.read_text(), before)
        state = json.loads((self.run_dir / "run_state.json").read_text())
        assert (state["state"], state["exit_code"]) == ("finished", 0)
        assert not list(self.run_dir.rglob("*.tmp"))
        check_disk(self.run_dir)


# --- the test -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kept(["tokens", "rows"], 0))
def test_killed_trainings_end_as_the_undisturbed_one(
    kind: str, shell: Shell, tmp_path: Path
) -> None:
    """``rows``: on the user's rows of text embeddings, with a frozen teacher of the same crops."""
    indexed, data, options = tmp_path / "indexed", write_rows(tmp_path / "data"), OPTIONS
    if kind == "rows":
        options += (f"model.text_rows=[{data / 'rows.npy'}]", f"base.objective={TAUGHT}")
    config = tiny.write_config(tmp_path / "config.yaml", indexed, data, *options)
    shell.ok("index", "--config", config)
    if kind == "rows":
        shell.ok("texts", "--config", config)
        shell.ok("embed", "--encoder", TEACHER, "--config", config)
    shutil.copytree(indexed, tmp_path / "undisturbed")
    Round(config, tmp_path / "undisturbed", SAVINGS[0]).finish()
    reference: dict[str, Any] = result_of(tmp_path / "undisturbed")
    assert (reference["step"], len(reference["rows"])) == (STEPS, STEPS)
    assert reference["optimizer"] and reference["model"]

    record = Record(f"train_kills_{kind}", tmp_path, options)
    kills = [Kill(**kill) for kill in record.read()]
    while len(kills) < NUM_KILLS:
        played = play(config, indexed, tmp_path / f"round_{len(kills):03d}", len(kills))
        found = result_of(played.run_dir)
        for name, expected in reference.items():
            assert found[name] == expected, f"{name} after {list(map(str, played.kills))}"
        shutil.rmtree(played.run_dir)
        kills += played.kills
        record.write(kills)
    check_variety(kills)
    record.close()


def play(config: Path, indexed: Path, run_dir: Path, first: int) -> Round:
    """A round whose kills are numbered from ``first`` on."""
    shutil.copytree(indexed, run_dir)
    played = Round(config, run_dir, SAVINGS[first // KILLS_PER_ROUND % len(SAVINGS)])
    while len(played.kills) < min(KILLS_PER_ROUND, NUM_KILLS - first):
        if not played.strike(first + len(played.kills)):
            break
    assert played.kills, "a whole round without a kill"
    begin = time.monotonic()
    if last(steps_of(run_dir)) < STEPS or not (run_dir / TRAINING / "manifest.json").exists():
        played.finish()
    print(f"finished after {time.monotonic() - begin:.1f} s, {played.starts} starts", flush=True)
    return played


def check_variety(kills: list[Kill]) -> None:
    """Every target was struck, most kills struck training, and a soak every way of saving."""
    report = "\n".join(map(str, kills))
    print(Counter(f"{kill.during} {kill.target}" for kill in kills))
    took_s = sorted(kill.took_s for kill in kills)
    print(f"{took_s[len(took_s) // 2]:.1f} s per kill (median), {sum(took_s):.0f} s in all")
    assert {kill.target for kill in kills} == set(TARGETS), report
    during = Counter(kill.during for kill in kills)
    assert during["training"] >= 0.6 * len(kills), report
    if SOAK:
        assert during["start"], report
        assert {Saving(kill.every, kill.asynchronous) for kill in kills} == set(SAVINGS), report
