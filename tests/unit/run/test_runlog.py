"""What the user sees: log lines, progress, metrics that a resumed run continues."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mclclip.run import runlog, trackers
from mclclip.run.recorder import Meter, Work
from mclclip.run.trackers import Tracker, Trackers
from tests import tiny


@pytest.fixture(autouse=True)
def log() -> Iterator[logging.Logger]:
    """Yields the log of the package and restores it afterwards."""
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


HOSTILE = "a\x1b[2J\r12:00:00 I b\n12:00:01 I forged\u2028\x9b1m\u202e\udcff"


def test_what_others_wrote_is_shown_escaped(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    runlog.setup(0)
    log.warning("key %s is bad", HOSTILE)
    log.warning("folders: %s, é 日本 ±", [Path(HOSTILE)])
    try:
        raise KeyError(HOSTILE) from ValueError(f"of\x1b{HOSTILE}")
    except KeyError:
        log.warning("with a traceback", exc_info=True)
    err = capsys.readouterr().err
    first, second, third, *lines = err.removesuffix("\n").split("\n")
    wanted = r"key a\x1b[2J\r12:00:00 I b\n12:00:01 I forged\u2028\x9b1m\u202e\udcff is bad"
    assert first.endswith(wanted) and second.endswith("é 日本 ±")
    assert third.endswith("with a traceback") and len(lines) > 8
    assert all(line.isprintable() for line in (first, second, third, *lines))


def test_progress_is_plain_lines_without_a_terminal(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runlog.setup(0)
    monkeypatch.setattr(runlog, "LOG_S", 0.0)
    items = list(runlog.progress("abc", total=3, description="embed"))
    assert items == ["a", "b", "c"]
    lines = [line.split(" I ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["embed: 1 of 3", "embed: 2 of 3, 0 s left"]
    list(runlog.progress("a", total=None, description="read"))
    assert capsys.readouterr().err.endswith(" I read: 1\n")
    words = iter(["", "loss 2", ""])  # of a training that was resumed at step 5
    list(
        runlog.progress("abc", total=9, description="stage 1", start=5, detail=lambda: next(words))
    )
    lines = [line.split(" I ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "stage 1: 6 of 9",
        "stage 1: 7 of 9, loss 2, 0 s left",
        "stage 1: 8 of 9, 0 s left",
    ]


def test_progress_says_how_long_it_will_last(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runlog.setup(0)
    clock = iter([0.0, 900.0, 1_020.0, 1_140.0])  # workers start before the first item
    monkeypatch.setattr(runlog.time, "monotonic", lambda: next(clock))
    list(runlog.progress("abc", total=4, description="embed"))
    lines = [line.split(" I ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["embed: 1 of 4", "embed: 2 of 4, 4 min left", "embed: 3 of 4, 2 min left"]
    assert runlog.time_left(89.6) == "90 s left" and runlog.time_left(12_600) == "3.5 h left"


def test_progress_is_one_line_of_a_terminal_and_the_log_stands_above_it(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runlog.setup(0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(runlog, "DRAW_S", 0.0)
    shown = runlog.progress(range(4), total=4, description="embed")
    assert [next(shown), next(shown)] == [0, 1]
    log.warning("a line")
    assert list(shown) == [2, 3]
    parts = capsys.readouterr().err.split(runlog.CLEAR_LINE)
    assert [part[:13] for part in parts if part.startswith("embed")] == [
        f"embed: {number} of 4" for number in (1, 2, 3, 4)
    ]
    assert parts[2].endswith("a line\n") and parts[-1] == ""


def test_an_interrupted_progress_draws_nothing_more(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runlog.setup(0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(runlog, "DRAW_S", 0.0)
    shown = runlog.progress(range(4), total=4, description="embed")  # held, as by a traceback
    with pytest.raises(KeyboardInterrupt):
        for number in shown:
            if number == 2:
                raise KeyboardInterrupt
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_progress_is_silent_on_other_ranks_and_seldom_on_the_first(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        runlog.setup(rank)
        monkeypatch.setattr(runlog, "LOG_S", 60.0 if rank == 0 else 0.0)
        assert list(runlog.progress("ab", total=2, description="x")) == ["a", "b"]
    assert capsys.readouterr().err == ""


# --- meter -------------------------------------------------------------------------------------


def test_the_meter_tells_speed_and_waiting_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.s)
    meter = Meter(global_batch=64, world_size=2)
    for _ in range(4):
        now.s += 2.0
        meter.wait_s += 0.5
        meter.steps += 1
    assert meter.read() == {
        "samples_per_s": 32.0,
        "samples_per_s_per_rank": 16.0,
        "data_wait_share": 0.25,
        "seconds": 8.0,
    }
    now.s += 1.0  # readings start anew
    assert meter.read()["samples_per_s"] == 0.0
    now.s += 2.0
    assert meter.read(wait_s=1.5)["data_wait_share"] == 0.75  # another rank waited longer


def test_the_meter_tells_the_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.s)
    # 100 samples in 2 s on 2 ranks: 25 a second and rank, of 4e12 operations each.
    for peak, share in ((400.0, 0.25), (None, None)):
        meter = Meter(
            global_batch=100, world_size=2, work=Work([(0, int(1e12)), (5, int(4e12))], peak)
        )
        meter.add_step(5)
        now.s += 2.0
        row = meter.read()
        assert row["tflops_per_s_per_rank"] == 100.0 and row.get("mfu") == share
        meter.add_step(4)  # of smaller pictures
        now.s += 2.0
        assert meter.read()["tflops_per_s_per_rank"] == 25.0
    assert not {"mfu", "tflops_per_s_per_rank"} & Meter(8, 1).read().keys()


# --- rows on disk ------------------------------------------------------------------------------


class Recording(Tracker):
    """A tracker that records its rows, and fails or hangs if it is told to."""

    def __init__(
        self, error: Exception | None = None, hangs_until: threading.Event | None = None
    ) -> None:
        self.error, self.hangs_until = error, hangs_until
        self.rows: list[tuple[int, Mapping[str, Any]]] = []
        self.closed = False

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.rows.append((step, row))

    def close(self) -> None:
        if self.hangs_until is not None:
            self.hangs_until.wait()
        self.closed = True


def write(path: Path, *steps: int, resume_step: int = 0) -> None:
    lines = runlog.JsonLines(path, resume_step=resume_step)
    for step in steps:
        lines.write({"step": step, "loss": step / 10})
    lines.close()


def test_rows_go_to_the_file_and_to_every_tracker(tmp_path: Path) -> None:
    tracker = Recording()
    metrics = runlog.MetricsLog(
        tmp_path / "train", resume_step=0, trackers=Trackers({"it": tracker})
    )
    metrics.write(10, {"loss": 0.5})
    metrics.write(12, {"loss": 0.4}, "epochs")
    # On disk before the files are closed.
    assert tiny.rows(tmp_path / "train" / "metrics.jsonl") == [{"step": 10, "loss": 0.5}]
    assert tiny.rows(tmp_path / "train" / "epochs.jsonl") == [{"step": 12, "loss": 0.4}]
    metrics.close()
    assert tracker.rows == [(10, {"loss": 0.5})] and tracker.closed and not metrics.lost


def test_a_resumed_run_repeats_no_row_and_misses_none(tmp_path: Path) -> None:
    path, undisturbed = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(path, 10, 20, 30)  # killed after 30; the last checkpoint is of step 20
    write(path, 30, 40, resume_step=20)
    write(undisturbed, 10, 20, 30, 40)
    assert path.read_text() == undisturbed.read_text()
    write(path, 5)  # a run from the start forgets the rows before
    assert [row["step"] for row in tiny.rows(path)] == [5]


def test_a_tracker_gets_each_row_once(tmp_path: Path) -> None:
    """Killed after the row of step 30 was logged; the last checkpoint is of step 20."""
    tracker = Recording()
    for resume_step, steps in ((0, (10, 20, 30)), (20, (30, 40))):
        metrics = runlog.MetricsLog(
            tmp_path,
            resume_step=resume_step,
            trackers=Trackers({"it": tracker}),
            evaluates=True,
        )
        for step in steps:
            metrics.write(step, {"loss": step / 10})
        metrics.write(20, {"imagenet": 41.0}, "evaluations")  # of the checkpoint, again
        metrics.close()
    assert [step for step, row in tracker.rows if "loss" in row] == [10, 20, 30, 40]
    assert [step for step, row in tracker.rows if "imagenet" in row] == [20]
    assert len(tiny.rows(tmp_path / "evaluations.jsonl")) == 1


@pytest.mark.parametrize("half", [b'{"step": 20, "lo', b"\0\0\0\n", b"\xff\n"])
def test_half_a_row_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, half: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 10)
    with path.open("ab") as file:
        file.write(half)
    with caplog.at_level("INFO", "mclclip"):
        write(path, 20, resume_step=20)
    assert [row["step"] for row in tiny.rows(path)] == [10, 20]
    assert "half-written" in caplog.text


def test_rows_are_json_for_the_strictest_reader(tmp_path: Path) -> None:
    lines = runlog.JsonLines(tmp_path / "m.jsonl", resume_step=0)
    lines.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1})
    lines.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    row = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.1}


def test_a_row_that_does_not_fit_leaves_no_trace(tmp_path: Path) -> None:
    """A file on a disk that has room for only half of a row."""
    lines = runlog.JsonLines(tmp_path / "m.jsonl", resume_step=0)
    lines.write({"step": 1})
    whole = lines.file

    def half(data: bytes) -> int:
        return whole.write(data[: len(data) // 2])

    lines.file = SimpleNamespace(  # type: ignore[assignment]
        write=half, fileno=whole.fileno, truncate=whole.truncate
    )
    with pytest.raises(OSError, match="No space left"):
        lines.write({"step": 2})
    lines.file = whole
    lines.write({"step": 3})
    lines.close()
    assert tiny.rows(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 3}]


def test_what_fails_is_said_once_counted_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = Recording(), Recording(ConnectionError("no\nroute"))
    metrics = runlog.MetricsLog(
        tmp_path, resume_step=0, trackers=Trackers({"bad": bad, "good": good})
    )
    metrics.files["epochs.jsonl"].close()  # so that writing fails
    for step in (1, 2, 3):
        metrics.write(step, {"loss": 0.5})
        metrics.write(step, {"loss": 0.5}, "epochs")
    metrics.close()
    assert metrics.lost == {"bad": 3, "epochs.jsonl": 3}
    assert len(good.rows) == 3 and bad.closed and len(tiny.rows(tmp_path / "metrics.jsonl")) == 3
    assert caplog.text.count("bad cannot be written (no route): the run goes on") == 1
    assert "bad: 3 writes failed in all" in caplog.text


def test_a_tracker_that_hangs_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.5)
    answer = threading.Event()
    slow, after = Recording(hangs_until=answer), Recording()
    both = Trackers({"slow": slow, "after": after})
    runlog.MetricsLog(tmp_path, resume_step=0, trackers=both).close()
    assert after.closed and not slow.closed
    assert "slow was not closed after 0.5 s: not waiting longer" in caplog.text
    answer.set()
