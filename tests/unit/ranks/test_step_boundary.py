"""One process decides between two steps; tests/e2e/test_ends.py has several."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mclclip.ranks import signals
from mclclip.ranks.process_group import SINGLE
from mclclip.ranks.step_boundary import Decision, StepBoundary


def boundary(run_dir: Path, deadline: float | None = None, poll_s: float = 0.0) -> StepBoundary:
    return StepBoundary(SINGLE, run_dir, poll_s=poll_s, deadline=deadline)


def test_what_is_asked_is_done_one_boundary_later(tmp_path: Path) -> None:
    asked = boundary(tmp_path)
    (tmp_path / "save_now").touch()
    assert asked.decide() == Decision()
    assert not (tmp_path / "save_now").exists()
    assert asked.decide() == Decision(save=True)
    assert asked.decide() == Decision()  # once


def test_stop_leaves_and_is_not_to_be_started_again(tmp_path: Path) -> None:
    asked = boundary(tmp_path)
    (tmp_path / "stop").touch()
    asked.decide()
    decision = asked.decide()
    assert decision.leave == "the file 'stop'" and not decision.make_error().requeue
    assert asked.decide().leave is not None  # until it has left


def test_the_wall_time_limit_is_to_be_started_again(tmp_path: Path) -> None:
    asked = boundary(tmp_path, deadline=time.monotonic() + 3600.0)
    asked.decide()
    assert asked.decide() == Decision()
    asked.deadline = time.monotonic() - 0.001
    asked.decide()
    decision = asked.decide()
    assert decision.leave == "the wall-time limit" and decision.make_error().requeue


def test_a_signal_counts_more_than_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a job is pre-empted while its user stops it, the cluster's request decides."""
    asked = boundary(tmp_path)
    (tmp_path / "stop").touch()
    monkeypatch.setattr(signals, "get_request", lambda: "SIGTERM")
    asked.decide()
    decision = asked.decide()
    assert decision.leave == "SIGTERM" and decision.make_error().requeue


def test_files_are_looked_for_now_and_then(tmp_path: Path) -> None:
    asked = boundary(tmp_path, poll_s=60.0)
    asked.decide()
    (tmp_path / "stop").touch()
    for _ in range(3):
        assert asked.decide() == Decision()
    assert (tmp_path / "stop").exists()


def test_nothing_is_left_under_way(tmp_path: Path) -> None:
    asked = boundary(tmp_path)
    asked.decide()
    asked.finish()
    assert asked.finish() == Decision()
    assert asked.decide() == Decision()


def test_what_was_asked_at_the_last_boundary_is_told_at_the_end(tmp_path: Path) -> None:
    """The file is removed by then, so the next stage's boundary would not see the request."""
    asked = boundary(tmp_path)
    (tmp_path / "stop").touch()
    asked.decide()
    assert asked.finish().leave == "the file 'stop'"
