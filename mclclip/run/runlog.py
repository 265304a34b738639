"""Log lines, progress, the files that hold metrics, and sinks such as tensorboard.

A training never ends because a row could not be written: failed writes are counted, and the first
one is logged.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mclclip.ranks.failures import line_of
from mclclip.util import advice
from mclclip.util.files import printable, printable_lines, write_bytes

T = TypeVar("T")
log = logging.getLogger("mclclip")

CLOSE_S = 20.0  # a sink gets this time to flush: a pre-empted process has little
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


class Sink(NamedTuple):
    """A tracker besides metrics.jsonl that gets the rows of metrics, such as wandb."""

    write: Callable[[int, Mapping[str, Any]], object]
    """``write(step, row)``"""
    close: Callable[[], object]


def open_sinks(
    names: Iterable[str], directory: Path, *, config: Mapping[str, Any], resume_step: int
) -> dict[str, Sink]:
    """Opens the sinks in ``names``, of 'tensorboard' and 'wandb'; each gets a folder of its name.

    A sink that does not start (no network, no key, a full disk) is left out with a warning. Raises
    ValueError if its package is not installed.
    """
    sinks: dict[str, Sink] = {}
    for name in names:
        try:
            if name == "tensorboard":
                sinks[name] = _open_tensorboard(directory / name, resume_step)
            else:
                sinks[name] = _open_wandb(directory / name, config)
        except ImportError as error:
            raise ValueError(
                f"track: {name} is not installed: pip install 'mclclip[track]'"
            ) from error
        except Exception as error:  # whatever its package raises
            log.warning(
                "%s does not start (%s): the training goes on without", name, line_of(error)
            )
    return sinks


def _open_tensorboard(directory: Path, resume_step: int) -> Sink:
    """Writes every number of a row as a scalar. Hides the points after ``resume_step``, which an
    earlier process left."""
    from torch.utils import tensorboard

    module: Any = tensorboard
    writer = module.SummaryWriter(str(directory), purge_step=resume_step + 1)

    def write(step: int, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float):
                writer.add_scalar(name, value, step)
        writer.flush()

    return Sink(write, writer.close)


def _open_wandb(directory: Path, config: Mapping[str, Any]) -> Sink:
    """Logs rows to Weights & Biases, whose environment variables apply, such as
    WANDB_MODE=offline. wandb ignores rows of steps that it has, which a resumed training repeats.
    """
    import wandb  # type: ignore[import-not-found, unused-ignore]

    path = directory / "run_id"  # a resumed training goes on in the same wandb run
    if not path.exists():
        write_bytes(path, secrets.token_hex(4).encode())
    run: Any = wandb.init(
        project="mclclip",
        id=path.read_text().strip(),
        resume="allow",
        dir=str(directory),
        config=json.loads(printable(json.dumps(config))),  # hides secrets, such as in signed urls
    )
    return Sink(lambda step, row: run.log(dict(row), step=step), run.finish)


class JsonLines:
    """A file of strict JSON with one row per line; opening it drops rows after ``resume_step``.

    Every row has a field ``step``. NaN and infinity, which JSON does not know, become null.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab", buffering=0)
        self.file.truncate(self._length(resume_step))

    def _length(self, resume_step: int) -> int:
        """Returns the length in bytes of the complete rows up to ``resume_step``."""
        length = 0
        with open(self.path, "rb") as lines:
            for line in lines:
                try:
                    step = json.loads(line)["step"] if line.endswith(b"\n") else None
                except (ValueError, TypeError, LookupError, RecursionError):
                    step = None
                if not isinstance(step, int):  # the row being written when the run was killed
                    log.info("%s: dropped a half-written row", self.path)
                    break
                if step > resume_step:
                    break
                length += len(line)
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

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows written so far, in order."""
        with open(self.path, "rb") as lines:
            yield from map(json.loads, lines)

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


class MetricsLog:
    """The files metrics.jsonl and epochs.jsonl and the sinks of one training; evaluations.jsonl too
    if it ``evaluates``, and warnings.jsonl from the first warning on.

    Opening may raise OSError. Writing and closing raise no error: ``lost`` counts the failed writes
    by the name of the file or sink.
    """

    def __init__(
        self,
        directory: Path,
        *,
        resume_step: int,
        sinks: Mapping[str, Sink] | None = None,
        evaluates: bool = False,
    ) -> None:
        self.sinks = dict(sinks or {})
        self.lost: Counter[str] = Counter()
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
        'warnings'. Rows of 'metrics' and 'evaluations' also go to the sinks."""
        name = f"{kind}.jsonl"
        self._try(name, lambda: self._file(name).write({"step": step, **row}))
        if kind in ("metrics", "evaluations"):
            for sink_name, sink in self.sinks.items():
                self._try(sink_name, partial(sink.write, step, row))

    def earlier_rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of metrics.jsonl so far."""
        return self.files["metrics.jsonl"].rows()

    def _file(self, name: str) -> JsonLines:
        """Returns the file ``name``; creates warnings.jsonl at the first warning."""
        if name not in self.files:
            self.files[name] = JsonLines(self._warnings, resume_step=0)
        return self.files[name]

    def close(self) -> None:
        """Closes files and sinks, and logs how many writes failed. Waits `CLOSE_S` seconds at most
        for a sink."""
        for name, file in self.files.items():
            self._try(name, file.close)
        for name, sink in self.sinks.items():
            # This runs in a thread, since a sink may wait for the network for ever.
            closing = threading.Thread(target=self._try, args=(name, sink.close), daemon=True)
            closing.start()
            closing.join(CLOSE_S)
            if closing.is_alive():
                log.warning("%s was not closed after %g s: not waiting longer", name, CLOSE_S)
        for name, count in self.lost.items():
            log.warning("%s: %s failed in all", name, count_of(count, "write"))

    def _try(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # of the disk, the network, or a sink's package
            self.lost[name] += 1
            if self.lost[name] == 1:
                log.warning("%s cannot be written (%s): the training goes on", name, line_of(error))
