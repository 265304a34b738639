"""What a training leaves behind beside checkpoints: rows of metrics, and its bad samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mclclip import runlog
from mclclip.parallel import collectives
from mclclip.parallel.process_group import Context

log = logging.getLogger("mclclip")


class _Read(Protocol):
    """What the recorder looks at in a batch (data.training_batches.Batch)."""

    group_size: int
    replaced: dict[int, str]


class Recorder:
    """Metrics of the steps since the last row, and the samples that had to be replaced.

    ``share_bad`` makes this rank's replaced samples known to all ranks and returns how many are
    known (data.bad_samples.BadSamples.share); it is called by all ranks at every row.
    """

    def __init__(
        self,
        directory: Path,
        context: Context,
        *,
        name: str,
        global_batch: int,
        start: int,
        share_bad: Callable[[Mapping[int, str]], int],
        track: list[str],
        config: Mapping[str, Any],
    ) -> None:
        self.name, self.context, self.global_batch = name, context, global_batch
        self.meter = runlog.Meter(global_batch, context.world_size)
        self.share_bad = share_bad
        self.replaced: dict[int, str] = {}
        self.group_size = 0
        self.metrics = None
        if context.is_main:
            sinks = [runlog.make_sink(sink, directory / sink, config) for sink in track]
            path = directory / "metrics.jsonl"
            self.metrics = runlog.MetricsLog(path, resume_step=start, sinks=sinks)

    def take(self, batch: _Read) -> None:
        """Notes one step's batch."""
        self.meter.steps += 1
        self.replaced.update(batch.replaced)
        self.group_size = batch.group_size

    def write(self, done: int, parts: Mapping[str, Tensor], lr: float) -> None:
        """Writes one row (rank 0) after step ``done``; a collective."""
        num_bad = self.share_bad(self.replaced)
        self.replaced = {}
        means = {
            name: float(collectives.all_reduce_sum(value.double())) / self.context.world_size
            for name, value in parts.items()
        }
        row = means | {
            "samples_seen": done * self.global_batch,
            "lr": lr,
            "group_size": self.group_size,
            "bad_samples": num_bad,
            **self.meter.read(),
        }
        if self.metrics is not None:
            self.metrics.write(done, row)
            log.info(
                "%s step %d: loss %.4f lr %.2e scale %.1f, %.0f samples/s, waiting %.0f %%",
                self.name, done, row["loss"], lr, row["logit_scale"],
                row["samples_per_s"], 100 * row["data_wait_share"],
            )  # fmt: skip

    def close(self) -> None:
        """Closes metrics.jsonl and the sinks."""
        if self.metrics is not None:
            self.metrics.close()
