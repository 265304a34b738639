"""What is measured of steps: NaN and infinity, memory by phase, traces; no step waits for it."""

from __future__ import annotations

import gzip
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mclclip.run import recorder as measures
from mclclip.run.recorder import NotFinite, PeakMemory, StepProfiler, StepWatch, not_finite
from tests.benchmarks import memory
from tests.device_waits import Readings

BAD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_one_number_is_found_at_every_place(bad: float, dtype: torch.dtype) -> None:
    """Vector instructions take the numbers eight by eight, with a rest at the end."""
    for place in range(37):
        values = torch.linspace(-3, 3, 37).to(dtype)
        assert not not_finite({"a": values})
        values[place] = bad
        assert not_finite({"good": torch.ones(3), "a": values, "b": values[place]}) == ["a", "b"]


def watch_of(figures: list[float], norms: dict[int, float] | None = None) -> StepWatch:
    watch, norms = StepWatch(), norms or {}
    for step, loss in enumerate(figures):
        watch.take(torch.tensor(loss, requires_grad=True), torch.tensor(norms.get(step, 1.0)))
    return watch


def counts_of(watch: StepWatch) -> dict[str, int]:
    return {name: int(value) for name, value in watch.counts.items()}


@pytest.mark.parametrize("bad", BAD)
def test_the_first_bad_step_is_told_though_later_ones_are_finite(bad: float) -> None:
    """The row of a class center may be spoiled and not be drawn again for long."""
    watch = watch_of([1.0, 1.0, bad, 1.0, bad, 1.0])
    assert counts_of(watch) == {"max_since": 4, "max_in_a_row": 0}
    with pytest.raises(NotFinite, match="not finite since step 103$") as caught:
        watch.raise_if_diverged(106, **counts_of(watch))
    assert caught.value.step == 103


@pytest.mark.parametrize("bad", BAD)
def test_the_gradient_counts_too(bad: float) -> None:
    assert counts_of(watch_of([1.0] * 4, {3: bad})) == {"max_since": 1, "max_in_a_row": 1}
    assert counts_of(watch_of([bad], {0: bad})) == {"max_since": 1, "max_in_a_row": 1}


def test_finite_steps_are_no_matter() -> None:
    watch = watch_of([1.0, 1e30, -5.0])
    assert counts_of(watch) == {"max_since": 0, "max_in_a_row": 0}
    watch.raise_if_diverged(3, **counts_of(watch))
    StepWatch().raise_if_diverged(0, **counts_of(StepWatch()))


@pytest.mark.parametrize(("many", "warned"), [(15, 0), (16, 1)])
def test_steps_left_out_are_a_warning_where_they_are_many(
    many: int, warned: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("mclclip"), "propagate", True)
    caplog.set_level(logging.WARNING, "mclclip")  # whatever a test before this one left
    watch = watch_of([math.nan, 1.0] + [math.nan] * many)
    watch.leaves_out = True
    watch.raise_if_diverged(40, **counts_of(watch))
    # A test before this one may have left the capture at two loggers: one record comes twice then.
    assert len({id(record) for record in caplog.records if record.name == "mclclip"}) == warned
    assert warned == ("the last 16 steps up to step 40 were left out" in caplog.text)
    watch.take(torch.tensor(1.0), torch.tensor(1.0))
    assert counts_of(watch)["max_in_a_row"] == 0


def test_no_step_waits_for_the_device() -> None:
    one: Tensor = torch.tensor(1.0)
    with Readings() as readings:
        watch = StepWatch()
        for _ in range(3):
            watch.take(one, one * math.nan)
        assert readings.count == 0
        assert counts_of(watch) == {"max_since": 3, "max_in_a_row": 3}
        assert readings.count == 2  # they would have been seen


CPU = torch.device("cpu")
MIB = 2**20
Measured = list[tuple[dict[str, int], dict[str, float]]]  # peaks by phase, figures


def can_reset() -> bool:
    return PeakMemory(CPU).by_phases


# --- memory ------------------------------------------------------------------------------------


def touch(mib: int) -> None:
    """Has this much memory in use for a moment."""
    # Beyond the C library's threshold, memory is given back to the system at once.
    torch.ones(mib * MIB, dtype=torch.uint8)


def by_phase() -> PeakMemory:
    """Two phases of 300 and 100 MiB."""
    peaks = PeakMemory(CPU)
    peaks.ended("start")
    touch(300)
    peaks.ended("forward")
    touch(100)
    peaks.ended("backward")
    return peaks


def partly_watched() -> PeakMemory:
    """300 MiB that nobody watches, and a checkpoint of 100."""
    peaks = PeakMemory(CPU)
    peaks.ended("start")
    peaks.watching = False
    touch(300)
    peaks.ended("forward")
    with peaks.phase("checkpoint"):  # always measured
        touch(100)
    assert not peaks.watching
    peaks.watching = True
    peaks.restart()
    peaks.ended("backward")
    return peaks


def measure_both() -> Measured:
    return [(peaks.by_phase, peaks.figures()) for peaks in (by_phase(), partly_watched())]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """In a process that was just started: the kernel takes back what an older one has not touched
    for a while, so that it may hold less at its peak than it held before."""
    if not can_reset():
        pytest.skip("/proc/self/clear_refs cannot be written here")
    return memory.in_fresh_process(measure_both)


def test_each_phase_has_its_own_peak(measured: Measured) -> None:
    peaks, figures = measured[0]
    assert 250 < (peaks["forward"] - peaks["start"]) / MIB < 350
    assert 50 < (peaks["backward"] - peaks["start"]) / MIB < 150
    assert figures["memory_gib"] == figures["memory_forward_gib"]
    assert figures["memory_checkpoint_gib"] == 0.0  # never measured


def test_what_nobody_watches_counts_in_all_but_for_no_phase(measured: Measured) -> None:
    peaks, figures = measured[1]
    assert set(peaks) == {"start", "checkpoint", "backward"}
    assert 50 < (peaks["checkpoint"] - peaks["start"]) / MIB < 150
    assert (peaks["backward"] - peaks["start"]) / MIB < 50
    assert figures["memory_gib"] > (peaks["start"] + 250 * MIB) / 2**30


def test_without_a_mark_to_set_back_there_is_the_whole_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measures, "CLEAR", tmp_path / "no" / "such")
    with caplog.at_level(logging.INFO, "mclclip"):
        peaks = PeakMemory(CPU)
        for phase in measures.PHASES:
            peaks.ended(phase)
    figures = peaks.figures()
    assert 0.01 < figures.pop("memory_gib") < 100
    assert set(figures.values()) == {0.0}
    assert caplog.text.count("peak memory is not measured by phase") == 1


def test_on_a_gpu_the_allocator_is_asked_about_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No counter that waits for the device is read, and never another device's."""
    device, peak, asked = torch.device("cuda", 1), SimpleNamespace(gib=3), []

    def read(of: torch.device) -> int:
        asked.append(of)
        return peak.gib * 2**30

    def reset(of: torch.device) -> None:
        asked.append(of)
        peak.gib = 1

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", read)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    peaks = PeakMemory(device)
    peak.gib = 2
    peaks.ended("forward")
    peaks.ended("backward")
    assert peaks.by_phase == {"forward": 2 * 2**30, "backward": 2**30}
    assert peaks.figures()["memory_gib"] == 2.0 and set(asked) == {device}


# --- traces ------------------------------------------------------------------------------------


def work(profiler: StepProfiler, steps: int) -> None:
    for step in range(steps):
        with profiler.step(step):
            torch.ones(8, 8) @ torch.ones(8, 8)


def test_chosen_steps_leave_a_trace_and_a_table(tmp_path: Path) -> None:
    work(StepProfiler(tmp_path / "profile", [1, 3], 4, CPU), 4)
    names = [f"step_0000000{step}_rank0.{kind}" for step in (1, 3) for kind in ("json.gz", "txt")]
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == names
    trace = json.loads(gzip.decompress((tmp_path / "profile" / names[0]).read_bytes()))
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}
    assert "aten::mm" in (tmp_path / "profile" / names[1]).read_text()


def test_no_profiler_runs_where_no_step_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "profile", None)  # calling it would fail
    work(StepProfiler(tmp_path / "profile", [], 3, CPU), 3)
    work(StepProfiler(tmp_path / "profile", [1], 3, CPU, rank=1), 3)  # the first rank is traced
    assert not (tmp_path / "profile").exists()


def test_a_trace_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    work(StepProfiler(tmp_path / "profile", [0], 1, CPU), 1)
    assert "cannot be written" in caplog.text
