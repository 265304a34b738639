"""``ranks``: functions on real gloo processes, one kept per rank for the whole session.

Opening a process takes a tenth of a second (`forks`), a call to one that is there milliseconds.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, BrokenExecutor, Future, ProcessPoolExecutor, wait
from datetime import timedelta
from functools import cache
from multiprocessing import active_children
from typing import Any

import pytest
import torch

from mclclip.ranks import collectives, process_group
from mclclip.ranks.process_group import Context
from mclclip.ranks.workers import die_with_parent
from tests import forks

MAX_RANKS = 4
START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 300.0  # of calls of moments, on a busy machine
GRACE_S = 60.0  # for the other ranks to end after one has failed


def _set_up() -> None:
    die_with_parent()
    torch.set_num_threads(1)


def here() -> Context:
    """The context of a process of the pool."""
    return Context(collectives.rank(), collectives.world_size())


def _call(call: bytes, rank: int, world_size: int, store: str, timeout_s: float) -> bytes:
    """Runs in the process of ``rank``: the function between opening and closing the group.

    Arguments and results are pickled here, since a queue would send tensors as handles of shared
    memory that end with their process.
    """
    timeout = timedelta(seconds=timeout_s)
    process_group.join(torch.device("cpu"), rank, world_size, timeout, init_method=store)
    try:
        function, args = pickle.loads(call)
        return pickle.dumps(function(*args))
    except Exception as error:
        error.__dict__["failed_at"] = time.monotonic()
        raise
    finally:
        process_group.shutdown()


def _failed_at(error: BaseException) -> float:
    """When; a process that died without an error did so before its peers missed it."""
    return 0.0 if isinstance(error, BrokenExecutor) else float(getattr(error, "failed_at", 1e99))


class RankPool:
    """``pool(world_size, function, *args)``: the function's results, one per rank.

    The function is a module-level one; it finds its rank through ``collectives``. The first error
    of any rank is raised, with a note on each rank that failed. After an error, or after
    ``timeout_s``, processes that still run are killed, and the next call starts new ones.
    """

    def __init__(self) -> None:
        self._executors: list[ProcessPoolExecutor] = []
        self._pids: list[int] = []

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> list[Any]:
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size is {world_size}: wanted 1 to {MAX_RANKS}")
        self._start(world_size)
        call = pickle.dumps((function, args))
        with tempfile.TemporaryDirectory() as directory:
            store = f"file://{directory}/store"
            futures = [
                self._executors[rank].submit(_call, call, rank, world_size, store, timeout_s)
                for rank in range(world_size)
            ]
            self._await(futures, function.__name__, timeout_s)
        return [pickle.loads(future.result()) for future in futures]

    def _start(self, world_size: int) -> None:
        if not set(self._pids) <= {child.pid for child in active_children()}:
            self.kill()  # one has died since the last call
        new = range(len(self._executors), world_size)
        self._executors += [
            ProcessPoolExecutor(1, mp_context=forks.context(), initializer=_set_up) for _ in new
        ]
        pids = [self._executors[rank].submit(os.getpid) for rank in new]
        self._pids += [pid.result(START_TIMEOUT_S) for pid in pids]

    def _await(self, futures: list[Future[bytes]], name: str, timeout_s: float) -> None:
        """Returns when all ranks have succeeded; otherwise leaves no process stuck, and raises."""
        pending = wait(futures, timeout_s, FIRST_EXCEPTION).not_done
        if any(future.done() and future.exception() for future in futures):
            # The others usually fail with it, or for the lack of it.
            pending = wait(futures, GRACE_S).not_done
        errors = {
            rank: error
            for rank, future in enumerate(futures)
            if future not in pending and (error := future.exception()) is not None
        }
        # What failed outside the function (a dead process, a group that did not open) stays broken.
        if pending or not all(hasattr(error, "failed_at") for error in errors.values()):
            self.kill()
        if errors:
            cause = min(errors.values(), key=_failed_at)
            for rank, error in errors.items():
                cause.add_note(f"{name}, rank {rank}: {type(error).__name__}: {error}")
            raise cause
        if pending:
            stuck = [rank for rank, future in enumerate(futures) if future in pending]
            raise TimeoutError(f"{name}: ranks {stuck} had not ended after {timeout_s:g} s")

    def kill(self) -> None:
        """Ends the processes at once: one that ran autograd under gloo may crash when it leaves."""
        for child in active_children():
            if child.pid in self._pids:
                child.kill()
        for executor in self._executors:
            executor.shutdown(wait=True, cancel_futures=True)
        self._executors, self._pids = [], []


@pytest.fixture(scope="session")
def single(ranks: RankPool) -> Callable[..., tuple[list[float], dict[str, Any]]]:
    """Steps of one process under DDP (``test_engines.run``): losses and state; each is run once."""
    from tests.distributed.test_engines import STEPS, run

    @cache
    def result(precision: str, steps: int = STEPS, **options: Any) -> Any:
        return ranks(1, run, "ddp", precision, options, steps)[0]

    return result


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's processes (of each worker's session under pytest-xdist)."""
    pool = RankPool()
    yield pool
    pool.kill()
