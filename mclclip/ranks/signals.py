"""How a process is asked to end, and that it then does (needs no torch).

SIGTERM, SIGUSR1, SIGHUP and SIGINT ask it to save and leave. Outside a training loop everything
that a verb has finished is on disk, so the handler raises ``Preempted`` or ``KeyboardInterrupt`` at
once. Inside a training loop (``deferred``) a request waits for a boundary between two steps, where
all ranks agree on it (``step_boundary``); a second SIGINT is not waited for.

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
INTERRUPT = signal.SIGINT.name
GRACE_S = 5.0  # from a request, outside of a training loop, to the end of the process
AGAIN_S = 0.5  # from the second interrupt: the first one's cleaning up may be almost done
RECORD_S = 1.0  # for recording how the process ends: the disk may be what hangs
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Preempted(BaseException):
    """The process was asked to leave and everything it needs to go on is saved.

    Like KeyboardInterrupt it is not an Exception, so that ``except Exception`` does not catch it.
    ``requeue`` says whether the same command is to be started again, ``agreed`` whether all ranks
    raise this at the same place, so that none needs a message.
    """

    def __init__(self, reason: str, requeue: bool = True, agreed: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.requeue, self.agreed = reason, requeue, agreed


class _State:
    """The last request that this process received, and how and when it ends."""

    name: str | None = None  # of the request's signal
    deferred = False  # a request is only recorded
    interrupted = False
    handled = False  # by the handlers of this module
    ending = False  # the process ends anyway: requests are not raised any more
    # When the process is ended if it does not end by itself (time.monotonic()).
    due: float | None = None
    interrupts = 0
    wake: int | None = None  # writing a byte here wakes the thread that watches the clock
    code: int | None = None  # the exit code that has been chosen, once one has
    # Records (error, exit code) where the run's state is kept.
    record: Callable[[BaseException, int], object] | None = None


def install_handlers() -> None:
    """Handles SIGTERM, SIGUSR1, SIGHUP and SIGINT; does nothing outside the main thread.

    A SIGHUP or SIGINT that the starter of the process ignores (``nohup``) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _State.handled, _State.ending = True, False
    wake = _start_clock() if _State.wake is None else _State.wake
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _on_request)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _on_request)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _on_interrupt)


@contextmanager
def handled_as_before() -> Iterator[None]:
    """After the block, signals are handled as before it and no request stands, for a process that
    goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (*_REQUESTS, signal.SIGINT, signal.SIGCHLD)
    handlers = {number: signal.getsignal(number) for number in numbers}
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: a handler that was not installed by Python
                signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        _State.name = _State.due = _State.code = None
        _State.interrupted = _State.ending = _State.handled = False
        _State.interrupts = 0


@contextmanager
def saving_interrupts() -> Iterator[None]:
    """In the block the first SIGINT of a training waits until it has saved, as in a verb, and is
    then raised as KeyboardInterrupt.

    For a program that calls a function of mclclip: does nothing outside its main thread, or where
    SIGINT has another handler than Python's.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    with handled_as_before():
        signal.signal(signal.SIGINT, _on_interrupt)
        try:
            yield
        except Preempted as asked:
            if asked.reason != INTERRUPT:
                raise
            raise KeyboardInterrupt("saved: the same call goes on") from None


def ignore() -> None:
    """Answers no request from now on, for a process that is about to end anyway.

    A second interrupt still ends it at once. The death of a loader worker, for which torch raises
    an error wherever the main thread is, does not matter any more.
    """
    _State.ending = True
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def set_action(action: signal.Handlers) -> None:
    """Gives all four signals an action of the system.

    SIG_DFL serves a failed process, which may be ended at any moment; SIG_IGN loader and pool
    workers: a signal to the whole job must not end a worker before its parent has saved, with which
    it ends.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (*_REQUESTS, signal.SIGINT):
            signal.signal(number, action)


def received() -> str | None:
    """Name of the signal that asked this process to leave, or None."""
    return _State.name


def asked_within(seconds: float) -> BaseException | None:
    """The error of a signal that has come or comes within ``seconds``; None where there is none."""
    deadline = time.monotonic() + seconds
    while not (_State.interrupted or _State.name) and time.monotonic() < deadline:
        time.sleep(0.02)
    if _State.interrupted:
        return KeyboardInterrupt()
    return _asked(_State.name) if _State.name is not None else None


def _asked(name: str) -> Preempted:
    """The error of a request; whoever interrupts a process does not want it started again."""
    return Preempted(name, requeue=name != INTERRUPT)


@contextmanager
def deferred() -> Iterator[None]:
    """While the block runs, a request is only recorded (``received``).

    Leaving the outermost block without an error raises Preempted if a signal was recorded.
    """
    before, _State.deferred = _State.deferred, True
    try:
        yield
    finally:
        _State.deferred = before
    if _State.name is not None and not before:
        end_within(GRACE_S)
        raise _asked(_State.name)


@contextmanager
def recording(record: Callable[[BaseException, int], object]) -> Iterator[None]:
    """While the block runs, ``record(error, exit_code)`` is how an end by the clock is recorded."""
    before, _State.record = _State.record, record
    try:
        yield
    finally:
        _State.record = before


def choose_code(code: int) -> None:
    """Settles the exit code of a process that is ending; an end by the clock gives it too."""
    _State.code = code


# --- handlers, which run in the main thread ------------------------------------------------------


def _on_request(number: int, frame: FrameType | None) -> None:
    if _State.ending:
        return
    first = _State.name is None
    _State.name = signal.Signals(number).name
    if first and not _State.deferred:
        _raise(Preempted(_State.name), frame)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    if _State.ending or _State.interrupted:
        return
    if _State.deferred and _State.name is None:
        _State.name = INTERRUPT
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):
                os.write(2, b"mclclip: saves after this step, and ends; Ctrl-C again: ends now\n")
        return
    _State.interrupted = True
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
    _State.due = due if _State.due is None else min(_State.due, due)
    if _State.wake is not None:
        with suppress(OSError):
            os.write(_State.wake, b"\0")


def end_now(error: BaseException, code: int) -> NoReturn:
    """Records the error, says its line, and ends the process, from any thread."""
    code = code if _State.code is None else _State.code
    if _State.code is None and _State.record is not None:
        recording = threading.Thread(target=_State.record, args=(error, code), daemon=True)
        recording.start()
        recording.join(RECORD_S)
    if _State.code is None and (isinstance(error, Exception) or os.environ.get("RANK", "0") == "0"):
        with suppress(OSError):
            os.write(2, f"mclclip: {line_of(error)}\n".encode())
    if code == EXIT_PREEMPTED and "TORCHELASTIC_RUN_ID" in os.environ:
        code = 0
    os._exit(code)


def code_of(error: BaseException) -> int:
    """The exit code that stands for a request, or for a lost process."""
    if is_interrupt(error):
        return EXIT_INTERRUPTED
    return EXIT_PREEMPTED if isinstance(error, Preempted) else 1


def is_interrupt(error: BaseException) -> bool:
    """Returns whether the user interrupted the process, in a training or elsewhere."""
    saved = isinstance(error, Preempted) and error.reason == INTERRUPT
    return saved or isinstance(error, KeyboardInterrupt)


def line_of(error: BaseException) -> str:
    """The line that is printed of a request, or of another error."""
    if is_interrupt(error):
        return "interrupted: the same command goes on from what is saved"
    if isinstance(error, Preempted):
        return f"asked to leave ({error}): the same command goes on"
    return str(error)


def _start_clock() -> int:
    """Starts a thread that reads the numbers of signals from a pipe, and returns the pipe's end for
    ``signal.set_wakeup_fd``: the interpreter writes there whatever the main thread does."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    _State.wake = write
    os.register_at_fork(after_in_child=_forget)
    _quiet_hooks()
    threading.Thread(target=_watch, args=(read,), name="signals", daemon=True).start()
    return write


def _forget() -> None:
    """A forked child does not report its signals to its parent's clock, nor answers them itself: a
    signal to the whole job may reach it before it has called ``set_action(SIG_IGN)``."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
    _State.wake = _State.due = _State.record = None
    _State.ending = True


def _watch(read: int) -> None:
    while True:
        left = None if _State.due is None else max(_State.due - time.monotonic(), 0.0)
        if select.select([read], [], [], left)[0]:
            for number in os.read(read, 64):
                if not _State.handled:
                    continue
                if number == signal.SIGINT:
                    _State.interrupts += 1
                    if _State.interrupts > 1 or not _State.deferred:
                        end_within(GRACE_S if _State.interrupts == 1 else AGAIN_S)
                elif number in _REQUESTS and not (_State.deferred or _State.ending):
                    end_within(GRACE_S)
        elif _State.due is not None and time.monotonic() >= _State.due:
            if (error := counted_for()) is not None:
                end_now(error, code_of(error))


def counted_for() -> BaseException | None:
    """The request for which the clock counts, as the error that it stands for; None: it does not.

    A request that a training has recorded (``deferred``) is not counted for.
    """
    if _State.due is None:
        return None
    return KeyboardInterrupt() if _State.interrupts else Preempted(_State.name or "a signal")


def _quiet_hooks() -> None:
    """Wraps Python's reports of errors that nobody catches.

    A request that was raised in a destructor, and so lost, ends the process without a traceback.
    Errors of a library's thread are not reported while the process ends by request, such as one at
    the pipe of a loader worker that has ended.
    """
    report_unraisable, report = sys.unraisablehook, sys.excepthook

    def on_unraisable(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Preempted | KeyboardInterrupt):
            end_within(0.0)
        else:
            report_unraisable(unraisable)

    def on_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        of_thread = threading.current_thread() is not threading.main_thread()
        if not (of_thread and (_State.ending or counted_for() is not None)):
            report(kind, error, trace)

    sys.unraisablehook, sys.excepthook = on_unraisable, on_uncaught
