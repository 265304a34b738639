"""What the user sees: log lines, progress, metrics that a resumed run continues."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mclclip import runlog


@pytest.fixture(autouse=True)
def log() -> Iterator[logging.Logger]:
    """The log of the package, put back as it was afterwards."""
    log = logging.getLogger("mclclip")
    handlers, propagate, level = log.handlers[:], log.propagate, log.level
    yield log
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


# --- log and progress --------------------------------------------------------------------------


def test_rank_0_speaks_the_others_warn(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    runlog.setup(0)
    log.info("step %d", 3)
    log.debug("hidden")
    runlog.setup(2)
    log.info("hidden too")
    log.warning("disk is slow")
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == "" and first.endswith(" I step 3")
    assert second.endswith(" W [rank 2] disk is slow")


def test_setting_up_twice_does_not_double_lines(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    runlog.setup(0)
    runlog.setup(0)
    log.info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_progress_is_plain_lines_without_a_terminal(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    runlog.setup(0)
    items = list(runlog.progress("abc", total=3, description="embed", every_s=0.0))
    assert items == ["a", "b", "c"]
    lines = [line.split(" I ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["embed: 1 of 3", "embed: 2 of 3", "embed: 3 of 3"]
    list(runlog.progress("a", total=None, description="read", every_s=0.0))
    assert "read: 1 of ?" in capsys.readouterr().err


def test_progress_is_a_bar_on_a_terminal(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runlog.setup(0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(runlog.progress(range(4), total=4, description="embed")) == [0, 1, 2, 3]
    err = capsys.readouterr().err
    assert "embed" in err and "100%" in err


def test_progress_is_silent_on_other_ranks_and_seldom_on_the_first(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        runlog.setup(rank)
        every_s = 60.0 if rank == 0 else 0.0
        assert list(runlog.progress("ab", total=2, description="x", every_s=every_s)) == ["a", "b"]
    assert capsys.readouterr().err == ""


# --- meter -------------------------------------------------------------------------------------


def test_the_meter_tells_speed_and_waiting_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.s)

    def slow() -> Iterator[int]:
        for step in range(4):
            now.s += 0.5  # reading a batch
            yield step

    meter = runlog.Meter(global_batch=64, world_size=2)
    for _ in meter.waiting(slow()):
        now.s += 1.5  # training on it
        meter.steps += 1
    figures = meter.read()
    assert figures["samples_per_s"] == 32.0 and figures["samples_per_s_per_rank"] == 16.0
    assert figures["data_wait_share"] == 0.25
    assert 0.01 < figures["memory_gib"] < 100
    now.s += 1.0
    assert meter.read()["samples_per_s"] == 0.0  # readings start anew


@pytest.mark.parametrize(
    ("allocated", "expected"), [(3 * 2**30, 3.0), (0, None)], ids=["GPU used", "GPU idle"]
)
def test_memory_is_that_of_the_device_in_use(
    monkeypatch: pytest.MonkeyPatch, allocated: int, expected: float | None
) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, max_memory_allocated=lambda: allocated)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    gib = runlog.memory_gib()
    assert gib == expected if expected is not None else 0 < gib < 100


# --- metrics.jsonl -----------------------------------------------------------------------------


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, Any]]] = []
        self.closed = False

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        self.rows.append((step, row))

    def close(self) -> None:
        self.closed = True


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *steps: int, resume_step: int = 0) -> None:
    metrics = runlog.MetricsLog(path, resume_step=resume_step)
    for step in steps:
        metrics.write(step, {"loss": step / 10})
    metrics.close()


def test_rows_go_to_the_file_and_to_every_sink(tmp_path: Path) -> None:
    sink = Sink()
    path = tmp_path / "train" / "metrics.jsonl"
    metrics = runlog.MetricsLog(path, resume_step=0, sinks=[sink])
    metrics.write(10, {"loss": 0.5})
    assert rows(path) == [{"step": 10, "loss": 0.5}]  # on disk before the file is closed
    metrics.close()
    assert sink.rows == [(10, {"loss": 0.5})] and sink.closed


def test_a_resumed_run_repeats_no_row_and_misses_none(tmp_path: Path) -> None:
    path, undisturbed = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(path, 10, 20, 30)  # killed after 30; the last checkpoint is of step 20
    write(path, 30, 40, resume_step=20)
    write(undisturbed, 10, 20, 30, 40)
    assert path.read_text() == undisturbed.read_text()


def test_half_a_row_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 10)
    with path.open("a") as file:
        file.write('{"step": 20, "lo')
    with caplog.at_level("INFO", "mclclip"):
        write(path, 20, resume_step=20)
    assert [row["step"] for row in rows(path)] == [10, 20]
    assert "half-written" in caplog.text


def test_a_run_from_the_start_forgets_the_rows_before(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 10, 20)
    write(tmp_path / "m.jsonl", 5)
    assert [row["step"] for row in rows(tmp_path / "m.jsonl")] == [5]


# --- sinks -------------------------------------------------------------------------------------


def test_a_sink_that_is_not_installed_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"wandb is not installed: pip install 'mclclip\[track\]'"):
        runlog.make_sink("wandb", tmp_path, {})


def test_tensorboard_keeps_the_numbers(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = runlog.make_sink("tensorboard", tmp_path, {})
    sink.write(10, {"loss": 0.5, "note": "text is left out"})
    sink.write(20, {"loss": 0.25})
    sink.close()
    events = loading.EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (10, 0.5),
        (20, 0.25),
    ]


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    run = SimpleNamespace(log=lambda row, step: None, finish=lambda: None)

    def init(**options: Any) -> SimpleNamespace:
        started.append(options)
        return run

    util = SimpleNamespace(generate_id=lambda: f"id{len(started)}")
    fake = SimpleNamespace(util=util, init=init)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        sink = runlog.make_sink("wandb", tmp_path / "wandb", {"seed": 1})
        sink.write(1, {"loss": 0.5})
        sink.close()
    assert [options["id"] for options in started] == ["id0", "id0"]
    assert started[0]["config"] == {"seed": 1} and started[1]["resume"] == "allow"
