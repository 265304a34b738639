"""The lock: a run directory has one writer."""

from __future__ import annotations

import datetime
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
from types import TracebackType
from typing import Any

log = logging.getLogger("mclclip")


def _process_start(pid: int) -> str | None:
    """When process ``pid`` started (clock ticks since boot), or None where it does not run.

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
    except ProcessLookupError:
        return None
    except PermissionError:  # it runs, as another user
        return "running"
    return "running"


class RunLock:
    """The one writer of a run directory: ``run.lock`` with host, pid and start time.

    A lock of a process that no longer runs on this host is taken over. A lock of another host is
    taken over once its heartbeat is older than ``stale_s``: a node may have died with it. A writer
    that slept so long that another host took its lock ends itself.

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

    def _read(self) -> dict[str, Any] | None:
        """What the lock file says, or None where there is none or it is half-written."""
        try:
            owner = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        except ValueError:  # its owner was killed between open and write
            return None
        whole = isinstance(owner, dict) and {"host", "pid", "process_start", "started"} <= set(
            owner
        )
        return owner if whole else None

    def _living_owner(self) -> str | None:
        """A description of the living owner, or None where the lock is free or stale."""
        owner = self._read()
        if owner is None:
            return None
        if owner["host"] == socket.gethostname():
            start = _process_start(owner["pid"])
            alive = start is not None and start == owner["process_start"]
        else:
            alive = time.time() - self.path.stat().st_mtime < self.stale_s
        if not alive:
            return None
        return f"process {owner['pid']} on {owner['host']}, started {owner['started']}"

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

    def _try(self) -> str | None:
        """Takes the lock; returns None on success, else who holds it."""
        with self._guard():
            if (owner := self._living_owner()) is not None:
                return owner
            self._record = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "process_start": _process_start(os.getpid()),
                "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
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
        deadline = time.monotonic() + self.wait_s
        first_beat: float | None = None
        while (owner := self._try()) is not None:
            beat = self._foreign_beat()
            if beat is not None and first_beat is None:
                first_beat = beat
                log.info("%s is locked by %s: waiting for a sign of life", self.path.parent, owner)
            if time.monotonic() > deadline and (beat is None or beat != first_beat):
                raise RuntimeError(
                    f"{self.path.parent} is in use by {owner}: a run directory has one writer. "
                    f"Wait for it, stop it, or use another run_dir"
                )
            time.sleep(0.2)
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()
        return self

    def _foreign_beat(self) -> float | None:
        """When the lock of another host was last renewed: without a new beat its owner may be dead.

        None where there is no such lock.
        """
        owner = self._read()
        if owner is None or owner["host"] == socket.gethostname():
            return None
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:  # it has just ended
            return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._read() != self._record:  # taken over meanwhile, or removed by hand
            return
        with self._guard():
            self.path.unlink(missing_ok=True)
