"""InfoNCE with the group mask: the formula written out; invariants in value and gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.row_losses import Pairs, row_losses

SCALE = 7.0


class Batch:
    """Raw features with gradient, labels and sample ids; `run` gives the loss and gradients."""

    def __init__(self, image: Tensor, text: Tensor, labels: Tensor, sample_id: Tensor) -> None:
        self.image, self.text = image.clone().requires_grad_(), text.clone().requires_grad_()
        self.scale = torch.tensor(SCALE, dtype=image.dtype, requires_grad=True)
        self.labels, self.sample_id = labels, sample_id

    def run(self, tile: int = 1024) -> tuple[Tensor, int]:
        output = InfoNCE(tile)(
            functional.normalize(self.image, dim=-1),
            functional.normalize(self.text, dim=-1),
            self.scale,
            self.labels[:, None],
            self.sample_id,
        )
        output["loss"].backward()
        return output["loss"].detach(), int(output["rows_without_negatives"])

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.image.grad is not None
        assert self.text.grad is not None
        assert self.scale.grad is not None
        return self.image.grad, self.text.grad, self.scale.grad


def draw(seed: int, rows: int, groups: int = 1, dim: int = 6, dtype: Any = torch.float64) -> Batch:
    rng = np.random.default_rng(seed)
    image, text = (torch.tensor(rng.normal(size=(rows, dim)), dtype=dtype) for _ in range(2))
    labels = torch.tensor(rng.integers(0, groups, size=rows))
    return Batch(image, text, labels, torch.tensor(rng.permutation(1000)[:rows]))


def select(batch: Batch, rows: Any) -> Batch:
    return Batch(
        batch.image.detach()[rows],
        batch.text.detach()[rows],
        batch.labels[rows],
        batch.sample_id[rows],
    )


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def slow_loss(batch: Batch) -> Tensor:
    """The definition, pair by pair, differentiable."""
    image = functional.normalize(batch.image, dim=-1)
    text = functional.normalize(batch.text, dim=-1)
    count = len(image)

    def keep(p: int, q: int) -> bool:
        same_group = bool(batch.labels[p] == batch.labels[q])
        return p == q or (same_group and bool(batch.sample_id[p] != batch.sample_id[q]))

    total = torch.zeros((), dtype=image.dtype)
    for p in range(count):
        rows = [batch.scale * image[p] @ text[q] for q in range(count) if keep(p, q)]
        columns = [batch.scale * image[q] @ text[p] for q in range(count) if keep(p, q)]
        own = batch.scale * image[p] @ text[p]
        for logits in (rows, columns):
            total = total - own + torch.stack(logits).exp().sum().log()
    return total / (2 * count)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 9),
    groups=st.integers(1, 4),
    tile=st.integers(1, 10),
)
def test_loss_and_gradient_are_the_definition(seed: int, rows: int, groups: int, tile: int) -> None:
    batch = draw(seed, rows, groups)
    if rows > 3:
        batch.sample_id[0] = batch.sample_id[3]
    reference = select(batch, slice(None))
    loss, _ = batch.run(tile)
    expected = slow_loss(reference)
    expected.backward()
    close(loss, expected.detach())
    for found, wanted in zip(batch.gradients(), reference.gradients(), strict=True):
        close(found, wanted)
    assert loss >= -1e-15  # (vii) lower bound


def test_permuting_the_batch_changes_nothing() -> None:
    batch = draw(1, 8, groups=3)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    shuffled = select(batch, order)
    close(shuffled.run()[0], batch.run()[0])
    close(shuffled.gradients()[0], batch.gradients()[0][order])
    close(shuffled.gradients()[2], batch.gradients()[2])


def test_mixed_batch_is_the_weighted_mean_of_pure_batches() -> None:
    batch = draw(2, 12, groups=3)
    loss, _ = batch.run()
    total = torch.zeros((), dtype=torch.float64)
    for label in batch.labels.unique():
        rows = (batch.labels == label).nonzero()[:, 0]
        pure = select(batch, rows)
        total += len(rows) * pure.run()[0]
        for mixed, own in zip(batch.gradients()[:2], pure.gradients()[:2], strict=True):
            close(12 * mixed[rows], len(rows) * own)
    close(12 * loss, total)


def both_directions(batch: Batch) -> Tensor:
    """Each row's loss, the sum of both directions."""
    image = functional.normalize(batch.image, dim=-1)
    text = functional.normalize(batch.text, dim=-1)
    pairs = Pairs(batch.labels, batch.sample_id, batch.labels, batch.sample_id, first=0)
    by_image, _ = row_losses(SCALE * image, text, pairs, tile=4)
    by_text, _ = row_losses(SCALE * text, image, pairs, tile=4)
    return by_image + by_text


def test_repeating_a_sample_leaves_its_own_row() -> None:
    batch = draw(3, 6, groups=2)
    twice = select(batch, [0, 1, 2, 3, 4, 5, 2])
    rows, repeated = both_directions(batch), both_directions(twice)
    close(repeated[2], rows[2])
    close(repeated[6], rows[2])
    # Rows of the same group see the repeated sample once more; others do not.
    other = batch.labels != batch.labels[2]
    close(repeated[:6][other], rows[other])


def test_masked_pairs_have_exactly_zero_gradient() -> None:
    """Sample 0 is alone in its group: nothing can depend on it, nor it on anything."""
    batch = draw(4, 6)
    batch.labels = torch.tensor([1, 0, 0, 0, 0, 0])
    batch.run()
    image, text, _ = batch.gradients()
    assert torch.equal(image[0], torch.zeros(6, dtype=torch.float64))
    assert torch.equal(text[0], torch.zeros(6, dtype=torch.float64))
    alone = select(batch, range(1, 6))
    alone.run()
    close(image[1:] * 6, alone.gradients()[0] * 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_negatives_are_silent_and_counted(dtype: torch.dtype) -> None:
    batch = draw(5, 4, dtype=dtype)
    batch.labels = torch.arange(4)
    loss, count = batch.run()
    assert (loss.item(), count) == (0.0, 4)
    for gradient in batch.gradients():
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_one_sample_repeated_has_no_negatives() -> None:
    batch = draw(6, 3)
    batch.sample_id = torch.zeros(3, dtype=torch.int64)
    assert batch.run() == (torch.tensor(0.0, dtype=torch.float64), 3)


def test_large_logits_stay_finite() -> None:
    batch = draw(7, 5, dtype=torch.float32)
    batch.scale = torch.tensor(1e4, requires_grad=True)
    loss, _ = batch.run()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in batch.gradients())


def test_arithmetic_is_fp32_under_autocast() -> None:
    expected = draw(8, 6, groups=2, dtype=torch.float32)
    loss, _ = expected.run()
    batch = select(expected, slice(None))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = batch.run()  # the backward too
    assert found.dtype == torch.float32
    assert torch.equal(found, loss)
    for mine, theirs in zip(batch.gradients(), expected.gradients(), strict=True):
        assert torch.equal(mine, theirs)


def test_half_precision_features_are_widened() -> None:
    batch = draw(9, 6, dtype=torch.float32)
    output = InfoNCE()(
        functional.normalize(batch.image, dim=-1).bfloat16(),
        functional.normalize(batch.text, dim=-1).half(),
        batch.scale,
        batch.labels[:, None],
        batch.sample_id,
    )
    assert output["loss"].dtype == torch.float32


def test_shapes_are_checked() -> None:
    image, ids = torch.ones(3, 2), torch.arange(3)
    scale, labels = torch.tensor(1.0), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="must both be"):
        InfoNCE()(image, torch.ones(3, 4), scale, labels, ids)
    with pytest.raises(ValueError, match=r"labels \(3,\)"):
        InfoNCE()(image, image, scale, labels[:, 0], ids)
    with pytest.raises(ValueError, match=r"sample_id \(2,\)"):
        InfoNCE()(image, image, scale, labels, ids[:2])


def test_tile_is_checked() -> None:
    with pytest.raises(ValueError, match="tile is 0: wanted at least 1"):
        InfoNCE(tile=0)
