"""The lock: a run directory has one writer."""

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

from mclclip.files import now

log = logging.getLogger("mclclip")
_LOOK_S = 0.2  # pause between two looks at a lock that another process holds
_FIELDS = {"host", "pid", "process_start", "started"}
_LATE_LOOK_S = 1.0  # what a late look counts for at most


def _process_start(pid: int) -> str | None:
    """Start of process ``pid`` (clock ticks since boot), or None where it does not run.

    Where there is no /proc to ask, ``running`` stands for any time.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _answers(pid)
    state, *rest = text.rsplit(")", 1)[1].split()
    return None if state in "ZX" else rest[18]


def _answers(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except OSError as error:  # not permitted: it runs, as another user
        return "running" if isinstance(error, PermissionError) else None
    return "running"


class _Watch:
    """Record of what this process has seen of a lock whose owner runs on another host.

    Clocks of two hosts may be minutes apart. So the time of the last heartbeat says nothing; that
    it changes while we look does. How long it has not changed is counted by our own clock, and
    only while we look: where a look hangs for minutes, the owner may hang on the same disk.
    """

    def __init__(self) -> None:
        self._seen: tuple[dict[str, Any], int] | None = None
        self._last_look: float | None = None
        self.silent_s, self.beats = 0.0, False

    def look(self, owner: dict[str, Any], beat: int) -> None:
        """Takes note of the lock's owner and of the time of its heartbeat, in any unit."""
        now = time.monotonic()
        if self._seen == (owner, beat) and self._last_look is not None:
            self.silent_s += min(now - self._last_look, _LATE_LOOK_S)
        else:
            self.silent_s, self.beats = 0.0, self._seen is not None
        self._seen, self._last_look = (owner, beat), now


class RunLock:
    """The one writer of a run directory: ``run.lock`` with host, pid and start time.

    A lock of a process that no longer runs on this host is taken over at once. The owner of a lock
    of another host may have died with its node: it is taken over when its heartbeat, due every
    ``beat_s``, has not come for ``stale_s`` seconds in which we looked. A writer that slept so long
    that another host took its lock ends itself.

    Entering raises RuntimeError, one line, where a living writer keeps the lock for longer than
    ``wait_s`` or the directory cannot be written. A writer on another host counts as living when
    its heart beats while we wait; a job that starts again elsewhere thus gets a dead node's lock.
    """

    def __init__(
        self, run_dir: Path, *, wait_s: float = 10.0, beat_s: float = 20.0, stale_s: float = 120.0
    ) -> None:
        self.path = Path(run_dir) / "run.lock"
        self.wait_s, self.beat_s, self.stale_s = wait_s, beat_s, stale_s
        self._record: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _look(self) -> tuple[dict[str, Any], int] | None:
        """Returns the lock's owner and the time of its last beat (ns, by the disk's own clock).

        None where there is no lock or it is half-written.
        """
        try:
            with open(self.path) as file:
                owner, beat = json.load(file), os.fstat(file.fileno()).st_mtime_ns
        except (FileNotFoundError, ValueError):  # its owner was killed between open and write
            return None
        whole = isinstance(owner, dict) and _FIELDS <= owner.keys()
        return (owner, beat) if whole else None

    def _read(self) -> dict[str, Any] | None:
        found = self._look()
        return found[0] if found else None

    def _is_living(self, owner: dict[str, Any], beat: int, watch: _Watch) -> bool | None:
        """Whether the owner of the lock lives; None where that cannot be known yet."""
        if owner["host"] == socket.gethostname():
            start = _process_start(owner["pid"])
            return start is not None and start == owner["process_start"]
        watch.look(owner, beat)
        if watch.silent_s >= self.stale_s:
            return False
        return True if watch.beats else None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Keeps other processes out: two that find a stale lock must not both take it."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            guard = open(self.path.with_name(".run.lock.guard"), "w")
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

    def _try(self, watch: _Watch) -> tuple[str, bool] | None:
        """Takes the lock; returns None on success, else its owner and whether he surely lives."""
        with self._guard():
            if (found := self._look()) is not None:
                owner, living = found[0], self._is_living(*found, watch)
                if living is not False:
                    who = f"process {owner['pid']} on {owner['host']}, started {owner['started']}"
                    return who, living is True
            self._record = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "process_start": _process_start(os.getpid()),
                "started": now(),
            }
            # Not atomic: the guard keeps readers out, and half a record counts as stale.
            self.path.write_text(json.dumps(self._record) + "\n")
        return None

    def _beat(self) -> None:
        while not self._stop.wait(self.beat_s):
            try:
                owner = self._read()
                if owner == self._record:
                    os.utime(self.path)
            except OSError as error:  # a shared disk may hiccup; the next beat may come through
                log.warning("%s: no heartbeat: %s", self.path, error)
                continue
            if owner is not None and owner != self._record:
                self._lost(owner)
                return

    def _lost(self, owner: dict[str, Any]) -> None:
        """Another host took this process for dead: one of the two writers must go."""
        log.error(
            "%s was taken over by process %s on %s: this process was not heard of for %.0f s and "
            "ends now", self.path, owner["pid"], owner["host"], self.stale_s,
        )  # fmt: skip
        os.kill(os.getpid(), signal.SIGKILL)  # not SIGTERM, on which it would save

    def __enter__(self) -> RunLock:
        deadline, watch, told = time.monotonic() + self.wait_s, _Watch(), False
        while (held := self._try(watch)) is not None:
            owner, lives = held
            if lives and time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.path.parent} is in use by {owner}: a run directory has one writer. "
                    f"Wait for it, stop it, or use another run_dir"
                )
            if not lives and not told:
                told = True
                log.warning(
                    "%s is locked by %s: waiting for a sign of life from there; without one for "
                    "%g s the lock is taken over", self.path.parent, owner, self.stale_s,
                )  # fmt: skip
            time.sleep(_LOOK_S)
        if watch.silent_s >= self.stale_s:
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
