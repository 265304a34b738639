"""Trackers: services and files beside metrics.jsonl that get the rows of a training, such as wandb.

A tracker is a module of this folder, or one of another package that an entry point of the group
``mclclip.trackers`` names. Its function ``open_tracker(directory, *, name, config)`` returns a
`Tracker`: ``directory`` is a folder of its own, ``name`` names what is tracked, such as
'runs/mine/stage_1/train', and ``config`` holds the options, without secrets. It is called again
when a killed training goes on, and then continues what it finds in ``directory``.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module, util
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

from pydantic import AfterValidator

from mclclip.ranks.failures import line_of
from mclclip.util import shipped
from mclclip.util.files import parse_json, printable, write_bytes
from mclclip.util.options import nearest

log = logging.getLogger("mclclip")
CLOSE_S = 20.0  # trackers get this time to flush: a pre-empted process has little
FOLDER, ENTRY_POINTS = "run/trackers", "mclclip.trackers"


class Tracker:
    """Gets the rows of one training, each of them once and in the order of steps; or the files of
    a whole run. Any method may raise an error, which is logged and ends nothing."""

    def write(self, step: int, row: Mapping[str, Any]) -> object:
        """Logs a row of metrics, whose values are numbers, after ``step`` steps."""

    def attach(self, path: Path) -> object:
        """Logs a file, such as report.html. A tracker that shows no such file does nothing."""

    def close(self) -> object:
        """Sends what is left."""


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the fields of a row that are numbers."""
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def new_id() -> str:
    """Draws an id of eight characters."""
    return secrets.token_hex(4)


def read_or_write_id(directory: Path, new: Callable[[], str] = new_id) -> str:
    """Returns the id in ``directory/run_id``, under which a resumed training goes on; the first
    process writes a ``new`` one there."""
    path = directory / "run_id"
    if not path.exists():
        write_bytes(path, new().encode())
    return path.read_text().strip()


# --- which there are -----------------------------------------------------------------------------


def check_name(name: str) -> str:
    """Returns the name of a tracker; raises ValueError, with the nearest ones, for another."""
    names = {*shipped.plugins(FOLDER), *shipped.installed(ENTRY_POINTS).names}
    if name not in names:
        near = ", ".join(nearest(name, names))
        raise ValueError(f"there is no tracker {name!r} (nearest: {near})")
    return name


TrackerName = Annotated[str, AfterValidator(check_name)]


def check_installed(names: Iterable[str]) -> None:
    """Raises ValueError if the package of a shipped tracker, which has its name, is missing."""
    for name in names:
        if name in shipped.plugins(FOLDER) and util.find_spec(name) is None:
            raise ValueError(_describe_missing(name))


def _describe_missing(name: str) -> str:
    return f"track: {name} is not installed: pip install 'mclclip[track]'"


def _open(name: str, directory: Path, config: Mapping[str, Any]) -> Tracker:
    if points := shipped.installed(ENTRY_POINTS).select(name=name):
        loaded = next(iter(points)).load()
        open_tracker = getattr(loaded, "open_tracker", loaded)
    else:
        open_tracker = import_module(f"{__name__}.{name}").open_tracker
    directory.mkdir(parents=True, exist_ok=True)
    tracker: Tracker = open_tracker(directory, name=str(directory.parent), config=config)
    return tracker


# --- those that are open -------------------------------------------------------------------------


class Attempts(Counter[str]):
    """Counts the writes that failed, by the name of the file or tracker; logs the first of each."""

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Calls ``work``, whose errors are those of the disk, the network or a package."""
        try:
            work()
        except Exception as error:
            self[name] += 1
            if self[name] == 1:
                log.warning("%s cannot be written (%s): the run goes on", name, line_of(error))


class Trackers:
    """The open trackers by name. Their calls raise no error: ``lost`` counts those that failed.

    A thread makes the calls of each tracker in their order, so that a slow network holds up no step
    of a training.
    """

    def __init__(self, by_name: Mapping[str, Tracker] | None = None) -> None:
        self.by_name, self.lost = dict(by_name or {}), Attempts()
        self._calls: dict[str, SimpleQueue[Callable[[], object] | None]] = {}
        self._threads: dict[str, threading.Thread] = {}

    @classmethod
    def open(cls, names: Iterable[str], directory: Path, *, config: Mapping[str, Any]) -> Trackers:
        """Opens the trackers ``names``; each has a folder of its name in ``directory``.

        One that does not start (no network, no key, a full disk) is left out with a warning. Raises
        ValueError if its package is not installed.
        """
        by_name: dict[str, Tracker] = {}
        # Hides secrets, such as in signed urls.
        shown = parse_json(printable(json.dumps(config)), "config")
        for name in names:
            try:
                by_name[name] = _open(name, directory / name, shown)
            except ImportError as error:
                raise ValueError(_describe_missing(name)) from error
            except Exception as error:  # whatever its package raises
                log.warning("%s does not start (%s): the run goes on without", name, line_of(error))
        return cls(by_name)

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Logs a row of metrics to all of them."""
        for name, tracker in self.by_name.items():
            self._call(name, partial(tracker.write, step, row))

    def attach(self, path: Path) -> None:
        """Logs a file to all of them."""
        for name, tracker in self.by_name.items():
            self._call(name, partial(tracker.attach, path))

    def close(self) -> None:
        """Closes all of them. Waits `CLOSE_S` seconds at most."""
        for name, tracker in self.by_name.items():
            self._call(name, tracker.close)
            self._calls[name].put(None)
        end = time.monotonic() + CLOSE_S
        for name, thread in self._threads.items():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                log.warning("%s was not closed after %g s: not waiting longer", name, CLOSE_S)

    def _call(self, name: str, work: Callable[[], object]) -> None:
        if name not in self._threads:
            self._calls[name] = SimpleQueue()
            self._threads[name] = threading.Thread(target=self._work, args=(name,), daemon=True)
            self._threads[name].start()
        self._calls[name].put(work)

    def _work(self, name: str) -> None:
        """Makes the calls of one tracker, in a thread of its own, until it is closed."""
        while (work := self._calls[name].get()) is not None:
            self.lost.run(name, work)
