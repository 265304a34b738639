"""Training on fast pixels: the batches, where they are normalised, and what a run records of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mclclip.config import Config
from mclclip.data.batches import Batch
from mclclip.data.sample_index import SampleIndex
from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Artifact, RunPaths, read_manifest
from mclclip.train.inputs import StageTraining
from mclclip.train.loop import ModelWithObjective
from mclclip.verbs import index, train
from tests import tiny


def trained(run_dir: Path, data: Path, pixels: str, *overrides: str) -> Path:
    """The directory of a training of stage 0 in four steps of 24 samples."""
    options = ["base.steps=4", "base.log_every=1", f"data.pixels={pixels}"]
    options += ["base.checkpoint.every=4"]
    settled = tiny.make_config(run_dir, data, *options, *overrides)
    index.run(settled, SINGLE)
    return train.run(settled, SINGLE, stage=0)


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A training for either way to make pixels."""
    root = tmp_path_factory.mktemp("done")
    return {pixels: trained(root / pixels, data, pixels) for pixels in ("exact", "fast")}


def prepared(batch: Batch, config: Config, model: Any) -> Batch:
    assert config.base is not None
    return ModelWithObjective(model, nn.Identity(), config.base.precision).on_device(
        batch, SINGLE.device
    )


def test_batches_that_are_normalised_are_left_alone(tmp_path: Path) -> None:
    config = tiny.make_config(tmp_path, tmp_path, "base.precision=float64")
    model = load_towers(tiny.MODEL)
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    views = [pixels.float(), pixels]
    ids = torch.arange(2)
    batch = Batch(views=views, group_ids=ids[:, None], sample_id=ids, step=0, group_size=2)
    found = prepared(batch, config, model)
    mean, deviation = model.normalization
    wanted = pixels.float().div(255).sub(mean).div(deviation)
    assert torch.equal(found.views[0], pixels.double())
    assert torch.equal(found.views[1], wanted.double())


def test_training_learns_nearly_the_same(done: dict[str, Path]) -> None:
    exact, fast = (
        [row["loss"] for row in tiny.rows(done[name] / "metrics.jsonl")] for name in done
    )
    assert len(fast) == 4 and fast != exact
    assert fast == pytest.approx(exact, rel=2e-2)


def test_the_manifest_holds_what_was_chosen_and_refuses_another(
    done: dict[str, Path], data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("exact", "fast"):
        assert read_manifest(done[name], "train").config["data"] == {"pixels": name}
    for name, other in (("exact", "fast"), ("fast", "exact"), ("exact", "auto")):
        with pytest.raises(ValueError, match="was made with other settings: data.pixels"):
            trained(done[name].parents[1], data, other)
    with caplog.at_level("INFO", "mclclip"):
        assert trained(done["fast"].parents[1], data, "auto") == done["fast"]
    assert "is finished: skipped" in caplog.text


def test_a_control_takes_what_its_original_took(data: Path, tmp_path: Path) -> None:
    folder = RunPaths(tmp_path).train(1)
    artifact = Artifact(
        folder, kind="train", config={"data": {"pixels": "fast"}}, inputs={}
    ).compare(write=True)
    index.run(tiny.make_config(tmp_path, data), SINGLE)
    for asked, wanted in (("auto", "fast"), ("exact", "exact")):
        config = tiny.make_config(tmp_path, data, f"data.pixels={asked}")
        layout = RunPaths(tmp_path, "ungrouped")
        samples = SampleIndex.open(layout.index)
        assert StageTraining(config, config.train, SINGLE, layout, 1, samples).pixels == wanted
    assert not artifact.manifest


def test_what_does_more_than_crop_is_refused_with_the_options(tmp_path: Path) -> None:
    more = "model.augmentation={kind: simclr}"
    with pytest.raises(ValueError, match="asks for kind: set data.pixels=exact") as raised:
        tiny.make_config(tmp_path, tmp_path, "data.pixels=fast", more)
    assert "\n" not in str(raised.value)
    settled = tiny.make_config(tmp_path, tmp_path, more)
    assert settled.pixels_of("base") == settled.pixels_of("train") == "exact"
