"""Hard negatives: the authors' formula written out, and its identities."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.objectives.hcl import HardNegatives, Options
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.temperature import Temperature
from tests import contrast_loops as loops


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 6),
    groups=st.integers(1, 3),
    between=st.sampled_from(["captions", "views"]),
    beta=st.sampled_from([0.0, 0.5, 2.0]),
    tau_plus=st.sampled_from([0.0, 0.1, 0.6]),
)
def test_loss_and_gradient_are_the_definition(
    seed: int, rows: int, groups: int, between: Any, beta: float, tau_plus: float
) -> None:
    batch = loops.draw(seed, rows, groups, repeated=rows > 3, scale=3.0)
    objective = HardNegatives(between, None, beta, tau_plus, tile=3)
    loops.agree(
        batch, objective, between, lambda row, s: loops.hard_negatives(row, s, beta, tau_plus)
    )


@pytest.mark.parametrize("between", ["captions", "views"])
def test_without_weights_and_correction_it_is_info_nce(between: Any) -> None:
    name = "text_features" if between == "captions" else "image_features_1"
    batch = loops.draw(1, 8, groups=2)
    twin = batch.rows(slice(None))
    found = batch.run(HardNegatives(between, None, 0.0, 0.0), name)["loss"]
    loops.close(found, twin.run(InfoNCE(between=between), name)["loss"])
    for mine, theirs in zip(batch.gradients(), twin.gradients(), strict=True):
        loops.close(mine, theirs)


def test_it_grows_with_beta() -> None:
    batch = loops.draw(2, 9, groups=2)
    found = [
        batch.rows(slice(None)).run(HardNegatives("views", Temperature(0.3), beta))["loss"].item()
        for beta in (0.0, 0.5, 1.0, 2.0, 6.0)
    ]
    assert found == sorted(found) and len(set(found)) == 5


def floor(batch: loops.Batch, scale: float) -> torch.Tensor:
    """The loss of rows whose estimate is its lower bound."""

    def of_row(row: loops.Row) -> torch.Tensor:
        assert row.positive is not None
        own = (scale * row.positive).exp()
        return -(own / (own + len(row.negatives) * torch.tensor(-scale).double().exp())).log()

    return loops.loss(loops.rows_of(batch, "views"), of_row)


@pytest.mark.parametrize("scale", [2.0, 100.0])
def test_the_estimate_has_a_floor(scale: float) -> None:
    """Views that agree and negatives that lie opposite: the correction takes more than there is."""
    batch = loops.draw(3, 4)
    with torch.no_grad():
        batch.second.copy_(batch.first)
    objective = HardNegatives("views", Temperature(1.0 / scale), 0.0, 0.9)
    found = batch.run(objective)["loss"].detach()
    assert found > 0
    loops.close(found, floor(batch, scale).detach())
    assert all(torch.isfinite(gradient).all() for gradient in batch.gradients())
    loose = batch.rows(slice(None)).run(HardNegatives("views", Temperature(1 / scale), 0.0, 0.0))
    assert loose["loss"] > found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_negatives_are_silent(dtype: torch.dtype) -> None:
    batch = loops.draw(4, 5, dtype=dtype)
    batch.labels = torch.tensor([0, 1, 2, 3, 3])
    parts = batch.run(HardNegatives("views", Temperature(0.5)))
    assert parts["rows_without_negatives"] == 3
    for gradient in batch.gradients()[:2]:
        assert torch.equal(gradient[:3], torch.zeros_like(gradient[:3]))
        assert (gradient[3:] != 0).all()
    pair = batch.rows([3, 4])
    alone = pair.run(HardNegatives("views", Temperature(0.5)))["loss"]
    loops.close(5 * parts["loss"], 2 * alone, 1e-6 if dtype == torch.float32 else 1e-12)


def test_large_scales_stay_finite() -> None:
    batch = loops.draw(5, 6, groups=2, scale=100.0, dtype=torch.float32)
    assert torch.isfinite(batch.run(HardNegatives("captions", None, 6.0), "text_features")["loss"])
    assert all(torch.isfinite(gradient).all() for gradient in batch.gradients())


def test_wrong_options_are_told_in_one_line() -> None:
    with pytest.raises(ValueError, match="tau_plus"):
        Options(tau_plus=1.0)
    with pytest.raises(ValueError, match="beta"):
        Options(beta=-1.0)
