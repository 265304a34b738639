"""Steps are watched for NaN, memory and traces, and no step waits for that."""

from __future__ import annotations

import gzip
import json
import logging
import math
from pathlib import Path

import pytest
import torch

from mclclip.run import recorder as measures
from mclclip.run.recorder import NotFinite, StepProfiler, StepWatch, not_finite, peak_bytes
from tests import forks

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
    """A spoiled row of the class centers may not be drawn again for a long time."""
    watch = watch_of([1.0, 1.0, bad, 1.0, bad, 1.0])
    assert counts_of(watch) == {"max_since": 4, "max_in_a_row": 0}
    with pytest.raises(NotFinite, match="not finite since step 103$") as caught:
        watch.raise_if_diverged(106, **counts_of(watch))
    assert caught.value.step == 103


def test_the_gradient_counts_too_and_finite_steps_are_no_matter() -> None:
    assert counts_of(watch_of([1.0] * 4, {3: math.inf})) == {"max_since": 1, "max_in_a_row": 1}
    assert counts_of(watch_of([math.inf], {0: math.inf})) == {"max_since": 1, "max_in_a_row": 1}
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


CPU = torch.device("cpu")

# --- memory ------------------------------------------------------------------------------------


def test_the_peak_of_main_memory_is_what_was_in_use_at_once() -> None:
    def touch() -> None:
        before = peak_bytes(CPU)
        torch.ones(2**28, dtype=torch.uint8)
        assert 2**28 - 2**22 < peak_bytes(CPU) - before < 2**28 + 2**26

    assert forks.exit_code(touch) == 0


def test_on_a_gpu_the_allocator_is_asked_about_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {torch.device("cuda", 0): 1, torch.device("cuda", 1): 3 * 2**30}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    assert peak_bytes(torch.device("cuda", 1)) == 3 * 2**30


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
