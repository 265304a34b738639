"""What is special to holding a model near its base; value and gradient are the contract's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.config import load
from mclclip.data.batches import Batch
from mclclip.models.loading import load_towers
from mclclip.objectives.base import ObjectiveInputs, parse
from mclclip.objectives.pairs import Pairs
from mclclip.objectives.row_losses import divergences
from mclclip.ranks.process_group import SINGLE
from tests import tiny
from tests.objective_loops import parts_of, split

WHAT = ["similarities", "features"]


def built(model: Any = None, **options: Any) -> Any:
    setting = ObjectiveInputs(model or load_towers(tiny.MODEL, seed=1), SINGLE, 0)
    return parse({"kind": "preserve", **options}).build(setting)


def batch_of() -> Batch:
    rows = 6
    random = torch.Generator().manual_seed(3)
    return Batch(
        views=[torch.randn(rows, 3, 32, 32, generator=random)],
        text=torch.randint(1, 400, (rows, 20), generator=random),
        group_ids=torch.arange(rows)[:, None] % 2,
        sample_id=torch.arange(rows),
        step=0,
        group_size=rows,
    )


@pytest.mark.parametrize(
    ("what", "between"), [("similarities", "captions"), ("features", "images")]
)
def test_at_the_base_loss_and_gradient_are_zero_to_the_last_bit(what: str, between: str) -> None:
    model, batch = load_towers(tiny.MODEL, seed=1).train(), batch_of()
    objective = built(model, what=what, between=between, exact=True)

    def run() -> Tensor:
        model.zero_grad()
        loss: Tensor = objective(objective.features(model, batch, {}), batch)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert run().item() == 0.0
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients and all(bool((gradient == 0.0).all()) for gradient in gradients)
    with torch.no_grad():  # the copy stays where it was
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    assert run().item() > 0.0
    assert any(bool((p.grad != 0.0).any()) for p in model.parameters() if p.grad is not None)
    assert not [*objective.parameters()] and not objective.state_dict()


def sides() -> dict[str, Tensor]:
    """Features of the base, and marks."""
    rows, dim = 8, 5
    random = torch.Generator().manual_seed(7)
    found = {
        f"base_{name}_features": functional.normalize(
            torch.randn(rows, dim, generator=random, dtype=torch.float64)
        )
        for name in ("image", "text")
    }
    ids = torch.arange(rows)
    return found | {"group_ids": torch.zeros(rows, 1, dtype=torch.int64), "sample_id": ids}


def test_a_rotation_of_both_towers_is_free_for_similarities_alone() -> None:
    given = sides()
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    turned = {n: given[f"base_{n}"] @ turn for n in ("image_features", "text_features")}
    losses = {what: parts_of(built(what=what), **turned, **given)["loss"].item() for what in WHAT}
    assert losses["similarities"] == pytest.approx(0.0, abs=1e-12)
    assert losses["features"] > 0.1
    one = turned | {"text_features": given["base_text_features"]}
    assert parts_of(built(), **one, **given)["loss"].item() > 0.01  # of one tower it is not


@pytest.mark.parametrize(
    ("what", "between"), [("similarities", "captions"), ("features", "images")]
)
def test_chance_is_the_loss_of_features_that_are_alike(what: str, between: str) -> None:
    given, objective = sides(), built(what=what, between=between)
    nearest = {
        n: functional.normalize(given[f"base_{n}"].mean(dim=0), dim=0).expand(8, 5)
        for n in ("image_features", "text_features")
    }
    parts = parts_of(objective, **nearest, **given)
    assert objective.chance(*split(nearest | given), parts).item() == pytest.approx(
        parts["loss"].item()
    )


def test_a_common_scale_of_100_loses_no_digits() -> None:
    """fp32 against the definition in float64, at the logit scale of a trained CLIP."""
    random = torch.Generator().manual_seed(2)
    base = [functional.normalize(torch.randn(64, 16, generator=random)) for _ in range(2)]
    own = [functional.normalize(b + 0.01 * torch.randn(64, 16, generator=random)) for b in base]
    ids = torch.arange(64)
    pairs = Pairs(torch.zeros_like(ids), ids, torch.zeros_like(ids), ids, 0, tile=20)
    rows = divergences(100 * own[0], own[1], 100 * base[0], base[1], pairs, with_own=True)
    wanted, logits = ((100 * (x.double() @ y.double().T)) for x, y in (base, own))
    exact = functional.kl_div(
        logits.log_softmax(1), wanted.log_softmax(1), reduction="none", log_target=True
    ).sum(dim=1)
    torch.testing.assert_close(rows.double(), exact, atol=2e-5, rtol=1e-4)


def test_a_base_without_a_logit_scale_needs_a_temperature() -> None:
    image_tower = load_towers(tiny.MODEL, seed=1, text=False)
    with pytest.raises(ValueError, match="has none: set temperature to a number"):
        built(image_tower, between="images")
    assert built(image_tower, between="images", temperature=0.1).scale == pytest.approx(10.0)


HELD = "train.objective=[{kind: info_nce}, {kind: preserve, exact: %s, weight: 0.5}]"


def test_captions_are_embedded_where_a_term_holds_texts() -> None:
    assert not load("demo", []).stored_texts
    assert load("demo", [HELD % "false"]).stored_texts
    assert not load("demo", [HELD % "true"]).stored_texts
    load("demo", [HELD % "true", "embed.feature=pooled"])
