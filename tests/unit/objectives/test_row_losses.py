"""Losses of rows computed in tiles: the whole matrix's values and gradients, without the matrix."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mclclip.objectives.pairs import Pairs
from mclclip.objectives.row_losses import row_losses


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
