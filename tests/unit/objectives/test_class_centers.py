"""Class centers of one process: where they start, how they move, and products with them in bf16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers import (
    Margin,
    ShardedClassCenters,
    normal_rows,
)
from mclclip.objectives.mlcd import ClassCenterLoss
from mclclip.objectives.products import EXACT, Products, choose_products
from tests.objective_loops import parts_of

K, D, LR = 20, 5, 0.1
ROWS = torch.randn(K, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def centers_of(**options: object) -> ShardedClassCenters:
    return ShardedClassCenters(
        K,
        D,
        lambda start, stop: ROWS[start:stop],
        dtype=torch.float64,
        **options,  # type: ignore[arg-type]
    )


def gradients(step: int) -> tuple[Tensor, Tensor]:
    """Some touched rows and their gradients, others at each step."""
    random = torch.Generator().manual_seed(100 + step)
    touched = torch.randperm(K, generator=random)[: 3 + step].sort().values
    return touched, torch.randn(len(touched), D, generator=random, dtype=torch.float64)


def steps_of(centers: ShardedClassCenters) -> Iterator[tuple[Tensor, Tensor]]:
    """Makes five steps; yields after each the rows that were touched and the whole gradient."""
    for step in range(5):
        touched, grad = gradients(step)
        centers.zero_grad()
        centers.add_gradient(touched, grad.clone())
        centers.step(LR)
        whole = torch.zeros_like(ROWS)
        whole[touched] = grad
        yield touched, whole


def test_dense_is_torchs_adamw() -> None:
    centers = centers_of(weight_decay=0.3, lr_scale=2.0)
    wanted = torch.nn.Parameter(ROWS.clone())
    adamw = torch.optim.AdamW([wanted], 2.0 * LR, (0.9, 0.98), 1e-6, weight_decay=0.3)
    for _, wanted.grad in steps_of(centers):
        adamw.step()
    torch.testing.assert_close(centers.rows, wanted.detach(), atol=1e-12, rtol=0)


def test_lazy_is_adamw_of_each_row_in_the_steps_that_touch_it() -> None:
    centers = centers_of(weight_decay=0.3, lazy=True)
    wanted = [torch.nn.Parameter(row.clone()) for row in ROWS]
    each = [torch.optim.AdamW([row], LR, (0.9, 0.98), 1e-6, weight_decay=0.3) for row in wanted]
    count = [0] * K
    for touched, whole in steps_of(centers):
        for j in touched.tolist():
            wanted[j].grad, count[j] = whole[j], count[j] + 1
            each[j].step()
    torch.testing.assert_close(centers.rows, torch.stack(wanted).detach(), atol=1e-12, rtol=0)
    assert centers.steps.tolist() == count and min(count) < max(count)


@pytest.mark.parametrize("lazy", [True, False])
def test_many_rows_move_as_few_do(lazy: bool) -> None:
    """More rows than a step works on at a time, against each of them on its own."""
    many, repeats = 2_500, 2_500 // K
    rows = ROWS.repeat(repeats, 1)
    centers = ShardedClassCenters(many, D, lambda a, b: rows[a:b], lazy=lazy, dtype=torch.float64)
    few = centers_of(lazy=lazy)
    for step in range(2):
        touched, grad = gradients(step)
        of_each = torch.arange(repeats)[:, None] * K
        centers.zero_grad()
        centers.add_gradient((of_each + touched).flatten(), grad.repeat(repeats, 1))
        few.zero_grad()
        few.add_gradient(touched, grad.clone())
        for each in (centers, few):
            each.step(LR)
    assert torch.equal(centers.rows, few.rows.repeat(repeats, 1))
    assert torch.equal(centers.steps, few.steps.repeat(repeats))


def test_the_factor_scales_the_gradient() -> None:
    one, other = centers_of(), centers_of()
    touched, grad = gradients(0)
    one.add_gradient(touched, grad.clone())
    one.step(LR, torch.tensor(0.5, dtype=torch.float64))
    other.add_gradient(touched, 0.5 * grad)
    other.step(LR)
    assert torch.equal(one.rows, other.rows) and torch.equal(one.exp_avg, other.exp_avg)


def test_gradients_add_up() -> None:
    centers = centers_of()
    whole = torch.zeros_like(ROWS)
    for step in range(3):
        touched, grad = gradients(step)
        centers.add_gradient(touched, grad.clone())
        whole[touched] += grad
    assert centers.touched is not None and centers.grad is not None
    torch.testing.assert_close(centers.grad, whole[centers.touched])
    assert float(centers.grad_square()) == pytest.approx(float(whole.square().sum()))
    centers.zero_grad()
    assert float(centers.grad_square()) == 0.0
    centers.step(LR)  # nothing to go along
    assert torch.equal(centers.rows, ROWS)


def test_normal_rows_do_not_depend_on_the_cut() -> None:
    rows = normal_rows(3, seed=1)
    whole = rows(0, 10_000)
    assert torch.equal(torch.cat([rows(0, 17), rows(17, 5_000), rows(5_000, 10_000)]), whole)
    assert rows(7, 7).shape == (0, 3)
    assert float(whole.std()) == pytest.approx(0.01, rel=0.02)
    assert not torch.equal(normal_rows(3, seed=2)(0, 17), whole[:17])


# --- margins --------------------------------------------------------------------------------------


COSINES = torch.linspace(-0.999, 0.999, 1999, dtype=torch.float64)


@pytest.mark.parametrize("size", [0.1, 0.3, 1.5])
def test_arc_is_the_cosine_of_the_larger_angle_and_a_line_beyond_pi(size: float) -> None:
    """Where the angle passes pi its cosine would rise again."""
    values, inside = Margin("arc", size)(COSINES), COSINES >= -math.cos(size)
    wanted = torch.cos(torch.arccos(COSINES[inside]) + size)
    torch.testing.assert_close(values[inside], wanted, atol=1e-12, rtol=0)
    beyond = COSINES < -math.cos(size) - 1e-9
    torch.testing.assert_close(values[beyond], COSINES[beyond] - size * math.sin(size))
    assert (values.diff() > 0).all()
    # Float64 sums exp(-scale * phi) by this bound (ClassCenterLoss).
    assert values.abs().max() <= 1.0 + math.pi / 2


@pytest.mark.parametrize("kind", ["arc", "cos", "none"])
def test_exact_slopes(kind: str) -> None:
    """By central differences, away from where arc changes its formula."""
    margin, h = Margin(kind, 0.3), 1e-6  # type: ignore[arg-type]
    cosine = COSINES[(COSINES + math.cos(0.3)).abs() > 1e-3]
    cosine = cosine[cosine.abs() < 0.9995]
    difference = (margin(cosine + h) - margin(cosine - h)) / (2 * h)
    torch.testing.assert_close(margin.derivative(cosine), difference, atol=1e-6, rtol=1e-6)


def test_slopes_at_the_ends_and_straight_through() -> None:
    """Clamped cosines have no slope, and those of 1 a finite one."""
    straight = Margin("arc", 0.3, "straight_through").derivative(COSINES)
    assert torch.equal(straight, torch.ones_like(COSINES))
    ends = torch.tensor([-1.0, -0.99995, 0.99995, 1.0], dtype=torch.float64)
    assert not Margin().derivative(ends).any()
    ones = torch.tensor([1.0, -1.0, 1.0 + 1e-7], dtype=torch.float32)
    assert torch.isfinite(Margin()(ones)).all() and torch.isfinite(Margin().derivative(ones)).all()


# --- products in bf16 with sums in fp32, against float64 ------------------------------------------


BF16 = Products(bf16=True, as_fp32=True)


def test_bf16_is_for_half_precision_on_a_gpu() -> None:
    every = product(("auto", "fp32"), ("fp32", "bf16", "fp16", "float64"), ("cpu", "cuda"))
    for option, precision, device in every:
        chosen = choose_products(option, precision, torch.device(device))  # type: ignore[arg-type]
        wanted = option == "auto" and device == "cuda" and precision in ("bf16", "fp16")
        assert chosen == (Products(bf16=True) if wanted else EXACT)


def test_products_of_rounded_numbers_are_added_in_fp32() -> None:
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 300, generator=random) for n in (5, 7))
    got = BF16.multiply(BF16.factor(left), BF16.factor(right).T)
    exact = left.bfloat16().double() @ right.bfloat16().double().T
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


def late_in_a_training(num_classes: int, dim: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features whose class centers have cosines of 0.5, and 50 others cosines of 0.3."""
    random = torch.Generator().manual_seed(num_classes)
    normal = torch.randn(num_classes, dim, generator=random, dtype=torch.float64)
    rows = functional.normalize(normal, dim=1)
    features = torch.randn(batch, dim, generator=random, dtype=torch.float64)
    features = functional.normalize(features, dim=1)
    labels = torch.randperm(num_classes, generator=random)[: batch * 8].reshape(batch, 8)
    near = torch.randint(num_classes, (batch, 50), generator=random)
    for row, feature in enumerate(features):
        for ids, cosine in ((near[row], 0.3), (labels[row], 0.5)):
            rows[ids] = functional.normalize(rows[ids] + feature * cosine * 1.2, dim=1)
    return features, labels, rows


def loss_and_gradients(
    features: Tensor, labels: Tensor, rows: Tensor, products: Products
) -> list[Tensor]:
    """The loss, and the gradients of features and class centers."""
    num, dim = rows.shape
    centers = ShardedClassCenters(num, dim, lambda a, b: rows[a:b], dtype=rows.dtype)
    centers.begin(0)
    objective = ClassCenterLoss(centers, margin=Margin("arc"), products=products)
    leaf = features.clone().requires_grad_()
    loss = parts_of(objective, image_features=leaf, classes=labels)["loss"]
    loss.backward()
    assert leaf.grad is not None and centers.grad is not None
    return [loss.detach(), leaf.grad, centers.grad]


@pytest.mark.parametrize("num_classes", [1_000, 20_000])
def test_the_error_of_a_head_in_bf16_is_bounded(num_classes: int) -> None:
    """Against float64 the loss is within 0.1 %, and gradients within 2 % (1.03 % at most)."""
    features, labels, rows = late_in_a_training(num_classes, dim=64, batch=16)
    exact = loss_and_gradients(features, labels, rows, EXACT)
    rounded = loss_and_gradients(features.float(), labels, rows.float(), BF16)
    errors = [
        float((got.double() - wanted).norm() / wanted.norm())
        for got, wanted in zip(rounded, exact, strict=True)
    ]
    assert errors[0] < 1e-3 and max(errors[1:]) < 2e-2, errors
    assert min(errors) > 1e-6, "the numbers have not been rounded"
