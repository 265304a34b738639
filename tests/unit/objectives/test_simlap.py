"""SimLAP: its draws, penalties and temperatures, and files that it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from mclclip.objectives.base import ObjectiveInputs, parse
from mclclip.objectives.contrast import CosineSchedule, Learnable
from mclclip.objectives.simlap import Options, SimLAP
from mclclip.ranks.process_group import Context
from tests.objective_loops import parts_of

CLASSES, DIM, ROWS = 4, 6, 9


def batch() -> dict[str, Any]:
    """Two views of samples of four classes, one of which (3) has one sample."""
    rng = np.random.default_rng(0)
    views = [torch.tensor(rng.normal(size=(ROWS, DIM))) for _ in range(2)]
    first, second = (functional.normalize(view).requires_grad_() for view in views)
    classes = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 3])
    return {
        "image_features": first,
        "image_features_1": second,
        "classes": classes[:, None],
        "group_ids": torch.zeros(ROWS, 1, dtype=torch.int64),
        "sample_id": torch.tensor([11, 5, 8, 30, 2, 17, 4, 9, 12]),
    }


def objective(**options: Any) -> SimLAP:
    own = {"temperature": 0.2, "norm": "none", "label_dim": 5, "hidden_dim": 7} | options
    made = Options(**own).build(setting())
    assert isinstance(made, SimLAP)
    made.begin(17, 100, 0.5)
    return made


def test_a_batch_without_any_positive_has_loss_and_gradient_zero() -> None:
    given = batch()
    given["classes"] = torch.zeros(ROWS, 1, dtype=torch.int64)
    module = objective(pairs="distinct")
    found = parts_of(module, **given)
    assert (float(found["loss"].detach()), int(found["rows_without_positives"])) == (0.0, ROWS)
    found["loss"].backward()
    for leaf in (given["image_features"], *module.filter.parameters()):
        assert leaf.grad is not None and torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_temperature_may_be_learned_scheduled_or_the_models() -> None:
    given, expected = batch(), parts_of(objective(), **batch())["loss"]
    learned = objective(temperature=Learnable(start=0.2))
    found = parts_of(learned, **given)
    torch.testing.assert_close(found["loss"], expected)
    (gradient,) = torch.autograd.grad(found["loss"], list(learned.temperature.parameters()))
    assert gradient.abs().max() > 0.0
    cosine = CosineSchedule(min=0.2, max=0.9, half_period=1.0)
    scheduled = objective(temperature=cosine)
    scheduled.begin(17, 100, 1.0)
    torch.testing.assert_close(parts_of(scheduled, **given)["loss"], expected)
    logit_scale = torch.tensor(5.0, dtype=torch.float64)
    models = objective(temperature=None)
    torch.testing.assert_close(parts_of(models, **given, logit_scale=logit_scale)["loss"], expected)
    with pytest.raises(ValueError, match="takes the logit scale of the model, which gives none"):
        parts_of(models, **given)
    assert parse({"kind": "simlap", "temperature": None}).reads.logit_scale


def setting() -> ObjectiveInputs:
    classes = SimpleNamespace(num_classes=CLASSES, centroids=lambda: np.eye(CLASSES))
    model = SimpleNamespace(feature_dim=DIM)
    return ObjectiveInputs(model, Context(), seed=5, precision="float64", classes=classes)


def test_n_closest_by_means_and_by_embeddings(tmp_path: Path) -> None:
    given = batch()
    arbitrary = parse({"kind": "simlap"}).build(setting())
    arbitrary.begin(17, 100, 0.0)
    expected = parts_of(arbitrary, **given)["loss"]
    np.save(tmp_path / "means.npy", np.eye(CLASSES, 7))
    every = {"kind": "simlap", "pairs": "n_closest", "num_closest": CLASSES - 1}
    by_file = {"attribute": "breed", "class_means": str(tmp_path / "means.npy")}
    for more in ({}, {"closest_by": "label_embeddings"}, by_file):
        module = parse(every | more).build(setting())
        module.begin(17, 100, 0.0)
        torch.testing.assert_close(parts_of(module, **given)["loss"], expected)
    with pytest.raises(ValueError, match="num_closest is 4, with 4 classes: wanted at most 3"):
        parse(every | {"num_closest": 4}).build(setting())


def test_bad_files_of_class_means_are_refused_in_one_line(tmp_path: Path) -> None:
    near = {"kind": "simlap", "pairs": "n_closest", "num_closest": 1}
    with pytest.raises(FileNotFoundError, match="nowhere.npy is no file"):
        parse(near | {"class_means": "nowhere.npy"}).build(setting())
    np.save(tmp_path / "few.npy", np.eye(3))
    with pytest.raises(ValueError, match=r"is \[3, 3\], wanted a row for each of 4 classes"):
        parse(near | {"class_means": str(tmp_path / "few.npy")}).build(setting())
