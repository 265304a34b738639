"""A training from its options: its name in the log, and where its checkpoints are copied to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mclclip import config
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import RunPaths
from mclclip.train.inputs import StageTraining


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
    job = StageTraining(options, options.train, SINGLE, RunPaths(tmp_path, variant), stage, unread)
    assert job.title == expected
