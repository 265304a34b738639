"""The lock of a run directory, and the record of how its last writer ended.

One process holds ``run.lock`` while it writes to the run directory. ``run_state.json`` says how the
last one ended. torchrun turns every exit code into 1 or 0, so a script that restarts runs reads
this file instead. It holds one line::

    {"state": "preempted", "exit_code": 85, "requeue": true, "reason": "SIGUSR1", ...}

``state`` is ``running``, ``preempted``, ``interrupted`` (by the user), ``finished`` or ``failed``.
If it is ``running`` but no process runs, the run was killed. The first rank of each node writes the
same line to the file that the environment variable MCLCLIP_STATE_FILE names; any rank may write a
failure there. The line has a fixed length, so that it can be overwritten on a full disk.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mclclip.util.files import now, open_own, parse_json, with_path_in_errors, write_bytes

log = logging.getLogger("mclclip")
_LONGEST = 10_000  # characters that are read of run.lock
_PAUSE_S = 0.2  # between two attempts to take the lock
_FIELDS = {"host", "pid", "process_start", "started"}
MAX_SILENCE_S = 1.0  # between two readings of the heartbeat at most this much counts as silence

RUN_STATE = "run_state.json"
_STATE_BYTES, _MAX_REASON = 2048, 1000  # length of the line in bytes; characters of its reason


def start_of_process(pid: int) -> str | None:
    """Returns when process ``pid`` started, in clock ticks since boot; None if it does not run.

    On a system without /proc, returns 'running' for every process that runs.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except PermissionError:  # it belongs to another user, so it runs
            return "running"
        except OSError:
            return None
        return "running"
    state, *rest = text.rsplit(")", 1)[1].split()
    return None if state in "ZX" else rest[18]


class RunLock:
    """A context manager that holds ``run.lock``, which names its owner: host, pid, start time.

    The owner touches the file every ``beat_s`` seconds: its heartbeat. Entering the context takes
    the lock over if its owner is dead. On this host the process table tells. An owner on another
    host counts as dead after ``stale_s`` seconds without a heartbeat, and as living once its
    heartbeat has changed while we wait: the hosts' clocks may be minutes apart, so the age of a
    heartbeat says nothing. An owner that was only asleep kills itself when it wakes up.

    Entering raises RuntimeError if the directory cannot be written, or if the owner lives and keeps
    the lock for longer than ``wait_s`` seconds. As long as it is unknown whether the owner lives,
    entering waits, longer than ``wait_s`` if need be.
    """

    def __init__(
        self, run_dir: Path, *, wait_s: float = 10.0, beat_s: float = 20.0, stale_s: float = 120.0
    ) -> None:
        self.path = Path(run_dir) / "run.lock"
        self.wait_s, self.beat_s, self.stale_s = wait_s, beat_s, stale_s
        self._record: dict[str, Any] | None = None  # what this process wrote to run.lock
        self._seen: tuple[dict[str, Any], int] | None = None  # owner and heartbeat, last time
        self._seen_at = 0.0
        # Of an owner on another host: its heartbeat has changed; seconds since it last did.
        self.beats, self.silent_s = False, 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _read_heartbeat(self) -> tuple[dict[str, Any], int] | None:
        """Reads the lock's owner and the time of its last heartbeat (ns, file system's clock).

        Returns None if there is no lock, or only a half-written one.
        """
        try:
            with open_own(self.path, "r") as file:
                owner = parse_json(file.read(_LONGEST), str(self.path))
                beat = os.fstat(file.fileno()).st_mtime_ns
        except (FileNotFoundError, ValueError):  # ValueError: killed between open and write
            return None
        return (owner, beat) if isinstance(owner, dict) and _FIELDS <= owner.keys() else None

    def _read_owner(self) -> dict[str, Any] | None:
        heartbeat = self._read_heartbeat()
        return heartbeat[0] if heartbeat else None

    def is_living(self, owner: dict[str, Any], beat: int) -> bool | None:
        """Returns whether the lock's owner lives; None if that is not known yet.

        ``beat`` is the time of the owner's last heartbeat, in any unit. If it has not changed, the
        time since the last call counts as silence, but at most MAX_SILENCE_S: when our own reading
        of the disk hangs for longer, the owner's heartbeat may hang there too.
        """
        if owner["host"] == socket.gethostname():
            start = start_of_process(owner["pid"])
            return start is not None and start == owner["process_start"]
        read_at = time.monotonic()
        if self._seen == (owner, beat):
            self.silent_s += min(read_at - self._seen_at, MAX_SILENCE_S)
        else:
            self.silent_s, self.beats = 0.0, self._seen is not None
        self._seen, self._seen_at = (owner, beat), read_at
        if self.silent_s >= self.stale_s:
            return False
        return True if self.beats else None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Holds a lock of the file system, so that two processes cannot take run.lock over at the
        same time."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            guard = open_own(self.path.with_name(".run.lock.guard"), "w")
        except OSError as error:
            raise RuntimeError(f"run_dir {folder} cannot be written: {error.strerror}") from error
        with guard:
            try:
                fcntl.flock(guard, fcntl.LOCK_EX)
            except OSError as error:
                raise RuntimeError(
                    f"the file system of {folder} does not lock files ({error.strerror}): mount it "
                    f"with flock, or use another run_dir ('mclclip doctor --path DIR' checks one)"
                ) from error
            yield

    def _try(self) -> tuple[str, bool] | None:
        """Takes the lock and returns None; if that fails, returns a text about the owner, and True
        if the owner is known to live."""
        with self._guard():
            if (heartbeat := self._read_heartbeat()) is not None:
                owner, lives = heartbeat[0], self.is_living(*heartbeat)
                if lives is not False:
                    text = f"process {owner['pid']} on {owner['host']}, started {owner['started']}"
                    return text, lives is True
            self._record = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "process_start": start_of_process(os.getpid()),
                "started": now(),
            }
            # No rename is needed: the guard keeps readers out, and half a line counts as no lock.
            with with_path_in_errors(self.path), open_own(self.path, "w") as file:
                file.write(json.dumps(self._record) + "\n")
        return None

    def _beat(self) -> None:
        while not self._stop.wait(self.beat_s):
            try:
                owner = self._read_owner()
                if owner == self._record:
                    with open_own(self.path, "r") as file:
                        os.utime(file.fileno())
            except (OSError, RuntimeError) as error:
                # A shared disk may fail for a moment: the next heartbeat tries again.
                log.warning("%s: no heartbeat: %s", self.path, error)
                continue
            if owner is not None and owner != self._record:
                log.error(
                    "%s was taken over by process %s on %s: this process was not heard of for "
                    "%.0f s and ends now", self.path, owner["pid"], owner["host"], self.stale_s,
                )  # fmt: skip
                os.kill(os.getpid(), signal.SIGKILL)  # on SIGTERM it would save, as a second writer
                return

    def __enter__(self) -> RunLock:
        deadline, warned = time.monotonic() + self.wait_s, False
        self._seen, self.beats, self.silent_s = None, False, 0.0
        while (holder := self._try()) is not None:
            owner, lives = holder
            if lives and time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.path.parent} is in use by {owner}: a run directory has one writer. "
                    f"Wait for it, stop it, or use another run_dir"
                )
            if not lives and not warned:
                warned = True
                log.warning(
                    "%s is locked by %s: waiting for a sign of life from there; without one for "
                    "%g s the lock is taken over", self.path.parent, owner, self.stale_s,
                )  # fmt: skip
            time.sleep(_PAUSE_S)
        if self.silent_s >= self.stale_s:
            log.warning("%s is taken over: there was no sign of life", self.path)
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._guard():
            if self._read_owner() == self._record:  # else it was taken over, or removed by hand
                self.path.unlink(missing_ok=True)


def write_state(
    run_dir: Path | None,
    state: str,
    *,
    verb: str,
    exit_code: int,
    requeue: bool,
    reason: str,
    follows: bool = False,
) -> None:
    """Writes how the command ends to run_state.json in ``run_dir`` (None: not there), and to the
    file that MCLCLIP_STATE_FILE names. `mclclip.run.lock` explains the fields.

    A recorded failure with ``requeue`` false is kept: what other ranks report after it is only its
    consequence. With ``follows`` (this rank ends because another one has) every recorded failure is
    kept. The state 'running', of the next start, overwrites everything.
    """
    record = {
        "state": state,
        "exit_code": exit_code,
        "requeue": requeue,
        "reason": reason[:_MAX_REASON],
        "verb": verb,
        "time": now(),
    }
    line = json.dumps(record).encode().ljust(_STATE_BYTES - 1) + b"\n"
    paths = [] if run_dir is None else [Path(run_dir) / RUN_STATE]
    reports = state == "failed" or os.environ.get("LOCAL_RANK", "0") == "0"
    if (state_file := os.environ.get("MCLCLIP_STATE_FILE")) and reports:
        paths.append(Path(state_file))
    for path in paths:
        if state == "running" or not _keeps_failure(path, follows):
            _overwrite(path, line)


def _overwrite(path: Path, line: bytes) -> None:
    """Writes the file by rename, or in place if the disk has no room for a second file."""
    try:
        write_bytes(path, line)
    except OSError as error:
        try:
            file = os.open(path, os.O_WRONLY)
        except OSError:
            raise error from None
        try:
            with with_path_in_errors(path):
                os.pwrite(file, line, 0)
        finally:
            os.close(file)


def _keeps_failure(path: Path, follows: bool) -> bool:
    """Returns True if the failure recorded in ``path`` must be kept, see `write_state`."""
    try:
        record = parse_json(path.read_text(), str(path))
    except (OSError, ValueError):  # there is none yet, or it is not ours
        return False
    failed = isinstance(record, dict) and record.get("state") == "failed"
    return failed and (follows or not record.get("requeue"))
