"""Processes of tests; most are forked from one that has imported everything, which takes
seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any


def is_running(pid: int) -> bool:
    """Whether a process can still do something (a zombie cannot)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def context() -> ForkServerContext:
    """The context of such processes; a test process has one server."""
    found = get_context("forkserver")
    found.set_forkserver_preload(["tests.preloaded"])
    return found


def python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program in an interpreter that has imported nothing yet."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        words, **{"capture_output": True, "text": True, "timeout": 600, **options}
    )


def exit_code(work: Callable[[], object]) -> int:
    """Does work in a child of this process, which has everything imported and has no threads of
    torch's, and returns the child's exit code: 0 once the work is done, or less than 0, by the
    signal that ended it."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
