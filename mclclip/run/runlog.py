"""Log lines, progress, and the files that hold metrics.

A training never ends because a row could not be written: failed writes are counted, and the first
one is logged.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mclclip.run.trackers import Trackers
from mclclip.util import advice
from mclclip.util.files import parse_json, printable, printable_lines

T = TypeVar("T")
log = logging.getLogger("mclclip")

POINTS = 400
"""Most rows that `Stage.metrics` returns."""

DRAW_S = 0.1  # time between two updates of the progress line on a terminal
LOG_S = 15.0  # time between two lines of progress in the log
CLEAR_LINE = "\r\x1b[2K"  # makes a terminal clear its current line


class _Formatter(logging.Formatter):
    """Formats each log record as one line: control characters in a stranger's key, caption or file
    name are replaced (``printable``). Only tracebacks have more lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        clear = CLEAR_LINE if sys.stderr.isatty() else ""  # removes the progress line
        return clear + advice.complete(printable(super().formatMessage(record)))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable_lines(super().formatException(ei))


def setup(rank: int = 0, level: str = "INFO") -> None:
    """Sends mclclip's log to stderr: on rank 0 from ``level`` on, on other ranks only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    where = "" if rank == 0 else f" [rank {rank}]"
    line = f"%(asctime)s {'%(levelname).1s'}{where} %(message)s"
    handler.setFormatter(_Formatter(line, "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(level if rank == 0 else "WARNING")


def progress(
    items: Iterable[T],
    *,
    total: int | None,
    description: str,
    start: int = 0,
    detail: Callable[[], str] | None = None,
) -> Iterator[T]:
    """Yields ``items`` and reports how many are done and how long the rest will take.

    A terminal shows one line that is redrawn; elsewhere the log gets a line every `LOG_S` seconds,
    such as 'stage 1: 40 of 100, 12 min left'. Without ``total`` only the number is shown.

    ``start``: how many of the ``total`` were done before. ``detail`` returns a text to add to the
    line of the log ('': nothing new); with it a terminal gets these log lines too. Ranks other than
    the first report nothing. Only the loop draws, so nothing is drawn after an interruption.
    """
    if not log.isEnabledFor(logging.INFO):
        yield from items
        return
    on_terminal = sys.stderr.isatty()
    first = last = drawn = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        now, done = time.monotonic(), start + number
        logs = now - last >= LOG_S and done != total and (detail or not on_terminal)
        text, left = f"{description}: {done}" + ("" if total is None else f" of {total}"), ""
        if total is not None and number > 1:  # the first item waits for workers to start
            left = time_left((total - done) * (now - first) / (number - 1))
        if logs:
            last = now
            log.info("%s", ", ".join(filter(None, [text, detail and detail(), left])))
        if on_terminal and now - drawn >= DRAW_S:
            drawn = now
            line = CLEAR_LINE + ", ".join(filter(None, [text, left]))
            print(line, end="", file=sys.stderr, flush=True)
        if number == 1:
            first = now
    if on_terminal:
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


def count_of(number: float, noun: str) -> str:
    """Returns for example '1 group' or '12,000 groups', where ``noun`` is 'group'."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def time_left(seconds: float) -> str:
    """Returns for example '40 s left', '12 min left' or '3.5 h left'."""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


class JsonLines:
    """A file of strict JSON with one row per line; opening it drops rows after ``resume_step``.

    Every row has a field ``step``; ``last_step`` is that of the last row before some were dropped.
    NaN and infinity, which JSON does not know, become null.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab", buffering=0)
        self.last_step = -1
        self.file.truncate(self._length(resume_step))

    def _length(self, resume_step: int) -> int:
        """Returns the length in bytes of the complete rows up to ``resume_step``."""
        length, dropped = 0, False
        with open(self.path, "rb") as lines:
            for line in lines:
                try:
                    step = json.loads(line)["step"] if line.endswith(b"\n") else None
                except (ValueError, TypeError, LookupError, RecursionError):
                    step = None
                if not isinstance(step, int):  # the row being written when the run was killed
                    log.info("%s: dropped a half-written row", self.path)
                    break
                dropped = dropped or step > resume_step
                length += 0 if dropped else len(line)
                self.last_step = step
        return length

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row. If that raises OSError, the file is as it was before."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
        length = os.fstat(self.file.fileno()).st_size
        try:
            if self.file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            self.file.truncate(length)
            raise

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


class MetricsLog:
    """The files metrics.jsonl and epochs.jsonl and the trackers of one training; evaluations.jsonl
    too if it ``evaluates``, and warnings.jsonl from the first warning on.

    Opening may raise OSError. Writing and closing raise no error: ``lost`` counts the failed writes
    by the name of the file or tracker.
    """

    def __init__(
        self,
        directory: Path,
        *,
        resume_step: int,
        trackers: Trackers | None = None,
        evaluates: bool = False,
    ) -> None:
        self.trackers = trackers or Trackers()
        self.lost = self.trackers.lost
        self._warnings = Path(directory) / "warnings.jsonl"
        names = ["metrics.jsonl", "epochs.jsonl"]
        names += [self._warnings.name] if self._warnings.exists() else []
        self.files = {
            name: JsonLines(Path(directory) / name, resume_step=resume_step) for name in names
        }
        if evaluates:  # a resumed training evaluates ``resume_step`` again
            path = Path(directory) / "evaluations.jsonl"
            self.files[path.name] = JsonLines(path, resume_step=resume_step - 1)

    def write(self, step: int, row: Mapping[str, Any], kind: str = "metrics") -> None:
        """Appends a row to the file of its ``kind``: 'metrics', 'epochs', 'evaluations' or
        'warnings'. Rows of 'metrics' and 'evaluations' also go to the trackers, but for those that
        an earlier process has logged and that a resumed training repeats."""
        name = f"{kind}.jsonl"
        self.lost.run(name, lambda: self._file(name).write({"step": step, **row}))
        if kind in ("metrics", "evaluations") and step > self.files[name].last_step:
            self.trackers.write(step, row)

    def _file(self, name: str) -> JsonLines:
        """Returns the file ``name``; creates warnings.jsonl at the first warning."""
        if name not in self.files:
            self.files[name] = JsonLines(self._warnings, resume_step=0)
        return self.files[name]

    def close(self) -> None:
        """Closes files and trackers, and logs how many writes failed."""
        for name, file in self.files.items():
            self.lost.run(name, file.close)
        self.trackers.close()
        for name, count in self.lost.items():
            log.warning("%s: %s failed in all", name, count_of(count, "write"))


def read_records(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Reads a file of JSON lines; returns its rows in order of their ``step``: all, or at most
    ``most`` of them, evenly spread over the file.

    Skips lines without a whole row, such as one that is being written. A missing file has no rows.
    """
    lines = path.read_bytes().splitlines() if path.is_file() else []
    if most is not None and len(lines) > most:
        lines = [lines[place] for place in np.linspace(0, len(lines) - 1, most).astype(np.int64)]
    rows = []
    for line in lines:
        try:
            row = parse_json(line, str(path))
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return sorted(rows, key=lambda row: int(row["step"]))
