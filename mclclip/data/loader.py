"""Reads the items of a data set in worker processes, in order, with a time limit for each item."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing import resource_tracker
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from mclclip.ranks import failures, signals
from mclclip.ranks.process_group import start_loader_worker, start_to_host
from mclclip.ranks.workers import Spawn, start_worker
from mclclip.util.files import printable

# Workers send tensors through sockets in TMPDIR; the path of a socket has at most 107 characters.
LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")
T = TypeVar("T")
Note = TypeVar("Note")
log = logging.getLogger("mclclip")


class Loader(Generic[T]):
    """Iterates over ``dataset[item]`` for the ``items``, in order.

    num_workers  number of processes that read; 0: this process reads, without a time limit
    timeout_s    longest time to wait for an item
    describe     returns a name of an item and the keys of its samples, for error messages
    collate      an item is a list, which the data set reads at once, and a worker makes a batch of
                 the results by this function; None: ``dataset[item]`` is the batch
    pin_memory   as for DataLoader
    fresh        workers are started anew, not forked: urls cannot be read in a fork
                 (`mclclip.util.stores`)

    Iterating raises LostWorker if a worker was killed, or an item does not come in time. Raises
    ValueError if the path of TMPDIR is too long for workers.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        items: Sequence[Any],
        *,
        num_workers: int,
        timeout_s: float,
        describe: Callable[[Any], tuple[str, Sequence[str]]],
        collate: Callable[[list[Any]], T] | None = None,
        pin_memory: bool = False,
        fresh: bool = False,
    ) -> None:
        self.items, self.describe, self.timeout_s = items, describe, timeout_s
        num_workers = min(num_workers, len(items))
        folder = tempfile.gettempdir()
        if num_workers and len(os.fsencode(folder)) > LONGEST_TMPDIR:
            raise ValueError(
                f"TMPDIR={folder} is longer than the {LONGEST_TMPDIR} characters that sockets of "
                "reading processes leave it: set a shorter one, or data.num_workers=0"
            )
        self._in_file = _InFile(dataset) if fresh and num_workers else None
        one_by_one: dict[str, Any] = {"batch_size": None, "sampler": items}
        as_lists: dict[str, Any] = {"batch_sampler": items, "collate_fn": collate}
        self._loader: DataLoader[Any] = DataLoader(
            self._in_file or dataset,
            num_workers=num_workers,
            timeout=timeout_s if num_workers else 0,
            worker_init_fn=start_loader_worker,
            pin_memory=pin_memory,
            persistent_workers=False,
            multiprocessing_context=Spawn() if self._in_file else None,
            **(as_lists if collate else one_by_one),
        )

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:
        with self._in_file or nullcontext():
            source, workers = self._start()
            for item in self.items:
                late: list[object] = []
                # torch's own limit does not hold while it receives from a worker that stopped.
                timer = threading.Timer(2 * self.timeout_s, _give_up, (source, workers, late))
                try:
                    if workers:
                        timer.start()
                    batch = next(source)
                except (RuntimeError, ConnectionError, EOFError) as error:
                    cause = RuntimeError(failures.LATE_WORKER) if late else error
                    raise self._name(cause, item) from error
                finally:
                    timer.cancel()
                if late:  # it came as its worker was ended
                    raise self._name(RuntimeError(failures.LATE_WORKER), item)
                yield batch
            next(source, None)  # reaches the end of torch's loader, which ends its workers

    def _start(self) -> tuple[Iterator[Any], list[multiprocessing.process.BaseProcess]]:
        """Starts the workers; returns the loader's iterator and the workers.

        Signals are blocked meanwhile, so that a signal to the whole job does not end a worker
        before it ignores signals.
        """
        if self._in_file:
            resource_tracker.ensure_running()  # starting it would unblock signals
        before = set(multiprocessing.active_children())
        # torch's own first lines in a worker wait for ever if another thread of this process drew
        # random numbers as it was forked. Only what is registered here comes before them.
        starting = _Starting()
        multiprocessing.util.register_after_fork(starting, lambda _: start_worker())
        try:
            with signals.block_requests():
                source = iter(self._loader)
        except BaseException:
            _kill(set(multiprocessing.active_children()) - before)
            raise
        # Workers ignore the SIGTERM that Python sends at exit, and it would wait for ever.
        workers = getattr(source, "_workers", [])
        multiprocessing.util.Finalize(source, _end, [workers], exitpriority=1)
        for worker in workers:  # torch notices the end only of workers that are alive here
            if not worker.is_alive():
                error = RuntimeError(f"DataLoader worker (pid {worker.pid}) exited unexpectedly")
                raise self._name(error, self.items[0])
        return source, workers

    def _name(self, error: Exception, item: Any) -> Exception:
        """Returns the error, or if a worker was lost a LostWorker that names the awaited item."""
        if isinstance(error, ConnectionError | EOFError):  # killed while it sent a batch
            error = RuntimeError("DataLoader worker (pid 0) exited unexpectedly")
        what, keys = self.describe(item)
        lost = failures.as_lost(error, f"for {what}")
        if isinstance(lost, failures.LostWorker) and keys:
            log.error(
                "samples of %s (data.exclude=FILE leaves those out whose keys it lists): %s",
                what, printable(" ".join(keys)),
            )  # fmt: skip
        return lost


def run_ahead(
    compute: Callable[[T], tuple[Tensor, Note]], batches: Iterable[T]
) -> Iterator[tuple[NDArray[Any], Note]]:
    """Yields the rows that ``compute`` gives for each batch, in main memory and in order, with its
    note; a GPU has the next batch already when the rows of one are waited for."""
    waiting: tuple[Callable[[], Tensor], Note] | None = None
    for batch in batches:
        rows, note = compute(batch)
        following = start_to_host(rows), note
        if waiting:
            yield waiting[0]().numpy(), waiting[1]
        waiting = following
    if waiting:
        yield waiting[0]().numpy(), waiting[1]


class _Starting:
    """Exists while workers are started."""


class _InFile(Dataset[Any]):
    """A data set that fresh processes unpickle from a file; the file exists within the block.

    Python sends the data set through a pipe otherwise; if it is larger than the pipe and the
    process is killed, Python waits for ever. The file has no name, so that a killed process leaves
    none behind: others open it by its number in this process.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset, self._path = dataset, ""

    def __enter__(self) -> None:
        self._file = tempfile.TemporaryFile()
        self._path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        pickle.dump(self.dataset, self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self._path,)


def _read(path: str) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file)


def _give_up(
    source: Any, workers: Iterable[multiprocessing.process.BaseProcess], late: list[object]
) -> None:
    late.append(True)
    # Otherwise torch would raise an error in the main thread for each worker, wherever that is.
    if getattr(source, "_worker_pids_set", False):
        source._worker_pids_set = False
        signal_handling._remove_worker_pids(id(source))  # type: ignore[attr-defined]
    _kill(workers)


def _end(workers: Iterable[multiprocessing.process.BaseProcess]) -> None:
    if multiprocessing.util.is_exiting():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's action would raise an error of each
    _kill(workers)


def _kill(workers: Iterable[multiprocessing.process.BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
