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

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from mclclip.util.files import now, parse_json, with_path_in_errors

log = logging.getLogger("mclclip")
_LONGEST = 10_000  # characters that are read of run.lock
_PAUSE_S = 0.2  # between two attempts to take the lock

RUN_STATE = "run_state.json"
_STATE_BYTES, _MAX_REASON = 2048, 1000  # length of the line in bytes; characters of its reason


class Lock:
    """A context manager that holds the file ``path``: one process at a time writes to ``place``,
    by default the folder of that file.

    The lock is the file system's (flock): the kernel frees it when the process ends, however it
    ends. The file names its owner, with host, pid and time, and is removed when the lock is freed.

    Entering raises RuntimeError if the file cannot be written, if its file system does not lock
    files, or if another process keeps the lock for longer than ``wait_s`` seconds. The server of a
    network file system keeps the lock of a host that died for a while, by default 90 s in NFSv4: if
    the owner is on another host, it waits for ``lease_s`` seconds at least.
    """

    def __init__(
        self,
        path: Path,
        *,
        wait_s: float = 10.0,
        lease_s: float = 120.0,
        place: Path | None = None,
    ) -> None:
        self.path, self.wait_s, self.lease_s = path, wait_s, lease_s
        self.place = place or path.parent
        self._descriptor = -1

    def __enter__(self) -> Lock:
        """Takes the lock, waiting for it if need be; see the class."""
        start_s, is_waiting = time.monotonic(), False
        while not self._try():
            owner = self._read_owner()
            pid, host, started = (owner.get(name, "?") for name in ("pid", "host", "started"))
            is_elsewhere = host not in ("?", socket.gethostname())
            limit_s = max(self.wait_s, self.lease_s if is_elsewhere else 0.0)
            who = f"process {pid} on {host}, started {started}"
            if time.monotonic() - start_s >= limit_s:
                raise RuntimeError(
                    f"{self.place} is in use by {who}, which holds {self.path}: one process writes "
                    "there at a time. Wait for it, stop it, or use another folder"
                )
            if is_elsewhere and not is_waiting:
                is_waiting = True
                log.warning("%s is locked by %s: waiting up to %g s", self.path, who, limit_s)
            time.sleep(_PAUSE_S)
        return self

    def __exit__(self, *error: object) -> None:
        """Removes the file and frees the lock."""
        try:
            if self._is_named():  # else it was removed by hand
                self.path.unlink(missing_ok=True)
        except OSError as problem:  # its disk is gone: what the caller did is told, not this
            log.warning("%s cannot be removed: %s", self.path, problem)
        finally:
            _held.discard(self)
            os.close(self._descriptor)

    def _try(self) -> bool:
        """Takes the lock if it is free, and writes who holds it. Returns False if it is not."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            self._descriptor = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise RuntimeError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            is_free = _lock(self._descriptor, self.path.parent) and self._is_named()
            if is_free:
                self._sign()
        except BaseException:
            os.close(self._descriptor)
            raise
        if not is_free:
            os.close(self._descriptor)
        return is_free

    def _sign(self) -> None:
        """Writes who holds the lock. Warns if a process on another host has not removed it."""
        before, host = self._read_owner().get("host", ""), socket.gethostname()
        if before not in ("", host):
            log.warning(
                "%s was held by a process on %s, which did not end by itself. If it still runs, "
                "stop one of both: the locks of this file system count on one host only (on Lustre "
                "mount with flock, not localflock)", self.path, before,
            )  # fmt: skip
        owner = {"host": host, "pid": os.getpid(), "started": now()}
        with with_path_in_errors(self.path):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(owner).encode() + b"\n", 0)
        _held.add(self)

    def _is_named(self) -> bool:
        """Returns True if the open file is still the one at ``path``: its last owner removes it."""
        try:
            with open(self.path, "rb") as file:  # opening asks the server of a network file system
                return os.path.samestat(os.fstat(file.fileno()), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _read_owner(self) -> dict[str, Any]:
        """Reads who holds the lock; an empty mapping if that is not written yet."""
        try:
            owner = parse_json(self.path.read_text()[:_LONGEST], str(self.path))
        except (OSError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}


_held: set[Lock] = set()


def _leave_to_parent() -> None:
    """Closes the locks in a forked process: they end with the process that took them."""
    for lock in _held:
        os.close(lock._descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _lock(descriptor: int, folder: Path) -> bool:
    """Locks an open file in ``folder``; returns False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A network file system may say that it is not permitted, or that the file was removed.
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.ESTALE):
            return False
        raise RuntimeError(
            f"the file system of {folder} does not lock files ({error.strerror}): mount it with "
            "flock, or use another folder ('mclclip doctor --path DIR' checks it)"
        ) from error
    return True


class RunLock(Lock):
    """The lock ``run.lock`` of a run directory."""

    def __init__(self, run_dir: Path, *, wait_s: float = 10.0) -> None:
        super().__init__(Path(run_dir) / "run.lock", wait_s=wait_s)


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
    """Writes the line over the one before, for which a full disk has room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with with_path_in_errors(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
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
