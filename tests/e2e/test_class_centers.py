"""MLCD through the command line, and a text stage after it (see ``test_without_captions.py``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import mclclip
from mclclip.eval import results
from mclclip.models.loading import load_towers
from tests import tiny
from tests.e2e.conftest import Shell
from tests.matrix import in_soak

OBJECTIVE = (
    "train.objective={kind: mlcd, labels_per_sample: 3, sample_rate: 0.5, scale: 16, margin: none}"
)
OPTIONS = (
    "num_stages=1", "cluster.num_clusters=21", "cluster.labels_per_sample=4", "train.log_every=1",
    "train.precision=fp32", OBJECTIVE,
)  # fmt: skip


@pytest.fixture(scope="module")
def done(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole run on one rank: its configuration and directory; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("class_centers")
    config = tiny.write_config(folder / "config.yaml", folder / "run", data, *OPTIONS)
    shell.ok("run", "--config", config)
    return config, folder / "run"


@in_soak
def test_from_scratch_and_then_the_text_tower(
    shell: Shell, done: tuple[Path, Path], tmp_path: Path
) -> None:
    """Another architecture learns the clusters; then its frozen image tower teaches captions."""
    small = tiny.MODEL | {"embed_dim": 12}
    options = [
        f"trained_model={{name: {json.dumps(small)}}}", "train.objective.centers=normal",
        "export.concat=[]", "export.soup=false",
    ]  # fmt: skip
    for part in ("index", "stage_0"):
        shutil.copytree(done[1] / part, tmp_path / "run" / part)
    shell.ok("run", "--config", done[0], f"run_dir={tmp_path / 'run'}", *options)
    export = tmp_path / "run/stage_1/export"
    assert mclclip.load_model(str(export)).embed_dim == 12
    drawn, found = (
        model.clip.state_dict() for model in (load_towers(small), load_towers(str(export)))
    )
    for name in drawn:  # MLCD trains no text tower: what lit.yaml starts from is as it was drawn
        assert torch.equal(found[name], drawn[name]) or name.startswith("visual."), name
    lit = [
        f"run_dir={tmp_path / 'lit'}", f"model={{name: 'local-dir:{export}'}}", "num_stages=0",
        "train.objective={kind: info_nce}", "controls=[ungrouped]",
        "base.lock={image_blocks: 0, image_norm: false, image_projection: false}",
    ]  # fmt: skip
    shell.ok("run", "--config", done[0], *lit)
    assert {row.model for row in results.read(tmp_path / "lit/results.jsonl")} == {"stage_0"}
    assert not list((tmp_path / "lit").rglob("concat_*")), "one encoder is not joined with itself"
    before, after = (
        mclclip.load_model(str(path)).stages[0].clip.state_dict()
        for path in (export, tmp_path / "lit/stage_0/export")
    )
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("visual."), name
