"""Signals that ask this process to end (needs no torch).

SIGTERM, SIGUSR1, SIGHUP and SIGINT ask it to save and leave. Outside a training loop everything
that a verb has finished is on disk, so the handler raises ``Preempted`` or ``KeyboardInterrupt`` at
once. Inside a training loop (``deferred``) a request waits for a boundary between two steps, where
all ranks agree on it (``step_boundary``). The first SIGINT gives the signal its default action, so
that a second one ends the process at once, whatever it is at.

If a request is lost in a destructor, it is raised again after a while. A request that comes during
an import also waits: C++ code may abort on it, and a half-imported module would raise other errors.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_PREEMPTED, EXIT_INTERRUPTED = 85, 130
INTERRUPT = signal.SIGINT.name
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_AGAIN_S = 5.0  # until a request is raised again that did not end the process
_IMPORT_S = 0.1  # until a request is tried again that came during an import


class Preempted(BaseException):
    """The process was asked to leave and everything it needs to go on is saved.

    Like KeyboardInterrupt it is not an Exception, so that ``except Exception`` does not catch it.
    ``requeue`` says whether the same command is to be started again.
    """

    def __init__(self, reason: str, requeue: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.requeue = reason, requeue


class _State:
    """The first request that this process received, and how it is answered."""

    name: str | None = None  # of the request's signal
    deferred = False  # a request is only recorded
    ending = False  # the process ends anyway: requests are not raised any more
    second: object = signal.SIG_DFL  # the action of SIGINT after the first one


def install_handlers() -> None:
    """Handles SIGTERM, SIGUSR1, SIGHUP and SIGINT; does nothing outside the main thread.

    A SIGHUP or SIGINT that the starter of the process ignores (``nohup``) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _State.ending, _State.second = False, signal.SIG_DFL
    for number in (*_REQUESTS, signal.SIGINT):
        ignorable = number in (signal.SIGHUP, signal.SIGINT)
        if not ignorable or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_request)
    signal.signal(signal.SIGALRM, _on_request)


@contextmanager
def handled_as_before() -> Iterator[None]:
    """After the block, signals are handled as before it and no request stands, for a process that
    goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (*_REQUESTS, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            if handler is not None:  # None: a handler that was not installed by Python
                signal.signal(number, handler)
        _State.name, _State.ending = None, False


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
        _State.second = signal.default_int_handler
        signal.signal(signal.SIGINT, _on_request)
        try:
            yield
        except Preempted as request:
            if request.reason != INTERRUPT:
                raise
            raise KeyboardInterrupt("saved: the same call goes on") from None


@contextmanager
def blocked() -> Iterator[None]:
    """The four signals wait until the block has ended, and do not reach the processes that start in
    it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_REQUESTS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Answers no request from now on, for a process that is about to end anyway.

    The death of a loader worker, for which torch raises an error wherever the main thread is, does
    not matter any more.
    """
    _State.ending = True
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0)


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


def error_of(name: str, deferred: bool = False) -> Preempted | KeyboardInterrupt:
    """The error that is raised for the signal ``name``, after a training saved (``deferred``) or
    elsewhere. What a user interrupted is not started again by a scheduler."""
    if name == INTERRUPT and not deferred:
        return KeyboardInterrupt()
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
        raise error_of(_State.name, deferred=True)


def code_of(error: BaseException) -> int:
    """The exit code that stands for a request."""
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_PREEMPTED


def line_of(error: BaseException) -> str:
    """The line that is printed of a request."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: the same command goes on from what is saved"
    return f"asked to leave ({error}): the same command goes on"


def _on_request(number: int, frame: FrameType | None) -> None:
    """The handler of the four signals, and of the alarm that repeats a request."""
    if _State.ending:
        return
    repeated = _State.name is not None and number != signal.SIGALRM
    if _State.name is None and number != signal.SIGALRM:
        _State.name = signal.Signals(number).name
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, _State.second)  # type: ignore[arg-type]
        if _State.deferred and os.environ.get("RANK", "0") == "0":
            with suppress(OSError):
                os.write(2, b"mclclip: saves after this step, and ends; Ctrl-C again: ends now\n")
    if _State.deferred or _State.name is None or repeated:
        return
    importing = _is_importing(frame)
    signal.signal(signal.SIGALRM, _on_request)
    signal.setitimer(signal.ITIMER_REAL, _IMPORT_S if importing else _AGAIN_S)
    if not importing:
        raise error_of(_State.name)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _ignore_in_child() -> None:
    """A signal to the whole job may reach a forked child before it has called ``set_action``."""
    _State.ending = True


os.register_at_fork(after_in_child=_ignore_in_child)
