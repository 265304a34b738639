"""What contrastive losses share: options, rows without negatives, large scales."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mclclip.objectives.base import ObjectiveInputs, parse
from mclclip.objectives.contrast import ContrastOptions, Temperature
from mclclip.objectives.hcl import HardNegatives
from mclclip.objectives.hcl import Options as HardOptions
from mclclip.objectives.ifm import ImplicitModification
from mclclip.objectives.ifm import Options as ModifiedOptions
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.row_losses import softplus_of_difference
from mclclip.objectives.supcon import SupervisedContrast
from mclclip.ranks.process_group import SINGLE
from tests import objective_loops as loops

KINDS: dict[str, dict[str, Any]] = {
    "info_nce": {"kind": "info_nce"},
    "nt_xent": {"kind": "nt_xent"},
    "ifm": {"kind": "ifm"},
    "ifm_views": {"kind": "ifm", "between": "views", "temperature": 0.2},
    "hcl": {"kind": "hcl"},
    "hcl_views": {"kind": "hcl", "between": "views", "temperature": {"learnable": True}},
    "supcon": {"kind": "supcon", "attribute": "shape"},
    "supcon_1": {"kind": "supcon", "attribute": "shape", "num_views": 1},
}


def options_of(name: str) -> ContrastOptions:
    options = parse(KINDS[name])
    assert isinstance(options, ContrastOptions)
    return options


def test_a_temperature_of_its_own_leaves_the_models_scale_alone() -> None:
    reads = parse({"kind": "info_nce", "temperature": 0.07}).reads
    assert reads.captions and not reads.logit_scale


def test_excess_is_exact_for_large_differences() -> None:
    negatives = torch.tensor([-800.0, 0.0, 40.0, 800.0, float("-inf")], dtype=torch.float64)
    negatives.requires_grad_()
    found = softplus_of_difference(negatives, torch.zeros(5, dtype=torch.float64))
    expected = [0.0, 0.6931471805599453, 40.0 + 4.248354255291589e-18, 800.0, 0.0]
    loops.close(found, torch.tensor(expected, dtype=torch.float64), 1e-15)
    found.sum().backward()
    assert negatives.grad is not None
    loops.close(negatives.grad[1:], torch.tensor([0.5, 1.0, 1.0, 0.0], dtype=torch.float64))


# --- invariants of all of them -----------------------------------------------------------------


def run(name: str, batch: loops.Batch) -> dict[str, Tensor]:
    options = options_of(name)
    precision = "float64" if batch.first.dtype == torch.float64 else "fp32"
    model = SimpleNamespace(feature_dim=batch.first.shape[1])
    loss = options.build(ObjectiveInputs(model, SINGLE, 0, precision))
    second = "text_features" if options.between == "captions" else "image_features_1"
    return batch.run(loss, second)


TWO_SIDES = [name for name in KINDS if not name.startswith("supcon")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TWO_SIDES)
def test_rows_without_negatives_are_silent_and_counted(name: str, dtype: torch.dtype) -> None:
    batch = loops.draw(4, 5, dtype=dtype)
    batch.group_ids = torch.tensor([0, 1, 2, 3, 3])
    assert run(name, batch)["rows_without_negatives"] == 3
    for gradient in batch.gradients()[:2]:
        assert torch.equal(gradient[:3], torch.zeros_like(gradient[:3]))
        assert (gradient[3:] != 0).all()
    one_sample = batch.rows(range(5))
    one_sample.group_ids[:], one_sample.sample_id[:] = 0, 7
    assert run(name, one_sample)["rows_without_negatives"] == 5


@pytest.mark.parametrize("name", KINDS)
def test_large_scales_stay_finite(name: str) -> None:
    batch = loops.draw(5, 6, groups=2, scale=1000.0, dtype=torch.float32)
    assert torch.isfinite(run(name, batch)["loss"])
    assert all(torch.isfinite(gradient).all() for gradient in batch.gradients())


def test_half_precision_features_are_widened() -> None:
    image, text = loops.draw(9, 6, dtype=torch.float32).unit()
    ids = torch.arange(6)
    output = loops.parts_of(
        InfoNCE(),
        image_features=image.bfloat16(),
        text_features=text.half(),
        logit_scale=torch.tensor(7.0),
        group_ids=ids[:, None] * 0,
        sample_id=ids,
    )
    assert output["loss"].dtype == torch.float32


# --- hard negatives -------------------------------------------------------------------------------


def floor(batch: loops.Batch, scale: float) -> torch.Tensor:
    """The loss of rows whose estimate is its lower bound."""

    def of_row(row: loops.Row) -> torch.Tensor:
        assert row.positive is not None
        own = (scale * row.positive).exp()
        return -(own / (own + len(row.negatives) * torch.tensor(-scale).double().exp())).log()

    return loops.mean_loss(loops.rows_of(batch, "views"), of_row)


@pytest.mark.parametrize("scale", [2.0, 100.0])
def test_the_estimate_has_a_floor(scale: float) -> None:
    """Views that agree and negatives that lie opposite: the correction takes more than there is."""
    batch = loops.draw(3, 4)
    with torch.no_grad():
        batch.second.copy_(batch.first)
    tight, untied = (HardOptions(between="views", beta=0.0, tau_plus=tau) for tau in (0.9, 0.0))
    found = batch.run(HardNegatives(tight, temperature=Temperature(1 / scale)))["loss"].detach()
    assert found > 0
    loops.close(found, floor(batch, scale).detach())
    assert all(torch.isfinite(gradient).all() for gradient in batch.gradients())
    loose = batch.rows(slice(None)).run(HardNegatives(untied, temperature=Temperature(1 / scale)))
    assert loose["loss"] > found


# --- implicit feature modification ----------------------------------------------------------------


def test_either_direction_alone() -> None:
    batch = loops.draw(4, 6, groups=2)

    def run(direction: Any) -> float:
        objective = ImplicitModification(ModifiedOptions(direction=direction))
        return batch.rows(slice(None)).run(objective, "text_features")["loss"].item()

    assert (run("images") + run("texts")) / 2 == pytest.approx(run("both"), rel=1e-12)
    assert run("images") != run("texts")


# --- supervised contrast --------------------------------------------------------------------------


def supcon(num_views: int = 2) -> SupervisedContrast:
    return SupervisedContrast(num_views, temperature=Temperature(0.5))


def test_one_view_without_any_positive_has_no_loss_and_no_gradient() -> None:
    batch = loops.draw(3, 5)
    batch.classes = torch.arange(5)
    parts = batch.run(supcon(num_views=1))
    assert (parts["loss"].item(), int(parts["rows_without_positives"])) == (0.0, 5)
    for gradient in batch.gradients():
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_samples_without_a_class_are_nobodys_positives() -> None:
    features = torch.nn.functional.normalize(
        torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), dim=1
    )
    losses = []
    for classes in ([2, 2, 0, -1, -1, 1], [2, 2, 0, 7, 8, 1]):
        batch = SimpleNamespace(
            group_ids=torch.tensor([0, 0, 0, 1, 1, 1])[:, None], sample_id=torch.arange(6),
            classes=torch.tensor(classes)[:, None], extras={}, prefix_length=0,
        )  # fmt: skip
        parts: Any = supcon(num_views=1)({"image_features": features}, batch)  # type: ignore[arg-type]
        assert int(parts["rows_without_positives"]) == 4
        losses.append(float(parts["loss"]))
    assert losses[0] == losses[1] > 0
