"""Waiting for data: it may never come, and a process that waits for it must still hear.

A worker may be stopped or killed, storage may never answer, and whoever waits comes to no boundary
between steps, where requests are obeyed. The main thread therefore says when it begins to wait and
for what; a thread looks at clocks. Where the data has not come for the limit, or for ``PATIENCE_S``
after a request to leave, the thread has an error raised in the main thread, by a signal that
interrupts the call in which it waits. A call that cannot be interrupted (a hung disk) does not end
by that: the process is then ended as ``signals`` ends one.

Before that, a sample that has been decoded for most of the time is noted, since the same command
would meet it again.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mclclip.ranks import signals
from mclclip.ranks.failures import GOES_ON, LostWorker
from mclclip.ranks.signals import Preempted

T = TypeVar("T")
Request = Callable[[], Preempted | None]
Place = npt.NDArray[np.int64]
"""The place at which a process reads, int64 [3]: the file (-1: none), the sample that it decodes
(-1: none), and since when, in nanoseconds of ``time.monotonic_ns``."""
log = logging.getLogger("mclclip")

PATIENCE_S = 5.0  # data may just be slow: a request that is obeyed between steps loses nothing
ANSWER_S = 3.0  # for the main thread to take the error
NOTE_S = 3.0  # for a note on a sample to be written
CLOCK_S = 0.2
END_S = ANSWER_S + NOTE_S + 4.0  # a process ends so soon after its limit, on a busy machine too
_NUDGE = signal.SIGUSR2


class _Wait:
    """State of the main thread's wait for data, which the watching thread reads."""

    since: float | None = None  # time.monotonic()
    what: Callable[[], str] = str
    note: Callable[[int], str]  # of the sample that is being decoded
    place: Place
    request: Request | None = None
    own: Place = np.full(3, -1, np.int64)  # of this process, in memory that its parent may see
    error: tuple[float, LostWorker | Preempted] | None = None  # for the wait that began then


def note_place(number: int) -> None:
    """Says which file this process begins to read, as a number that the waiting process knows."""
    _Wait.own[0] = number


@contextmanager
def decoding(sample_id: int) -> Iterator[None]:
    """While the block runs, this process decodes that sample."""
    _Wait.own[1:] = sample_id, time.monotonic_ns()
    try:
        yield
    finally:
        _Wait.own[1] = -1


def share_place(place: Place) -> None:
    """From now on ``note_place`` and ``decoding`` write to this array."""
    _Wait.own = place


def nothing(sample_id: int) -> str:
    """Notes nothing of a sample."""
    return ""


def wait_for(
    take: Callable[[], T],
    what: Callable[[], str],
    note: Callable[[int], str] = nothing,
    place: Place | None = None,
) -> T:
    """Returns ``take()``, the next data; ``what()`` is a phrase that names who reads what.

    In the main thread of a process that has a limit (``limited``) it raises LostWorker where the
    limit passes, and Preempted where a request stands (``obeying``) and no data comes. Where the
    reading process, whose place is ``place`` (None: this process), has been decoding one sample for
    half of the limit by then, ``note`` is called with it, in another thread; what it returns is
    added to the message.
    """
    if threading.current_thread() is not threading.main_thread():
        return take()
    _Wait.note, _Wait.place = note, _Wait.own if place is None else place
    _Wait.what, _Wait.since = what, time.monotonic()
    try:
        return take()
    finally:
        _Wait.since = None


def waited_for() -> str | None:
    """Returns a phrase for the data that the main thread waits for now; None where it does not."""
    return None if _Wait.since is None else _Wait.what()


@contextmanager
def obeying(request: Request) -> Iterator[None]:
    """While the block runs, ``request()`` says whether and why this process is to leave.

    Another thread calls it, while the main thread waits.
    """
    before, _Wait.request = _Wait.request, request
    try:
        yield
    finally:
        _Wait.request = before


@contextmanager
def limited(timeout_s: float) -> Iterator[None]:
    """While the block runs in the main thread, waiting for data has a limit (``wait_for``)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop = threading.Event()
    before = signal.signal(_NUDGE, _raise)
    thread = threading.Thread(
        target=_watch_clock, args=(stop, timeout_s), name="data-wait", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        signal.signal(_NUDGE, before)


def _raise(number: int, frame: FrameType | None) -> None:
    """In the main thread: raises what was decided, unless the data has come meanwhile."""
    decided, _Wait.error = _Wait.error, None
    if decided is not None and decided[0] == _Wait.since:
        raise decided[1]


def _watch_clock(stop: threading.Event, timeout_s: float) -> None:
    asked: float | None = None  # since when a request is known
    while not stop.wait(CLOCK_S):
        since, now = _Wait.since, time.monotonic()
        if since is None or now - since < CLOCK_S:
            asked = None
            continue
        request = _Wait.request() if _Wait.request is not None else None
        asked = None if request is None else (asked or now)
        if request is not None and now - (asked or now) > PATIENCE_S:
            _note_sample(timeout_s)
            _give_up(since, request, signals.EXIT_PREEMPTED, stop)
        elif now - since > timeout_s:
            noted = _note_sample(timeout_s)
            line = f"{_Wait.what()} for {timeout_s:g} s (peer_timeout_s){noted}: {GOES_ON}"
            _give_up(since, LostWorker(line), 1, stop)


def _note_sample(timeout_s: float) -> str:
    """Has the sample noted that has been decoded for half of the limit, if there is one; returns
    the part of the message about it. A disk that does not answer is not waited for."""
    _, sample_id, began_ns = _Wait.place.tolist()
    if sample_id < 0 or time.monotonic_ns() - began_ns < timeout_s / 2 * 1e9:
        return ""
    notes: list[str] = []

    def note() -> None:
        try:
            notes.append(_Wait.note(sample_id))
        except (OSError, RuntimeError, ValueError) as error:
            log.warning("the sample that takes too long cannot be noted: %s", error)

    thread = threading.Thread(target=note, name="note-sample", daemon=True)
    thread.start()
    thread.join(NOTE_S)
    return f"; {notes[0]}" if any(notes) else ""


def _give_up(since: float, error: LostWorker | Preempted, code: int, stop: threading.Event) -> None:
    """Has the main thread raise ``error``; ends the process if that thread does not answer."""
    _Wait.error = since, error
    signal.pthread_kill(threading.main_thread().ident or 0, _NUDGE)
    deadline = time.monotonic() + ANSWER_S
    while _Wait.since == since and not stop.wait(0.05):
        if time.monotonic() > deadline:
            signals.end_now(error, code)
