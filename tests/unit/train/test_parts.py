"""A training from its options: its name in the log, and where its checkpoints are copied to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mclclip import config
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import RunPaths
from mclclip.train.build import StageTraining, build_checkpoints


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


def test_a_mirror_in_the_run_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be lost with the run; a folder beside it, and a url, are taken."""
    monkeypatch.chdir(tmp_path)
    unread: Any = None  # the index

    def checkpoints(mirror: str) -> Any:
        words = ["run_dir=run", f"train.checkpoint.mirror={mirror}"]
        options = config.load(None, words)
        layout = RunPaths(Path("run"), "mcl")
        return build_checkpoints(
            StageTraining(options, options.train, SINGLE, layout, 1, unread), "0" * 64
        )

    for inside in ("run", "run/mirror", "run/../run/mirror", str(tmp_path / "run/mirror")):
        with pytest.raises(ValueError, match="checkpoint.mirror"):
            checkpoints(inside)
    for beside in ("mirror", str(tmp_path / "runs"), "s3://bucket/run"):
        assert checkpoints(beside).mirror.url.startswith(beside)
