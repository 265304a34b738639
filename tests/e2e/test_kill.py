"""``kill -9`` at random moments of the pipeline, then the same command again, under torchrun.

The pipeline runs on two ranks. A moment is the making of one artifact (or of one model's rows): it
begins when all before it are finished. A kill waits for a moment that the running command reaches
by its own work, then for a random part of the time that the moment took undisturbed, and strikes
the launcher, one worker, or both. A round is one run directory: up to five kills, each followed by
the same command, until it finishes; then everything must be as in the undisturbed run, bit for bit.

Three kills by default. ``MCLCLIP_SOAK=1``: twenty, which must strike every verb; finished rounds
are kept in ``.soak/kills.json``, so that an interrupted soak goes on with the remaining ones.
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
from mclclip.run import artifacts
from mclclip.util import files
from tests import tiny
from tests.e2e.conftest import Started
from tests.e2e.soak import SEED, TARGETS, Record, hit
from tests.matrix import SOAK

pytestmark = pytest.mark.slow

KILLS_PER_ROUND = 5
NUM_KILLS = 20 if SOAK else 3
VERBS = ("index", "embed", "cluster", "train", "export", "evaluate", "join")
NUM_VERBS = len(VERBS) if SOAK else 3  # that have to be hit
RUN_S = 300.0
OPTIONS = (
    "data.num_workers=1",
    "data.index_workers=2",
    "train.lock.text=false",
    "train.checkpoint.every=1",
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
    path = run_dir / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {json.loads(line)["model"] for line in lines}


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


def finished_artifacts(run_dir: Path) -> set[str]:
    return {str(path.parent) for path in run_dir.rglob("manifest.json")}


def check_disk(run_dir: Path) -> None:
    """Whatever has its final name is whole."""
    for path in [*run_dir.rglob("manifest.json"), *run_dir.rglob("shards.json")]:
        files.read_json(path)
    models_with_rows(run_dir)
    for directory in run_dir.rglob("checkpoints"):
        for step in step_files.steps(directory):
            assert step_files.load_model_state(directory, step)


def check_log(log: str, finished_before: set[str], models_before: set[str]) -> None:
    """Only finished work was skipped, and the lock refused nobody."""
    assert "is in use by" not in log, log
    assert set(re.findall(r"I (\S+) is finished: skipped", log)) <= finished_before
    assert set(re.findall(r"I (\S+) is evaluated already", log)) <= models_before


def state_of(run_dir: Path) -> dict[str, Any]:
    """All that a run leaves, but for times and the bytes of formats that hold them."""
    manifests = {
        str(path.relative_to(run_dir)): {**files.read_json(path), "finished": "", "checksum": ""}
        for path in run_dir.rglob("manifest.json")
    }
    kept = ("step", "samples_seen", "loss", "lr", "logit_scale", "grad_norm", "bad_samples")
    metrics = {
        str(path.relative_to(run_dir)): [
            [json.loads(line)[name] for name in kept] for line in path.read_text().splitlines()
        ]
        for path in run_dir.rglob("metrics.jsonl")
    }
    return {
        "exports": tiny.digests(run_dir, "**/*.safetensors"),
        "arrays": tiny.digests(run_dir, "**/*.npy"),
        "index": tiny.digests(run_dir, "index/*.arrow"),
        "manifests": manifests,
        "metrics": metrics,
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
    """Chooses, strikes and checks; ``kills`` are those of finished rounds, ``round`` the others."""

    def __init__(self, config: Path, durations_s: list[float], kills: list[Kill]) -> None:
        self.config, self.durations_s, self.kills = config, durations_s, kills
        self.round: list[Kill] = []

    def misses_a_verb(self) -> bool:
        """Whether chance has left one out so far: the shortest are hard to hit."""
        return len({kill.verb for kill in self.kills}) < NUM_VERBS

    def choose(self, run_dir: Path, rng: random.Random) -> int | None:
        """A moment ahead, of the verb struck least so far; None where none is left."""
        reached = current(run_dir)
        first = 0 if reached == 0 else reached + 1  # ahead: what is begun is not begun anew
        ahead = range(first, min(first + 5, len(MOMENTS)))
        struck = Counter(kill.verb for kill in self.kills + self.round)
        if len(self.kills) >= NUM_KILLS:  # what chance has missed, however far ahead
            ahead = range(first, len(MOMENTS))
        least = min((struck[MOMENTS[number].verb] for number in ahead), default=0)
        fewest = [number for number in ahead if struck[MOMENTS[number].verb] == least]
        return rng.choice(fewest) if fewest else None

    def strike(self, run_dir: Path, log: Path) -> bool:
        """One start of the command and its kill; False where the run ended before the kill."""
        number = len(self.kills) + len(self.round)
        rng = random.Random(f"{SEED} {number}")
        if (moment := self.choose(run_dir, rng)) is None:
            return False
        before = finished_artifacts(run_dir), models_with_rows(run_dir)
        run = start(self.config, run_dir, log)
        try:
            if not at_moment(run, moment):
                return False
            # Where chance had its number of kills, what it has missed is struck at its beginning.
            share = 1.0 if number < NUM_KILLS else 0.1
            after_s = rng.uniform(0.0, share * self.durations_s[moment])
            time.sleep(after_s)
            target = TARGETS[number % len(TARGETS)]
            if run.launcher.poll() is not None or not run.workers():
                return False
            hit(run, target, rng)
            gone_after_s = run.gone_after_s()
        finally:
            run.end()
        check_log(log.read_text(), *before)
        check_disk(run_dir)
        if (struck := current(run_dir)) == len(MOMENTS):
            return False
        during = MOMENTS[struck]
        kill = Kill(number, target, during.verb, during.what[0], after_s, gone_after_s)
        print(kill, flush=True)
        self.round.append(kill)
        return True

    def play_round(self, run_dir: Path, reference: dict[str, Any]) -> None:
        """Kills until enough, lets the command finish, compares."""
        self.round = []
        logs = (run_dir.with_name(f"{run_dir.name}_{n:02d}.log") for n in range(100))
        while len(self.round) < min(KILLS_PER_ROUND, max(NUM_KILLS - len(self.kills), 1)):
            if not self.strike(run_dir, next(logs)):
                break
        assert self.round, "a whole round without a kill"
        finish(self.config, run_dir, next(logs))
        found = state_of(run_dir)
        for name, expected in reference.items():
            assert found[name] == expected, f"{name} after {list(map(str, self.round))}"
        self.kills += self.round


def finish(config: Path, run_dir: Path, log: Path) -> list[float]:
    """Runs the command to its end; returns the seconds that each moment took."""
    before = finished_artifacts(run_dir), models_with_rows(run_dir)
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
    check_log(log.read_text(), *before)
    return [after - begin for begin, after in zip(changes, changes[1:], strict=False)]


# --- the tests ----------------------------------------------------------------------------------


def test_killed_runs_end_as_the_undisturbed_one(tmp_path: Path) -> None:
    data = tiny.make_data(tmp_path / "data")
    config = tiny.write_config(tmp_path / "config.yaml", tmp_path / "reference", data, *OPTIONS)
    durations_s = finish(config, tmp_path / "reference", tmp_path / "reference.log")
    reference = state_of(tmp_path / "reference")
    assert len(reference["exports"]) >= 5 and not reference["left over"]
    record = Record("kills", tmp_path, OPTIONS)
    killer = Killer(config, durations_s, [Kill(**kill) for kill in record.read()])
    while len(killer.kills) < NUM_KILLS or killer.misses_a_verb():
        assert len(killer.kills) < 2 * NUM_KILLS, list(map(str, killer.kills))
        run_dir = tmp_path / f"round_{len(killer.kills):02d}"
        killer.play_round(run_dir, reference)
        shutil.rmtree(run_dir)
        record.write(killer.kills)
    report = "\n".join(map(str, killer.kills))
    print(dict(Counter(kill.verb for kill in killer.kills)))
    assert not killer.misses_a_verb(), report
    assert {kill.target for kill in killer.kills} == set(TARGETS)
    record.close()
