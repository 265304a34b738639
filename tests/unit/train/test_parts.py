"""A training from its options: its name in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mclclip import config
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Layout
from mclclip.train.build import Job


@pytest.mark.parametrize(
    ("kind", "variant", "stage", "expected"),
    [
        ("nt_xent", "mcl", 0, "nt_xent"),
        ("nt_xent", "mcl", 1, "mcl"),
        ("info_nce", "mcl", 0, "info_nce"),
        ("info_nce", "ungrouped", 1, "ungrouped"),
        ("simlap", "mcl", 1, "simlap"),
    ],
)
def test_stage_0_is_named_by_its_objective(
    tmp_path: Path, kind: str, variant: str, stage: int, expected: str
) -> None:
    """It has no groups: it is SimCLR or CLIP, and not MCL."""
    options = config.load(None, [f"run_dir={tmp_path}", f"train.objective.kind={kind}"])
    unread: Any = None  # the index
    job = Job.of(options, options.train, SINGLE, Layout(tmp_path, variant), stage, unread)
    assert job.title == expected
