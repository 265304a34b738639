"""Handles the signals that ask this process to save and end: requests (needs no torch).

SIGTERM, SIGUSR1, SIGHUP and SIGINT are requests. Outside a training loop everything that a verb has
finished is on disk, so the handler raises `Preempted` or KeyboardInterrupt at once. Inside a
training loop (`defer_requests`) a request waits until a step has ended, where all ranks agree on it
(`mclclip.ranks.step_boundary`). After the first SIGINT the signal has its default action again, so
a second one ends the process at once, whatever it does.

The handler raises a request again after a while, since Python drops an error that is raised within
a destructor. A request that comes during an import waits too: C++ code may abort on it, and a
half-imported module would raise other errors.
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
_AGAIN_S = 5.0  # a request that did not end the process is raised again after this time
_IMPORT_S = 0.1  # a request that came during an import is tried again after this time


class Preempted(BaseException):
    """Ends the process because of a request, after everything it needs to go on was saved.

    ``reason``: for example 'SIGTERM'. ``requeue``: True if a scheduler is to start the same command
    again. Like KeyboardInterrupt this is no Exception, so ``except Exception`` does not catch it.
    """

    def __init__(self, reason: str, requeue: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.requeue = reason, requeue


class _State:
    """The first request that this process received, and how the handler acts."""

    name: str | None = None  # the request's signal, such as 'SIGTERM'
    deferred = False  # the handler only records a request
    ending = False  # the process ends anyway, so the handler does nothing
    second: object = signal.SIG_DFL  # the action of SIGINT after the first SIGINT


def install_handlers() -> None:
    """Installs the handler of the four signals; does nothing outside the main thread.

    If this process was started with SIGHUP or SIGINT ignored, as ``nohup`` does, it stays ignored.
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
def restore_handlers() -> Iterator[None]:
    """After the block, restores the signal handlers of before it and forgets any request, so that
    the process can go on."""
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
            if handler is not None:  # None: other code than Python had installed it
                signal.signal(number, handler)
        _State.name, _State.ending = None, False


@contextmanager
def save_on_interrupt() -> Iterator[None]:
    """Lets a training in the block save after Ctrl-C, and then raises KeyboardInterrupt.

    It is for programs that call mclclip's functions, and does nothing outside the main thread or if
    the program has its own handler of SIGINT.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    with restore_handlers():
        _State.second = signal.default_int_handler
        signal.signal(signal.SIGINT, _on_request)
        try:
            yield
        except Preempted as request:
            if request.reason != INTERRUPT:
                raise
            raise KeyboardInterrupt("saved: the same call goes on") from None


@contextmanager
def block_requests() -> Iterator[None]:
    """Delays the four signals until the block has ended; processes started in it get none."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_REQUESTS, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Makes the handler ignore all requests from now on, since the process is about to end anyway.

    Also makes torch's handler ignore loader workers that end: it would raise an error.
    """
    _State.ending = True
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0)


def set_action(action: signal.Handlers) -> None:
    """Replaces the handler of the four signals by an action of the system.

    A process that has failed takes SIG_DFL, since it may end at any moment. Workers take SIG_IGN: a
    signal to the whole job must not end a worker before its parent has saved. A worker ends with
    its parent.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (*_REQUESTS, signal.SIGINT):
            signal.signal(number, action)


def get_request() -> str | None:
    """Returns the name of the signal that asked this process to end, such as 'SIGTERM', or None."""
    return _State.name


def make_error(name: str, deferred: bool = False) -> Preempted | KeyboardInterrupt:
    """Returns the error to raise for the signal ``name``; ``deferred``: a training has saved.

    After Ctrl-C, no scheduler is to start the command again.
    """
    if name == INTERRUPT and not deferred:
        return KeyboardInterrupt()
    return Preempted(name, requeue=name != INTERRUPT)


@contextmanager
def defer_requests() -> Iterator[None]:
    """Makes the handler only record requests in the block; `get_request` returns what it recorded.

    If the outermost such block ends without an error and a request was recorded, raises Preempted.
    """
    before, _State.deferred = _State.deferred, True
    try:
        yield
    finally:
        _State.deferred = before
    if _State.name is not None and not before:
        raise make_error(_State.name, deferred=True)


def code_of(error: BaseException) -> int:
    """Returns the exit code for Preempted or KeyboardInterrupt."""
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_PREEMPTED


def line_of(error: BaseException) -> str:
    """Returns the line to print for Preempted or KeyboardInterrupt."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: the same command goes on from what is saved"
    return f"asked to leave ({error}): the same command goes on"


def _on_request(number: int, frame: FrameType | None) -> None:
    """Handles the four signals, and the alarm that raises a request again."""
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
        raise make_error(_State.name)


def _is_importing(frame: FrameType | None) -> bool:
    """Returns True if an import statement is among the callers of ``frame``."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _ignore_in_child() -> None:
    """Ignores requests in a forked child: a signal to the whole job may reach it before it calls
    `set_action`."""
    _State.ending = True


os.register_at_fork(after_in_child=_ignore_in_child)
