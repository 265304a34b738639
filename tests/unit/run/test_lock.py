"""The lock lets one process write, however many try and however the last one ended."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mclclip.run.lock import Lock, RunLock, write_state

# Waits for a line on stdin, takes the lock, says so, holds it until stdin ends.
HOLDER = """
import sys
from mclclip.run.lock import RunLock
print("ready", flush=True)
sys.stdin.readline()
try:
    with RunLock(sys.argv[1], wait_s=float(sys.argv[2])):
        print("holding", flush=True)
        sys.stdin.read()
except RuntimeError as error:
    print(error, flush=True)
"""


@contextmanager
def holder(run_dir: Path, wait_s: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that takes the lock once it is told `go`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir), str(wait_s)],
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


def refused(run_dir: Path) -> str:
    with pytest.raises(RuntimeError) as caught, RunLock(run_dir, wait_s=0.0):
        pytest.fail("two writers")
    return str(caught.value)


# --- one process -------------------------------------------------------------------------------


def test_the_lock_says_who_holds_it_and_goes_with_him(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    with RunLock(run_dir):
        owner = json.loads((run_dir / "run.lock").read_text())
        assert owner["host"] == socket.gethostname() and owner["pid"] == os.getpid()
        assert owner["started"].startswith("20")
    assert not (run_dir / "run.lock").exists()


def test_an_error_frees_the_lock_and_it_can_be_used_again(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, wait_s=0.0)
    with pytest.raises(ZeroDivisionError), lock:
        _ = 1 / 0
    with lock:
        refused(tmp_path)


def test_a_second_writer_is_told_host_pid_and_start(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        message = refused(tmp_path)
        started = json.loads((tmp_path / "run.lock").read_text())["started"]
        assert refused(tmp_path) == message  # who was refused has not freed it
    assert f"process {os.getpid()} on {socket.gethostname()}, started {started}" in message
    assert str(tmp_path) in message and "\n" not in message


@pytest.mark.parametrize("text", ["", '{"host": "x", "pi', "[]"])
def test_what_a_killed_owner_left_is_no_lock(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.lock").write_text(text)
    with RunLock(tmp_path, wait_s=0.0):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_an_owner_that_has_not_written_yet_is_refused_all_the_same(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        (tmp_path / "run.lock").write_text('{"host": "x", "pi')
        assert "process ? on ?" in refused(tmp_path)


def test_an_owner_on_another_host_is_given_the_time_that_its_server_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunLock(tmp_path) as lock:
        owner = {"host": "elsewhere", "pid": 4711, "started": "2026-01-01"}
        lock.path.write_text(json.dumps(owner))
        start_s = time.monotonic()
        with pytest.raises(RuntimeError, match="process 4711 on elsewhere, started 2026-01-01"):
            Lock(lock.path, wait_s=0.0, lease_s=0.1).__enter__()
        assert time.monotonic() - start_s >= 0.1
    assert len(caplog.messages) == 1  # what it waits for


def test_what_cannot_be_locked_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    message = refused(tmp_path / "file" / "run")
    assert str(tmp_path / "file" / "run") in message and "Not a dir" in message

    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("mclclip.run.lock.fcntl.flock", no_locks)
    assert "does not lock files (Function not implemented)" in refused(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run.lock").symlink_to(tmp_path / "victim")
    assert str(tmp_path / "run.lock") in refused(tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


# --- several processes -------------------------------------------------------------------------


def test_a_killed_holder_is_followed_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        go(process)
        assert said(process) == "holding"
        assert f"process {process.pid} on {socket.gethostname()}" in refused(tmp_path)
        process.send_signal(signal.SIGKILL)
        with RunLock(tmp_path, wait_s=120.0):
            assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_a_writer_that_ends_in_time_is_waited_for(tmp_path: Path) -> None:
    with holder(tmp_path, 120.0) as process:
        with RunLock(tmp_path):
            go(process)
            time.sleep(0.1)
        assert said(process) == "holding"


def test_a_file_that_is_removed_as_it_is_taken_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner frees it between the opening and the locking, and another process takes it."""
    path, flock, files = tmp_path / "lock", fcntl.flock, []

    def replace(descriptor: int, how: int) -> None:
        if not files:
            path.unlink()
            files.append(path.open("w"))
            flock(files[0], fcntl.LOCK_EX)
        flock(descriptor, how)

    monkeypatch.setattr("mclclip.run.lock.fcntl.flock", replace)
    with pytest.raises(RuntimeError, match="in use by"):
        Lock(path, wait_s=0.0).__enter__()
    files[0].close()
    with Lock(path, wait_s=0.0) as lock:
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not lock.path.exists()


def test_a_lock_is_free_once_its_owner_has_died_though_a_forked_process_lives(
    tmp_path: Path,
) -> None:
    code = """
import os, sys, time
from mclclip.run.lock import RunLock
RunLock(sys.argv[1]).__enter__()
if os.fork() == 0:
    print("forked", flush=True)  # it has closed what its parent locks
    time.sleep(120)
    os._exit(0)
time.sleep(120)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert said(process) == "forked"
    try:
        refused(tmp_path)
        process.kill()
        process.wait()
        with RunLock(tmp_path, wait_s=0.0):
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_lock_that_another_host_did_not_free_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.lock").write_text('{"host": "elsewhere", "pid": 1, "started": "2026-01-01"}')
    with RunLock(tmp_path, wait_s=0.0):
        assert "elsewhere" in caplog.text
    caplog.clear()
    with RunLock(tmp_path, wait_s=0.0):
        assert not caplog.messages


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
