"""NT-Xent with the group mask: the formula written out, and its invariants."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.nt_xent import Options
from mclclip.objectives.temperature import Temperature
from tests import contrast_loops as loops


def nt_xent(tile: int = 5, temperature: float = 0.5) -> InfoNCE:
    return InfoNCE(tile, Temperature(temperature), between="views")


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 7),
    groups=st.integers(1, 3),
    repeated=st.booleans(),
    tile=st.integers(1, 20),
    temperature=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_loss_and_gradient_are_the_definition(
    seed: int, rows: int, groups: int, repeated: bool, tile: int, temperature: float
) -> None:
    batch = loops.draw(seed, rows, groups, repeated=repeated)
    parts = loops.agree(
        batch, nt_xent(tile, temperature), "views", loops.info_nce, temperature=temperature
    )
    alone = sum(not row.negatives for row in loops.rows_of(batch, "views")[0])
    assert parts["rows_without_negatives"] == alone
    assert parts["temperature"] == pytest.approx(temperature, rel=1e-15)


def test_without_a_mask_a_row_has_2b_minus_2_negatives() -> None:
    """Equal features everywhere: the loss is the log of the own pair and the negatives."""
    batch = loops.draw(0, rows=5)
    same = torch.ones(5, 3, dtype=torch.float64)
    batch.first, batch.second = (same.clone().requires_grad_() for _ in range(2))
    expected = torch.tensor(2.0 * 5 - 1).double().log()
    loops.close(batch.run(nt_xent())["loss"].detach(), expected)


def test_mixed_batch_is_the_weighted_mean_of_pure_batches() -> None:
    batch = loops.draw(2, 12, groups=3)
    loss = batch.run(nt_xent())["loss"].detach()
    total = torch.zeros((), dtype=torch.float64)
    for label in batch.labels.unique():
        chosen = (batch.labels == label).nonzero()[:, 0]
        pure = batch.rows(chosen)
        total += len(chosen) * pure.run(nt_xent())["loss"].detach()
        for mixed, own in zip(batch.gradients()[:2], pure.gradients()[:2], strict=True):
            loops.close(12 * mixed[chosen], len(chosen) * own)
    loops.close(12 * loss, total)


def test_views_and_samples_may_change_places() -> None:
    batch = loops.draw(3, 7, groups=2)
    loss = batch.run(nt_xent())["loss"]
    exchanged = batch.rows([4, 2, 0, 6, 1, 5, 3])
    exchanged.first, exchanged.second = exchanged.second, exchanged.first
    loops.close(exchanged.run(nt_xent())["loss"], loss)


def test_rows_without_negatives_are_silent() -> None:
    batch = loops.draw(4, 4)
    batch.labels = torch.arange(4)
    parts = batch.run(nt_xent())
    assert (parts["loss"].item(), int(parts["rows_without_negatives"])) == (0.0, 4)
    for gradient in batch.gradients():
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_options_build_it_at_half_a_temperature() -> None:
    options = Options()
    assert (options.num_views, options.reads.captions, options.reads.groups) == (2, False, True)
    assert not options.reads.logit_scale
    batch = loops.draw(5, 6)
    expected = batch.run(nt_xent(temperature=0.5))["loss"]
    setting: Any = SimpleNamespace(precision="float64")
    for same in (options, Options(temperature=None)):
        found = batch.rows(slice(None)).run(same.build(setting))
        loops.close(found["loss"], expected)
