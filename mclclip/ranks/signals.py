"""SIGTERM and SIGUSR1: how a cluster asks a process to save and leave (needs no torch).

Outside a training step everything a verb has finished is on disk, so the process leaves where it
stands, by an exception. Inside a training loop (``deferred``) the request waits for a step
boundary, where all ranks agree on it (``step_boundary``).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_PREEMPTED = 85
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(BaseException):
    """The process was asked to leave and everything it needs to go on is saved.

    Like KeyboardInterrupt no Exception: no handler of errors may take it for one. ``requeue`` says
    whether the same command is to be started again.
    """

    def __init__(self, reason: str, requeue: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.requeue = reason, requeue


class _Requests:
    """Requests to this process since it started (signals belong to processes)."""

    name: str | None = None
    deferred: bool = False


def install_handlers() -> None:
    """Makes SIGTERM and SIGUSR1 requests to leave; only the main thread may set handlers."""
    _handle(_on_signal)


def ignore() -> None:
    """From here on the process ends anyway: requests to leave change nothing any more."""
    _handle(signal.SIG_IGN)


def restore() -> None:
    """Gives the signals their default action: a failed process may be ended at any moment."""
    _handle(signal.SIG_DFL)


def _handle(action: signal.Handlers | Callable[[int, FrameType | None], None]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, action)


def ignore_in_child() -> None:
    """For loader workers and pools: a signal to the whole job must not end them before their
    parent has saved; they end with their parent."""
    ignore()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def received() -> str | None:
    """Name of the signal that asked this process to leave, or None."""
    return _Requests.name


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, a signal is only noted (``received``); after it, an unanswered one is raised."""
    before, _Requests.deferred = _Requests.deferred, True
    try:
        yield
    finally:
        _Requests.deferred = before
    if _Requests.name is not None and not before:
        raise Preempted(_Requests.name)


def _on_signal(number: int, frame: FrameType | None) -> None:
    first = _Requests.name is None
    _Requests.name = signal.Signals(number).name
    if first and not _Requests.deferred:
        raise Preempted(_Requests.name)
