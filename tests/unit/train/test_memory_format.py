"""A training in channels-last records it, and one that was begun without goes on without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from mclclip import checkpoint, index
from mclclip.models import towers
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import read_manifest
from mclclip.train import verb as train
from tests import tiny


def trained(run_dir: Path, data: Path, model: object = tiny.RESNET) -> Path:
    options = ["base.steps=4", "base.log_every=1", f"model.name={json.dumps(model)}"]
    options += ["base.checkpoint={every: 2, keep_every: 2}"]
    settled = tiny.make_config(run_dir, data, *options, "train.lock.image_blocks=all")
    index.run(settled, SINGLE)
    return train.run(settled, SINGLE, stage=0)


def state(directory: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_model_state(directory / "checkpoints", 4)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A training of now, and one of a version that knew no channels-last."""
    root = tmp_path_factory.mktemp("done")
    data = tiny.make_data(root / "data", num_samples=96)
    now = trained(root / "channels_last", data)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(towers, "choose_memory_format", lambda _: "contiguous")
        before = trained(root / "contiguous", data)
    return {"channels_last": now, "contiguous": before, "data": data}


def test_the_format_is_a_setting_where_the_tower_is_convolutional(
    done: dict[str, Path], tmp_path: Path
) -> None:
    made = {name: read_manifest(done[name], "train").config for name in (*done,)[:2]}
    assert made["channels_last"].pop("memory_format") == "channels_last"
    assert made["channels_last"] == made["contiguous"]  # as it was before there was a choice
    of_vit = trained(tmp_path, done["data"], tiny.MODEL)
    assert "memory_format" not in read_manifest(of_vit, "train").config


def test_losses_are_the_same_within_rounding(done: dict[str, Path]) -> None:
    rows = [
        [json.loads(row)["loss"] for row in (done[name] / "metrics.jsonl").open()]
        for name in ("channels_last", "contiguous")
    ]
    assert len(rows[0]) == 4 and rows[0] == pytest.approx(rows[1], rel=1e-5)


@pytest.mark.parametrize("name", ["channels_last", "contiguous"])
def test_a_training_that_was_begun_goes_on_as_it_began(
    done: dict[str, Path], name: str, tmp_path: Path
) -> None:
    shutil.copytree(done[name].parents[1], tmp_path / "run")
    directory = tmp_path / "run/stage_0/train"
    made = read_manifest(directory, "train")
    (directory / "manifest.json").rename(directory / "in_progress.json")
    shutil.rmtree(directory / "checkpoints/step_00000004")
    assert trained(tmp_path / "run", done["data"]) == directory
    assert read_manifest(directory, "train").config == made.config
    found, wanted = state(directory), state(done[name])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[each], wanted[each]) for each in wanted)
    other = state(done["contiguous" if name == "channels_last" else "channels_last"])
    assert not all(torch.equal(other[each], wanted[each]) for each in wanted)
