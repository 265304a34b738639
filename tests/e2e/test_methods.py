"""Methods of images alone on four-channel data: run whole, killed, resumed, evaluated, analysed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import mclclip
from mclclip.checkpoint import step_files
from mclclip.eval import results
from tests import tiny, views
from tests.e2e.conftest import KillAfter, Shell
from tests.matrix import in_soak

STEPS = 4
VIEWS = "between: views, temperature: 0.5"
OBJECTIVES = {
    "nt_xent": "{kind: nt_xent}",
    "schedule": "{kind: nt_xent, temperature: {schedule: cosine, min: 0.1, max: 1.0, "
    "half_period: 2, per: step}}",
    "moco_v2": "{kind: moco, queue_size: 40}",
    "moco_v3": "{kind: moco, version: v3, predictor: [12, 6]}",
    "sigmoid": "{kind: sigmoid, between: views}",
    "ifm": f"{{kind: ifm, {VIEWS}}}",
    "hcl": f"{{kind: hcl, {VIEWS}}}",
    "sum": f"[{{kind: nt_xent}}, {{kind: ifm, term: modified, {VIEWS}}}]",
    "sum_moco": "[{kind: moco, queue_size: 40}, {kind: nt_xent}]",
    "supcon": "{kind: supcon, attribute: shape}",
    "simlap": "{kind: simlap, attribute: shape, label_dim: 8, hidden_dim: 8}",
    "classes": "{kind: single_label, attribute: shape, centers: normal, sample_rate: 1.0, "
    "margin: none, scale: 32}",
    "feature_dropout": "{kind: feature_dropout, width: 4, residual_blocks: 1}",
}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``train`` and ``test`` shards."""
    return views.make_data(tmp_path_factory.mktemp("pictures"))


def config(path: Path, run_dir: Path, pictures: Path, objective: str, **changes: Any) -> str:
    """Writes a configuration of small stages from scratch and returns its path."""
    tree = views.tree(run_dir, pictures, yaml.safe_load(objective), STEPS, **changes)
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@in_soak
def test_stages_from_scratch_beside_an_ensemble(
    shell: Shell, pictures: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    where = config(
        tmp_path / "c.yaml", run, pictures, OBJECTIVES["nt_xent"], controls=["ungrouped"]
    )
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("base.objective={kind: supcon, attribute: size}", "no attribute 'size'"),
        ("model.name.vision_cfg.channels=3", "has 4 channels, but the model takes 3"),
    ],
)
def test_mistakes_are_one_line(
    shell: Shell, pictures: Path, tmp_path: Path, changes: str, message: str
) -> None:
    where = config(tmp_path / "c.yaml", tmp_path / "run", pictures, OBJECTIVES["nt_xent"])
    assert message in shell.refused("run", "--config", where, "num_stages=0", changes)


@in_soak
@pytest.mark.parametrize("method", OBJECTIVES)
def test_killed_and_resumed(shell: Shell, pictures: Path, tmp_path: Path, method: str) -> None:
    where = config(tmp_path / "c.yaml", tmp_path / "run", pictures, OBJECTIVES[method])
    shell.ok("run", "--config", where)
    elsewhere = ["run", "--config", where, f"run_dir={tmp_path / 'killed'}"]
    shell(*elsewhere, inside=KillAfter("update", 3))
    assert step_files.steps(tmp_path / "killed/stage_0/train/checkpoints") == [2]
    shell(*elsewhere, inside=KillAfter("update", 2 + 3))
    shell.ok(*elsewhere)
    for stage in (0, 1):
        wanted, got = (
            step_files.load_model_state(tmp_path / name / f"stage_{stage}/train/checkpoints", STEPS)
            for name in ("run", "killed")
        )
        assert wanted.keys() == got.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert tiny.digests(tmp_path / "run") == tiny.digests(tmp_path / "killed")
