"""Reports a failed command to the user: in one line, with a traceback if the fault is ours."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import time
import traceback

LATER_RANKS_WAIT_S = 5.0
LONGEST_LINE = 4000  # characters of an error's line; the middle of a longer one is left out


def is_for_the_user(error: Exception) -> bool:
    """Whether the error's message is enough for the user, so that no traceback is printed.

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
    """Whether torch passed the error on from a loader worker; its message holds the traceback."""
    return " in DataLoader worker process " in str(error).partition("\n")[0]


def _is_out_of_files(error: BaseException) -> bool:
    """Whether too many files are open, also in a loader worker, of which torch keeps the text."""
    by_number = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    return by_number or (
        isinstance(error, OSError | RuntimeError) and "Too many open files" in str(error)
    )


def complain(error: Exception, with_traceback: bool) -> None:
    """Prints the error's message to stderr as one line, after the traceback if it is wanted."""
    if int(os.environ.get("RANK", "0")) > 0:
        # All ranks fail together: rank 0 prints, and the launcher ends the others meanwhile.
        time.sleep(LATER_RANKS_WAIT_S)
    if with_traceback:
        from mclclip.files import shown_lines  # as in `line_of`

        print(shown_lines("".join(traceback.format_exception(error))), file=sys.stderr)
    print(f"mclclip: {line_of(error)}", file=sys.stderr)


def line_of(error: BaseException) -> str:
    """The message of an error on one line; for a loader worker's error without its traceback."""
    from mclclip.files import FULL, shown  # imports numpy, which the command line does without

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
    line = shown(" ".join(line.split())) or type(error).__name__
    if len(line) <= LONGEST_LINE:
        return line
    left_out = len(line) - LONGEST_LINE
    return f"{line[: LONGEST_LINE // 2]} [{left_out} characters] {line[-LONGEST_LINE // 2 :]}"
