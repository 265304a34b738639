"""Of a training that a run borrows by a link nothing is removed; of its own old checkpoints are."""

from __future__ import annotations

from pathlib import Path

from mclclip.checkpoint import step_files
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import index, train
from tests import tiny


def test_a_lent_training_keeps_its_checkpoints(data: Path, tmp_path: Path) -> None:
    lender, borrower = tmp_path / "lender", tmp_path / "borrower"

    def trained(run_dir: Path, checkpoint: str) -> list[int]:
        options = ["base.steps=4", f"base.checkpoint={checkpoint}"]
        settled = tiny.make_config(run_dir, data, *options)
        index.run(settled, SINGLE)
        train.run(settled, SINGLE, stage=0)
        return step_files.steps(lender / "stage_0/train/checkpoints")

    assert trained(lender, "{every: 2, keep_every: 2}") == [2, 4]
    for part in ("index", "stage_0/train"):
        (borrower / part).parent.mkdir(parents=True, exist_ok=True)
        (borrower / part).symlink_to(lender / part)
    assert trained(borrower, "{every: 2}") == [2, 4]
    assert trained(lender, "{every: 2}") == [4]
