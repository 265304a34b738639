"""Records a training besides its checkpoints: rows of metrics, and samples that failed to decode.

Between two rows nothing here waits for the device: figures stay tensors until a row is written.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import runlog
from mclclip.run.measures import Meter, PeakMemory, StepWatch

log = logging.getLogger("mclclip")

# Parts of the loss that a log line shows, where the objective returns them.
_LOGGED = {
    "logit_scale": "scale %.1f",
    "positive_loss": "positive %.3f",
    "negative_loss": "negative %.3f",
    "positive_cosine": "cosine %.3f",
    "positives_per_row": "positives per row %.2f",
    "equal_captions": "equal pairs %.0f",
}
_WATCHED = 3  # so many first steps have memory measured by phase, besides those that give a row


class _Read(Protocol):
    """The fields of a batch that the recorder reads (data.batches.Batch)."""

    group_size: int
    replaced: dict[int, str]


R = TypeVar("R", bound=_Read)


@dataclass(eq=False)
class Recorder:
    """Metrics of the steps since the last row, and the samples that had to be replaced.

    directory        gets metrics.jsonl (a row per ``log_every`` steps and after the last),
                     epochs.jsonl (a row per epoch, or the part of it that ran), warnings.jsonl
                     (where there are any) and the sinks
    start, total     steps done before, and in the whole training
    share_bad        makes this rank's replaced samples known to all ranks and returns how many are
                     known (data.sample_index.BadSamples.share); called by all ranks at every row
    track, config    names of the sinks, and the configuration that they store with the run
    peaks            this rank's peak memory, in its phase "start"; rows hold the ranks' maximum
    evaluates        whether there will be evaluations, whose rows go to evaluations.jsonl
    leaves_out       whether the engine skips steps that are not finite (``StepWatch``)

    ``watch`` counts the steps that are not finite, and every row judges them. Raises ValueError on
    all ranks where the package of a sink is not installed.
    """

    directory: Path
    context: Context
    _: KW_ONLY
    name: str
    global_batch: int
    start: int
    total: int
    steps_per_epoch: int
    log_every: int
    share_bad: Callable[[Mapping[int, str]], int]
    track: list[str]
    config: Mapping[str, Any]
    peaks: PeakMemory
    evaluates: bool = False
    leaves_out: bool = False

    def __post_init__(self) -> None:
        self.row = Meter(self.global_batch, self.context.world_size)
        self.epoch = Meter(self.global_batch, self.context.world_size)
        self.replaced: dict[int, str] = {}
        self.group_size = 0
        self.loss_sum: Tensor | float = 0.0
        self.watch = StepWatch(self.leaves_out)
        self.metrics = collectives.together(self._open_log)

    def _open_log(self) -> runlog.MetricsLog | None:
        if not self.context.is_main:
            return None
        where, start = self.directory, self.start
        sinks = runlog.open_sinks(self.track, where, config=self.config, resume_step=start)
        return runlog.MetricsLog(where, resume_step=start, sinks=sinks, evaluates=self.evaluates)

    def reading(self, batches: Iterable[R]) -> Iterator[R]:
        """Yields ``batches``, the steps from ``start`` on, and notes what reading them costs."""
        self.peaks.ended("start")
        self.row.read()
        self.epoch.read()
        source = iter(batches)
        for done in itertools.count(self.start + 1):
            self.peaks.watching = self.gives_row(done) or done <= self.start + _WATCHED
            self.peaks.restart()
            before = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            wait_s = time.perf_counter() - before
            self.peaks.ended("data_wait")
            self.row.wait_s += wait_s
            self.epoch.wait_s += wait_s
            self.replaced.update(batch.replaced)
            self.group_size = batch.group_size
            yield batch

    def take(self, done: int, parts: Mapping[str, Tensor], lr: float) -> Mapping[str, Any] | None:
        """Records the ``done``-th step and writes a row if one is due (then it is a collective);
        returns it.

        Raises NotFinite on all ranks where a row is due and the training has diverged.
        """
        self.row.steps += 1
        self.epoch.steps += 1
        self.loss_sum = self.loss_sum + parts["loss"].detach().double()
        self.watch.take(parts["loss"], parts["grad_norm"])
        return self._write(done, parts, lr) if self.gives_row(done) else None

    def judge(self, done: int) -> None:
        """Raises NotFinite if the training has diverged within ``done`` steps; a collective."""
        every = self._gather(self.watch.counts)
        self.watch.judge(done, **{name: int(max(values)) for name, values in every.items()})

    def end_epoch(self, done: int, leaving: bool = False) -> None:
        """Writes the epoch's row if the epoch ends after ``done`` steps (then it is a collective).

        ``leaving``: the run ends here, and the row covers the part of the epoch that ran.
        """
        steps = self.epoch.steps
        if not steps or not (leaving or done % self.steps_per_epoch == 0 or done == self.total):
            return
        mean, self.loss_sum = self.loss_sum / steps, 0.0
        row = self._figures(done, self.epoch, {"loss": mean})
        if self.metrics is None:
            return
        self.metrics.write(done, row | {"first_step": done - steps, "steps": steps}, "epochs")
        log.info(
            "%s epoch %d of %d (%d steps): loss %.4f, %.0f samples/s, waiting %.0f %%, "
            "%d bad sample(s), peak memory %.2f GiB, %.1f s",
            self.name, math.ceil(row["epoch"]), math.ceil(self.total / self.steps_per_epoch),
            steps, row["loss"], row["samples_per_s"], 100 * row["data_wait_share"],
            row["bad_samples"], row["memory_gib"], row["seconds"],
        )  # fmt: skip

    def evaluated(self, done: int, figures: Mapping[str, float], seconds: float) -> None:
        """Writes the figures of the state after ``done`` steps. The ``seconds`` that it took to
        find them do not count as training."""
        self.row.since += seconds
        self.epoch.since += seconds
        if self.metrics is None:
            return
        progress = {
            "epoch": round(done / self.steps_per_epoch, 6),
            "samples_seen": done * self.global_batch,
        }
        row = progress | {"eval_seconds": seconds} | dict(figures)
        self.metrics.write(done, row, "evaluations")
        listed = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
        log.info("%s step %d: %s", self.name, done, listed)

    def earlier_rows(self) -> Iterator[dict[str, Any]]:
        """The rows of the steps before ``start``; on rank 0 alone, which has the file."""
        return iter(()) if self.metrics is None else self.metrics.earlier_rows()

    def warn(self, done: int, name: str, text: str) -> None:
        """Logs a warning of the state after ``done`` steps, and adds it to warnings.jsonl."""
        if self.metrics is not None:
            log.warning("%s step %d: %s", self.name, done, text)
            self.metrics.write(done, {"warning": name, "text": text}, "warnings")

    def close(self) -> None:
        """Closes the files and the sinks, each sink within ``runlog.CLOSE_S`` seconds."""
        if self.metrics is not None:
            self.metrics.close()

    def gives_row(self, done: int) -> bool:
        """Whether the ``done``-th step gives a row."""
        return done % self.log_every == 0 or done == self.total

    def _write(self, done: int, parts: Mapping[str, Tensor], lr: float) -> dict[str, Any]:
        row = self._figures(done, self.row, {**parts, **self.watch.counts})
        counts = {name: int(row.pop(name)) for name in self.watch.counts}
        row |= {"lr": lr, "group_size": self.group_size}
        if self.metrics is not None:
            self.metrics.write(done, row)
            parts_text = "".join(f" {t % row[name]}" for name, t in _LOGGED.items() if name in row)
            left_s = (self.total - done) * self.global_batch / max(row["samples_per_s"], 1e-9)
            log.info(
                "%s step %d: loss %.4f lr %.2e%s, %.0f samples/s, waiting %.0f %%, %s",
                self.name, done, row["loss"], lr, parts_text,
                row["samples_per_s"], 100 * row["data_wait_share"], runlog.time_left(left_s),
            )  # fmt: skip
        self.watch.judge(done, **counts)
        return {"step": done, **row}

    def _figures(
        self, done: int, meter: Meter, parts: Mapping[str, Tensor | float]
    ) -> dict[str, Any]:
        """Fields of every row: ``parts`` over the ranks (``max_``: the maximum, else the mean),
        progress, speed and memory."""
        num_bad = self.share_bad(self.replaced)
        self.replaced = {}
        memory = self.peaks.figures()
        every = self._gather({**parts, **memory, "wait_s": meter.wait_s})
        ranks = self.context.world_size
        # Maxima: the slowest reader holds up all ranks, and the fullest rank is the first to fail.
        return {
            "epoch": round(done / self.steps_per_epoch, 6),
            "samples_seen": done * self.global_batch,
            **{
                name: max(every[name]) if name.startswith("max_") else sum(every[name]) / ranks
                for name in parts
            },
            "bad_samples": num_bad,
            **meter.read(max(every["wait_s"])),
            **{name: max(every[name]) for name in memory if max(every[name])},
        }

    def _gather(self, values: Mapping[str, Tensor | float]) -> dict[str, list[float]]:
        """Every rank's numbers, by one collective."""
        mine = [
            torch.as_tensor(value, dtype=torch.float64, device=self.context.device).reshape(())
            for value in values.values()
        ]
        every = collectives.gather(torch.stack(mine)[None])
        return dict(zip(values, every.T.tolist(), strict=True))
