"""What the user sees and what stays: log lines, progress bars, metrics.jsonl, sinks."""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
log = logging.getLogger("mclclip")


def setup(rank: int = 0, level: str = "INFO") -> None:
    """Sends mclclip's log to stderr: rank 0 at ``level``, the others warnings with their rank."""
    handler = logging.StreamHandler(sys.stderr)
    where = "" if rank == 0 else f" [rank {rank}]"
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {'%(levelname).1s'}{where} %(message)s", "%H:%M:%S")
    )
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(level if rank == 0 else "WARNING")


def progress(
    items: Iterable[T], *, total: int | None, description: str, every_s: float = 15.0
) -> Iterator[T]:
    """Yields ``items`` under a progress bar on a terminal, with plain lines otherwise.

    Silent where the log is (ranks other than the first).
    """
    if not log.isEnabledFor(logging.INFO):
        yield from items
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(items, description, total=total, console=Console(stderr=True))
        return
    last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last >= every_s:
            last = time.monotonic()
            log.info("%s: %d of %s", description, done, "?" if total is None else total)


def memory_gib() -> float:
    """Peak memory of this process in GiB: resident on the CPU, allocated on the GPU if used."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        # A run on the CPU of a machine with a GPU has allocated nothing there.
        if allocated := torch.cuda.max_memory_allocated():
            return float(allocated) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Meter:
    """Speed since the last reading: steps, samples per second, share of time waiting for data."""

    def __init__(self, global_batch: int, world_size: int) -> None:
        self.global_batch, self.world_size = global_batch, world_size
        self.steps, self.wait_s, self.since = 0, 0.0, time.perf_counter()

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields ``batches`` and notes the time spent waiting for each."""
        source = iter(batches)
        while True:
            before = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self.wait_s += time.perf_counter() - before
            yield batch

    def read(self) -> dict[str, float]:
        """The figures since the last reading, which starts anew."""
        elapsed_s = max(time.perf_counter() - self.since, 1e-9)
        per_s = self.steps * self.global_batch / elapsed_s
        figures = {
            "samples_per_s": round(per_s, 1),
            "samples_per_s_per_rank": round(per_s / self.world_size, 1),
            "data_wait_share": round(min(self.wait_s / elapsed_s, 1.0), 4),
            "memory_gib": round(memory_gib(), 3),
        }
        self.steps, self.wait_s, self.since = 0, 0.0, time.perf_counter()
        return figures


class MetricSink(Protocol):
    """Where a row of training metrics goes besides metrics.jsonl."""

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Takes one row."""

    def close(self) -> None:
        """Flushes."""


class TensorboardSink:
    """Scalars for tensorboard under ``directory`` (needs the extra ``track``)."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))  # type: ignore[no-untyped-call, unused-ignore]

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Writes every number of the row as a scalar."""
        for name, value in row.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbSink:
    """Rows for Weights & Biases under ``directory`` (needs the extra ``track``)."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        directory.mkdir(parents=True, exist_ok=True)
        # One id per training, kept on disk: a resumed run goes on in the same wandb run.
        id_file = directory / "run_id"
        if not id_file.exists():
            id_file.write_text(wandb.util.generate_id())
        self._run: Any = wandb.init(
            project="mclclip",
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(directory),
            config=dict(config),
        )

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Logs the row at its step."""
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        """Finishes the wandb run."""
        self._run.finish()


def make_sink(name: str, directory: Path, config: Mapping[str, Any]) -> MetricSink:
    """The sink ``tensorboard`` or ``wandb``; ValueError where its package is not installed."""
    try:
        return TensorboardSink(directory) if name == "tensorboard" else WandbSink(directory, config)
    except ImportError as error:
        raise ValueError(f"track: {name} is not installed: pip install 'mclclip[track]'") from error


class MetricsLog:
    """``metrics.jsonl``: one row per logged step, cut back to the step a run resumes from."""

    def __init__(self, path: Path, *, resume_step: int, sinks: Iterable[MetricSink] = ()) -> None:
        self.path = Path(path)
        self.sinks = list(sinks)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in self._lines() if line["step"] <= resume_step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text(text)
        temporary.replace(self.path)
        self._file = open(self.path, "a", buffering=1)

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # the row being written when the run was killed
                log.info("%s: dropped a half-written last row", self.path)

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Appends one row and passes it to the sinks."""
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        for sink in self.sinks:
            sink.write(step, row)

    def close(self) -> None:
        """Closes the file and the sinks."""
        self._file.close()
        for sink in self.sinks:
            sink.close()
