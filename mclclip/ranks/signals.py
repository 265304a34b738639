"""SIGTERM and SIGUSR1: how a cluster asks a process to save and leave (needs no torch).

Outside a training loop everything that a verb has finished is on disk, so the handler raises
``Preempted`` at once. Inside a training loop (``deferred``) the request waits for a boundary
between two steps, where all ranks agree on it (``step_boundary``).
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

    Like KeyboardInterrupt it is not an Exception, so that ``except Exception`` does not catch it.
    ``requeue`` says whether the same command is to be started again.
    """

    def __init__(self, reason: str, requeue: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.requeue = reason, requeue


class _Requests:
    """The last signal that this process received, and whether handling it is deferred."""

    name: str | None = None
    deferred: bool = False


def install_handlers() -> None:
    """Handles SIGTERM and SIGUSR1 as requests to leave; does nothing outside the main thread."""
    _handle(_on_signal)


def ignore() -> None:
    """Ignores the signals from now on, for a process that is about to end anyway."""
    _handle(signal.SIG_IGN)


def restore() -> None:
    """Restores the signals' default action, for a failed process: it may be ended at any moment."""
    _handle(signal.SIG_DFL)


def _handle(action: signal.Handlers | Callable[[int, FrameType | None], None]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, action)


def ignore_in_child() -> None:
    """Ignores SIGTERM, SIGUSR1 and SIGINT, for loader and pool workers: they end with their parent.

    A signal to the whole job must not end them before their parent has saved.
    """
    ignore()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def received() -> str | None:
    """Name of the signal that asked this process to leave, or None."""
    return _Requests.name


@contextmanager
def deferred() -> Iterator[None]:
    """While the block runs, a signal is only recorded (``received``).

    Leaving the outermost block without an error raises Preempted if a signal was recorded.
    """
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
