"""A method of images alone on four-channel data: run whole, evaluated, analysed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import mclclip
from mclclip.eval import results
from tests import views
from tests.e2e.conftest import Shell
from tests.matrix import in_soak

STEPS = 4


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``train`` and ``test`` shards."""
    return views.make_data(tmp_path_factory.mktemp("pictures"))


def config(path: Path, run_dir: Path, pictures: Path, **changes: Any) -> str:
    """Writes a configuration of small stages from scratch and returns its path."""
    tree = views.tree(run_dir, pictures, {"kind": "nt_xent"}, STEPS, **changes)
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@in_soak
def test_stages_from_scratch_beside_an_ensemble(
    shell: Shell, pictures: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    where = config(tmp_path / "c.yaml", run, pictures, controls=["ungrouped"])
    shell.ok("run", "--config", where)
    rows = {(r.model, r.metric): r for r in results.read(run / "results.jsonl")}
    models = {"stage_0", "stage_1", "control_ungrouped_stage_1", "concat_raw"}
    assert models < {model for model, _ in rows}
    assert {metric for _, metric in rows} == {"shape", "colour", "mean"}
    answers = {"shape": 1, "colour": 1, "mean": 2}  # of each test picture
    assert all(row.count == answers[m] * views.SIZES["test"] for (_, m), row in rows.items())
    exports = ["stage_0", "stage_1", "controls/ungrouped/stage_1"]
    stem = "stages.0.tower.visual.trunk.conv1.weight"
    first = [mclclip.load_model(run / name / "export").get_parameter(stem) for name in exports]
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
    joined = mclclip.load_model(run / "exports" / "concat_stage_norm")
    assert joined.embed_dim == 2 * 12
    finished = shell.ok("analyse", "--config", where)
    assert "stage_1 has no embeddings" in finished.stderr
    drawn = {path.stem for path in (run / "analysis").glob("*.png")}
    assert drawn == {path.stem for path in (run / "analysis").glob("*.json")}
    assert {"accuracy", "agreement", "nearest", "overlap", "singular_values"} < drawn
    shares = json.loads((run / "analysis" / "recall.json").read_text())
    assert set(shares) == {"stage_0, shape", "stage_0, colour"}


def test_pictures_of_other_channels_than_the_models_are_one_line(
    shell: Shell, pictures: Path, tmp_path: Path
) -> None:
    where = config(tmp_path / "c.yaml", tmp_path / "run", pictures)
    three = ("num_stages=0", "model.name.vision_cfg.channels=3")
    line = shell.refused("run", "--config", where, *three)
    assert "has 4 channels, but the model takes 3" in line
