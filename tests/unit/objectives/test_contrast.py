"""Contrastive losses: rows in tiles, temperatures, rows without negatives, large scales."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.base import ObjectiveInputs, parse
from mclclip.objectives.contrast import (
    ContrastOptions,
    CosineSchedule,
    Learnable,
    Temperature,
)
from mclclip.objectives.contrast import (
    parse as parse_temperature,
)
from mclclip.objectives.hcl import HardNegatives
from mclclip.objectives.hcl import Options as HardOptions
from mclclip.objectives.ifm import ImplicitModification
from mclclip.objectives.ifm import Options as ModifiedOptions
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.pairs import Pairs
from mclclip.objectives.row_losses import row_losses, softplus_of_difference
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


@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("supcon")])
def test_rows_without_negatives_are_silent_and_counted(name: str) -> None:
    batch = loops.draw(4, 5, dtype=torch.float32)
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


# --- hard negatives -------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0, 100.0])
def test_the_estimate_has_a_floor(scale: float) -> None:
    """Views that agree and negatives that lie opposite: the correction takes more than there is."""
    batch = loops.draw(3, 4)
    with torch.no_grad():
        batch.second.copy_(batch.first)
    tight, untied = (HardOptions(between="views", beta=0.0, tau_plus=tau) for tau in (0.9, 0.0))
    found = batch.run(HardNegatives(tight, temperature=Temperature(1 / scale)))["loss"].detach()
    wanted = math.log1p(6 * math.exp(-2 * scale))  # of rows whose six negatives are at the floor
    assert found.item() == pytest.approx(wanted, rel=1e-9)
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


# --- temperatures ---------------------------------------------------------------------------------


def test_schedule_is_the_cosine_of_the_paper() -> None:
    schedule = CosineSchedule(min=0.1, max=1.0, half_period=200, per="step")
    for epoch in (0.0, 0.5, 37.25, 100.0, 200.0, 399.0, 400.0):
        expected = 0.1 + 0.5 * (1.0 - 0.1) * (1.0 + math.cos(math.pi * epoch / 200))
        assert schedule.at(epoch) == pytest.approx(expected, rel=1e-14)
    assert schedule.at(0) == pytest.approx(1.0)
    assert schedule.at(200) == pytest.approx(0.1)
    assert schedule.at(400 + 30) == pytest.approx(schedule.at(30))  # a period of two halves
    per_epoch = CosineSchedule(half_period=4)
    assert per_epoch.at(1.0) == per_epoch.at(1.99) != per_epoch.at(2.0)


def test_a_step_moves_the_loss_to_its_temperature() -> None:
    schedule = CosineSchedule(min=0.1, max=1.0, half_period=2)
    scheduled = InfoNCE(temperature=Temperature(schedule), between="views")
    batch = loops.draw(0, 6)
    for step, epoch in enumerate((0.0, 0.5, 1.0, 2.5)):
        scheduled.begin(step, 9, epoch)
        parts = batch.run(scheduled)
        fixed = InfoNCE(temperature=Temperature(schedule.at(epoch)), between="views")
        assert torch.equal(parts["loss"], batch.run(fixed)["loss"])
        assert parts["temperature"].item() == pytest.approx(schedule.at(epoch), rel=1e-14)
    assert not list(scheduled.parameters()) and not scheduled.state_dict()


def test_a_trained_one_moves_is_bounded_and_is_saved() -> None:
    options = Learnable(start=0.5, max_scale=2.5)
    objective = InfoNCE(temperature=Temperature(options, torch.float64), between="views")
    batch = loops.draw(1, 6)
    assert batch.run(objective)["temperature"].item() == pytest.approx(0.5, rel=1e-14)
    (parameter,) = objective.parameters()
    assert parameter.shape == (1,) and parameter.grad is not None and parameter.grad != 0
    twin = batch.rows(slice(None))
    with torch.no_grad():
        twin.scale.fill_(2.0)
    twin.run(InfoNCE(), "text_features")  # the same gradient arrives at a scale of the model's
    between = InfoNCE(temperature=Temperature(options, torch.float64))
    batch.rows(slice(None)).run(between, "text_features")
    (other,) = between.parameters()
    assert other.grad is not None and twin.scale.grad is not None
    loops.close(other.grad[0], 2.0 * twin.scale.grad)  # of the logarithm

    optimizer = build_optimizer(objective, weight_decay=0.5, lr=10.0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    parameter.grad.fill_(-1.0)
    optimizer.step()
    assert parameter.item() == math.log(2.5)
    again = InfoNCE(temperature=Temperature(options, torch.float64), between="views")
    again.load_state_dict(objective.state_dict())
    assert batch.run(again)["temperature"].item() == pytest.approx(1 / 2.5, rel=1e-14)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "greater than 0"),
        (math.inf, "finite"),
        (True, "wanted a number such as 0.5"),
        ({"schedule": "linear"}, "'cosine'"),
        ({"schedule": "cosine", "min": 2.0}, "min=2.0 is above max=1.0"),
        ({"learnable": True, "start": 0.001}, "start=0.001 is below 1 / max_scale=0.01"),
    ],
)
def test_what_is_no_temperature_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_temperature(given)


# --- rows computed in tiles -----------------------------------------------------------------------


def draw(
    seed: int, rows: int, groups: int = 1, dim: int = 5, tile: int = 3
) -> tuple[Tensor, Tensor, Pairs]:
    """Queries, keys and marks of samples of which none is repeated."""
    rng = np.random.default_rng(seed)
    queries, keys = (torch.tensor(rng.normal(size=(rows, dim))) for _ in range(2))
    marks = torch.tensor(rng.integers(0, groups, rows)), torch.tensor(rng.permutation(rows))
    return queries.requires_grad_(), keys.requires_grad_(), Pairs(*marks, *marks, 0, tile)


def whole(queries: Tensor, keys: Tensor, pairs: Pairs) -> Tensor:
    """The losses from the whole matrix."""
    own = torch.arange(len(queries))
    keep = (pairs.groups[:, None] == pairs.all_groups) & (
        pairs.sample_id[:, None] != pairs.all_sample_ids
    )
    keep[own, own] = True
    logits = queries @ keys.T
    positive = logits.gather(1, own[:, None])[:, 0]
    return logits.masked_fill(~keep, float("-inf")).logsumexp(dim=1) - positive


def gradients(losses: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of a sum in which every row counts differently."""
    weights = torch.linspace(0.5, 2, len(losses), dtype=losses.dtype)
    return torch.autograd.grad((losses * weights).sum(), inputs)


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_float32_is_as_accurate_as_the_matrix(scale: float) -> None:
    def features(dtype: torch.dtype) -> tuple[Tensor, Tensor, Pairs]:
        queries, keys, pairs = draw(2, rows=400, groups=2, dim=32, tile=64)
        queries, keys = (torch.nn.functional.normalize(x.detach().float()) for x in (queries, keys))
        queries, keys = (scale * queries).to(dtype), keys.to(dtype)
        return queries.requires_grad_(), keys.requires_grad_(), pairs

    def errors(losses: Tensor, *inputs: Tensor) -> list[float]:
        found = (losses, *gradients(losses, *inputs))
        return [
            float((x.double() - y).detach().norm() / y.detach().norm())
            for x, y in zip(found, exact, strict=True)
        ]

    queries, keys, pairs = features(torch.float64)
    losses = whole(queries, keys, pairs)
    exact = (losses, *gradients(losses, queries, keys))
    queries, keys, pairs = features(torch.float32)
    ours = errors(row_losses(queries, keys, pairs)[0], queries, keys)
    matrix = errors(whole(queries, keys, pairs), queries, keys)
    for mine, theirs in zip(ours, matrix, strict=True):
        assert 0 < mine < 1.5 * theirs


@pytest.mark.parametrize("order", [1, -1])
def test_maximum_may_come_first_or_last(order: int) -> None:
    """Logits up to 1e4 from tile to tile, rising and falling: exp of any but differences is inf."""
    columns = order * torch.linspace(-1e4, 1e4, 8, dtype=torch.float64)[:, None]
    queries = torch.ones(8, 1, dtype=torch.float64)
    pairs = Pairs(torch.zeros(8), torch.arange(8), torch.zeros(8), torch.arange(8), 0, tile=2)
    found, _ = row_losses(queries, columns, pairs)
    torch.testing.assert_close(found, 1e4 - columns[:, 0], atol=1e-9, rtol=0)
