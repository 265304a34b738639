"""Asked to leave: every rank saves the same step, says so, and the same command goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mclclip.checkpoint import step_files
from tests.e2e.conftest import Finished, Send, Shell, Touch, at_call, state_of
from tests.matrix import in_soak, kept

STEPS = 8
OPTIONS = (f"base.steps={STEPS}", "base.checkpoint.every=100", "base.log_every=1", "poll_s=0.01")


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


@dataclass(frozen=True)
class SignalBeforeJoining:
    """Both ranks are asked to leave when one waits for the other, which is still importing."""

    late: int

    def __call__(self) -> None:
        from mclclip.ranks import process_group

        threading.Timer(1.0, ask(signal.SIGTERM)).start()
        if int(os.environ["RANK"]) == self.late:
            setattr(process_group, "init", lambda *_, **__: sleep())  # noqa: B010


def sleep() -> None:
    """A rank that hangs."""
    time.sleep(600)


@pytest.fixture(scope="module")
def undisturbed(shell: Shell, indexed: tuple[Path, Path]) -> Callable[[int], dict[str, str]]:
    """Digests of the weights of a training that nobody disturbed, by number of ranks."""
    found: dict[int, dict[str, str]] = {}

    def digests(ranks: int) -> dict[str, str]:
        if ranks not in found:
            config, run_dir = indexed
            copy = run_dir.with_name(f"undisturbed_{ranks}")
            shutil.copytree(run_dir, copy)
            shell.ok(*train(config, copy), ranks=ranks)
            found[ranks] = weights(copy)
        return found[ranks]

    return digests


def train(config: Path, run_dir: Path, *options: str) -> list[object]:
    return ["train", "--stage", 0, "--config", config, f"run_dir={run_dir}", *options]


def weights(run_dir: Path) -> dict[str, str]:
    """The trained weights and moments, bit for bit."""
    directory = run_dir / "stage_0" / "train" / "checkpoints"
    assert step_files.steps(directory)[-1] == STEPS
    return {
        part + name: tensor.numpy().tobytes().hex()
        for part in ("model.", "optimizer.")
        for name, tensor in step_files.load_model_state(directory, STEPS, part[:-1]).items()
    }


def disturbed(shell: Shell, indexed: tuple[Path, Path], tmp_path: Path, **call: Any) -> Finished:
    """Trains in a copy of the indexed run; nothing may be lost and nothing shown as a crash."""
    config, run_dir = indexed
    shutil.copytree(run_dir, tmp_path / "run", dirs_exist_ok=True)
    options = call.pop("options", ())
    return shell(*train(config, tmp_path / "run", *options), **call)


@pytest.mark.parametrize(
    ("number", "ranks", "who"),
    kept([(signal.SIGUSR1, 1, (0,)), (signal.SIGTERM, 2, (0, 1)), (signal.SIGUSR1, 2, (1,))], 2),
    ids=["one", "all", "some"],
)
def test_a_signal_saves_and_leaves(
    shell: Shell, indexed: Any, undisturbed: Any, tmp_path: Path, number: int, ranks: int, who: Any
) -> None:
    """Also when it reaches one rank only, and the loader workers with it."""
    inside = After(3, ask(number), who)
    left = disturbed(
        shell, indexed, tmp_path, ranks=ranks, inside=inside, options=["data.num_workers=1"]
    )
    assert left.code == 85, left.stderrs
    name = signal.Signals(number).name
    assert left.complaints() == [f"mclclip: asked to leave ({name}): the same command goes on"]
    assert "Traceback" not in "".join(left.stderrs)
    state = state_of(tmp_path / "run")
    assert (state["state"], state["exit_code"], state["requeue"]) == ("preempted", 85, True)
    saved = step_files.steps(tmp_path / "run/stage_0/train/checkpoints")
    assert saved in ([4], [5])  # at the boundary after next at the latest
    shell.ok(*train(indexed[0], tmp_path / "run"), ranks=ranks)
    assert state_of(tmp_path / "run")["state"] == "finished"
    assert weights(tmp_path / "run") == undisturbed(ranks)


def test_the_first_interrupt_saves_and_asks_for_no_other_start(
    shell: Shell, indexed: Any, tmp_path: Path
) -> None:
    left = disturbed(shell, indexed, tmp_path, inside=After(3, ask(signal.SIGINT), (0,)))
    assert left.code == 85 and "Traceback" not in "".join(left.stderrs), left.stderrs
    state = state_of(tmp_path / "run")
    assert (state["state"], state["exit_code"], state["requeue"]) == ("preempted", 85, False)
    assert step_files.steps(tmp_path / "run/stage_0/train/checkpoints") in ([4], [5])


@pytest.mark.parametrize("late", kept([0, 1], 0))
def test_a_signal_while_waiting_for_a_late_rank(
    shell: Shell, indexed: Any, tmp_path: Path, late: int
) -> None:
    """Who has not come leaves and never will: who waits for it must not go on waiting."""
    left = disturbed(shell, indexed, tmp_path, ranks=2, inside=SignalBeforeJoining(late))
    assert left.code == 85, left.stderrs
    assert "Traceback" not in "".join(left.stderrs)


def test_a_signal_outside_of_training_leaves_at_once(
    shell: Shell, indexed: Any, undisturbed: Any, tmp_path: Path
) -> None:
    assert undisturbed(1)
    shutil.copytree(indexed[1].with_name("undisturbed_1"), tmp_path / "run")
    command = ["export", "--stage", 0, "--config", indexed[0], f"run_dir={tmp_path / 'run'}"]
    left = shell(*command, inside=signal_in_export)
    assert left.code == 85 and "Traceback" not in left.stderr
    assert state_of(tmp_path / "run")["state"] == "preempted"
    assert not (tmp_path / "run/stage_0/export/manifest.json").exists()
    shell.ok(*command)
    assert state_of(tmp_path / "run")["state"] == "finished"


def signal_in_export() -> None:
    from mclclip.models.model import Model

    def write(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)

    setattr(Model, "save", write)  # noqa: B010


@dataclass(frozen=True)
class TouchTwo:
    """Asks to save after the second update, and to stop after the fifth."""

    run_dir: Path

    def __call__(self) -> None:
        for count, name in ((2, "save_now"), (5, "stop")):
            After(count, Touch(self.run_dir / name), (0,))()


def test_save_now_saves_and_goes_on_and_stop_leaves_for_good(
    shell: Shell, indexed: Any, undisturbed: Any, tmp_path: Path
) -> None:
    every = "base.checkpoint={every: 100, keep_every: 1}"
    inside = TouchTwo(tmp_path / "run")
    left = disturbed(shell, indexed, tmp_path, ranks=2, inside=inside, options=[every])
    assert left.code == 85, left.stderrs
    assert not [*(tmp_path / "run").glob("s[at][vo]*")]
    saved = step_files.steps(tmp_path / "run/stage_0/train/checkpoints")
    assert len(saved) == 2 and saved[0] in (3, 4) and saved[1] in (6, 7)
    assert state_of(tmp_path / "run")["requeue"] is False
    shell.ok(*train(indexed[0], tmp_path / "run"), ranks=2)
    assert weights(tmp_path / "run") == undisturbed(2)


@in_soak
def test_the_wall_time_limit(shell: Shell, indexed: Any, undisturbed: Any, tmp_path: Path) -> None:
    left = disturbed(shell, indexed, tmp_path, options=["wall_time_s=0.001"])
    assert left.code == 85
    assert "the wall-time limit" in state_of(tmp_path / "run")["reason"]
    assert step_files.steps(tmp_path / "run/stage_0/train/checkpoints") == [2]
    shell.ok(*train(indexed[0], tmp_path / "run"))
    assert weights(tmp_path / "run") == undisturbed(1)


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
def test_a_lost_rank_ends_the_other_and_the_same_command_goes_on(
    shell: Shell, indexed: Any, undisturbed: Any, tmp_path: Path, number: int
) -> None:
    """By its closed connection, or by the limit of the process group where it only stands still."""
    act: Callable[[], None] = ask(signal.SIGKILL)
    if number == signal.SIGSTOP:
        act = StandStill(tmp_path / "run/run_state.json")
    call: dict[str, Any] = {"ranks": 2, "inside": After(3, act, (1,)), "timeout_s": 300.0}
    left = disturbed(shell, indexed, tmp_path, options=["peer_timeout_s=6"], **call)
    assert left.codes == [1, -signal.SIGKILL] and "Traceback" not in left.stderr, left.stderrs
    (line,) = left.complaints()
    assert "another rank" in line and "in step" in line, line
    assert ("peer_timeout_s" in line) is (number == signal.SIGSTOP)
    state = state_of(tmp_path / "run")
    assert (state["state"], state["requeue"]) == ("failed", True)
    if number == signal.SIGKILL:
        shell.ok(*train(indexed[0], tmp_path / "run"), ranks=2)
        assert weights(tmp_path / "run") == undisturbed(2)
