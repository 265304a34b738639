"""Peak memory by phase of a training step, and torch.profiler traces of chosen steps."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger("mclclip")

PHASES = ("start", "data_wait", "forward", "backward", "optimizer", "checkpoint")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_ROWS = 30  # operators in a profile's table


class PeakMemory:
    """Peak memory of this process since this object was made, in all and by phase.

    On a GPU this is what torch has allocated there, otherwise resident main memory, without that
    of loader workers. Reading it never waits for the device. ``ended`` marks the end of a phase;
    it does nothing while ``watching`` is False. Resident memory is measured by phase only where
    /proc/self/clear_refs can be written (Linux).
    """

    def __init__(self, device: torch.device) -> None:
        self.watching = True
        self.by_phase: dict[str, int] = {}
        self._whole = 0
        on_gpu = device.type == "cuda"
        self._counter = _DeviceMemory(device) if on_gpu else _MainMemory()
        self._counter.reset()

    def restart(self) -> None:
        """Begins a phase now; the memory used since the last one ended belongs to no phase."""
        if self.watching:
            self._take()

    def ended(self, name: str) -> None:
        """Ends the phase ``name`` (one of PHASES), which began at the last end or restart."""
        if self.watching and self._counter.can_reset:
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
        """Peak bytes since the last call; resets the counter."""
        peak = self._counter.peak()
        self._whole = max(self._whole, peak)
        self._counter.reset()
        return peak


class _DeviceMemory:
    """The high-water mark of torch's allocator on a GPU."""

    can_reset = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


class _MainMemory:
    """The high-water mark of resident memory; not every kernel lets us reset it."""

    can_reset = True

    def peak(self) -> int:
        if not self.can_reset:
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        lines = _STATUS.read_text().splitlines()
        return int(next(line for line in lines if line[:6] == "VmHWM:").split()[1]) * 1024

    def reset(self) -> None:
        if not self.can_reset:
            return
        try:
            _CLEAR.write_text("5")  # the kernel's number for the mark of resident memory
        except OSError as error:
            self.can_reset = False
            log.info("peak memory is not measured by phase: %s: %s", _CLEAR, error.strerror)


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
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self.device)  # else work of earlier steps would be recorded too
        with profile(activities=activities) as recorded:
            yield
        self._save(recorded, self.directory / f"step_{step:08d}_rank{self.rank}")

    def _save(self, recorded: profile, base: Path) -> None:
        by = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        trace, table = base.with_suffix(".json.gz"), base.with_suffix(".txt")
        try:
            base.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(trace))
            table.write_text(recorded.key_averages().table(sort_by=by, row_limit=_ROWS))
        except (OSError, RuntimeError) as error:  # such as a full disk
            log.warning("profile %s cannot be written (%s): the training goes on", base, error)
        else:
            log.info("profile: %s and %s", trace, table.name)
