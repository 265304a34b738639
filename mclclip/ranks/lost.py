"""Errors of a process that this one needs and that is gone or hangs, in one line (needs no torch).

They are nobody's mistake and no error of mclclip: the same command may go on from what is saved.
"""

from __future__ import annotations

import re

# torch's words for a loader worker that ended without an error of its own.
_ENDED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
    r"(?:is killed by signal: ([A-Za-z ]+)|exited unexpectedly(?: with exit code (\d+))?)"
)
GOES_ON = "the same command goes on from what is saved"


class Lost(RuntimeError):
    """A process that this one needs has ended or does not answer."""


class LostWorker(Lost):
    """A process that reads data for this one has ended or does not answer."""


def named(error: Exception) -> Exception:
    """LostWorker where ``error`` says that a worker was ended from outside; else ``error``."""
    if isinstance(error, Lost):
        return error
    if type(error).__name__ == "BrokenProcessPool":
        return LostWorker(
            f"a process that scans shards was ended from outside, {_cause('', 'index_workers')}"
        )
    found = _ENDED.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return error
    pids, signal_name, code = found.groups()
    how = f"exit code {code}" if code else (signal_name or "").strip() or "without a word"
    return LostWorker(
        f"loader worker (process {pids.strip()}) was ended from outside ({how}), "
        f"{_cause(signal_name or '', 'num_workers')}"
    )


def _cause(signal_name: str, option: str) -> str:
    """The probable cause, and what to do."""
    if signal_name.startswith("Bus"):
        return (
            f"most likely because shared memory (/dev/shm) is full: enlarge it, or lower "
            f"data.{option}; {GOES_ON}"
        )
    if signal_name.startswith("Segmentation"):
        return f"by a fault in a library that decodes images; {GOES_ON}"
    return (
        f"most likely because memory ran out ('dmesg' or the scheduler's report tells): lower "
        f"data.{option}, or ask for more memory; {GOES_ON}"
    )
