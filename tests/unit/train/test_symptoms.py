"""Every known failure of a training is told once, of a run that has it; none of a healthy run."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mclclip import config
from mclclip.config import Config
from mclclip.objectives.contrast import Learnable, Temperature
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.sigmoid import Sigmoid
from mclclip.ranks.process_group import Context
from mclclip.train.symptoms import FAILURES, ROWS, Course, Symptoms, _limit
from mclclip.verbs import export, index, train
from tests import tiny
from tests.distributed.conftest import here
from tests.objective_loops import parts_of, split

LEARNED = ("lr=5e-3", "objective.kind=info_nce", "objective.temperature=0.2")
NOTHING_LEARNED = ("lr=1e-9", "warmup=0", "objective.kind=info_nce", "objective.temperature=1.0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("data"), num_samples=48)


def settings(run_dir: Path, data: Path, *options: str, model: Any = tiny.ONE_BLOCK) -> Config:
    tree = tiny.tree(run_dir, data) | {"model": {"name": model}}
    tree["train"] |= {"lock": {"image_blocks": 1}}
    tree["base"] |= {"global_batch": 12, "steps": 65, "log_every": 5}
    tree["base"]["checkpoint"] = {"every": 1000}
    return config.from_tree(tree, [f"base.{option}" for option in options])


def trained(run_dir: Path, data: Path, *options: str, model: Any = tiny.ONE_BLOCK) -> Path:
    """Trains stage 0 on this rank with options of ``base``; returns the folder of the training."""
    torch.set_num_threads(1)
    context = here()
    settled = settings(run_dir, data, *options, model=model)
    index.run(settled, context)
    return train.run(settled, context, stage=0)


def exported(run_dir: Path, data: Path, *options: str, model: Any = tiny.ONE_BLOCK) -> Path:
    """The export of a training."""
    trained(run_dir, data, *options, model=model)
    return export.stage(settings(run_dir, data, *options, model=model), Context(), stage=0)


def warnings(directory: Path) -> list[str]:
    """The names of the warnings of a training; each may be there once."""
    names = [row["warning"] for row in tiny.rows(directory / "warnings.jsonl")]
    assert len(set(names)) == len(names)
    return names


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The export of a healthy training, which lies two folders above."""
    return exported(tmp_path_factory.mktemp("learned"), data, "steps=60", *LEARNED)


def test_nothing_is_said_of_a_healthy_training(learned: Path) -> None:
    directory = learned.parent / "train"
    rows = tiny.rows(directory / "metrics.jsonl")
    assert rows[-1]["loss"] < 0.8 * rows[-1]["chance_loss"]
    assert rows[-1]["chance_loss"] == pytest.approx(math.log(12))
    assert not (directory / "warnings.jsonl").exists()


def test_a_learning_rate_that_undoes_what_was_learned(
    tmp_path: Path, data: Path, learned: Path
) -> None:
    """All features become one, so that nothing is learned any more; the decay makes that certain
    on any processor."""
    options = *LEARNED, "lr=0.5", "weight_decay=2.0", "warmup=0", "log_every=1"
    found = warnings(trained(tmp_path, data, *options, model=f"local-dir:{learned}"))
    assert set(found) == {"lr_too_high", "features_collapse", "one_answer", "loss_at_chance"}


@pytest.mark.parametrize(("image_norm", "found"), [("true", ["far_from_base"]), ("false", [])])
def test_a_first_step_far_from_the_base_it_was_given(
    tmp_path: Path, data: Path, folded: Path, image_norm: str, found: list[str]
) -> None:
    options = f"lock.image_norm={image_norm}", "steps=2", "lr=1e-6", "global_batch=24"
    assert warnings(trained(tmp_path, data, *options, model=f"local-dir:{folded}")) == found


@pytest.mark.parametrize(("prefix_length", "count"), [(0, 1), (1, 0)])
def test_batch_norms_that_see_one_group_are_no_fault(prefix_length: int, count: int) -> None:
    """The base is compared on batches without groups alone."""
    trainee, recorder = SimpleNamespace(model=nn.BatchNorm1d(2)), MagicMock(total=9)
    trainee.modules = trainee.model.modules
    engine = MagicMock(measure=MagicMock(return_value={"loss": torch.zeros(())}))
    batch = SimpleNamespace(step=0, prefix_length=prefix_length)
    Symptoms(trainee, engine, recorder).before(batch)
    assert engine.measure.call_count == count and trainee.model.training


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """An export whose batch norms were folded into the convolutions before them, so that they have
    statistics of 0 and 1, as published CNNs do."""
    options = "steps=40", "global_batch=24", *LEARNED
    run_dir = tmp_path_factory.mktemp("folded")
    directory = shutil.copytree(
        exported(run_dir, data, *options, model=tiny.RESNET),
        run_dir / "folded",
        ignore=shutil.ignore_patterns("manifest.json"),  # with the digests of the weights
    )
    path = directory / "open_clip_model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("running_mean")]:
        norm = name.removesuffix("running_mean")
        conv = norm.replace("bn", "conv").replace("downsample.1", "downsample.0") + "weight"
        factor = tensors[norm + "weight"] / (tensors[norm + "running_var"] + 1e-5).sqrt()
        tensors[conv] *= factor[:, None, None, None]
        tensors[norm + "weight"].fill_(1.0)
        tensors[norm + "bias"] -= tensors[name] * factor
        tensors[name].zero_()
        tensors[norm + "running_var"].fill_(1.0 - 1e-5)
    save_file(tensors, path)
    return directory


# --- records -----------------------------------------------------------------------------------


def test_a_resumed_training_warns_as_an_undisturbed_one(
    tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a loss that stands at chance; killed before the step at which it would warn, and after."""
    options = *NOTHING_LEARNED, "checkpoint={every: 20, keep_every: 20}"
    with caplog.at_level("WARNING", "mclclip"):
        directory = trained(tmp_path, data, *options)
    assert warnings(directory) == ["loss_at_chance"]
    assert "stage 0 step 55: the loss stands at 2.5" in caplog.text
    assert "raise lr" in caplog.text
    whole = figures(directory), tiny.rows(directory / "warnings.jsonl")
    for last in (40, 60):
        for kept in (directory / "checkpoints").glob("step_*"):
            if int(kept.name.removeprefix("step_")) > last:
                shutil.rmtree(kept)
        (directory / "manifest.json").rename(directory / "in_progress.json")
        trained(tmp_path, data, *options)
        assert (figures(directory), tiny.rows(directory / "warnings.jsonl")) == whole


def figures(directory: Path) -> list[tuple[float, ...]]:
    names = "step", "loss", "chance_loss", "feature_spread", "top_answer_share"
    return [tuple(row[name] for name in names) for row in tiny.rows(directory / "metrics.jsonl")]


# --- what chance is ----------------------------------------------------------------------------


def test_chance_of_info_nce_is_the_logarithm_of_its_candidates() -> None:
    """Groups of 3 and 2, of which the second repeats a sample."""
    features, labels = torch.eye(5), torch.tensor([[0], [0], [0], [1], [1]])
    given = {"image_features": features, "text_features": features, "group_ids": labels}
    given |= {"sample_id": torch.tensor([0, 1, 2, 3, 3])}
    loss = InfoNCE("captions", Temperature(0.1))
    expected = torch.tensor([3.0, 3.0, 3.0, 1.0, 1.0]).log().mean()
    torch.testing.assert_close(loss.chance(*split(given), parts_of(loss, **given)), expected)


def test_chance_of_the_sigmoid_loss_is_the_least_of_any_bias() -> None:
    given = {"group_ids": torch.zeros(6, 1, dtype=torch.int64), "sample_id": torch.arange(6)}
    biases = torch.linspace(-9.0, 9.0, 4001, dtype=torch.float64)
    own, other = torch.nn.functional.softplus(-biases), torch.nn.functional.softplus(biases)
    least = (own + 5 * other).min()
    torch.testing.assert_close(Sigmoid().chance(*split(given), {}), least, rtol=1e-5, atol=0)


# --- the table ---------------------------------------------------------------------------------

GOOD = {"loss": 1.0, "chance_loss": 3.0, "lr": 1e-3, "logit_scale": 20.0}
BAD = GOOD | {"loss": 3.0, "feature_spread": 0.0, "top_answer_share": 1.0}


def told(rows: list[dict[str, float]], every: int = 10) -> list[tuple[int, str]]:
    """Step and name of each warning of a course of rows."""
    course = Course(steps=50)
    numbered = [row | {"step": every * number} for number, row in enumerate(rows, 1)]
    return [(int(row["step"]), each.name) for row in numbered for each in course.take(row)]


def test_a_failure_must_last() -> None:
    assert told([BAD] * (ROWS - 1) + [GOOD] + [BAD] * (ROWS - 1)) == []
    assert [step for step, _ in told([BAD] * 20, every=1)] == []
    assert {step for step, _ in told([BAD] * 60, every=1)} == {51}
    assert {step for step, _ in told([BAD] * 20, every=100)} == {100 * ROWS}


def test_nothing_is_said_while_the_learning_rate_rises() -> None:
    assert told([BAD | {"lr": 1e-5 * number} for number in range(1, 40)]) == []


def test_every_failure_is_told_once() -> None:
    """By a message that can be filled in."""
    names = [name for _, name in told([GOOD] * 3 + [BAD] * 30 + [GOOD] * 9 + [BAD] * 30)]
    for failure in FAILURES:
        row = BAD | {"scale": 100.0}
        assert "{" not in failure.message.format(**row) + failure.remedy.format(**row)
    assert sorted(names) == ["features_collapse", "loss_at_chance", "lr_too_high", "one_answer"]


@pytest.mark.parametrize(("start", "found"), [(2.0, ["logit_scale_at_limit"]), (2.3, [])])
def test_a_logit_scale_that_rose_to_its_limit(start: float, found: list[str]) -> None:
    """To that of the loss's own temperature; one that began there did not rise."""
    limit = _limit(InfoNCE("captions", Temperature(Learnable(start=1 / start, max_scale=2.3))))
    course, names = Course(steps=50, limit=limit), []
    for step in range(1, 100):
        scale = min(start + 0.01 * (step - 1), 2.3)
        row = GOOD | {"step": step, "0_info_nce/logit_scale": scale, "logit_scale": 1.0}
        names += [failure.name for failure in course.take(row)]
    assert names == found


def test_rows_that_are_not_finite_or_lack_figures_are_read() -> None:
    bare: dict[str, Any] = {"loss": None, "lr": 0.1}
    assert told([bare] * 10 + [{"loss": 1.0, "lr": 0.1}] * 10) == []
