"""The recorded state of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mclclip.run import run_state


def write(run_dir: Path | None, state: str, **fields: Any) -> None:
    given = {"verb": "run", "exit_code": 0, "requeue": False, "reason": ""} | fields
    run_state.write(run_dir, state, **given)


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_one_line_for_scripts(tmp_path: Path) -> None:
    write(tmp_path, "preempted", exit_code=85, requeue=True, reason="SIGUSR1")
    text = (tmp_path / "run_state.json").read_text()
    assert text.count("\n") == 1
    assert '"state": "preempted"' in text and '"requeue": true' in text
    assert read(tmp_path / "run_state.json")["exit_code"] == 85


def test_the_launcher_s_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by the first rank of each node, also where no run directory is known."""
    monkeypatch.setenv("MCLCLIP_STATE_FILE", str(tmp_path / "state"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    write(None, "finished")
    assert not (tmp_path / "state").exists()
    monkeypatch.setenv("LOCAL_RANK", "0")
    write(None, "finished")
    assert read(tmp_path / "state")["state"] == "finished"
    monkeypatch.setenv("LOCAL_RANK", "1")
    write(None, "failed", exit_code=2, reason="only here")  # whoever meets it
    assert read(tmp_path / "state")["reason"] == "only here"


def test_a_failure_for_good_is_not_covered_by_what_follows_from_it(tmp_path: Path) -> None:
    path = tmp_path / "run_state.json"
    write(tmp_path, "running")
    write(tmp_path, "failed", exit_code=2, reason="the cause")
    write(tmp_path, "failed", exit_code=1, requeue=True, reason="lost a peer")
    write(tmp_path, "preempted", exit_code=85, requeue=True, reason="SIGTERM")
    assert read(path)["reason"] == "the cause"
    write(tmp_path, "running")
    assert read(path)["state"] == "running"
    write(tmp_path, "failed", exit_code=1, requeue=True, reason="lost a peer")
    write(tmp_path, "preempted", exit_code=85, requeue=True, reason="SIGTERM")
    assert read(path)["state"] == "preempted"
