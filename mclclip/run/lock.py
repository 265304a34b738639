"""The lock of a run directory (``run.lock``), which one process holds while it writes there, and
the state in which the last writer ended (``run_state.json``).

torchrun turns every exit code into 1 or 0, so a script that restarts runs reads this line instead::

    {"state": "preempted", "exit_code": 85, "requeue": true, "reason": "SIGUSR1", ...}

``state`` is ``running``, ``preempted``, ``interrupted`` by the user, ``finished`` or ``failed``; a
run that still says ``running`` when its processes are gone was killed. The line is also in the file
that the environment variable MCLCLIP_STATE_FILE names, which the first rank of each node writes.
Any rank may write a failure there. The line is written by rename and padded to a fixed size, so
that on a full disk it can overwrite the previous line.
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
_LONGEST = 10_000  # characters of a record
_PAUSE_S = 0.2  # between two readings of a lock that another process holds
_FIELDS = {"host", "pid", "process_start", "started"}
MAX_SILENCE_S = 1.0  # at most this much time counts as silence between two readings

RUN_STATE = "run_state.json"
_STATE_BYTES, _REASON = 2048, 1000  # of the file; characters of a reason


def start_of_process(pid: int) -> str | None:
    """Start of process ``pid`` (clock ticks since boot), or None where it does not run.

    Without /proc a running process gives the word ``running`` instead.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except PermissionError:  # it runs, as another user
            return "running"
        except OSError:
            return None
        return "running"
    state, *rest = text.rsplit(")", 1)[1].split()
    return None if state in "ZX" else rest[18]


class RunLock:
    """Context manager that holds ``run.lock``, a file with host, pid and start time of its owner.

    If the owner was a process of this host that no longer runs, the lock is taken over at once. If
    it is a process of another host, it may have died with its node: the lock is taken over when we
    have seen no heartbeat for ``stale_s`` seconds (one is due every ``beat_s``). The clocks of two
    hosts may be minutes apart, so only a change of the heartbeat's time shows that the owner lives.
    A writer whose lock was taken over while it slept kills itself.

    Entering raises RuntimeError, one line, where a living writer keeps the lock for longer than
    ``wait_s`` or the directory cannot be written. A writer on another host counts as living once
    its heartbeat has changed while we wait. Until then we wait, longer than ``wait_s`` if need be.
    """

    def __init__(
        self, run_dir: Path, *, wait_s: float = 10.0, beat_s: float = 20.0, stale_s: float = 120.0
    ) -> None:
        self.path = Path(run_dir) / "run.lock"
        self.wait_s, self.beat_s, self.stale_s = wait_s, beat_s, stale_s
        self._record: dict[str, Any] | None = None
        self._seen: tuple[dict[str, Any], int] | None = None  # another host's owner, its heartbeat
        self._seen_at = 0.0
        self.beats, self.silent_s = False, 0.0  # a change was seen; seconds without one
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _read_heartbeat(self) -> tuple[dict[str, Any], int] | None:
        """The lock's owner and the time of its last heartbeat (ns, by the file system's clock).

        None where there is no lock or it is half-written.
        """
        try:
            with open_own(self.path, "r") as file:
                owner = parse_json(file.read(_LONGEST), str(self.path))
                beat = os.fstat(file.fileno()).st_mtime_ns
        except (FileNotFoundError, ValueError):  # its owner was killed between open and write
            return None
        whole = isinstance(owner, dict) and _FIELDS <= owner.keys()
        return (owner, beat) if whole else None

    def _read(self) -> dict[str, Any] | None:
        heartbeat = self._read_heartbeat()
        return heartbeat[0] if heartbeat else None

    def is_living(self, owner: dict[str, Any], beat: int) -> bool | None:
        """Returns True if the owner of the lock lives; None while that is not known yet.

        ``beat`` is the time of its heartbeat, in any unit. A reading adds at most MAX_SILENCE_S to
        the silence: if it hangs on the disk, the owner may hang there too.
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
        """Holds a file lock, so that two processes that find a stale lock cannot both take it."""
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
        """Takes the lock; returns None on success, else its owner and whether that surely lives."""
        with self._guard():
            if (heartbeat := self._read_heartbeat()) is not None:
                owner, living = heartbeat[0], self.is_living(*heartbeat)
                if living is not False:
                    who = f"process {owner['pid']} on {owner['host']}, started {owner['started']}"
                    return who, living is True
            self._record = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "process_start": start_of_process(os.getpid()),
                "started": now(),
            }
            # Needs no rename: the guard keeps readers out, and half a record counts as no lock.
            with with_path_in_errors(self.path), open_own(self.path, "w") as file:
                file.write(json.dumps(self._record) + "\n")
        return None

    def _beat(self) -> None:
        while not self._stop.wait(self.beat_s):
            try:
                owner = self._read()
                if owner == self._record:
                    with open_own(self.path, "r") as file:
                        os.utime(file.fileno())
            except (OSError, RuntimeError) as error:
                # A shared disk may fail for a moment; the next beat may work.
                log.warning("%s: no heartbeat: %s", self.path, error)
                continue
            if owner is not None and owner != self._record:  # there must be one writer
                log.error(
                    "%s was taken over by process %s on %s: this process was not heard of for "
                    "%.0f s and ends now", self.path, owner["pid"], owner["host"], self.stale_s,
                )  # fmt: skip
                os.kill(os.getpid(), signal.SIGKILL)  # not SIGTERM, on which it would save
                return

    def __enter__(self) -> RunLock:
        deadline, warned = time.monotonic() + self.wait_s, False
        self._seen, self.beats, self.silent_s = None, False, 0.0
        while (held := self._try()) is not None:
            owner, lives = held
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
            if self._read() == self._record:  # neither taken over meanwhile nor removed by hand
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
    """Writes the state to ``run_dir`` (None: not there) and to the file that MCLCLIP_STATE_FILE
    names.

    A recorded failure that a restart would not mend is only overwritten by ``running``, since later
    reports of other ranks are its consequences. A state that ``follows`` from the end of another
    rank overwrites no recorded failure.
    """
    record = {
        "state": state,
        "exit_code": exit_code,
        "requeue": requeue,
        "reason": reason[:_REASON],
        "verb": verb,
        "time": now(),
    }
    line = json.dumps(record).encode().ljust(_STATE_BYTES - 1) + b"\n"
    paths = [] if run_dir is None else [Path(run_dir) / RUN_STATE]
    writes = state == "failed" or os.environ.get("LOCAL_RANK", "0") == "0"
    if (state_file := os.environ.get("MCLCLIP_STATE_FILE")) and writes:
        paths.append(Path(state_file))
    for path in paths:
        if state == "running" or not _is_final(path, follows):
            _write_over(path, line)


def _write_over(path: Path, line: bytes) -> None:
    """Replaces the file, or its content where there is no room for a second file."""
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


def _is_final(path: Path, follows: bool) -> bool:
    """Returns True if ``path`` holds a failure that starting again would not mend, or one that
    something ``follows`` from."""
    try:
        record = parse_json(path.read_text(), str(path))
    except (OSError, ValueError):  # none yet, or not ours
        return False
    failed = isinstance(record, dict) and record.get("state") == "failed"
    return failed and (follows or not record.get("requeue"))
