"""Controls take the steps of the training they control, and see the same views of every sample."""

from __future__ import annotations

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
from mclclip.verbs import plan, train
from mclclip.verbs.plan import Machine
from tests import damage

CONTROLS = ("ungrouped", "random_groups")


def changed(options: Config, *overrides: str) -> Config:
    return config.from_tree(asdict(options), overrides)


@pytest.fixture
def options(prepared_run: Path, tmp_path: Path) -> Config:
    """Of a copy of the run with labels of stage 1; epochs, not steps, are configured."""
    own = ("train.steps=null", "train.epochs=1", "train.lock.text=true")
    return changed(damage.copied(prepared_run, tmp_path), *own, f"controls=[{','.join(CONTROLS)}]")


def test_controls_take_the_steps_of_what_they_control(options: Config) -> None:
    """They wait for it, and another one is refused: its steps are of options that are no more."""
    options = changed(options, "train.plan.policy=drop", "train.epochs=2")
    with pytest.raises(RuntimeError, match=r"run 'mclclip train --stage 1' first, or set train"):
        train.run(options, SINGLE, stage=1, variant="ungrouped")
    steps = {}
    for variant in ("mcl", *CONTROLS):
        if variant == "ungrouped":
            with pytest.raises(ValueError, match=r"train.epochs was 2.*, now 3"):
                train.run(changed(options, "train.epochs=3"), SINGLE, stage=1, variant=variant)
            assert not RunPaths.of(options, variant).train(1).exists()
        done = train.run(options, SINGLE, stage=1, variant=variant)
        steps[variant] = artifacts.read_manifest(done, "train").counts["steps"]
    assert steps["ungrouped"] == steps["random_groups"] == steps["mcl"]
    ungrouped = StageGroups(RunPaths.of(options, "ungrouped").train(1) / "grouped_index").read()[0]
    own = coverage_report(ungrouped, options.train.global_batch, options.train.plan.policy).steps
    assert 2 * own != steps["mcl"]  # epochs of its own would have been others
    planned = plan.compute(options, Machine(), None)["trainings"]
    assert [training["steps"] for training in planned] == [(steps["mcl"],) * 2] * 3


def test_a_control_has_no_patience(options: Config) -> None:
    """It could end earlier than the training that it controls."""
    patient = "train.evaluate={every: 1, metric: pairs/average, patience: 1}"
    options = changed(options, "controls=[]", patient)
    with pytest.raises(ValueError, match="train.evaluate.patience"):
        train.run(options, SINGLE, stage=1, variant="ungrouped")
    assert not RunPaths.of(options, "ungrouped").train(1).exists()


def test_controls_see_the_same_views(options: Config) -> None:
    """Captions and augmented pictures of a sample are equal, bit for bit; its batch is another."""
    views = {}
    for variant in ("mcl", *CONTROLS):
        train.run(options, SINGLE, stage=1, variant=variant)
        views[variant] = first_epoch(options, variant)
    for variant in CONTROLS:
        assert views[variant].keys() == views["mcl"].keys()
        assert list(views[variant]) != list(views["mcl"])
        for sample, (image, text) in views["mcl"].items():
            assert torch.equal(views[variant][sample][0], image)
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
