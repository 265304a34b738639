"""Class centers of one process: where they start, how they move, what they remember."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mclclip.objectives.class_centers import (
    Margin,
    ShardedClassCenters,
    normal_rows,
)
from mclclip.ranks.sharded_rows import shard_of
from tests.objective_loops import SlowLazyAdamW

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


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_dense_is_torchs_adamw(decay: float) -> None:
    centers = centers_of(weight_decay=decay, lr_scale=2.0)
    wanted = torch.nn.Parameter(ROWS.clone())
    adamw = torch.optim.AdamW(
        [wanted], lr=2.0 * LR, betas=(0.9, 0.98), eps=1e-6, weight_decay=decay
    )
    for _, wanted.grad in steps_of(centers):
        adamw.step()
    torch.testing.assert_close(centers.rows, wanted.detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lazy_moves_what_is_touched(decay: float) -> None:
    centers = centers_of(weight_decay=decay, lazy=True)
    slow = SlowLazyAdamW(ROWS.clone(), (0.9, 0.98), 1e-6, decay)
    for touched, whole in steps_of(centers):
        slow.step(whole, touched.tolist(), LR)
    torch.testing.assert_close(centers.rows, slow.rows, atol=1e-12, rtol=0)
    assert centers.steps.tolist() == slow.count and min(slow.count) < max(slow.count)


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


@pytest.mark.parametrize(("num_classes", "world_size"), [(20, 3), (9, 4), (5, 4), (1, 4), (8, 2)])
def test_shards_are_dtensors_chunks(num_classes: int, world_size: int) -> None:
    chunks = torch.arange(num_classes).chunk(world_size)
    for rank in range(world_size):
        start, stop = shard_of(num_classes, rank, world_size)
        wanted = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start, stop)) == wanted


def test_normal_rows_do_not_depend_on_the_cut() -> None:
    rows = normal_rows(3, seed=1)
    whole = rows(0, 10_000)
    assert torch.equal(torch.cat([rows(0, 17), rows(17, 5_000), rows(5_000, 10_000)]), whole)
    assert rows(7, 7).shape == (0, 3)
    assert float(whole.std()) == pytest.approx(0.01, rel=0.02)
    assert not torch.equal(normal_rows(3, seed=2)(0, 17), whole[:17])


# --- margins --------------------------------------------------------------------------------------


COSINES = torch.linspace(-0.999, 0.999, 1999, dtype=torch.float64)


def test_arc_is_the_cosine_of_the_larger_angle() -> None:
    inside = COSINES[COSINES >= -math.cos(0.3)]
    wanted = torch.cos(torch.arccos(inside) + 0.3)
    torch.testing.assert_close(Margin("arc", 0.3)(inside), wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["arc", "cos", "none"])
def test_exact_slopes(kind: str) -> None:
    """By central differences, away from where arc changes its formula."""
    margin, h = Margin(kind, 0.3), 1e-6  # type: ignore[arg-type]
    cosine = COSINES[(COSINES + math.cos(0.3)).abs() > 1e-3]
    cosine = cosine[cosine.abs() < 0.9995]
    difference = (margin(cosine + h) - margin(cosine - h)) / (2 * h)
    torch.testing.assert_close(margin.derivative(cosine), difference, atol=1e-6, rtol=1e-6)


def test_straight_through() -> None:
    margin = Margin("arc", 0.3, "straight_through")
    assert torch.equal(margin.derivative(COSINES), torch.ones_like(COSINES))


@pytest.mark.parametrize("size", [0.1, 0.3, 0.5])
def test_phi_lowers_every_cosine_and_is_bounded(size: float) -> None:
    for kind in ("arc", "cos"):
        margin = Margin(kind, size)  # type: ignore[arg-type]
        values = margin(COSINES)
        # Arc passes below the cosine nearly everywhere: cos(x + m) > cos(x) only past pi - m / 2.
        assert (
            values[COSINES > -math.cos(size / 2)] < COSINES[COSINES > -math.cos(size / 2)]
        ).all()
        # Float64 sums exp(-scale * phi) by this bound (ClassCenterLoss).
        assert values.abs().max() <= 1.0 + math.pi / 2


@pytest.mark.parametrize("size", [0.1, 0.3, 1.5])
def test_arc_falls_with_the_angle_beyond_pi_too(size: float) -> None:
    """Where the angle passes pi its cosine would rise again: there phi is a line."""
    values = Margin("arc", size)(COSINES)
    assert (values.diff() > 0).all()
    beyond = COSINES < -math.cos(size) - 1e-9
    torch.testing.assert_close(values[beyond], COSINES[beyond] - size * math.sin(size))


def test_clamped_cosines_have_no_slope() -> None:
    ends = torch.tensor([-1.0, -0.99995, 0.99995, 1.0], dtype=torch.float64)
    assert not Margin().derivative(ends).any()


def test_a_cosine_of_one_has_a_finite_slope() -> None:
    ones = torch.tensor([1.0, -1.0, 1.0 + 1e-7], dtype=torch.float32)
    assert torch.isfinite(Margin()(ones)).all()
    assert torch.isfinite(Margin().derivative(ones)).all()
