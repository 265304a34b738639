"""Controls take the steps of the training they control, and see the same views of every sample."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mclclip import config
from mclclip.config import Config
from mclclip.data.coverage import coverage_report
from mclclip.data.groups import StageGroups
from mclclip.data.sample_index import SampleIndex
from mclclip.ranks.process_group import SINGLE
from mclclip.run import artifacts
from mclclip.run.artifacts import RunPaths
from mclclip.train import build
from mclclip.train.inputs import StageTraining, TrainingInputs
from mclclip.verbs import cluster, embed, export, index, plan, train
from mclclip.verbs.plan import Machine
from tests import tiny
from tests.matrix import in_soak

CONTROLS = ("ungrouped", "random_groups")


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run whose pseudo labels of stage 1 are there."""
    folder = tmp_path_factory.mktemp("labels")
    tiny.make_data(folder / "data", num_samples=96)
    options = make_config(folder, folder / "run")
    index.run(options, SINGLE)
    export.stage(options, SINGLE, stage=0)
    embed.run(options, SINGLE, stage=0)
    cluster.run(options, SINGLE, stage=0)
    return folder


def test_a_control_has_no_patience(labels: Path) -> None:
    """It could end earlier than the training that it controls."""
    patient = "train.evaluate={every: 1, metric: pairs/average, patience: 1}"
    options = make_config(labels, labels / "run", "controls=[]", patient)
    with pytest.raises(ValueError, match="train.evaluate.patience"):
        train.run(options, SINGLE, stage=1, variant="ungrouped")
    assert not (labels / "run" / "controls").exists()


def make_config(labels: Path, run_dir: Path, *overrides: str) -> Config:
    """Epochs, not steps, are configured."""
    own = ("base=null", "num_stages=1", "train.steps=null", "train.epochs=2")
    controls = "controls=[ungrouped,random_groups]"
    return tiny.make_config(run_dir, labels / "data", *own, controls, *overrides)


def labelled(labels: Path, run_dir: Path, policy: str, *overrides: str) -> Config:
    """A copy of the run with the labels, to be trained under ``policy``."""
    shutil.copytree(labels / "run", run_dir)
    return make_config(labels, run_dir, f"train.plan.policy={policy}", *overrides)


@pytest.mark.parametrize("policy", ["drop", "wrap"])
@in_soak
def test_controls_take_the_steps_of_what_they_control(
    labels: Path, tmp_path: Path, policy: str
) -> None:
    options = labelled(labels, tmp_path / "run", policy)
    steps = {}
    for variant in ("mcl", *CONTROLS):
        done = train.run(options, SINGLE, stage=1, variant=variant)
        steps[variant] = artifacts.read_manifest(done, "train").counts["steps"]
    assert steps["ungrouped"] == steps["random_groups"] == steps["mcl"]
    ungrouped = StageGroups(RunPaths.of(options, "ungrouped").train(1) / "grouped_index").read()[0]
    own = coverage_report(ungrouped, options.train.global_batch, options.train.plan.policy).steps
    assert 2 * own != steps["mcl"]  # epochs of its own would have been others
    planned = plan.compute(options, Machine(), None)["trainings"]
    assert [training["steps"] for training in planned] == [(steps["mcl"],) * 2] * 3
    # The same command finds all of them finished.
    for variant in CONTROLS:
        train.run(options, SINGLE, stage=1, variant=variant)


def test_a_control_waits_for_what_it_controls(labels: Path, tmp_path: Path) -> None:
    options = labelled(labels, tmp_path / "run", "drop")
    with pytest.raises(RuntimeError, match=r"run 'mclclip train --stage 1' first, or set train"):
        train.run(options, SINGLE, stage=1, variant="ungrouped")
    assert not RunPaths.of(options, "ungrouped").train(1).exists()


def test_controls_see_the_same_views(labels: Path, tmp_path: Path) -> None:
    """Captions and augmented pictures of a sample are equal, bit for bit; its batch is another."""
    options = labelled(labels, tmp_path / "run", "backoff", "train.epochs=1")
    train.run(options, SINGLE, stage=1)
    views = {}
    for variant in ("mcl", *CONTROLS):
        if variant != "mcl":
            train.run(options, SINGLE, stage=1, variant=variant)
        views[variant] = first_epoch(options, variant)
    for variant in CONTROLS:
        assert views[variant].keys() == views["mcl"].keys()
        assert list(views[variant]) != list(views["mcl"])
        for sample, (image, text) in views["mcl"].items():
            torch.testing.assert_close(views[variant][sample][0], image, rtol=0, atol=0)
            assert torch.equal(views[variant][sample][1], text)


def first_epoch(options: Config, variant: str) -> dict[int, tuple[Tensor, Tensor]]:
    """Picture and caption of every sample as the training of a variant reads them in epoch 0."""
    layout = RunPaths.of(options, variant)
    job = StageTraining(options, options.train, SINGLE, layout, 1, SampleIndex.open(layout.index))
    grouped, bad = StageGroups(layout.train(1) / "grouped_index").read()
    model = build.build_model(job)
    num_steps = grouped.num_samples // options.train.global_batch
    opened, plan = TrainingInputs(job.classes, None, job.read_extras()), job.plan(grouped)
    loader = build.build_loader(job, opened, plan, bad, model, range(num_steps))
    found = {}
    for batch in loader:
        assert batch.text is not None
        rows = zip(batch.sample_id.tolist(), batch.views[0], batch.text, strict=True)
        found.update({sample: (image, text) for sample, image, text in rows})
    return found


def test_a_control_of_another_training_is_refused(labels: Path, tmp_path: Path) -> None:
    """Its number of steps would be that of labels or options that are no more."""
    options = labelled(labels, tmp_path / "run", "drop")
    train.run(options, SINGLE, stage=1)
    longer = config.from_tree(asdict(options), ["train.epochs=3"])
    with pytest.raises(ValueError, match=r"train.epochs was 2.*, now 3"):
        train.run(longer, SINGLE, stage=1, variant="ungrouped")
    assert not RunPaths.of(options, "ungrouped").train(1).exists()
