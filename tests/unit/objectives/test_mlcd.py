"""MLCD, MLC and the softmax against their definitions, and the invariants of the formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers import Margin, ShardedClassCenters
from mclclip.objectives.mlcd import ClassCenterLoss, negative_draw
from tests.objective_loops import dense_loss, parts_of

K, D, B, L = 40, 6, 10, 3
KINDS = ("mlcd", "mlc", "single_label")
NONE = Margin("none")


def rows_of() -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randn(K, D, generator=random, dtype=torch.float64)


def features_of(num_rows: int = B) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, D, generator=random, dtype=torch.float64)


def labels_of(padded: bool = True) -> Tensor:
    """Distinct classes per row; with ``padded`` one row has one label and one has none."""
    random = torch.Generator().manual_seed(2)
    labels = torch.stack([torch.randperm(K, generator=random)[:L] for _ in range(B)])
    if padded:
        labels[3, 1:], labels[5] = -1, -1
    return labels


def head(
    kind: str = "mlcd",
    rows: Tensor | None = None,
    negatives: Any = None,
    *,
    scale: float = 16.0,
    margin: Margin = NONE,
    **options: Any,
) -> ClassCenterLoss:
    """An objective whose negatives are always these classes (None: all)."""
    rows = rows_of() if rows is None else rows
    draw = None if negatives is None else lambda step: np.asarray(negatives, dtype=np.int64)
    centers = ShardedClassCenters(
        len(rows), D, lambda start, stop: rows[start:stop], draw=draw, dtype=rows.dtype, **options
    )
    centers.begin(0)
    return ClassCenterLoss(centers, kind, scale=scale, margin=margin, tile=7)  # type: ignore[arg-type]


def loss_and_gradients(
    objective: ClassCenterLoss, features: Tensor, labels: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What the objective returns, and the gradients of raw features and of all class centers."""
    raw = features.clone().requires_grad_()
    output = parts_of(objective, image_features=functional.normalize(raw, dim=1), classes=labels)
    output["loss"].backward()
    centers = objective.centers
    assert raw.grad is not None and centers.grad is not None and centers.touched is not None
    whole = torch.zeros_like(centers.rows)
    whole[centers.touched] = centers.grad
    return output, raw.grad, whole


# --- against the definition --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_at_large_scales(kind: str) -> None:
    """Where exp of the products would overflow: 100 needs float64, and MLC its logarithms."""
    scale = 100.0
    features, labels = features_of(), labels_of()
    features[0] = -rows_of()[labels[0, 0]]  # as far from its positive as can be
    margin = Margin("arc")
    exact = head(kind, scale=scale, margin=margin)
    found = head(kind, rows_of().float(), scale=scale, margin=margin)
    wanted = loss_and_gradients(exact, features, labels)
    got = loss_and_gradients(found, features.float(), labels)
    assert torch.isfinite(got[0]["loss"])
    torch.testing.assert_close(got[0]["loss"].double(), wanted[0]["loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [64.0, 256.0])
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_late_in_a_training(kind: str, scale: float) -> None:
    """Positives near 0.95 and negatives up to 0.85: exp(-scale) of a good positive still counts
    where it is multiplied with a large N."""
    random = torch.Generator().manual_seed(3)
    unit = functional.normalize(features_of(), dim=1)
    rows, labels = rows_of(), labels_of(padded=False)
    for row in range(B):
        for place, cosine in ((labels[row, 0], 0.95), ((labels[row, 0] + 1) % K, 0.85)):
            other = torch.randn(D, generator=random, dtype=torch.float64)
            other -= (other @ unit[row]) * unit[row]
            rows[place] = cosine * unit[row] + (1 - cosine**2) ** 0.5 * other / other.norm()
    wanted = loss_and_gradients(head(kind, rows, scale=scale), unit, labels)
    got = loss_and_gradients(head(kind, rows.float(), scale=scale), unit.float(), labels)
    assert float(wanted[0]["loss"].detach()) > 0.1
    for one, other in zip(got[1:], wanted[1:], strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 1e-3
    torch.testing.assert_close(got[0]["loss"].double(), wanted[0]["loss"], rtol=1e-4, atol=0)


# --- invariants --------------------------------------------------------------------------------


def test_without_negatives_only_the_positive_term_is_left() -> None:
    features, labels = features_of(), labels_of()
    output, grad, _ = loss_and_gradients(head("mlcd", negatives=[]), features, labels)
    assert float(output["negative_loss"]) == 0.0
    assert torch.equal(output["loss"].detach(), output["positive_loss"])
    assert torch.isfinite(grad).all() and grad.abs().sum() > 0
    assert float(output["max_negative_cosine"]) == -1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_whose_positives_are_all_that_is_drawn(kind: str) -> None:
    """Its N is empty: no share of it is taken, and the others' gradients are as ever."""
    features, labels = features_of(num_rows=3), torch.tensor([[0, 1], [1, 0], [5, 6]])
    rows, margin = rows_of(), Margin("arc")
    output, of_features, of_rows = loss_and_gradients(
        head(kind, rows, [0, 1], margin=margin), features, labels
    )
    one, other = features.clone().requires_grad_(), rows.clone().requires_grad_()
    wanted = dense_loss(kind, other, one, labels, [0, 1], 16.0, margin)
    wanted.backward()  # type: ignore[no-untyped-call]
    assert float(output["loss"].detach()) == pytest.approx(float(wanted.detach()), abs=1e-12)
    torch.testing.assert_close(of_features, one.grad, atol=1e-13, rtol=0)
    torch.testing.assert_close(of_rows, other.grad, atol=1e-13, rtol=0)


def test_the_loss_scale_is_taken_out_of_the_class_centers() -> None:
    features, labels = features_of(), labels_of()
    _, plain, of_rows = loss_and_gradients(head(), features, labels)
    scaled = head()
    scaled.centers.begin(0, loss_scale=1024.0)
    raw = features.clone().requires_grad_()
    unit = functional.normalize(raw, dim=1)
    (1024.0 * parts_of(scaled, image_features=unit, classes=labels)["loss"]).backward()
    assert raw.grad is not None and scaled.centers.grad is not None
    torch.testing.assert_close(raw.grad, 1024.0 * plain)
    touched = scaled.centers.touched
    torch.testing.assert_close(scaled.centers.grad, of_rows[touched])


def test_figures() -> None:
    features, labels = features_of(), labels_of()
    objective = head("mlcd", negatives=range(0, K, 2))
    unit = functional.normalize(features, dim=1)
    output = parts_of(objective, image_features=unit, classes=labels)
    cosine = functional.normalize(features, dim=1) @ functional.normalize(rows_of(), dim=1).T
    pairs = [(i, j) for i, row in enumerate(labels.tolist()) for j in row if j >= 0]
    positives = {j for _, j in pairs}
    others = [
        float(cosine[i, j]) for i in range(B) for j in range(0, K, 2) if (i, j) not in set(pairs)
    ]
    assert float(output["positive_cosine"]) == pytest.approx(
        np.mean([float(cosine[pair]) for pair in pairs])
    )
    assert float(output["max_negative_cosine"]) == pytest.approx(max(others))
    assert float(output["positives_per_row"]) == pytest.approx(len(pairs) / (B - 1))
    assert int(output["distinct_positives"]) == len(positives)
    assert int(output["conflicts"]) == len([j for j in positives if j % 2 == 0])


@pytest.mark.parametrize(
    ("kind", "cosines"), [("mlcd", (0.05, 0.15)), ("mlc", (0.9, 0.5)), ("single_label", (0.9, 0.5))]
)
def test_saturation(kind: str, cosines: tuple[float, float]) -> None:
    """MLCD's pull is below 1 % beyond a cosine of 0.104 at scale 64 and l = 8. What pulls a coupled
    loss is PN / (1 + PN): a positive of cosine 0.9 beside a negative of 0.9 does."""
    feature = torch.eye(D, dtype=torch.float64)[:1]
    for cosine, share in zip(cosines, (0.0, 1.0), strict=True):
        rows, several = torch.zeros(8, D, dtype=torch.float64), kind == "mlcd"
        rows[:, 0] = cosine
        rows[0, 0] = cosine if several else 0.9
        rows[:, 1] = (1.0 - rows[:, 0].square()).sqrt()
        rows = rows if several else rows[:2]
        objective = head(kind, rows, [] if several else None, scale=64.0)
        classes = torch.arange(8 if several else 1)[None]
        output = parts_of(objective, image_features=feature, classes=classes)
        assert float(output["saturated_share"]) == share
        assert ("positive_loss" in output) == several  # coupled ones have no such terms


# --- which classes are negatives ---------------------------------------------------------------


@pytest.mark.parametrize(("num_classes", "rate", "count"), [(40, 0.1, 4), (70_000, 0.01, 700)])
def test_the_draw(num_classes: int, rate: float, count: int) -> None:
    draw = negative_draw(num_classes, rate, seed=3)
    first = draw(0)
    assert len(set(first.tolist())) == count and set(first) <= set(range(num_classes))
    np.testing.assert_array_equal(negative_draw(num_classes, rate, seed=3)(0), first)
    assert set(draw(1)) != set(first)
    assert set(negative_draw(num_classes, rate, seed=4)(0)) != set(first)


def test_pairs_are_drawn_equally_often() -> None:
    draw, times, steps = negative_draw(40, 0.25, seed=3), np.zeros((40, 40)), 400
    for step in range(steps):
        drawn = draw(step)
        times[np.ix_(drawn, drawn)] += 1
    share = 10 * 9 / (40 * 39)
    of_pairs = times[~np.eye(40, dtype=bool)] / steps
    assert np.abs(of_pairs - share).max() < 4.5 * (share * (1 - share) / steps) ** 0.5
