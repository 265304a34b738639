"""Log lines, progress bars, files of metrics, and sinks such as tensorboard.

A training never ends because a row could not be written: failures are counted, and the first one
is logged.
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

CLOSE_S = 20.0  # time that a sink gets to flush; a pre-empted process has little
DRAW_S = 0.1  # between two drawings of a line of progress
LOG_S = 15.0  # between two of its lines in the log
CLEAR_LINE = "\r\x1b[2K"  # of a terminal


class _Formatter(logging.Formatter):
    """One record is one line, whatever a stranger's key, caption or file name holds (see
    ``printable``); the traceback of an error has lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        clear = CLEAR_LINE if sys.stderr.isatty() else ""  # of a line of progress
        return clear + advice.complete(printable(super().formatMessage(record)))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable_lines(super().formatException(ei))


def setup(rank: int = 0, level: str = "INFO") -> None:
    """Sends mclclip's log to stderr: rank 0 at ``level``, the others warnings with their rank."""
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
    """Yields ``items`` and reports how many are done and how long the rest will take: on a terminal
    in one line that it redraws, else in the log. Without ``total`` it reports the number alone.

    ``start``: how many of the ``total`` were done before. ``detail`` returns further words for a
    line of the log, empty if nothing has changed; a terminal shows these lines too. Only the loop
    draws, so nothing is drawn after an interruption. Ranks other than the first report nothing.
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
        words, left = f"{description}: {done}" + ("" if total is None else f" of {total}"), ""
        if total is not None and number > 1:  # the first one waits for workers to start
            left = time_left((total - done) * (now - first) / (number - 1))
        if logs:
            last = now
            log.info("%s", ", ".join(filter(None, [words, detail and detail(), left])))
        if on_terminal and now - drawn >= DRAW_S:
            drawn = now
            line = CLEAR_LINE + ", ".join(filter(None, [words, left]))
            print(line, end="", file=sys.stderr, flush=True)
        if number == 1:
            first = now
    if on_terminal:
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


def count_of(number: float, noun: str) -> str:
    """A number of things for a message: ``1 group``, ``12,000 groups``."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def time_left(seconds: float) -> str:
    """How long something will last, in words: ``40 s left``, ``12 min left``, ``3.5 h left``."""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


class Sink(NamedTuple):
    """A place besides metrics.jsonl to which rows of training metrics go."""

    write: Callable[[int, Mapping[str, Any]], object]
    """Takes the row of a step."""
    close: Callable[[], object]


def open_sinks(
    names: Iterable[str], directory: Path, *, config: Mapping[str, Any], resume_step: int
) -> dict[str, Sink]:
    """The sinks ``tensorboard`` and ``wandb`` by name, each in a folder of its own.

    A sink that does not start (no network, no key, a full disk) is left out with a warning. Raises
    ValueError where its package (of the extra ``track``) is not installed.
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
    """Every number of a row as a scalar, which is on disk at once. Points after ``resume_step``,
    which an earlier process left, are hidden."""
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
    """Rows for Weights & Biases. Environment variables of wandb apply, such as WANDB_MODE=offline.
    wandb ignores the rows that a resumed training repeats, because it has those steps already."""
    import wandb  # type: ignore[import-not-found, unused-ignore]

    path = directory / "run_id"  # one for each training, which goes on in the same wandb run
    if not path.exists():
        write_bytes(path, secrets.token_hex(4).encode())
    run: Any = wandb.init(
        project="mclclip",
        id=path.read_text().strip(),
        resume="allow",
        dir=str(directory),
        config=json.loads(printable(json.dumps(config))),  # without secrets, as of signed urls
    )
    return Sink(lambda step, row: run.log(dict(row), step=step), run.finish)


class JsonLines:
    """A file with one row of strict JSON per line, truncated to the rows up to ``resume_step``.

    Every row has ``step``. NaN and infinity, which JSON does not have, are written as null. Where
    writing a row raises OSError, no part of it is in the file.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab", buffering=0)
        self.file.truncate(self._length(resume_step))

    def _length(self, resume_step: int) -> int:
        """Bytes of the whole rows up to ``resume_step``."""
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
        """Appends one row; raises OSError and leaves the file as it was if that fails."""
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
        """The rows written so far, each a dictionary, in order."""
        with open(self.path, "rb") as lines:
            yield from map(json.loads, lines)

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


class MetricsLog:
    """``metrics.jsonl``, ``epochs.jsonl`` and the sinks of one training; also
    ``evaluations.jsonl`` if it ``evaluates``, and ``warnings.jsonl`` if there are warnings.

    Writing and closing raise no errors: ``lost`` counts the failed writes of each file and sink by
    its name. Opening the files may raise OSError.
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
        if evaluates:  # a resumed training evaluates its first step again
            path = Path(directory) / "evaluations.jsonl"
            self.files[path.name] = JsonLines(path, resume_step=resume_step - 1)

    def write(self, step: int, row: Mapping[str, Any], kind: str = "metrics") -> None:
        """Appends a row to KIND.jsonl: of a step (``metrics``), of an epoch that ended after it
        (``epochs``), of the figures after it (``evaluations``) or a warning (``warnings``). Sinks
        get steps and figures."""
        name = f"{kind}.jsonl"
        self._try(name, lambda: self._file(name).write({"step": step, **row}))
        if kind in ("metrics", "evaluations"):
            for sink_name, sink in self.sinks.items():
                self._try(sink_name, partial(sink.write, step, row))

    def earlier_rows(self) -> Iterator[dict[str, Any]]:
        """The rows of metrics.jsonl so far."""
        return self.files["metrics.jsonl"].rows()

    def _file(self, name: str) -> JsonLines:
        """The file of this name; that of warnings is made for the first."""
        if name not in self.files:
            self.files[name] = JsonLines(self._warnings, resume_step=0)
        return self.files[name]

    def close(self) -> None:
        """Closes files and sinks, each within CLOSE_S seconds, and says how much was lost."""
        for name, file in self.files.items():
            self._try(name, file.close)
        for name, sink in self.sinks.items():
            # In a thread, since a sink may wait for the network for ever.
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
        except Exception as error:  # a disk, a network, whatever a sink's package raises
            self.lost[name] += 1
            if self.lost[name] == 1:
                log.warning("%s cannot be written (%s): the training goes on", name, line_of(error))
