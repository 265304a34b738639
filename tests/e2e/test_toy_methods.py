"""Methods of another package through the command line: run whole, killed, and resumed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import mclclip
from mclclip import checkpoint
from tests import tiny, toys
from tests.e2e.conftest import KillAfter, Shell
from tests.matrix import kept

STEPS = 6
METHODS = {
    "two_views": ("num_stages=0", "base.objective={kind: toy_two_views}"),
    "momentum": ("num_stages=0", "base.objective={kind: toy_momentum}"),
    "adversary": ("num_stages=0", "base.objective={kind: toy_adversary}"),
    "prototypes": ("num_stages=1", "train.objective={kind: toy_prototypes}"),
    "sum": (
        "num_stages=1",
        "train.objective={kind: weighted_sum, terms: [{objective: {kind: info_nce}}, "
        "{objective: {kind: toy_alignment}, weight: 0.5}]}",
        "controls=[ungrouped]",
    ),
}


def state_of(run_dir: Path, stage: int) -> dict[str, torch.Tensor]:
    directory = run_dir / f"stage_{stage}/train/checkpoints"
    return checkpoint.load_model_state(directory, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("method", kept([*METHODS], 3))
def test_run_killed_and_resumed(
    shell: Shell, data: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = toys.install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(site)
    options = METHODS[method]
    stage = int(options[0][-1])
    config = tiny.write_config(tmp_path / "c.yaml", tmp_path / "run", data, *options)
    elsewhere = ["run", "--config", config, f"run_dir={tmp_path / 'killed'}"]
    shell.ok("run", "--config", config)
    # Stage 0 comes first, and takes as many steps.
    shell(*elsewhere, inside=KillAfter("update", 4 + stage * STEPS))
    assert checkpoint.steps(tmp_path / f"killed/stage_{stage}/train/checkpoints") == [2]
    shell.ok(*elsewhere)
    wanted, got = state_of(tmp_path / "run", stage), state_of(tmp_path / "killed", stage)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert tiny.digests(tmp_path / "run") == tiny.digests(tmp_path / "killed")
    assert mclclip.load_model(str(tmp_path / f"run/stage_{stage}/export")).embed_dim == 8
