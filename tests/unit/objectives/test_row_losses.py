"""Losses of rows computed in tiles: the whole matrix's values and gradients, without the matrix."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mclclip.objectives.row_losses import (
    Pairs,
    row_losses,
)


def draw(
    seed: int,
    rows: int,
    ranks: int = 1,
    rank: int = 0,
    groups: int = 1,
    dim: int = 5,
    distinct: int | None = None,
    tile: int = 3,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Pairs]:
    """Queries of one of several ranks, keys of all, labels; at most ``distinct`` sample ids."""
    rng = np.random.default_rng(seed)
    total = rows * ranks
    queries, keys = (torch.tensor(rng.normal(size=(n, dim)), dtype=dtype) for n in (rows, total))
    all_groups = torch.tensor(rng.integers(0, groups, total))
    all_ids = torch.tensor(
        rng.permutation(total) if distinct is None else rng.choice(distinct, total)
    )
    own = slice(rank * rows, (rank + 1) * rows)
    pairs = Pairs(all_groups[own], all_ids[own], all_groups, all_ids, rank * rows, tile)
    return queries.requires_grad_(), keys.requires_grad_(), pairs


def whole(queries: Tensor, keys: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The same from the whole matrix."""
    own = pairs.first + torch.arange(len(queries))
    keep = (pairs.groups[:, None] == pairs.all_groups) & (
        pairs.sample_id[:, None] != pairs.all_sample_ids
    )
    alone = ~keep.any(dim=1)
    keep[torch.arange(len(queries)), own] = True
    logits = queries @ keys.T
    positive = logits.gather(1, own[:, None])[:, 0]
    return logits.masked_fill(~keep, float("-inf")).logsumexp(dim=1) - positive, alone


def gradients(losses: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of a sum in which every row counts differently."""
    weights = torch.linspace(0.5, 2, len(losses), dtype=losses.dtype)
    return torch.autograd.grad((losses * weights).sum(), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [1, 3, 100])
def test_rows_without_negatives_are_exactly_silent(tile: int, dtype: torch.dtype) -> None:
    queries, keys, pairs = draw(1, rows=7, groups=7, distinct=3, dim=64, tile=tile, dtype=dtype)
    losses, alone = row_losses(queries, keys, pairs)
    assert 0 < alone.sum() < 7
    assert torch.equal(losses[alone], torch.zeros_like(losses[alone]))
    assert (losses[~alone] > 0).all()
    for gradient in gradients(losses, queries, keys):
        assert torch.equal(gradient[alone], torch.zeros_like(gradient[alone]))


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_float32_is_as_accurate_as_the_matrix(scale: float) -> None:
    def features(dtype: torch.dtype) -> tuple[Tensor, Tensor, Pairs]:
        queries, keys, pairs = draw(2, rows=400, groups=2, dim=32, tile=64, dtype=torch.float32)
        queries, keys = (torch.nn.functional.normalize(x.detach()) for x in (queries, keys))
        queries, keys = (scale * queries).to(dtype), keys.to(dtype)
        return queries.requires_grad_(), keys.requires_grad_(), pairs

    def errors(losses: Tensor, *inputs: Tensor) -> list[float]:
        found = (losses, *gradients(losses, *inputs))
        return [
            float((x.double() - y).detach().norm() / y.detach().norm())
            for x, y in zip(found, exact, strict=True)
        ]

    queries, keys, pairs = features(torch.float64)
    losses = whole(queries, keys, pairs)[0]
    exact = (losses, *gradients(losses, queries, keys))
    queries, keys, pairs = features(torch.float32)
    ours = errors(row_losses(queries, keys, pairs)[0], queries, keys)
    matrix = errors(whole(queries, keys, pairs)[0], queries, keys)
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


@pytest.mark.parametrize("trained", [0, 1])
def test_gradient_of_one_side_alone(trained: int) -> None:
    queries, keys, pairs = draw(4, rows=5)
    expected = gradients(row_losses(queries, keys, pairs)[0], queries, keys)[trained]
    inputs = [queries.detach(), keys.detach()]
    inputs[trained].requires_grad_()
    found = gradients(row_losses(inputs[0], inputs[1], pairs)[0], inputs[trained])
    assert torch.equal(found[0], expected)


def test_compiled_callers_get_the_same() -> None:
    queries, keys, pairs = draw(7, rows=6, groups=2)

    def loss(queries: Tensor, keys: Tensor) -> Tensor:
        return row_losses(2 * queries, keys, pairs)[0].mean()

    compiled = torch.compile(loss, backend="aot_eager")
    found, expected = compiled(queries, keys), loss(queries, keys)
    assert torch.equal(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, (queries, keys)),
        torch.autograd.grad(expected, (queries, keys)),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
