"""How a process is asked to end, and that it then does (needs no torch).

SIGTERM, SIGUSR1 and SIGHUP ask it to save and leave; SIGINT interrupts it. Outside a training loop
everything that a verb has finished is on disk, so the handler raises ``Preempted`` or
``KeyboardInterrupt`` at once. Inside a training loop (``deferred``) a request waits for a boundary
between two steps, where all ranks agree on it (``step_boundary``).

What is raised may get lost (in a destructor), cannot be raised (in an import, in a call that never
comes back to Python), or may meet a cleaning up that hangs. A thread therefore watches the clock:
``GRACE_S`` seconds after the request, or at the second interrupt, it records how the process ends
and ends it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

EXIT_PREEMPTED, EXIT_INTERRUPTED = 85, 130
GRACE_S = 5.0  # from a request, outside of a training loop, to the end of the process
AGAIN_S = 0.5  # from the second interrupt: the first one's cleaning up may be almost done
RECORD_S = 1.0  # for recording how the process ends: the disk may be what hangs
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_ALL = (*_REQUESTS, signal.SIGINT)


class Preempted(BaseException):
    """The process was asked to leave and everything it needs to go on is saved.

    Like KeyboardInterrupt it is not an Exception, so that ``except Exception`` does not catch it.
    ``requeue`` says whether the same command is to be started again, ``agreed`` whether all ranks
    raise this at the same place, so that none needs a message.
    """

    def __init__(self, reason: str, requeue: bool = True, agreed: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.requeue, self.agreed = reason, requeue, agreed


class _Requests:
    """The last request that this process received, and how it is handled."""

    name: str | None = None
    deferred: bool = False
    interrupted: bool = False
    ending: bool = False  # the process ends anyway: requests are not raised any more


class _Clock:
    """When the process is ended if it does not end by itself, and how."""

    due: float | None = None  # time.monotonic()
    interrupts: int = 0
    wake: int | None = None  # writing a byte here wakes the thread
    code: int | None = None  # the exit code that has been chosen, once one has
    # Records (state, exit code, reason) where the run's state is kept.
    record: Callable[[BaseException, int], object] | None = None


def install_handlers() -> None:
    """Handles SIGTERM, SIGUSR1, SIGHUP and SIGINT; does nothing outside the main thread.

    A SIGHUP or SIGINT that the starter of the process ignores (``nohup``) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _Requests.ending = False
    if _Clock.wake is None:
        _start_clock()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _on_request)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _on_request)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _on_interrupt)


def ignore() -> None:
    """Answers no request from now on, for a process that is about to end anyway.

    A second interrupt still ends it at once. The death of a loader worker, for which torch raises
    an error wherever the main thread is, does not matter any more.
    """
    _Requests.ending = True
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def restore() -> None:
    """Restores the signals' default action, for a failed process: it may be ended at any moment."""
    _set_all(signal.SIG_DFL)


def ignore_in_child() -> None:
    """Ignores the signals, for loader and pool workers: they end with their parent.

    A signal to the whole job must not end them before their parent has saved.
    """
    _set_all(signal.SIG_IGN)


def _set_all(action: signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _ALL:
            signal.signal(number, action)


def received() -> str | None:
    """Name of the signal that asked this process to leave, or None."""
    return _Requests.name


def asked_within(seconds: float) -> BaseException | None:
    """The error of a signal that has come or comes within ``seconds``; None where there is none."""
    deadline = time.monotonic() + seconds
    while not (_Requests.interrupted or _Requests.name) and time.monotonic() < deadline:
        time.sleep(0.02)
    if _Requests.interrupted:
        return KeyboardInterrupt()
    return Preempted(_Requests.name) if _Requests.name is not None else None


@contextmanager
def deferred() -> Iterator[None]:
    """While the block runs, a request is only recorded (``received``).

    Leaving the outermost block without an error raises Preempted if a signal was recorded.
    """
    before, _Requests.deferred = _Requests.deferred, True
    try:
        yield
    finally:
        _Requests.deferred = before
    if _Requests.name is not None and not before:
        end_within(GRACE_S)
        raise Preempted(_Requests.name)


@contextmanager
def recording(record: Callable[[BaseException, int], object]) -> Iterator[None]:
    """While the block runs, ``record(error, exit_code)`` is how an end by the clock is recorded."""
    before, _Clock.record = _Clock.record, record
    try:
        yield
    finally:
        _Clock.record = before


def choose_code(code: int) -> None:
    """Settles the exit code of a process that is ending; an end by the clock gives it too."""
    _Clock.code = code


# --- handlers, which run in the main thread ------------------------------------------------------


def _on_request(number: int, frame: FrameType | None) -> None:
    if _Requests.ending:
        return
    first = _Requests.name is None
    _Requests.name = signal.Signals(number).name
    if first and not _Requests.deferred:
        _raise(Preempted(_Requests.name), frame)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    if not (_Requests.ending or _Requests.interrupted):
        _Requests.interrupted = True
        _raise(KeyboardInterrupt(), frame)


def _raise(error: BaseException, frame: FrameType | None) -> None:
    """Raises ``error``, but not out of an import, where C++ code (torch's) may abort on it and a
    half-imported module would answer with errors of its own: there the clock ends the process."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end_within(0.0)
            return
        frame = frame.f_back
    raise error


# --- the clock -----------------------------------------------------------------------------------


def end_within(seconds: float) -> None:
    """The process ends within so many seconds, by itself or by the clock."""
    due = time.monotonic() + seconds
    _Clock.due = due if _Clock.due is None else min(_Clock.due, due)
    if _Clock.wake is not None:
        with suppress(OSError):
            os.write(_Clock.wake, b"\0")


def end_now(error: BaseException, code: int) -> NoReturn:
    """Records the error, says its line, and ends the process, from any thread."""
    code = code if _Clock.code is None else _Clock.code
    if _Clock.code is None and _Clock.record is not None:
        recording = threading.Thread(target=_Clock.record, args=(error, code), daemon=True)
        recording.start()
        recording.join(RECORD_S)
    if _Clock.code is None and (isinstance(error, Exception) or os.environ.get("RANK", "0") == "0"):
        with suppress(OSError):
            os.write(2, f"mclclip: {_line(error)}\n".encode())
    if code == EXIT_PREEMPTED and "TORCHELASTIC_RUN_ID" in os.environ:
        code = 0
    os._exit(code)


def code_of(error: BaseException) -> int:
    """The exit code that stands for a request, or for a lost process."""
    if isinstance(error, Preempted):
        return EXIT_PREEMPTED
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _line(error: BaseException) -> str:
    if isinstance(error, Preempted):
        return f"asked to leave ({error}): the same command goes on"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)


def _start_clock() -> None:
    """The interpreter writes the number of every signal that arrives into a pipe, whatever the main
    thread does; a thread reads it."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    _Clock.wake = write
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)
    sys.unraisablehook = _Unraisable(sys.unraisablehook)
    sys.excepthook = _OfThreads(sys.excepthook)
    threading.Thread(target=_watch, args=(read,), name="signals", daemon=True).start()


def _forget() -> None:
    """A forked child does not report its signals to its parent's clock, nor answers them itself: a
    signal to the whole job may reach it before it has called ``ignore_in_child``."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
    _Clock.wake = _Clock.due = _Clock.record = None
    _Requests.ending = True


def _watch(read: int) -> None:
    while True:
        left = None if _Clock.due is None else max(_Clock.due - time.monotonic(), 0.0)
        if select.select([read], [], [], left)[0]:
            for number in os.read(read, 64):
                _count_request(number)
        elif _Clock.due is not None and time.monotonic() >= _Clock.due:
            _end_overdue()


def _count_request(number: int) -> None:
    if number == signal.SIGINT:
        _Clock.interrupts += 1
        end_within(GRACE_S if _Clock.interrupts == 1 else AGAIN_S)
    elif number in _REQUESTS and not (_Requests.deferred or _Requests.ending):
        end_within(GRACE_S)


def counted_for() -> BaseException | None:
    """The request for which the clock counts, as the error that it stands for; None: it does not.

    A request that a training has recorded (``deferred``) is not counted for.
    """
    if _Clock.due is None:
        return None
    return KeyboardInterrupt() if _Clock.interrupts else Preempted(_Requests.name or "a signal")


def _end_overdue() -> None:
    if (error := counted_for()) is not None:
        end_now(error, code_of(error))


class _Unraisable:
    """``sys.unraisablehook``: a request that was raised in a destructor, and so lost, ends the
    process without a traceback; other errors are reported as ``before`` does."""

    def __init__(self, before: Callable[[Any], object]) -> None:
        self.before = before

    def __call__(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Preempted | KeyboardInterrupt):
            end_within(0.0)
        else:
            self.before(unraisable)


class _OfThreads:
    """``sys.excepthook``: what a thread of a library fails at while the process ends by request,
    such as the pipe of a loader worker that has ended, is not reported; other errors go to
    ``before``.
    """

    def __init__(self, before: Callable[[type[BaseException], BaseException, Any], object]) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        of_thread = threading.current_thread() is not threading.main_thread()
        if not (of_thread and (_Requests.ending or counted_for() is not None)):
            self.before(kind, error, trace)
