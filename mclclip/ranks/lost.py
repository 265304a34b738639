"""Errors of a process that this one needs and that is gone or hangs, in one line (needs no torch).

They are nobody's mistake and no error of mclclip: the same command may go on from what is saved.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from mclclip.ranks import signals

# torch's words for a loader worker that ended without an error of its own.
_ENDED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
    r"(?:is killed by signal: ([A-Za-z ]+)|exited unexpectedly(?: with exit code (\d+))?)"
)
_WORDS = {signal.SIGKILL: "Killed", signal.SIGBUS: "Bus", signal.SIGSEGV: "Segmentation"}
_REQUEST_S = 0.5  # between the processes of a job that a signal is sent to
GOES_ON = "the same command goes on from what is saved"


class Lost(RuntimeError):
    """A process that this one needs has ended or does not answer."""


class LostWorker(Lost):
    """A process that reads data for this one has ended or does not answer."""


@contextmanager
def naming() -> Iterator[None]:
    """Raises errors of the block as ``named`` gives them.

    Where a worker was ended and this process was asked to leave, it leaves as it was asked: a
    signal to a whole job may reach a worker that is not deaf to it yet.
    """
    try:
        yield
    except RuntimeError as error:
        better = named(error)
        asked = signals.asked_within(_REQUEST_S) if isinstance(better, LostWorker) else None
        if asked is not None:
            raise asked from error
        if better is error:
            raise
        raise better from error


def named(error: Exception) -> Exception:
    """LostWorker where ``error`` says that a worker was ended from outside; else ``error``."""
    if isinstance(error, Lost):
        return error
    if type(error).__name__ == "BrokenProcessPool":
        return LostWorker(
            f"a process that scans shards was ended from outside, {_cause(0, 'index_workers')}"
        )
    ended = _ENDED.search(str(error)) if isinstance(error, RuntimeError) else None
    if ended is None:
        return error
    pid, word, code = ended.groups()
    by = next((number for number, text in _WORDS.items() if (word or "").startswith(text)), 0)
    return worker("", int(pid.split(",")[0]), -by or int(code or 0))


def worker(number: str, pid: int, exit_code: int) -> LostWorker:
    """The error for a loader worker that ended with ``exit_code`` (negative: of a signal)."""
    try:
        how = signal.Signals(-exit_code).name
    except ValueError:
        how = f"exit code {exit_code}" if exit_code else "without a word"
    cause = _cause(-exit_code, "num_workers")
    return LostWorker(
        f"loader worker {number}(process {pid}) was ended from outside ({how}), {cause}"
    )


def _cause(by: int, option: str) -> str:
    """The probable cause of an end by a signal (0: unknown), and what to do."""
    if by == signal.SIGBUS:
        return (
            f"most likely because shared memory (/dev/shm) is full: enlarge it, or lower "
            f"data.{option}; {GOES_ON}"
        )
    if by == signal.SIGSEGV:
        return f"by a fault in a library that decodes images; {GOES_ON}"
    return (
        f"most likely because memory ran out ('dmesg' or the scheduler's report tells): lower "
        f"data.{option}, or ask for more memory; {GOES_ON}"
    )
