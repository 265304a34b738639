"""Reads a data set in worker processes, for training, embedding and evaluation alike.

Whoever waits for a batch hears requests to leave, has a limit of time, and is told which worker
reads what (``ranks.data_wait``).
"""

from __future__ import annotations

import multiprocessing.connection
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mclclip.ranks import data_wait, lost
from mclclip.ranks.lost import LostWorker
from mclclip.ranks.process_group import start_loader_worker

T = TypeVar("T")

_ENDS_S = 1.0

_STATES = {"T": ", stopped", "t": ", stopped", "D": ", waiting for its disk", "Z": ", ended"}


class Loader(Generic[T]):
    """Iterates over ``dataset[item]`` for the ``items``, in order, read by ``num_workers``
    processes (0: by this one).

    ``describe(item, place)`` names what is read, for a message: ``place`` is the number that the
    reading process last gave to ``data_wait.note_place`` (-1: none). ``note_slow`` is called with a
    sample whose decoding ends this process (``data_wait.wait_for``). With ``batched`` an item is a
    list, of which the data set returns all at once. ``pin_memory`` is DataLoader's.
    Iterating raises LostWorker where a worker was ended from outside or, in a process with a limit,
    where a batch does not come.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        items: Sequence[Any],
        *,
        num_workers: int,
        describe: Callable[[Any, int], str],
        note_slow: Callable[[int], str] = data_wait.nothing,
        batched: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.items, self.describe, self.note_slow = items, describe, note_slow
        self.num_workers = min(num_workers, len(items))
        # A place per worker (`data_wait.Place`), in memory that they share with this process.
        self._places = torch.full((max(self.num_workers, 1), 3), -1).share_memory_()  # type: ignore[no-untyped-call]
        one: dict[str, Any] = {"batch_size": None, "sampler": items}
        many: dict[str, Any] = {"batch_sampler": items, "collate_fn": list}
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            num_workers=self.num_workers,
            worker_init_fn=partial(_start_worker, self._places),
            pin_memory=pin_memory,
            persistent_workers=False,
            **(many if batched else one),
        )

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:
        if not self.num_workers:
            data_wait.share_place(self._place(0))
        source = iter(self._loader)
        for number in range(len(self.items)):
            yield self._take(source, number)
        next(source, None)  # the loader's own end, which ends its workers

    def _take(self, source: Iterator[T], number: int) -> T:
        what, place = partial(self._what, source, number), self._place(number)
        try:
            return data_wait.wait_for(lambda: next(source), what, self.note_slow, place)
        except (RuntimeError, OSError, EOFError) as error:
            raise _lost_worker(source, error) or error from error

    def _place(self, number: int) -> data_wait.Place:
        """The place of the process that reads item ``number``; items are dealt out in turn."""
        place: data_wait.Place = self._places.numpy()[number % len(self._places)]
        return place

    def _what(self, source: object, number: int) -> str:
        """Which process was to read item ``number``, and where it is."""
        worker = number % max(self.num_workers, 1)
        what = self.describe(self.items[number], int(self._place(number)[0]))
        if not self.num_workers:
            return f"{what} has not been read by this process"
        workers = getattr(source, "_workers", ())
        pid = workers[worker].pid if worker < len(workers) else 0
        return f"{what} has not come from loader worker {worker} (process {pid}{_state(pid)})"


def _lost_worker(source: object, error: Exception) -> LostWorker | None:
    """LostWorker where ``error`` came of a worker that was ended from outside."""
    workers = getattr(source, "_workers", ())
    if isinstance(error, ConnectionError | EOFError):
        # A worker's files close, its sentinel among them, before it has ended.
        closed = multiprocessing.connection.wait([worker.sentinel for worker in workers], _ENDS_S)
        for worker in workers:
            if worker.sentinel in closed:
                worker.join(_ENDS_S)
    for number, worker in enumerate(workers):
        if worker.exitcode:
            return lost.worker(f"{number} ", worker.pid, worker.exitcode)
    return None


def _start_worker(places: Tensor, worker: int) -> None:
    start_loader_worker(worker)
    data_wait.share_place(places.numpy()[worker])


def _state(pid: int) -> str:
    """Why a process does not go on, as far as Linux tells."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ", ended"
    return _STATES.get(state, "")
