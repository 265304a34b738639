"""What the user is told when a command fails: one line, or a traceback where it is our fault."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback

LATER_RANKS_WAIT_S = 5.0


def is_for_the_user(error: Exception) -> bool:
    """Whether the error's own line says what to do: ours, the file system's, memory's."""
    if isinstance(error, RuntimeError):
        # torch raises RuntimeError for our bugs too: those want a traceback.
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if _is_of_loader_worker(error):
            files = re.findall(r'^ *File "(.+)", line', str(error), re.MULTILINE)
        package = os.path.dirname(os.path.dirname(__file__))
        raised_here = bool(files) and files[-1].startswith(package)
        return raised_here or type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, ValueError | OSError)


def _is_of_loader_worker(error: BaseException) -> bool:
    """Whether torch raised it again from a loader worker, with the traceback in its message."""
    return " in DataLoader worker process " in str(error).partition("\n")[0]


def complain(error: Exception, with_traceback: bool) -> None:
    """The user's line; the traceback only where it is asked for or is our own fault."""
    if int(os.environ.get("RANK", "0")) > 0:
        # Ranks fail together: the first one speaks, and the launcher ends the others meanwhile.
        time.sleep(LATER_RANKS_WAIT_S)
    if with_traceback:
        traceback.print_exc()
    print(f"mclclip: {line_of(error)}", file=sys.stderr)


def line_of(error: BaseException) -> str:
    """Message of an error on one line; of a loader worker's its own words, not its traceback."""
    line = str(error)
    if _is_of_loader_worker(error):
        line = line.strip().splitlines()[-1].partition(": ")[2]
    return " ".join(line.split()) or type(error).__name__
