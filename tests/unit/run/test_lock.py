"""The lock lets one process write, however many try and however the last one ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mclclip.run import lock as run_lock
from mclclip.run.lock import RunLock, start_of_process, write_state

# Waits for a line on stdin, takes the lock, says so, holds it until stdin ends.
HOLDER = """
import sys
from mclclip.run.lock import RunLock
print("ready", flush=True)
sys.stdin.readline()
try:
    with RunLock(sys.argv[1], wait_s=float(sys.argv[2]), stale_s=float(sys.argv[3])):
        print("holding", flush=True)
        sys.stdin.read()
except RuntimeError as error:
    print(error, flush=True)
"""
# A writer on another host, whose clock is ahead or behind and sets the times of its files.
FOREIGN = """
import os, socket, sys, time
socket.gethostname = lambda: "elsewhere"
utime = os.utime
os.utime = lambda path: utime(path, (time.time() + float(sys.argv[2]),) * 2)
from mclclip.run.lock import RunLock
with RunLock(sys.argv[1], beat_s=0.2) as lock:
    os.utime(lock.path)
    print("ready", flush=True)
    sys.stdin.read()
"""
RECORD = {"host": socket.gethostname(), "pid": 1, "process_start": "1", "started": "2026-01-01"}


@contextmanager
def holder(run_dir: Path, *options: float, code: str = HOLDER) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that takes the lock, with these ``wait_s`` and ``stale_s``."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir), *map(str, options or (0.0, 120.0))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert said(process) == "ready"
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def write_record(run_dir: Path, **changes: Any) -> Path:
    path = run_dir / "run.lock"
    path.write_text(json.dumps(RECORD | changes))
    return path


def refused(run_dir: Path, **options: Any) -> str:
    with pytest.raises(RuntimeError) as caught, RunLock(run_dir, wait_s=0.0, **options):
        pytest.fail("two writers")
    return str(caught.value)


# --- one process -------------------------------------------------------------------------------


def test_the_lock_says_who_holds_it_and_goes_with_him(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    with RunLock(run_dir):
        owner = json.loads((run_dir / "run.lock").read_text())
        assert owner["host"] == socket.gethostname() and owner["pid"] == os.getpid()
        assert owner["process_start"] == start_of_process(os.getpid())
        assert owner["started"].startswith("20")
    assert not (run_dir / "run.lock").exists()


def test_an_error_frees_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path):
        _ = 1 / 0
    with RunLock(tmp_path, wait_s=0.0):
        assert (tmp_path / "run.lock").exists()


def test_a_second_writer_is_told_host_pid_and_start(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        message = refused(tmp_path)
        started = json.loads((tmp_path / "run.lock").read_text())["started"]
    assert f"process {os.getpid()} on {socket.gethostname()}, started {started}" in message
    assert "one writer" in message and str(tmp_path) in message and "\n" not in message
    assert (tmp_path / "run.lock").exists() is False


def test_a_lock_can_be_used_again(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, wait_s=0.0)
    for _ in range(2):
        with lock:
            refused(tmp_path)


@pytest.mark.parametrize(
    "text", ["", '{"host": "x", "pi', '{"host": "x"}', "[]"], ids=["empty", "half", "thin", "list"]
)
def test_half_a_record_is_no_owner(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.lock").write_text(text)
    with RunLock(tmp_path, wait_s=0.0):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    """The owner has the pid of this process, but was started at another time."""
    write_record(tmp_path, pid=os.getpid(), process_start="12345")
    with RunLock(tmp_path, wait_s=0.0):
        assert json.loads((tmp_path / "run.lock").read_text())["process_start"] != "12345"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refused(tmp_path / "file" / "run")
    assert message.startswith(f"run_dir {tmp_path / 'file' / 'run'} cannot be written: Not a dir")


def test_a_file_system_without_locks_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("mclclip.run.lock.fcntl.flock", no_locks)
    assert "does not lock files (Function not implemented)" in refused(tmp_path)


# --- other hosts -------------------------------------------------------------------------------


def test_another_host_keeps_its_lock_while_its_heart_beats(tmp_path: Path) -> None:
    path, over = write_record(tmp_path, host="elsewhere", pid=4711), threading.Event()

    def beat() -> None:
        while not over.wait(0.2):
            os.utime(path)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        assert "process 4711 on elsewhere, started 2026-01-01" in refused(tmp_path)
    finally:
        over.set()
        heart.join()


SKEWS_S = (-180.0, 180.0)


@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_a_living_writer_keeps_its_lock_whatever_its_clock_says(
    tmp_path: Path, skew_s: float
) -> None:
    with holder(tmp_path, skew_s, code=FOREIGN) as process:
        age_s = time.time() - (tmp_path / "run.lock").stat().st_mtime
        assert age_s == pytest.approx(-skew_s, abs=20)
        assert f"process {process.pid} on elsewhere" in refused(tmp_path, stale_s=120.0)
        assert process.stdin is not None and process.poll() is None
        process.stdin.close()
        assert process.wait(120) == 0
        process.stdin = None
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_a_dead_writer_loses_its_lock_whatever_its_clock_says(
    tmp_path: Path, skew_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """It is taken over after the time in which a heartbeat would have come; a warning says so."""
    path = write_record(tmp_path, host="elsewhere", pid=4711)
    os.utime(path, (time.time() + skew_s,) * 2)
    start = time.monotonic()
    with RunLock(tmp_path, wait_s=0.0, stale_s=0.7):
        assert 0.7 <= time.monotonic() - start < 120
        assert json.loads(path.read_text())["host"] == socket.gethostname()
    waiting, taken = caplog.messages
    assert waiting == (
        f"{tmp_path} is locked by process 4711 on elsewhere, started 2026-01-01: waiting for a "
        "sign of life from there; without one for 0.7 s the lock is taken over"
    )
    assert taken == f"{path} is taken over: there was no sign of life"


def test_a_writer_on_another_host_that_ends_in_time_is_followed_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_record(tmp_path, host="elsewhere")

    def leave() -> None:
        while not caplog.messages:  # that somebody waits
            time.sleep(0.01)
        path.unlink()

    threading.Thread(target=leave, daemon=True).start()
    with RunLock(tmp_path, wait_s=0.0, stale_s=60.0):
        assert json.loads(path.read_text())["host"] == socket.gethostname()
    assert len(caplog.messages) == 1  # what it waits for, and no taking over


def test_time_in_which_nobody_looked_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs for minutes stops the owner's heartbeat as well."""
    now_s = [50.0]
    monkeypatch.setattr(run_lock, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    lock = RunLock(tmp_path)

    def look(after_s: float, beat: int, pid: int = 1) -> tuple[float, bool]:
        now_s[0] += after_s
        living = lock.is_living(RECORD | {"host": "elsewhere", "pid": pid}, beat)
        assert living is (lock.beats or None)
        return round(lock.silent_s, 3), lock.beats

    assert look(0.0, 7) == (0.0, False)
    assert look(0.2, 7) == (0.2, False)
    assert look(600.0, 7) == (0.2 + run_lock.MAX_SILENCE_S, False)
    assert look(0.2, 7) == (0.4 + run_lock.MAX_SILENCE_S, False)
    assert look(0.2, 6) == (0.0, True)  # its clock went back, its heart beats
    assert look(0.2, 6) == (0.2, True)
    assert look(0.2, 6, pid=2) == (0.0, True)  # another took the lock


def test_the_heart_beats(tmp_path: Path) -> None:
    with RunLock(tmp_path, beat_s=0.02):
        os.utime(tmp_path / "run.lock", (1.0, 1.0))
        deadline = time.monotonic() + 120
        while (tmp_path / "run.lock").stat().st_mtime < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - (tmp_path / "run.lock").stat().st_mtime < 60


def test_a_writer_that_lost_its_lock_ends_and_leaves_the_other_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It slept for minutes (a paused machine), another host took over, and now it wakes."""
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr("mclclip.run.lock.os.kill", lambda pid, sig: ended.append((pid, sig)))
    with RunLock(tmp_path, beat_s=0.02):
        path = write_record(tmp_path, host="elsewhere", pid=4711)
        os.utime(path, (5.0, 5.0))
        deadline = time.monotonic() + 120
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
    assert ended == [(os.getpid(), signal.SIGKILL)]
    assert "taken over by process 4711 on elsewhere" in caplog.text
    assert json.loads(path.read_text())["pid"] == 4711 and path.stat().st_mtime == 5.0


def test_a_lock_removed_by_hand_is_not_missed(tmp_path: Path) -> None:
    with RunLock(tmp_path, beat_s=0.01):
        (tmp_path / "run.lock").unlink()
        time.sleep(0.05)
    assert not (tmp_path / "run.lock").exists()


# --- several processes -------------------------------------------------------------------------


def test_a_killed_holder_is_followed_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        go(process)
        assert said(process) == "holding"
        assert f"process {process.pid} on {socket.gethostname()}" in refused(tmp_path)
        process.send_signal(signal.SIGKILL)
        # Not waited for: a zombie does not write either.
        with RunLock(tmp_path, wait_s=120.0):
            assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_a_writer_that_ends_in_time_is_waited_for(tmp_path: Path) -> None:
    with holder(tmp_path, 120.0, 120.0) as process:
        with RunLock(tmp_path):
            go(process)
            time.sleep(0.5)
        assert said(process) == "holding"


@pytest.mark.parametrize(("host", "stale_s"), [(socket.gethostname(), 120.0), ("elsewhere", 1.0)])
def test_of_many_that_race_for_a_stale_lock_one_wins(
    tmp_path: Path, host: str, stale_s: float
) -> None:
    """The owner has ended on this host, or with another host."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_record(tmp_path, host=host, pid=dead.pid)
    with ExitStack() as stack:
        racing = [stack.enter_context(holder(tmp_path, 0.0, stale_s)) for _ in range(3)]
        for process in racing:
            go(process)
        answers = {process.pid: said(process) for process in racing}
        winners = [pid for pid, answer in answers.items() if answer == "holding"]
        assert len(winners) == 1, answers
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == winners[0]
        losers = [answer for pid, answer in answers.items() if pid not in winners]
        assert all(f"in use by process {winners[0]} on" in answer for answer in losers)


# --- what others planted --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.lock", ".run.lock.guard"])
@pytest.mark.parametrize("kind", ["link", "dangling", "second_name", "pipe"])
def test_what_others_planted_is_neither_followed_nor_waited_for(
    tmp_path: Path, name: str, kind: str
) -> None:
    victim, run_dir = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    os.utime(victim, (1, 1))
    run_dir.mkdir()
    if kind == "link":
        (run_dir / name).symlink_to(victim)
    elif kind == "dangling":
        (run_dir / name).symlink_to(tmp_path / "made")
    elif kind == "second_name":
        os.link(victim, run_dir / name)
    else:
        os.mkfifo(run_dir / name)
    start = time.monotonic()
    with pytest.raises((RuntimeError, OSError)) as caught:
        RunLock(run_dir, wait_s=0.0).__enter__()
    assert time.monotonic() - start < 60 and "\n" not in str(caught.value)
    assert str(run_dir) in str(caught.value)
    assert victim.read_text() == "precious" and victim.stat().st_mtime == 1
    assert not (tmp_path / "made").exists()


def test_a_heartbeat_does_not_follow_a_link_either(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    with RunLock(tmp_path / "run", beat_s=0.05) as lock:
        victim.write_text(lock.path.read_text())
        os.utime(victim, (1, 1))
        lock.path.unlink()
        lock.path.symlink_to(victim)
        time.sleep(0.3)
        assert victim.stat().st_mtime == 1
        lock.path.unlink()


# --- the recorded state -----------------------------------------------------------------------


def record(run_dir: Path | None, state: str, **fields: Any) -> None:
    given = {"verb": "run", "exit_code": 0, "requeue": False, "reason": ""} | fields
    write_state(run_dir, state, **given)


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_one_line_for_scripts(tmp_path: Path) -> None:
    record(tmp_path, "preempted", exit_code=85, requeue=True, reason="SIGUSR1")
    text = (tmp_path / "run_state.json").read_text()
    assert text.count("\n") == 1
    assert '"state": "preempted"' in text and '"requeue": true' in text
    assert read(tmp_path / "run_state.json")["exit_code"] == 85


def test_the_launcher_s_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of each node writes it, even if no run directory is known."""
    monkeypatch.setenv("MCLCLIP_STATE_FILE", str(tmp_path / "state"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    record(None, "finished")
    assert not (tmp_path / "state").exists()
    monkeypatch.setenv("LOCAL_RANK", "0")
    record(None, "finished")
    assert read(tmp_path / "state")["state"] == "finished"
    monkeypatch.setenv("LOCAL_RANK", "1")
    record(None, "failed", exit_code=2, reason="only here")  # whoever meets it
    assert read(tmp_path / "state")["reason"] == "only here"


def test_a_failure_for_good_is_not_covered_by_what_follows_from_it(tmp_path: Path) -> None:
    path = tmp_path / "run_state.json"
    record(tmp_path, "running")
    record(tmp_path, "failed", exit_code=2, reason="the cause")
    record(tmp_path, "failed", exit_code=1, requeue=True, reason="lost a peer")
    record(tmp_path, "preempted", exit_code=85, requeue=True, reason="SIGTERM")
    assert read(path)["reason"] == "the cause"
    record(tmp_path, "running")
    assert read(path)["state"] == "running"
    record(tmp_path, "failed", exit_code=1, requeue=True, reason="lost a worker")
    record(tmp_path, "failed", exit_code=1, requeue=True, reason="lost a peer", follows=True)
    assert read(path)["reason"] == "lost a worker"
    record(tmp_path, "preempted", exit_code=85, requeue=True, reason="SIGTERM")
    assert read(path)["state"] == "preempted"
