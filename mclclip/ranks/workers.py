"""Starts worker processes, which ignore signals and end with their parent (needs no torch)."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any, TypeVar

from mclclip.ranks import signals
from mclclip.ranks.failures import LostWorker

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_ONE_AT_A_TIME = threading.Lock()


def die_with_parent(parent: int | None = None) -> None:
    """Asks Linux to kill this process when its parent dies; does nothing on other systems.

    ``parent`` is the expected parent's process id (None: the present parent). If it has died
    already, this process ends at once. Otherwise a rank would outlive a torchrun that was killed
    with -9, and a worker its rank, and a restarted job would write to the same files.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Process(SpawnProcess):
    """A spawned process that does not import the program that started it. Python's own would: a
    script without ``if __name__ == "__main__"`` would run once more in each process. So what is
    sent to it must lie in modules."""

    @staticmethod
    def _Popen(process: Any) -> Any:
        with _ONE_AT_A_TIME:
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:
                return SpawnProcess._Popen(process)
            finally:
                sys.modules["__main__"] = main


class Spawn(SpawnContext):
    """Starts processes from new interpreters, which import what is sent to them and no more."""

    Process = _Process


def start_worker() -> None:
    """Makes a worker ignore signals and end with its parent; every pool and loader worker runs it
    first.

    A signal to the whole job must not end a loader before the training process has saved.
    """
    owner = multiprocessing.parent_process()
    # Under forkserver the parent is the server, not the owner.
    by_server = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    die_with_parent(None if owner is None or by_server else owner.pid)
    signals.set_action(signal.SIG_IGN)


def map_in_pool(
    function: Callable[..., T], calls: Sequence[tuple[object, ...]], workers: int
) -> Generator[T, None, None]:
    """Yields ``function(*call)`` for each of ``calls`` in order, computed by ``workers`` processes.

    With one worker or one call this process does the work. If the caller stops early, by an error,
    a signal or ``close()``, the workers are killed at once: to wait for them would keep a cluster
    waiting that has asked this process to leave. Raises what the function raises, and LostWorker if
    a worker was killed from outside.
    """
    workers = min(workers, len(calls))
    if workers <= 1:
        yield from itertools.starmap(function, calls)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=Spawn(), initializer=start_worker)
    try:
        yield from pool.map(function, *zip(*calls, strict=True))
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        if isinstance(error, BrokenProcessPool):
            raise LostWorker(
                f"one of {workers} worker processes was killed from outside, probably because the "
                "memory ran out: use fewer of them"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)
