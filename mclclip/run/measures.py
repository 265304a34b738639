"""Measures of training steps: speed, peak memory, traces, and NaN and infinity.

A diverging training raises no error by itself: NaN spreads, and the run would go on to its end
with useless weights. Bad steps are counted on the device, so that no step waits for it; the counts
are read when metrics are copied to the host anyway.
"""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mclclip.ranks import collectives

log = logging.getLogger("mclclip")

PHASES = ("start", "data_wait", "forward", "backward", "optimizer", "checkpoint")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_ROWS = 30  # operators in a profile's table
# The fp16 loss scale starts at 65,536 and is halved by every skipped step. After 16 of them it is
# 1, and no longer explains why gradients overflow.
_MANY = 16


# --- NaN and infinity --------------------------------------------------------------------------


class NotFinite(RuntimeError):
    """The training has diverged: its loss, gradient or state is not finite at ``step``.

    All ranks raise it together.
    """

    def __init__(self, what: str, step: int) -> None:
        super().__init__(what)
        self.step = step


class StepWatch:
    """Counts the steps of this rank whose loss or gradient norm is not finite.

    ``leaves_out``: whether the engine skips the weight update of such steps. Then only many of them
    in a row are warned of; otherwise the first one has spoiled the weights. ``judge`` takes the
    maximum of each of the ``counts`` over the ranks.
    """

    def __init__(self, leaves_out: bool = False) -> None:
        self.leaves_out = leaves_out
        # Steps from the first bad one on (0: none yet), and bad ones up to the last step.
        self.counts: dict[str, Tensor | int] = {"max_since": 0, "max_in_a_row": 0}

    def take(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Counts one more step, from its 0-dimensional tensors; does not wait for the device."""
        bad = ~torch.isfinite(loss.detach() + grad_norm)
        since, in_a_row = self.counts.values()
        self.counts = {
            "max_since": since + ((since > 0) | bad),
            "max_in_a_row": (in_a_row + 1) * bad,
        }

    def judge(self, done: int, max_since: int, max_in_a_row: int) -> None:
        """Raises NotFinite if one of the ``done`` steps was not finite and was not skipped.

        Warns of many skipped steps in a row. All ranks must call this with equal counts.
        """
        if max_since and not self.leaves_out:
            first = done - max_since + 1
            raise NotFinite(f"the loss or its gradient is not finite since step {first}", first)
        if max_in_a_row >= _MANY and collectives.rank() == 0:
            log.warning(
                "the last %d steps up to step %d were left out, since their loss or gradient is "
                "not finite: nothing is learned; lower lr, or start from other weights",
                max_in_a_row, done,
            )  # fmt: skip


def not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """The names of the tensors that hold a NaN or an infinity. Waits for the device.

    Of a DTensor only the local part is read. Values that are no floating-point tensors are ignored.
    """
    extremes: dict[str, tuple[Tensor, Tensor]] = {}
    for name, value in tensors.items():
        local = value.to_local() if hasattr(value, "to_local") else value
        if isinstance(local, Tensor) and local.is_floating_point() and local.numel():
            # With a NaN inside, both extremes are NaN. One pass without a copy: on a CPU this is
            # many times as fast as isfinite().all().
            extremes[name] = torch.aminmax(local.detach())
    return [n for n, pair in extremes.items() if not all(math.isfinite(x.item()) for x in pair)]


# --- speed and memory --------------------------------------------------------------------------


class Meter:
    """Speed since the last reading: steps, samples per second, share of time waiting for data."""

    def __init__(self, global_batch: int, world_size: int) -> None:
        self.global_batch, self.world_size = global_batch, world_size
        self.steps, self.wait_s, self.since = 0, 0.0, time.perf_counter()

    def read(self, wait_s: float | None = None) -> dict[str, float]:
        """The figures since the last reading; begins the next period.

        ``wait_s`` replaces this process's own seconds of waiting for data.
        """
        seconds = max(time.perf_counter() - self.since, 1e-9)
        waited_s = self.wait_s if wait_s is None else wait_s
        per_s = self.steps * self.global_batch / seconds
        self.steps, self.wait_s, self.since = 0, 0.0, time.perf_counter()
        return {
            "samples_per_s": round(per_s, 1),
            "samples_per_s_per_rank": round(per_s / self.world_size, 1),
            "data_wait_share": round(min(waited_s / seconds, 1.0), 4),
            "seconds": round(seconds, 3),
        }


class PeakMemory:
    """Peak memory of this process since this object was made, in all and by phase.

    On a GPU this is what torch has allocated there, otherwise resident main memory, without that
    of loader workers. Reading it never waits for the device. ``ended`` marks the end of a phase;
    it does nothing while ``watching`` is False. Resident memory is measured by phase only where
    /proc/self/clear_refs can be written (``by_phases``; Linux).
    """

    def __init__(self, device: torch.device) -> None:
        self.watching = self.by_phases = True
        self.by_phase: dict[str, int] = {}
        self._whole = 0
        self.device = device
        self._reset()

    def restart(self) -> None:
        """Begins a phase now; the memory used since the last one ended belongs to no phase."""
        if self.watching:
            self._take()

    def ended(self, name: str) -> None:
        """Ends the phase ``name`` (one of PHASES), which began at the last end or restart."""
        if self.watching and self.by_phases:
            self.by_phase[name] = max(self.by_phase.get(name, 0), self._take())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the block as the phase ``name``, also while ``watching`` is False."""
        before, self.watching = self.watching, True
        self.restart()
        try:
            yield
            self.ended(name)
        finally:
            self.watching = before

    def figures(self) -> dict[str, float]:
        """The peaks so far in GiB: ``memory_gib`` in all, and ``memory_PHASE_gib`` by phase.

        A phase that was never measured has 0.
        """
        self._take()
        named = {"memory_gib": self._whole}
        named |= {f"memory_{name}_gib": self.by_phase.get(name, 0) for name in PHASES}
        return {name: round(number / 2**30, 4) for name, number in named.items()}

    def _take(self) -> int:
        """Peak bytes since the last call; resets the high-water mark."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        elif self.by_phases:
            line = next(s for s in _STATUS.read_text().splitlines() if s.startswith("VmHWM:"))
            peak = int(line.split()[1]) * 1024
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        self._whole = max(self._whole, peak)
        self._reset()
        return peak

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.by_phases:
            try:
                _CLEAR.write_text("5")  # the kernel's number for the mark of resident memory
            except OSError as error:
                self.by_phases = False
                log.info("peak memory is not measured by phase: %s: %s", _CLEAR, error.strerror)


# --- traces ------------------------------------------------------------------------------------


class StepProfiler:
    """Traces of the steps ``steps`` (the first step of a training is 0) below ``directory``.

    A trace ``step_00000012_rank0.json.gz`` opens in chrome://tracing or ui.perfetto.dev; beside it
    lies a table of the operators that took longest. Only the first rank is traced. Steps from
    ``total`` on are warned of, since how many steps there are may depend on the data.
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
        """Runs the work of a step, and records it if the step was chosen."""
        if step not in self.steps:
            yield
            return
        activities, by = [ProfilerActivity.CPU], "self_cpu_time_total"
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            by = "self_device_time_total"
            torch.cuda.synchronize(self.device)  # else work of earlier steps would be recorded too
        with profile(activities=activities) as recorded:
            yield
        base = self.directory / f"step_{step:08d}_rank{self.rank}"
        trace, table = base.with_suffix(".json.gz"), base.with_suffix(".txt")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(trace))
            table.write_text(recorded.key_averages().table(sort_by=by, row_limit=_ROWS))
        except (OSError, RuntimeError) as error:  # such as a full disk
            log.warning("profile %s cannot be written (%s): the training goes on", base, error)
        else:
            log.info("profile: %s and %s", trace, table.name)
