"""Requests to a running training that are folders in the place of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mclclip.ranks.process_group import Context
from mclclip.ranks.step_boundary import StepBoundary


@pytest.mark.parametrize(("name", "inside"), [("stop", True), ("save_now", False)])
def test_a_folder_of_that_name_is_a_request(tmp_path: Path, name: str, inside: bool) -> None:
    """It is answered once, also where it cannot be removed."""
    (tmp_path / name).mkdir()
    if inside:
        (tmp_path / name / "file").touch()
    boundary = StepBoundary(Context(), tmp_path, poll_s=1e-6)
    assert boundary.decide() != boundary.decide()
    assert (tmp_path / name).exists() is inside
    decisions = [boundary.decide() for _ in range(3)]
    assert not any(decision.save for decision in decisions)
    again = StepBoundary(Context(), tmp_path, poll_s=1e-6)
    again.decide()
    assert (again.decide().leave is not None) is (inside and name == "stop")
