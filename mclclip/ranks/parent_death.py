"""Processes that end with the process that started them (needs no torch)."""

from __future__ import annotations

import ctypes
import itertools
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

from mclclip.ranks import signals

T = TypeVar("T")
log = logging.getLogger("mclclip")
_PR_SET_PDEATHSIG = 1
_UNKNOWN_S = 1.0  # how long a worker may take to end where there is no /proc to read


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, even by SIGKILL.

    Workers outlive a torchrun that was killed with -9 by seconds, and pool workers may outlive
    their owner; a restarted job would write to the same files. If torchrun is already dead, this
    process ends here. On other systems this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        log.warning("prctl(PR_SET_PDEATHSIG) failed: a worker may outlive a killed launcher")
    # The parent may have died between the two calls, or long before them.
    if os.getppid() != parent or _launcher_is_gone(parent):
        log.error("the launcher of process %d has died: the process ends", os.getpid())
        os._exit(1)


def start_pool_worker() -> None:
    """``initializer`` of every pool and loader process: ignores signals, and ends with its parent.

    A signal to the whole job must not end a loader before the training process has saved. Such a
    worker therefore also ignores the SIGTERM that Python sends at exit; ``_end_workers`` ends it
    instead, in every process that has imported this module. A parent that ended while the worker
    was starting, before this call, is noticed too.
    """
    die_with_parent()
    signals.set_action(signal.SIG_IGN)
    owner = multiprocessing.parent_process()
    if owner is None:
        return
    # A forked worker may hold the pipe by which its older sibling would notice that the owner has
    # ended. Under forkserver the parent is the server, which has the pipe to itself.
    adopted = os.getppid() != owner.pid
    by_server = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    if not owner.is_alive() or (adopted and not by_server):
        os._exit(1)


def map_in_pool(
    function: Callable[..., T], calls: Sequence[tuple[object, ...]], workers: int
) -> Generator[T, None, None]:
    """Yields ``function(*call)`` for all calls in their order, by up to ``workers`` processes.

    With one worker or one call this process does the work. Where the caller stops in between, by
    an error, a signal or ``close()``, the processes are killed at once, whatever they are at:
    waiting for them would keep a cluster waiting that has asked this process to leave. Raises what
    the function raises, and RuntimeError where a process was killed from outside.
    """
    workers = min(workers, len(calls))
    if workers <= 1:
        yield from itertools.starmap(function, calls)
        return
    spawn = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_pool_worker)
    try:
        yield from pool.map(function, *zip(*calls, strict=True))
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        if isinstance(error, BrokenProcessPool):
            raise RuntimeError(
                f"one of {workers} worker processes was killed from outside, probably because the "
                "memory ran out: use fewer of them"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_workers() -> None:
    """Ends the daemonic children of a process that exits, also those that ignore SIGTERM.

    Python itself sends one SIGTERM and waits for ever. A child that handles SIGTERM gets all the
    time that it needs, as it would without this function.
    """
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    try:
        _end_patiently(workers)
    except BaseException:  # interrupted again
        for worker in workers:
            worker.kill()
        raise


def _end_patiently(workers: list[multiprocessing.process.BaseProcess]) -> None:
    if workers and threading.current_thread() is threading.main_thread():
        # torch's handler would raise an error for a loader worker that was killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.terminate()
    asked = time.monotonic()
    while alive := [worker for worker in workers if worker.is_alive()]:
        for worker in alive:
            # Checked in every round: a worker that is just starting may begin to ignore it.
            if _is_deaf(worker.pid or 0, time.monotonic() - asked):
                worker.kill()
        time.sleep(0.01)


def _is_deaf(pid: int, asked_s: float) -> bool:
    """Whether process ``pid`` ignores SIGTERM, which was sent to it ``asked_s`` seconds ago, or has
    been stopped and hears nothing.

    Without /proc, a process that still runs after ``_UNKNOWN_S`` seconds counts as ignoring it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return asked_s > _UNKNOWN_S
    if status.split("State:")[1].split()[0] in ("T", "t"):
        return True
    ignored = int(status.split("SigIgn:")[1].split()[0], 16)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


def _end_workers_at_exit(_: object = None) -> None:
    """Has ``multiprocessing`` call ``_end_workers`` at exit, before its own SIGTERM and join."""
    multiprocessing.util.Finalize(None, _end_workers, exitpriority=0)


_end_workers_at_exit()
# A forked child does not inherit its parent's exit functions.
multiprocessing.util.register_after_fork(_end_workers_at_exit, _end_workers_at_exit)


def _launcher_is_gone(parent: int) -> bool:
    """True where torchrun started this process but is not among its ancestors any more."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    while parent > 0:
        try:
            command = Path(f"/proc/{parent}/cmdline").read_bytes()
            stat = Path(f"/proc/{parent}/stat").read_text()
        except OSError:  # cannot be read: assume that the launcher lives
            return False
        # Process 1 adopts orphans and may be any Python program in a container.
        launcher = b"torchrun" in command or b"torch.distributed" in command
        if launcher or (b"python" in command and parent != 1):
            return False
        parent = int(stat.rsplit(")", 1)[1].split()[1])
    return True
