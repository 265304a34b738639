"""Sorts the errors that end a command and prints each on one line, without torch or numpy.

Some are mistakes of the user, whose message is enough. Some mean that another process, which this
one needs, has ended or hangs (`Lost`): the same command may then go on from what is saved. All
others are bugs and need a traceback.
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

LATER_RANKS_WAIT_S = 5.0  # ranks other than the first wait so long before they print an error
LONGEST_LINE = 4000  # characters of an error's line; a longer line loses its middle
MORE_SHARED_MEMORY = "give it more (docker run --shm-size=8g), or set data.num_workers=0"
GOES_ON = "the same command goes on from what is saved"
_MOST_OF_TORCH = 300  # characters that are quoted of torch's message
LATE_WORKER = "DataLoader timed out"
# torch's message for a loader worker that ended without an error of its own.
_ENDED_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) "
    r"(?:is killed by signal: (?P<word>[A-Za-z ]+)|exited unexpectedly)"
)
# Parts of gloo's and NCCL's messages, and names of their errors, for a process of a collective that
# is gone (_GONE) or does not answer (_LATE).
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
    message = str(error)
    return isinstance(error, RuntimeError) and any(part in message for part in (*_GONE, *_LATE))


def as_lost(error: Exception, where: str = "") -> Exception:
    """Returns a `Lost` of one line if ``error`` means that another process is gone; else ``error``.

    ``where`` is added to the line; it says what this process was doing, such as 'at step 12'.
    """
    if isinstance(error, Lost):
        return error
    text, where = str(error), where and f" ({where})"
    if isinstance(error, RuntimeError) and text.startswith(LATE_WORKER):
        return LostWorker(f"no data has come within peer_timeout_s{where}: {GOES_ON}")
    if isinstance(error, RuntimeError) and "unable to allocate shared memory" in text:
        return LostWorker(
            f"shared memory (/dev/shm) is full{where}: {MORE_SHARED_MEMORY}; {GOES_ON}"
        )
    ended = _ENDED_WORKER.search(text) if isinstance(error, RuntimeError) else None
    if ended is not None:
        return LostWorker(f"a loader worker has ended{where}, {_guess_cause(ended['word'] or '')}")
    if is_lost_peer(error):
        late = any(part in text for part in _LATE)
        slow, gone = "another rank has not answered within peer_timeout_s", "another rank has ended"
        quote = text.partition("\n")[0].partition(". ")[0][:_MOST_OF_TORCH]
        return Lost(f"{slow if late else gone}{where}: {GOES_ON} (torch: {quote})")
    return error


def _guess_cause(word: str) -> str:
    """Says why a loader worker probably ended, and what to do. ``word``: torch's name of the signal
    that ended it, such as 'Bus error' or 'Killed'."""
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
    """Returns True if the user needs only the error's message, and no traceback.

    That is so for ValueError, OSError and MemoryError, and for a RuntimeError that this package
    raised itself or that means too little memory or too many open files.
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
    """Returns True if torch passed ``error`` on from a loader worker, so that its message holds a
    traceback."""
    return " in DataLoader worker process " in str(error).partition("\n")[0]


def _is_out_of_files(error: BaseException) -> bool:
    """Returns True if too many files are open, here or in a loader worker (whose error torch passes
    on as text)."""
    by_number = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return by_number or (
        isinstance(error, OSError | RuntimeError) and "Too many open files" in str(error)
    )


def number_of(variable: str, default: int) -> int:
    """Returns the number in an environment ``variable`` of the launcher, such as RANK; ``default``
    if it is not set or no number. (`process_group.init` refuses wrong ones.)"""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def complain(error: Exception, with_traceback: bool) -> None:
    """Prints the error's message to stderr on one line, after its traceback if so asked."""
    if number_of("RANK", 0) > 0:
        # All ranks usually fail together. Rank 0 prints; the launcher ends the others meanwhile.
        time.sleep(LATER_RANKS_WAIT_S)
    if with_traceback:
        from mclclip.util.files import printable_lines  # imports numpy

        print(printable_lines("".join(traceback.format_exception(error))), file=sys.stderr)
    print(f"mclclip: {line_of(error)}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):  # other broken rules of the configuration
        print(f"mclclip: {line_of(ValueError(note))}", file=sys.stderr)


def line_of(error: BaseException) -> str:
    """Returns the message of ``error`` on one line, with a remedy if the disk or memory is full or
    too many files are open. Leaves out the traceback in a loader worker's message."""
    from mclclip.util.files import FULL, printable  # imports numpy

    line = str(error)
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"{error.filename or 'a file'} cannot be written ({error.strerror}): make room there, "
            "and the same command goes on from what is finished, or write to another disk"
        )
    if _is_out_of_files(error):
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = 2**20 if most == resource.RLIM_INFINITY else most
        more = f"call 'ulimit -n {most}' before" if now < most else "have its hard limit raised"
        return (
            f"too many files are open (a process may open {now} here): {more}, or lower "
            "data.max_open_files or data.num_workers; the same command goes on from what is saved"
        )
    if isinstance(error, PermissionError) and error.filename is not None:
        line = (
            f"{error.filename} may not be read or written by this user: change the permissions "
            f"of it or of {os.path.dirname(str(error.filename)) or '.'}, or name another folder"
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
