"""Hard negatives: the authors' formula written out, and its identities."""

from typing import Any

import pytest
import torch

from mclclip.objectives.hcl import HardNegatives, Options
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.temperature import Temperature
from tests import contrast_loops as loops


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


def test_wrong_options_are_told_in_one_line() -> None:
    with pytest.raises(ValueError, match="tau_plus"):
        Options(tau_plus=1.0)
    with pytest.raises(ValueError, match="beta"):
        Options(beta=-1.0)
