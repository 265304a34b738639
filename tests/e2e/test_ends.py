"""How real processes end where they are asked to leave, or where one of them is lost.

Asked to leave, every rank saves the same step and says so. Nothing hangs longer than
``peer_timeout_s``, every end is one line that says what is known, and the same command goes on
with the same bits.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.checkpoint import step_files
from mclclip.data.sample_index import SampleIndex
from tests import tiny
from tests.e2e.conftest import (
    Finished,
    RecordBatches,
    Send,
    Shell,
    Touch,
    at_call,
    rows_of,
    state_of,
    training_in,
)

STEPS = 8
LIMIT_S = 6.0  # peer_timeout_s
OPENING_S = 1.5 * LIMIT_S
OPTIONS = (f"base.steps={STEPS}", "base.checkpoint.every=100", "base.log_every=1", "poll_s=0.01")
TRAINING = "stage_0/train"


def train(indexed: tuple[Path, Path], run_dir: Path, *options: str) -> list[str]:
    """A training of stage 0 in a copy of the indexed run."""
    if not (run_dir / "index").exists():
        shutil.copytree(indexed[1], run_dir)
    config = str(indexed[0])
    return ["train", "--stage", "0", "--config", config, f"run_dir={run_dir}", *options]


@pytest.fixture(scope="module")
def undisturbed(shell: Shell, indexed: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two ranks train that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    shell.ok(*train(indexed, run_dir), ranks=2)
    found = training_in(run_dir / TRAINING)
    assert found["step"] == len(found["rows"]) == STEPS
    return found


def saved_in(run_dir: Path) -> list[int]:
    return step_files.steps(run_dir / TRAINING / "checkpoints")


def assert_ended(run_dir: Path, state: str, code: int, requeue: bool) -> str:
    """How the run's state says that it ended; returns its reason."""
    found = state_of(run_dir)
    assert (found["state"], found["exit_code"], found["requeue"]) == (state, code, requeue), found
    return str(found["reason"])


# --- asked to leave -----------------------------------------------------------------------------


@dataclass(frozen=True)
class After:
    """Calls ``act`` on the given ranks after the n-th update, once per process."""

    count: int
    act: Callable[[], None]
    ranks: tuple[int, ...]

    def __call__(self) -> None:
        from mclclip.engines.engine import Engine

        if int(os.environ.get("RANK", "0")) in self.ranks:
            at_call(Engine, "update", self.count, self.act)


def ask(number: int) -> Send:
    """A signal to the process itself, and to its loader workers."""
    return Send(number, ("workers", "self"))


def test_a_signal_saves_and_leaves_and_the_records_of_both_parts_join(
    shell: Shell, indexed: Any, undisturbed: Any, tmp_path: Path
) -> None:
    """Also when it reaches one rank only, and the loader workers with it."""
    run_dir = tmp_path / "run"
    command = train(indexed, run_dir, "data.num_workers=1", "base.profile_steps=[2,40]")
    left = shell(*command, ranks=2, inside=After(3, ask(signal.SIGUSR1), (1,)))
    assert left.code == 85, left.stderrs
    assert left.complaints() == ["mclclip: asked to leave (SIGUSR1): the same command goes on"]
    assert "Traceback" not in "".join(left.stderrs)
    assert_ended(run_dir, "preempted", 85, True)
    assert saved_in(run_dir) in ([4], [5])  # at the boundary after next at the latest
    (at,) = saved_in(run_dir)
    again = shell.ok(*command, ranks=2)
    assert state_of(run_dir)["state"] == "finished"
    assert training_in(run_dir / TRAINING) == undisturbed

    for row in rows_of(run_dir / TRAINING):
        assert abs(row["samples_per_s"] - 2 * row["samples_per_s_per_rank"]) < 1
        assert row["memory_gib"] > 0 and 0 <= row["data_wait_share"] <= 1
    first, second = tiny.rows(run_dir / TRAINING / "epochs.jsonl")
    assert [(part["first_step"], part["step"]) for part in (first, second)] == [
        (0, at),
        (at, STEPS),
    ]
    losses = [row["loss"] for row in undisturbed["rows"]]
    assert first["loss"] == pytest.approx(sum(losses[:at]) / at)
    assert second["loss"] == pytest.approx(sum(losses[at:]) / (STEPS - at))
    names = sorted(path.name for path in (run_dir / TRAINING / "profile").iterdir())
    assert names == ["step_00000002_rank0.json.gz", "step_00000002_rank0.txt"]
    assert "profile_steps: there is no step [40], the last is 7" in left.stderr + again.stderr


def test_an_interrupt_saves_and_so_does_the_wall_time_limit(
    shell: Shell, indexed: Any, tmp_path: Path
) -> None:
    """The first does not ask for another start, the second does."""
    run_dir = tmp_path / "run"
    left = shell(*train(indexed, run_dir), inside=After(3, ask(signal.SIGINT), (0,)))
    assert left.code == 85 and "Traceback" not in left.stderr, left.stderrs
    assert_ended(run_dir, "preempted", 85, False)
    assert saved_in(run_dir) in ([4], [5])
    before = saved_in(run_dir)[-1]
    assert shell(*train(indexed, run_dir, "wall_time_s=0.001")).code == 85
    assert "the wall-time limit" in assert_ended(run_dir, "preempted", 85, True)
    assert before < saved_in(run_dir)[-1] < STEPS


@dataclass(frozen=True)
class SignalBeforeJoining:
    """Both ranks are asked to leave when one waits for the other, which is still importing."""

    late: int

    def __call__(self) -> None:
        from mclclip.ranks import process_group

        threading.Timer(1.0, ask(signal.SIGTERM)).start()
        if int(os.environ["RANK"]) == self.late:
            setattr(process_group, "init", lambda *_, **__: time.sleep(600))  # noqa: B010


def test_a_signal_while_waiting_for_a_late_rank(shell: Shell, indexed: Any, tmp_path: Path) -> None:
    """Who has not come leaves and never will: who waits for it must not go on waiting."""
    left = shell(*train(indexed, tmp_path / "run"), ranks=2, inside=SignalBeforeJoining(0))
    assert left.code == 85, left.stderrs
    assert "Traceback" not in "".join(left.stderrs)


def signal_in_export() -> None:
    from mclclip.models.model import Model

    def write(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)

    setattr(Model, "save", write)  # noqa: B010


def test_a_signal_outside_of_training_leaves_at_once(
    shell: Shell, based: tuple[Path, Path], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(based[1] / "stage_0/train", run_dir / TRAINING)
    command = ["export", "--stage", 0, "--config", based[0], f"run_dir={run_dir}"]
    left = shell(*command, inside=signal_in_export)
    assert left.code == 85 and "Traceback" not in left.stderr, left.stderr
    assert state_of(run_dir)["state"] == "preempted"
    assert not (run_dir / "stage_0/export/manifest.json").exists()
    shell.ok(*command)
    assert state_of(run_dir)["state"] == "finished"


@dataclass(frozen=True)
class TouchTwo:
    """Asks to save after the second update, and to stop after the fifth."""

    run_dir: Path

    def __call__(self) -> None:
        for count, name in ((2, "save_now"), (5, "stop")):
            After(count, Touch(self.run_dir / name), (0,))()


def test_save_now_saves_and_goes_on_and_stop_leaves_for_good(
    shell: Shell, indexed: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = train(indexed, run_dir, "base.checkpoint={every: 100, keep_every: 1}")
    left = shell(*command, ranks=2, inside=TouchTwo(run_dir))
    assert left.code == 85, left.stderrs
    assert not [*run_dir.glob("s[at][vo]*")]
    first, second = saved_in(run_dir)
    assert first in (3, 4) and second in (6, 7)
    assert state_of(run_dir)["requeue"] is False


# --- a rank that is lost ------------------------------------------------------------------------


@dataclass(frozen=True)
class StandStill:
    """The process stops, and is killed once another rank has ended the run."""

    state: Path

    def __call__(self) -> None:
        me, state = os.getpid(), f"{self.state} 2>/dev/null"
        kill = f"while ! grep -q failed {state}; do sleep 0.1; done; kill -9 {me}"
        subprocess.Popen(["sh", "-c", kill], start_new_session=True)
        os.kill(me, signal.SIGSTOP)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_other(
    shell: Shell, indexed: Any, tmp_path: Path, number: int
) -> None:
    """By its closed connection, or by the limit of the process group where it only stands still."""
    run_dir = tmp_path / "run"
    act: Callable[[], None] = ask(signal.SIGKILL)
    if number == signal.SIGSTOP:
        act = StandStill(run_dir / "run_state.json")
    command = train(indexed, run_dir, f"peer_timeout_s={LIMIT_S}")
    left = shell(*command, ranks=2, inside=After(3, act, (1,)), timeout_s=300.0)
    assert left.codes == [1, -signal.SIGKILL] and "Traceback" not in left.stderr, left.stderrs
    (line,) = left.complaints()
    assert "another rank" in line and "in step" in line, line
    assert ("peer_timeout_s" in line) is (number == signal.SIGSTOP)
    assert_ended(run_dir, "failed", 1, True)


@dataclass(frozen=True)
class Slow:
    """The first rank's part of opening a training takes longer than the limit."""

    def __call__(self) -> None:
        from mclclip.ranks import collectives

        on_main = collectives.on_main

        def slowly(work: Callable[[], Any]) -> Any:
            setattr(collectives, "on_main", on_main)  # noqa: B010
            return on_main(lambda: (time.sleep(OPENING_S), work())[1])

        setattr(collectives, "on_main", slowly)  # noqa: B010


@pytest.mark.slow
def test_the_work_of_one_rank_is_waited_for_without_a_limit(
    shell: Shell, indexed: Any, tmp_path: Path
) -> None:
    since = time.monotonic()
    options = (f"peer_timeout_s={LIMIT_S}", "base.steps=2", "data.num_workers=0")
    shell.ok(*train(indexed, tmp_path / "run", *options), ranks=2, inside=Slow())
    assert time.monotonic() - since > OPENING_S


# --- data that does not come --------------------------------------------------------------------


@dataclass(frozen=True)
class Silence:
    """As the fourth batch is waited for, the loader's workers are stopped for ever, or
    (``killed``) die soon after."""

    killed: bool

    def __call__(self) -> None:
        from torch.utils.data import dataloader

        iterator: Any = dataloader._BaseDataLoaderIter
        original, calls = iterator.__next__, itertools.count(1)

        def following(own: Any) -> Any:
            if next(calls) == 4:
                Send(signal.SIGSTOP, ("workers",))()
                if self.killed:
                    threading.Timer(0.5, Send(signal.SIGKILL, ("workers",))).start()
            return original(own)

        setattr(iterator, "__next__", following)  # noqa: B010


@pytest.mark.parametrize("killed", [True, False])
def test_workers_that_are_killed_or_stand_still_are_one_line(
    shell: Shell, indexed: Any, tmp_path: Path, killed: bool
) -> None:
    """The kernel kills them where memory ran out, which is no error of mclclip: the job may start
    again. Where they stand still they have batches ready, which the run has yet to take."""
    run_dir = tmp_path / "run"
    command = train(indexed, run_dir, f"peer_timeout_s={LIMIT_S}", "data.num_workers=1")
    left = shell(*command, inside=Silence(killed), timeout_s=100)
    # torch raises wherever the process is: Python reports what it raises within a finaliser.
    ignored = r"(?s)Exception ignored in.*?RuntimeError: DataLoader worker[^\n]*\n"
    assert left.code == 1 and "Traceback" not in re.sub(ignored, "", left.stderr), left.stderr
    reason = assert_ended(run_dir, "failed", 1, True)
    for part in ("memory ran out", "data.num_workers") if killed else ("peer_timeout_s",):
        assert part in reason


# --- a sample that is left out ------------------------------------------------------------------


@dataclass(frozen=True)
class Undecodable:
    """Decoding the image with this CRC-32 never returns, or (not ``hangs``) finds no picture."""

    crc32: int
    hangs: bool
    then: Callable[[], None]

    def __call__(self) -> None:
        from mclclip.data import samples

        decode = samples.decode

        def meet(data: bytes, *arguments: Any) -> Any:
            if zlib.crc32(data) != self.crc32:
                return decode(data, *arguments)
            while self.hangs:
                time.sleep(0.1)
            raise samples.DecodeError("broken")

        setattr(samples, "decode", meet)  # noqa: B010
        self.then()


@pytest.mark.slow
def test_a_picture_whose_decoding_does_not_end_ends_the_run_which_goes_on_without_it(
    shell: Shell, indexed: Any, tmp_path: Path
) -> None:
    """One line within the limit names step and shard, the log all keys of the batch. What is
    excluded is replaced as a bad sample is."""
    index, sample_id = SampleIndex.open(indexed[1] / "index"), 100
    with open(index.shards[int(index.shard_of[sample_id])].path, "rb") as shard:
        shard.seek(index.image_offset[sample_id])
        crc32 = zlib.crc32(shard.read(index.image_size[sample_id]))
    run_dir, (key,) = tmp_path / "run", index.keys([sample_id])
    first, rest, broken = (RecordBatches(tmp_path / name) for name in ("first", "rest", "broken"))

    def ended(run_dir: Path, inside: Undecodable, *options: str) -> Finished:
        common = ("data.num_workers=1", "base.checkpoint.every=2")
        return shell(*train(indexed, run_dir, *common, *options), inside=inside)

    hung = ended(run_dir, Undecodable(crc32, True, first), f"peer_timeout_s={LIMIT_S}")
    assert hung.code == 1 and key in hung.stderr and "Traceback" not in hung.stderr, hung.stderrs
    reason = assert_ended(run_dir, "failed", 1, True)
    assert all(part in reason for part in ("peer_timeout_s", "step ", ".tar")), reason
    listed = tmp_path / "keys.txt"
    listed.write_text(f"{key}\n")
    done = ended(run_dir, Undecodable(crc32, True, rest), f"data.exclude={listed}")
    assert done.code == 0 and "excluded" in done.stderr, done.stderrs
    assert ended(tmp_path / "other", Undecodable(crc32, False, broken)).code == 0
    batches = rest.sample_ids()
    assert 0 < len(batches) < STEPS, "it goes on from a saved step"
    assert sample_id not in batches
    np.testing.assert_array_equal(batches, broken.sample_ids()[-len(batches) :])
