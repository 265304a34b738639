"""Implicit feature modification: the paper's Eq. 2 written out, and its identities."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mclclip.objectives.base import parse
from mclclip.objectives.ifm import ImplicitModification, Options
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.temperature import Temperature
from tests import contrast_loops as loops


@pytest.mark.parametrize(("between", "second"), [("captions", "text_features"), ("views", None)])
def test_no_modification_is_info_nce(between: Any, second: str | None) -> None:
    name = second or "image_features_1"
    batch = loops.draw(1, 8, groups=2)
    twin = batch.rows(slice(None))
    found = batch.run(ImplicitModification(between, epsilon=0.0), name)["loss"]
    loops.close(found, twin.run(InfoNCE(between=between), name)["loss"])
    for mine, theirs in zip(batch.gradients(), twin.gradients(), strict=True):
        loops.close(mine, theirs)


def losses(batch: loops.Batch, epsilon: float) -> float:
    objective = ImplicitModification("views", Temperature(0.2), epsilon, (0.0, 1.0))
    return batch.rows(slice(None)).run(objective)["loss"].item()


def test_it_grows_with_epsilon_and_by_no_more_than_twice_epsilon_over_the_temperature() -> None:
    batch = loops.draw(2, 8, groups=2)
    found = [losses(batch, epsilon) for epsilon in (0.0, 0.05, 0.1, 0.2, 1.0)]
    assert found == sorted(found) and len(set(found)) == 5
    for value, epsilon in zip(found, (0.0, 0.05, 0.1, 0.2, 1.0), strict=True):
        assert value - found[0] <= 2.0 * epsilon / 0.2 + 1e-12


def test_the_gradient_of_a_negative_points_along_its_anchor() -> None:
    """Between captions of one direction, a caption that is no positive moves along the images that
    meet it; with one image left to meet it, along that image."""
    batch = loops.draw(3, 4)
    batch.labels = torch.tensor([0, 0, 1, 1])
    image, text = (side.detach() for side in batch.unit())
    text.requires_grad_()
    objective = ImplicitModification("captions", Temperature(0.5), 0.3, direction="images")
    own = objective.rows(
        objective.contrasts(
            [image, text],
            [image, text],
            [batch.labels, batch.sample_id],
            [batch.labels, batch.sample_id],
            torch.tensor(2.0).double(),
        )[0]
    )[0]
    gradient = torch.autograd.grad(own[0], text)[0]
    loops.close(gradient[1] / gradient[1].norm(), image[0])
    loops.close(gradient[0] / gradient[0].norm(), -image[0])
    assert torch.equal(gradient[2:], torch.zeros_like(gradient[2:]))


def test_either_direction_alone() -> None:
    batch = loops.draw(4, 6, groups=2)

    def run(direction: Any) -> float:
        objective = ImplicitModification("captions", direction=direction)
        return batch.rows(slice(None)).run(objective, "text_features")["loss"].item()

    assert (run("images") + run("texts")) / 2 == pytest.approx(run("both"), rel=1e-12)
    assert run("images") != run("texts")


def test_rows_without_negatives_are_silent() -> None:
    batch = loops.draw(5, 4)
    batch.labels = torch.arange(4)
    parts = batch.run(ImplicitModification("views", epsilon=0.5))
    assert (parts["loss"].item(), int(parts["rows_without_negatives"])) == (0.0, 4)
    for gradient in batch.gradients():
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_it_is_a_term_beside_another_objective() -> None:
    """info_nce and the modified term at half a weight each are the paper's loss."""
    terms = [{"kind": "info_nce"}, {"kind": "ifm", "term": "modified", "epsilon": 0.2}]
    options = parse(
        {"kind": "weighted_sum", "terms": [{"objective": t, "weight": 0.5} for t in terms]}
    )
    assert options.reads == parse({"kind": "info_nce"}).reads
    batch = loops.draw(6, 5)
    setting: Any = SimpleNamespace(dtype=torch.float64)
    found = batch.run(options.build(setting), "text_features")["loss"]
    whole = batch.rows(slice(None)).run(
        ImplicitModification("captions", epsilon=0.2), "text_features"
    )
    loops.close(found, whole["loss"])


def test_wrong_options_are_told_in_one_line() -> None:
    with pytest.raises(ValueError, match="direction=images is for between=captions"):
        Options(between="views", direction="images")
    with pytest.raises(ValueError, match="epsilon"):
        Options(epsilon=-0.1)
