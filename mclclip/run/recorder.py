"""Records a training: rows of metrics (loss, speed, memory), samples that failed to decode, traces.

It also ends a training that has diverged. Such a training raises no error by itself: NaN spreads,
and the run would go on to its end with useless weights.

Between two rows nothing here waits for the device. Figures stay tensors on the device until a row
is written, and steps with NaN or infinity are counted there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import runlog
from mclclip.run.trackers import Trackers

_STATUS = Path("/proc/self/status")
_PROFILE_ROWS = 30  # operators in the table of a profile
# A warning follows this many skipped steps in a row. The fp16 loss scale starts at 65,536 and is
# halved by every skipped step: after 16 it is 1, and no longer explains why gradients overflow.
_MANY_SKIPPED = 16


# --- NaN and infinity --------------------------------------------------------------------------


class NotFinite(RuntimeError):
    """The training has diverged: loss, gradient or state holds NaN or infinity after ``step``.

    All ranks raise it together.
    """

    def __init__(self, what: str, step: int) -> None:
        super().__init__(what)
        self.step = step


class StepWatch:
    """Counts the bad steps of this rank: those whose loss or gradient norm is not finite.

    ``leaves_out``: the engine skips the weight update of a bad step. Then only many bad steps in a
    row cause a warning; otherwise the first one has spoiled the weights. ``counts`` holds tensors;
    the caller passes their maxima over the ranks to `raise_if_diverged`.
    """

    def __init__(self, leaves_out: bool = False) -> None:
        self.leaves_out = leaves_out
        # max_since: steps since the first bad one, itself included (0: none was bad).
        # max_in_a_row: bad steps in a row up to the last step.
        self.counts: dict[str, Tensor | int] = {"max_since": 0, "max_in_a_row": 0}

    def take(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Counts a step, given its 0-dimensional tensors; does not wait for the device."""
        bad = ~torch.isfinite(loss.detach() + grad_norm)
        since, in_a_row = self.counts.values()
        self.counts = {
            "max_since": since + ((since > 0) | bad),
            "max_in_a_row": (in_a_row + 1) * bad,
        }

    def raise_if_diverged(self, done: int, max_since: int, max_in_a_row: int) -> None:
        """Raises NotFinite if one of the first ``done`` steps was bad and was not skipped.

        Warns if many steps in a row were skipped. All ranks must pass the same numbers.
        """
        if max_since and not self.leaves_out:
            first = done - max_since + 1
            raise NotFinite(f"the loss or its gradient is not finite since step {first}", first)
        if max_in_a_row >= _MANY_SKIPPED and collectives.rank() == 0:
            log.warning(
                "the last %d steps up to step %d were left out, since their loss or gradient is "
                "not finite: nothing is learned; lower lr, or start from other weights",
                max_in_a_row, done,
            )  # fmt: skip


def not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tensors that hold NaN or infinity. Waits for the device.

    Reads only the local part of a DTensor, and ignores values that are no floating-point tensors.
    """
    extremes: dict[str, tuple[Tensor, Tensor]] = {}
    for name, value in tensors.items():
        local = value.to_local() if hasattr(value, "to_local") else value
        if isinstance(local, Tensor) and local.is_floating_point() and local.numel():
            # If a NaN is inside, both extremes are NaN. This is one pass without a copy, on a CPU
            # many times as fast as isfinite().all().
            extremes[name] = torch.aminmax(local.detach())
    return [n for n, pair in extremes.items() if not all(math.isfinite(x.item()) for x in pair)]


# --- speed and memory --------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The operations of a rank's samples, and the rate that its device could reach.

    operations    floating-point operations of a sample, from each of some steps on (first 0): they
                  change with the image size; empty: not counted
    peak_tflops   highest rate of the device, in TFLOP/s; None: unknown
    """

    operations: Sequence[tuple[int, int]] = ()
    peak_tflops: float | None = None

    def of_step(self, step: int) -> int:
        """Returns the operations of a sample in the step number ``step``, counted from 0."""
        return next((count for first, count in reversed(self.operations) if first <= step), 0)


_NOT_COUNTED = Work()


class Meter:
    """Measures samples per second, the share of the device's peak, and the share of time spent
    waiting for data.

    The caller adds steps and ``wait_s``; `read` returns the figures and starts anew.
    """

    def __init__(self, global_batch: int, world_size: int, work: Work = _NOT_COUNTED) -> None:
        self.global_batch, self.world_size, self.work = global_batch, world_size, work
        self._start()

    def _start(self) -> None:
        self.steps, self.operations, self.wait_s = 0, 0, 0.0
        self.since = time.perf_counter()

    def add_step(self, step: int) -> None:
        """Counts the step number ``step``, counted from 0."""
        self.steps += 1
        self.operations += self.work.of_step(step)

    def read(self, wait_s: float | None = None) -> dict[str, float]:
        """Returns the figures since the last call, and starts the next period.

        ``wait_s``: seconds spent waiting for data (default: those of this process).
        """
        seconds = max(time.perf_counter() - self.since, 1e-9)
        waited_s = self.wait_s if wait_s is None else wait_s
        per_s = self.steps * self.global_batch / seconds
        rates = self._rates(seconds)
        self._start()
        return {
            "samples_per_s": round(per_s, 1),
            "samples_per_s_per_rank": round(per_s / self.world_size, 1),
            **rates,
            "data_wait_share": round(min(waited_s / seconds, 1.0), 4),
            "seconds": round(seconds, 3),
        }

    def _rates(self, seconds: float) -> dict[str, float]:
        """Returns a rank's ``tflops_per_s_per_rank`` and, where the device's peak is known, ``mfu``
        (model FLOPs utilization: PaLM, arXiv:2204.02311, appendix B), its share of that peak."""
        local_batch = self.global_batch / self.world_size
        tflops = self.operations * local_batch / seconds / 1e12
        rates = {"tflops_per_s_per_rank": round(tflops, 6)} if self.work.operations else {}
        peak = self.work.peak_tflops
        return rates | ({"mfu": round(tflops / peak, 4)} if rates and peak else {})


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process in bytes, without waiting for the device.

    On a GPU it is what torch has allocated there since the training began, otherwise the resident
    main memory since the process began, without that of loader workers.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage would count the process that started this one too.
    line = next(s for s in _STATUS.read_text().splitlines() if s.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# --- traces ------------------------------------------------------------------------------------


class StepProfiler:
    """Writes traces of the chosen ``steps`` (the first step is 0) of rank 0 to ``directory``.

    A trace ``step_00000012_rank0.json.gz`` opens in chrome://tracing or ui.perfetto.dev; beside it
    lies a table of the operators that took longest. Warns of chosen steps that the training of
    ``total`` steps does not reach: it is no error, since the data may determine that number.
    """

    def __init__(
        self, directory: Path, steps: Sequence[int], total: int, device: torch.device, rank: int = 0
    ) -> None:
        self.directory, self.device, self.rank = Path(directory), device, rank
        self.steps = frozenset(steps) if rank == 0 else frozenset()
        outside = sorted(step for step in self.steps if step >= total)
        if outside:
            log.warning("profile_steps: there is no step %s, the last is %d", outside, total - 1)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Traces the work in the block if step number ``step`` was chosen."""
        if step not in self.steps:
            yield
            return
        activities, by = [ProfilerActivity.CPU], "self_cpu_time_total"
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            by = "self_device_time_total"
            torch.cuda.synchronize(self.device)  # else the trace would hold work of earlier steps
        with profile(activities=activities) as recorded:
            yield
        base = self.directory / f"step_{step:08d}_rank{self.rank}"
        trace, table = base.with_suffix(".json.gz"), base.with_suffix(".txt")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(trace))
            table.write_text(recorded.key_averages().table(sort_by=by, row_limit=_PROFILE_ROWS))
        except (OSError, RuntimeError) as error:  # such as a full disk
            log.warning("profile %s cannot be written (%s): the training goes on", base, error)
        else:
            log.info("profile: %s and %s", trace, table.name)


# --- the recorder ------------------------------------------------------------------------------

log = logging.getLogger("mclclip")

# Parts of the loss that a line of the log shows, if the objective returns them.
_LOGGED = {
    "logit_scale": "scale %.1f",
    "positive_loss": "positive %.3f",
    "negative_loss": "negative %.3f",
    "positive_cosine": "cosine %.3f",
    "positives_per_row": "positives per row %.2f",
    "near_copies": "near copies %.0f",
}


class _Read(Protocol):
    """The two fields of `data.batches.Batch` that the recorder reads."""

    group_size: int
    replaced: dict[int, str]


R = TypeVar("R", bound=_Read)


@dataclass(eq=False)
class Recorder:
    """Writes the rows of one training; the training loop calls it once per step and per epoch.

    directory        gets metrics.jsonl (a row per ``log_every`` steps and after the last step),
                     epochs.jsonl (a row per epoch, or for the part of it that ran), warnings.jsonl
                     (if there are any) and the folders of the trackers
    name             names the training in log lines, such as 'stage 1'
    start, total     steps done before this process, and steps of the whole training
    share_bad        tells all ranks this rank's replaced samples and returns how many all ranks
                     know (data.sample_index.SharedBadSamples.add); all ranks call it at every row
    track, config    names of the trackers, such as ``["wandb"]``, and the options they store
    evaluates        True if there will be evaluations, whose rows go to evaluations.jsonl
    leaves_out       True if the engine skips bad steps, see `StepWatch`
    work             what a rank computes, for the rates of operations

    Raises ValueError on all ranks if the package of a tracker is not installed.
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
    evaluates: bool = False
    leaves_out: bool = False
    work: Work = _NOT_COUNTED

    def __post_init__(self) -> None:
        self.row = Meter(self.global_batch, self.context.world_size, self.work)
        self.epoch = Meter(self.global_batch, self.context.world_size, self.work)
        self.replaced: dict[int, str] = {}
        self.group_size = 0
        self.loss_sum: Tensor | float = 0.0
        self.watch = StepWatch(self.leaves_out)
        self._latest = ""  # text on the last row, until a line of the log has shown it
        self._began = time.perf_counter()
        if self.context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.context.device)
        self.metrics = collectives.raise_on_every_rank(self._open_log)

    def _open_log(self) -> runlog.MetricsLog | None:
        if not self.context.is_main:
            return None
        directory, start = self.directory, self.start
        trackers = Trackers.open(self.track, directory, config=self.config)
        return runlog.MetricsLog(
            directory, resume_step=start, trackers=trackers, evaluates=self.evaluates
        )

    def read_batches(self, batches: Iterable[R]) -> Iterator[R]:
        """Yields ``batches``, one per step from ``start`` on, measures the time that reading them
        takes, and shows the progress."""
        timed = self._timed(batches)
        return runlog.progress(
            timed, total=self.total, description=self.name, start=self.start, detail=self.latest
        )

    def _timed(self, batches: Iterable[R]) -> Iterator[R]:
        self._began = time.perf_counter()
        self.row.read()
        self.epoch.read()
        source = iter(batches)
        while True:
            before = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            wait_s = time.perf_counter() - before
            self.row.wait_s += wait_s
            self.epoch.wait_s += wait_s
            self.replaced.update(batch.replaced)
            self.group_size = batch.group_size
            yield batch

    def take(self, done: int, parts: Mapping[str, Tensor], lr: float) -> Mapping[str, Any] | None:
        """Records the step number ``done``, counted from 1; if a row is due, writes and returns it.

        ``parts``: the parts of the loss by name, with 'loss' and 'grad_norm'. All ranks call this
        together. Raises NotFinite on all ranks if a row is due and the training has diverged.
        """
        self.row.add_step(done - 1)
        self.epoch.add_step(done - 1)
        self.loss_sum = self.loss_sum + parts["loss"].detach().double()
        self.watch.take(parts["loss"], parts["grad_norm"])
        return self._write(done, parts, lr) if self.is_row_due(done) else None

    def raise_if_diverged(self, done: int) -> None:
        """Raises NotFinite if the first ``done`` steps diverged. All ranks call it together."""
        every = self._gather(self.watch.counts)
        self.watch.raise_if_diverged(
            done, **{name: int(max(values)) for name, values in every.items()}
        )

    def end_epoch(self, done: int, leaving: bool = False) -> None:
        """Writes the epoch's row if it ends after ``done`` steps. All ranks call it together.

        ``leaving``: this process ends here, so the row is due for the part of the epoch that ran.
        """
        steps = self.epoch.steps
        if not steps or not (leaving or done % self.steps_per_epoch == 0 or done == self.total):
            return
        mean, self.loss_sum = self.loss_sum / steps, 0.0
        row = self._figures(done, self.epoch, {"loss": mean})
        if self.metrics is None:
            return
        self.metrics.write(done, row | {"first_step": done - steps, "steps": steps}, "epochs")
        if leaving or done == self.total:
            bad = row["bad_samples"]
            words = [f"{self.name}: {done} of {self.total}", self.latest()]
            words += [f"peak memory {row['memory_gib']:.2f} GiB"]
            words += [f"{runlog.count_of(bad, 'bad sample')}"] if bad else []
            words += [f"{time.perf_counter() - self._began:.0f} s"]
            log.info("%s", ", ".join(filter(None, words)))

    def latest(self) -> str:
        """Returns the text on the last row for a line of the log; the next call returns ''."""
        text, self._latest = self._latest, ""
        return text

    def write_evaluation(self, done: int, figures: Mapping[str, float], seconds: float) -> None:
        """Writes ``figures`` of the model after ``done`` steps, such as ``{"imagenet": 41.2}``.

        The ``seconds`` that the evaluation took do not count as training.
        """
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

    def earlier_rows(self) -> list[dict[str, Any]]:
        """Returns the rows of steps before ``start`` on rank 0; on other ranks nothing."""
        return runlog.read_records(self.directory / "metrics.jsonl") if self.metrics else []

    def warn(self, done: int, name: str, text: str) -> None:
        """Logs a warning after ``done`` steps and adds it to warnings.jsonl; ``name`` identifies it
        there, such as 'collapse'."""
        if self.metrics is not None:
            log.warning("%s step %d: %s", self.name, done, text)
            self.metrics.write(done, {"warning": name, "text": text}, "warnings")

    def close(self) -> None:
        """Closes files and trackers; waits for trackers at most ``trackers.CLOSE_S`` seconds."""
        if self.metrics is not None:
            self.metrics.close()

    def is_row_due(self, done: int) -> bool:
        """Returns True if metrics.jsonl gets a row after ``done`` steps."""
        return done % self.log_every == 0 or done == self.total

    def _write(self, done: int, parts: Mapping[str, Tensor], lr: float) -> dict[str, Any]:
        row = self._figures(done, self.row, {**parts, **self.watch.counts})
        counts = {name: int(row.pop(name)) for name in self.watch.counts}
        row |= {"lr": lr, "group_size": self.group_size}
        if self.metrics is not None:
            self.metrics.write(done, row)
            parts_text = "".join(f" {t % row[name]}" for name, t in _LOGGED.items() if name in row)
            rate = ""
            if "mfu" in row:
                rate = f"MFU {100 * row['mfu']:.1f} %, "
            elif "tflops_per_s_per_rank" in row:  # of a device whose peak is not known
                rate = f"{1000 * row['tflops_per_s_per_rank']:,.3g} GFLOP/s per rank, "
            self._latest = (
                f"epoch {math.ceil(row['epoch'])} of {math.ceil(self.total / self.steps_per_epoch)}"
                f", loss {row['loss']:.4f} lr {lr:.2e}{parts_text}, {row['samples_per_s']:,.0f} "
                f"samples/s, {rate}waiting {100 * row['data_wait_share']:.0f} %"
            )
            log.debug("%s step %d: %s", self.name, done, self._latest)
        self.watch.raise_if_diverged(done, **counts)
        return {"step": done, **row}

    def _figures(
        self, done: int, meter: Meter, parts: Mapping[str, Tensor | float]
    ) -> dict[str, Any]:
        """Returns the fields of a row: progress, ``parts``, speed and memory.

        Parts are averaged over the ranks; of those named ``max_...`` the maximum is taken.
        """
        num_bad = self.share_bad(self.replaced)
        self.replaced = {}
        mine = {"wait_s": meter.wait_s, "memory_bytes": peak_bytes(self.context.device)}
        every = self._gather({**parts, **mine})
        ranks = self.context.world_size
        # The slowest reader holds up all ranks, and the rank with the fullest memory fails first:
        # hence the maxima of both.
        return {
            "epoch": round(done / self.steps_per_epoch, 6),
            "samples_seen": done * self.global_batch,
            **{
                name: max(every[name]) if name.startswith("max_") else sum(every[name]) / ranks
                for name in parts
            },
            "bad_samples": num_bad,
            **meter.read(max(every["wait_s"])),
            "memory_gib": round(max(every["memory_bytes"]) / 2**30, 4),
        }

    def _gather(self, values: Mapping[str, Tensor | float]) -> dict[str, list[float]]:
        """Returns for each name the list of all ranks' numbers, by one collective."""
        mine = [
            torch.as_tensor(value, dtype=torch.float64, device=self.context.device).reshape(())
            for value in values.values()
        ]
        every = collectives.gather(torch.stack(mine)[None])
        return dict(zip(values, every.T.tolist(), strict=True))
