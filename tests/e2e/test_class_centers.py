"""MLCD through the command line: what a run leaves, and a text stage after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import mclclip
from mclclip.checkpoint import step_files
from mclclip.eval import results
from mclclip.models.loading import load_towers
from tests import tiny
from tests.e2e.conftest import Shell
from tests.matrix import in_soak

STEPS, ROWS = 6, "stage_1/train/metrics.jsonl"
OBJECTIVE = (
    "train.objective={kind: mlcd, labels_per_sample: 3, sample_rate: 0.5, scale: 16, margin: none}"
)
OPTIONS = (
    "num_stages=1", "cluster.num_clusters=21", "cluster.labels_per_sample=4", "train.log_every=1",
    "train.precision=fp32", OBJECTIVE,
)  # fmt: skip
FIGURES = {
    "positive_loss", "negative_loss", "positive_cosine", "max_negative_cosine", "saturated_share",
    "distinct_positives", "conflicts",
}  # fmt: skip


@pytest.fixture(scope="module")
def done(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole run on one rank: its configuration and directory; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("class_centers")
    config = tiny.write_config(folder / "config.yaml", folder / "run", data, *OPTIONS)
    shell.ok("run", "--config", config)
    return config, folder / "run"


def untrained(done: tuple[Path, Path], run_dir: Path) -> list[object]:
    """A copy of the run as it was before stage 1, and the command that trains it."""
    shutil.copytree(done[1] / "index", run_dir / "index")
    shutil.copytree(done[1] / "stage_0", run_dir / "stage_0")
    return ["train", "--stage", 1, "--config", done[0], f"run_dir={run_dir}"]


def test_a_run_leaves_centers_and_an_image_tower_that_moved(done: tuple[Path, Path]) -> None:
    run_dir = done[1]
    clusters = run_dir / "stage_0/clusters"
    labels = np.load(clusters / "cluster_labels.npy")
    similarities = np.load(clusters / "similarities.npy")
    assert (labels.shape, labels.dtype) == ((192, 4), np.int32)
    assert (similarities.shape, similarities.dtype) == ((192, 4), np.float16)
    assert not (run_dir / "stage_1/pseudo_labels").exists()
    rows = tiny.rows(run_dir / ROWS)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert FIGURES <= rows[0].keys()
    assert rows[0]["loss"] == pytest.approx(rows[0]["positive_loss"] + rows[0]["negative_loss"])
    assert rows[-1]["loss"] < rows[0]["loss"]
    directory = run_dir / "stage_1/train/checkpoints"
    state = step_files.load_model_state(directory, STEPS, "class_centers")
    assert state["rows"].shape == (21, 8)
    moved = state["rows"] - torch.from_numpy(np.load(clusters / "centroids.npy"))
    assert moved.abs().max() > 0 and int(state["steps"].max()) == STEPS

    # The text tower stays what it was.
    before, after = (
        mclclip.load_model(str(done[1] / stage / "export")).stages[0].clip.state_dict()
        for stage in ("stage_0", "stage_1")
    )
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {n for n in before if not n.startswith("visual.")} <= same
    assert not torch.equal(before["visual.proj"], after["visual.proj"])


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
    command = ["run", *untrained(done, tmp_path / "run")[3:], *options]
    shell.ok(*command)
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


def test_a_mistake_does_not_stand_in_the_way(
    shell: Shell, done: tuple[Path, Path], tmp_path: Path
) -> None:
    """What only the training itself can know leaves nothing behind either."""
    train = untrained(done, tmp_path / "run")
    assert "leave it out" in shell.refused(*train, "--variant", "ungrouped")
    assert not (tmp_path / "run/stage_1").exists()
