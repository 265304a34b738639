"""Class centers of one process: where they start, how they move, what they remember."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mclclip.objectives.class_centers.rows import (
    HeadOptimizer,
    ShardedClassCenters,
    normal_rows,
)
from mclclip.ranks.process_group import Context
from mclclip.ranks.sharded_rows import shard_of
from tests.slow_heads import SlowLazyAdamW

K, D, LR = 20, 5, 0.1
ROWS = torch.randn(K, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def centers_of(**options: object) -> ShardedClassCenters:
    return ShardedClassCenters(
        K,
        D,
        lambda start, stop: ROWS[start:stop],
        optimizer=HeadOptimizer(**options),  # type: ignore[arg-type]
        dtype=torch.float64,
    )


def gradients(step: int) -> tuple[Tensor, Tensor]:
    """Some touched rows and their gradients, others at each step."""
    random = torch.Generator().manual_seed(100 + step)
    touched = torch.randperm(K, generator=random)[: 3 + step].sort().values
    return touched, torch.randn(len(touched), D, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_dense_is_torchs_adamw(decay: float) -> None:
    centers = centers_of(weight_decay=decay, lr_scale=2.0)
    wanted = torch.nn.Parameter(ROWS.clone())
    adamw = torch.optim.AdamW(
        [wanted], lr=2.0 * LR, betas=(0.9, 0.98), eps=1e-6, weight_decay=decay
    )
    for step in range(5):
        touched, grad = gradients(step)
        centers.zero_grad()
        centers.add_gradient(touched, grad.clone())
        centers.step(LR)
        wanted.grad = torch.zeros_like(ROWS)
        wanted.grad[touched] = grad
        adamw.step()
    torch.testing.assert_close(centers.rows, wanted.detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lazy_moves_what_is_touched(decay: float) -> None:
    centers = centers_of(weight_decay=decay, lazy=True)
    slow = SlowLazyAdamW(ROWS.clone(), (0.9, 0.98), 1e-6, decay)
    for step in range(5):
        touched, grad = gradients(step)
        centers.zero_grad()
        centers.add_gradient(touched, grad.clone())
        centers.step(LR)
        whole = torch.zeros_like(ROWS)
        whole[touched] = grad
        slow.step(whole, touched.tolist(), LR)
    torch.testing.assert_close(centers.rows, slow.rows, atol=1e-12, rtol=0)
    assert centers.steps.tolist() == slow.count and min(slow.count) < max(slow.count)


def test_lazy_with_all_rows_touched_is_dense() -> None:
    lazy, dense = centers_of(lazy=True), centers_of()
    for step in range(3):
        grad = torch.full_like(ROWS, step + 1.0)
        for centers in (lazy, dense):
            centers.zero_grad()
            centers.add_gradient(torch.arange(K), grad.clone())
            centers.step(LR)
    torch.testing.assert_close(lazy.rows, dense.rows, atol=1e-13, rtol=0)


@pytest.mark.parametrize("lazy", [True, False])
def test_many_rows_move_as_few_do(lazy: bool) -> None:
    """More rows than a step works on at a time, against each of them on its own."""
    many, repeats = 2_500, 2_500 // K
    rows = ROWS.repeat(repeats, 1)
    centers = ShardedClassCenters(
        many, D, lambda a, b: rows[a:b], optimizer=HeadOptimizer(lazy=lazy), dtype=torch.float64
    )
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


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"are \[20, 5\]: wanted \[20, 6\].*set centers=normal"):
        ShardedClassCenters(K, 6, lambda start, stop: ROWS[start:stop])
    with pytest.raises(ValueError, match="num_classes is 0: wanted at least 1"):
        ShardedClassCenters(0, D, normal_rows(D, 0))


def test_a_rank_may_hold_nothing() -> None:
    rows = normal_rows(D, 0)
    assert shard_of(5, 3, 4) == (5, 5) and tuple(rows(5, 5).shape) == (0, D)


def test_negatives_are_this_ranks_share() -> None:
    centers = ShardedClassCenters(
        K, D, lambda start, stop: ROWS[start:stop], draw=lambda step: np.array([9, 3, 12 + step])
    )
    centers.begin(2)
    labels = torch.tensor([[0]])
    assert centers.negatives(labels).tolist() == [3, 9, 14]
    centers.start, centers.stop, centers.context = 9, 13, Context()
    centers.begin(0)
    assert centers.negatives(labels).tolist() == [0, 3]
