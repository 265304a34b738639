"""Errors that end a command: which ones are the user's, which mean a lost process, and how each is
printed on one line.

A process that this one needs may be gone or hang. That is no mistake of the user and no error of
mclclip: the same command may go on from what is saved. (This module needs neither torch nor numpy.)
"""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import time
import traceback

from mclclip.util import advice

LATER_RANKS_WAIT_S = 5.0
LONGEST_LINE = 4000  # characters of an error's line; the middle of a longer one is left out
MORE_SHARED_MEMORY = "give it more (docker run --shm-size=8g), or set data.num_workers=0"
GOES_ON = "the same command goes on from what is saved"
_MOST_OF_TORCH = 300  # characters
LATE_WORKER = "DataLoader timed out"
# torch's words for a loader worker that ended without an error of its own.
_ENDED_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) "
    r"(?:is killed by signal: (?P<word>[A-Za-z ]+)|exited unexpectedly)"
)
# gloo's and NCCL's words and errors where a process of a collective is gone or does not answer.
_GONE = ("closed by peer", "reset by peer", "Broken pipe", "recv error", "Connection refused")
_LATE = ("Timed out waiting", "timed out")
_GONE_ERRORS = ("DistBackendError", "DistNetworkError")


class Lost(RuntimeError):
    """A process that this one needs has ended or does not answer."""


class LostWorker(Lost):
    """A process that reads data for this one has ended or does not answer."""


def is_lost_peer(error: BaseException) -> bool:
    """Returns True if a collective failed because another process is gone or does not answer."""
    if type(error).__name__ in _GONE_ERRORS:
        return True
    words = (*_GONE, *_LATE)
    return isinstance(error, RuntimeError) and any(text in str(error) for text in words)


def as_lost(error: Exception, where: str = "") -> Exception:
    """Lost with one line where ``error`` says that another process is gone; else ``error``.

    ``where`` says what this process was at, or which data it waited for.
    """
    if isinstance(error, Lost):
        return error
    text, where = str(error), where and f" ({where})"
    if isinstance(error, RuntimeError) and text.startswith(LATE_WORKER):
        return LostWorker(f"no data has come within peer_timeout_s{where}: {GOES_ON}")
    ended = _ENDED_WORKER.search(text) if isinstance(error, RuntimeError) else None
    if ended is not None:
        return LostWorker(f"a loader worker has ended{where}, {_cause(ended['word'] or '')}")
    if is_lost_peer(error):
        late = any(words in text for words in _LATE)
        no_answer = "another rank has not answered within peer_timeout_s"
        what = no_answer if late else "another rank has ended"
        said = text.partition("\n")[0].partition(". ")[0][:_MOST_OF_TORCH]
        return Lost(f"{what}{where}: {GOES_ON} (torch: {said})")
    return error


def _cause(word: str) -> str:
    """The probable cause of a worker's end by a signal that torch names so, and what to do."""
    if word.startswith("Bus"):
        return (
            f"most likely because shared memory (/dev/shm) is full: {MORE_SHARED_MEMORY}; {GOES_ON}"
        )
    if word.startswith("Segmentation"):
        return f"by a fault in a library that decodes images; {GOES_ON}"
    return (
        "most likely because memory ran out ('dmesg' or the scheduler's report tells): lower "
        f"data.num_workers, or ask for more memory; {GOES_ON}"
    )


# --- the line of an error ----------------------------------------------------------------------


def is_for_the_user(error: Exception) -> bool:
    """Returns True if the error's message is enough for the user, so that no traceback is printed.

    It is for ValueError and OSError, for a RuntimeError that this package raised itself, and where
    memory ran out or too many files are open.
    """
    if _is_out_of_files(error):
        return True
    if isinstance(error, RuntimeError):
        # torch raises RuntimeError for our bugs too, and those need a traceback.
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if _is_of_loader_worker(error):
            files = re.findall(r'^ *File "(.+)", line', str(error), re.MULTILINE)
        package = os.path.dirname(os.path.dirname(__file__))
        raised_here = bool(files) and files[-1].startswith(package)
        return raised_here or type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, ValueError | OSError | MemoryError)


def _is_of_loader_worker(error: BaseException) -> bool:
    """Returns True for an error that torch passed on from a loader worker; its message holds the
    traceback."""
    return " in DataLoader worker process " in str(error).partition("\n")[0]


def _is_out_of_files(error: BaseException) -> bool:
    """Returns True if too many files are open, here or in a loader worker, whose error torch keeps
    as text."""
    by_number = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return by_number or (
        isinstance(error, OSError | RuntimeError) and "Too many open files" in str(error)
    )


def number_of(variable: str, default: int) -> int:
    """A number that the launcher has set in the environment; ``default`` where it is not set, or is
    no number, which ``process_group.init`` refuses where it matters."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def complain(error: Exception, with_traceback: bool) -> None:
    """Prints the error's message to stderr as one line, after the traceback if it is wanted."""
    if number_of("RANK", 0) > 0:
        # All ranks fail together: rank 0 prints, and the launcher ends the others meanwhile.
        time.sleep(LATER_RANKS_WAIT_S)
    if with_traceback:
        from mclclip.util.files import printable_lines  # as in `line_of`

        print(printable_lines("".join(traceback.format_exception(error))), file=sys.stderr)
    print(f"mclclip: {line_of(error)}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):  # further rules of the configuration are broken
        print(f"mclclip: {line_of(ValueError(note))}", file=sys.stderr)


def line_of(error: BaseException) -> str:
    """The message of an error on one line; for a loader worker's error without its traceback."""
    from mclclip.util.files import (  # imports numpy, which the command line does without
        FULL,
        printable,
    )

    line = str(error)
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"{error.filename or 'a file'} cannot be written ({error.strerror}): make room there, "
            "or use another run_dir; the same command goes on from what is finished"
        )
    if _is_out_of_files(error):
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = 2**20 if most == resource.RLIM_INFINITY else most
        more = f"call 'ulimit -n {most}' before" if now < most else "have its hard limit raised"
        return (
            f"too many files are open (a process may open {now} here): {more}, or lower "
            "data.max_open_files or data.num_workers; the same command goes on from what is saved"
        )
    if isinstance(error, MemoryError):
        line = (
            f"memory ran out ({line or 'no more could be had'}): end other programs, lower "
            "data.num_workers or the batch, or take a machine with more; the same command goes on "
            "from what is finished"
        )
    if _is_of_loader_worker(error):
        line = line.strip().splitlines()[-1].partition(": ")[2]
    line = advice.complete(printable(" ".join(line.split()))) or type(error).__name__
    if len(line) <= LONGEST_LINE:
        return line
    left_out = len(line) - LONGEST_LINE
    return f"{line[: LONGEST_LINE // 2]} [{left_out} characters] {line[-LONGEST_LINE // 2 :]}"
