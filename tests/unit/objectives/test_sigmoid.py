"""The sigmoid loss: SigLIP's formula pair by pair; invariants in value and gradient; options."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip import config
from mclclip.models.loading import load_towers
from mclclip.objectives.base import ObjectiveInputs
from mclclip.objectives.sigmoid import Sigmoid
from mclclip.ranks.process_group import SINGLE
from tests.objective_loops import parts_of

VIT = json.loads((Path(__file__).parents[2] / "configs" / "tiny_vit.json").read_text())


def run(
    group_ids: list[int], sample_id: list[int], *, scale: float = 7.0, text_grad: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the loss returns for drawn features, and the leaves that it was pulled back to."""
    random, rows = torch.Generator().manual_seed(7), len(group_ids)
    image, text = (torch.randn(rows, 6, generator=random).requires_grad_() for _ in range(2))
    leaves = {"logit_scale": torch.tensor(scale), "logit_bias": torch.tensor(-2.0)}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    unit = [functional.normalize(x, dim=-1) for x in (image, text)]
    parts = parts_of(
        Sigmoid(),
        image_features=unit[0],
        text_features=unit[1] if text_grad else unit[1].detach(),
        group_ids=torch.tensor(group_ids)[:, None],
        sample_id=torch.tensor(sample_id),
        **leaves,
    )
    parts["loss"].backward()
    return parts, {"image": image, "text": text} | leaves


def test_large_logits_stay_finite() -> None:
    parts, leaves = run([0] * 5, [*range(5)], scale=1e4)
    assert torch.isfinite(parts["loss"])
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves.values())


def test_texts_without_gradient_change_nothing_else() -> None:
    (_, wanted), (_, found) = (run([0, 1] * 3, [*range(6)], text_grad=g) for g in (True, False))
    assert found.pop("text").grad is None
    for name, leaf in found.items():
        torch.testing.assert_close(leaf.grad, wanted[name].grad)


def test_rows_without_negatives_are_counted_and_keep_their_own_pair() -> None:
    """A sample that is repeated is no negative."""
    parts, leaves = run([0, 1, 2, 2], [3, 4, 5, 5])
    assert int(parts["rows_without_negatives"]) == 4
    image, text = (functional.normalize(leaves[n], dim=1) for n in ("image", "text"))
    logits = leaves["logit_scale"] * (image * text).sum(dim=1) + leaves["logit_bias"]
    torch.testing.assert_close(parts["loss"], -functional.logsigmoid(logits).mean())


# --- where scale and bias come from ------------------------------------------------------------


def batch(views: int) -> Any:
    random = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        views=[torch.randn(3, 3, 32, 32, generator=random) for _ in range(views)],
        text=torch.randint(1, 400, (3, VIT["text_cfg"]["context_length"]), generator=random),
        text_features=None,
        group_ids=torch.zeros(3, 1, dtype=torch.int64),
        sample_id=torch.arange(3),
    )


def built(tree: dict[str, Any], model_config: dict[str, Any]) -> tuple[Any, Any, dict[str, Tensor]]:
    """Model, objective and what it returns for a batch, with its parts locked as for a run."""
    options = {"run_dir": "x", "base": {"objective": {"kind": "sigmoid", **tree}}}
    training = config.from_tree(options).base
    assert training is not None
    model = load_towers(model_config, seed=1)
    model.lock(**training.model_arguments()["lock"])
    objective = training.objective.build(ObjectiveInputs(model=model, context=SINGLE, seed=0))
    given = batch(training.objective.reads.num_views)
    if not training.objective.reads.captions:
        given.text = None
    parts: dict[str, Tensor] = objective(objective.features(model, given, {}), given)
    parts["loss"].backward()  # type: ignore[no-untyped-call]
    return model, objective, parts


def test_scale_and_bias_of_the_model_are_trained() -> None:
    model, objective, parts = built({}, VIT | {"init_logit_bias": -7.0, "init_logit_scale": 1.5})
    assert not list(objective.parameters())
    assert parts["logit_bias"].item() == -7.0
    assert parts["logit_scale"].item() == pytest.approx(math.exp(1.5))
    assert model.clip.logit_bias.grad.abs() > 0 and model.clip.logit_scale.grad.abs() > 0


def test_a_model_without_a_bias_gets_one_of_the_objective() -> None:
    model, objective, parts = built({}, VIT)
    assert {n: p.shape for n, p in objective.named_parameters()} == {"bias": (1,)}
    assert parts["logit_bias"].item() == -10.0 and objective.bias.grad.abs() > 0
    assert model.clip.logit_scale.grad.abs() > 0


def test_views_have_scale_and_bias_of_the_objective() -> None:
    model, objective, parts = built({"between": "views"}, VIT | {"init_logit_bias": -7.0})
    assert {n for n, _ in objective.named_parameters()} == {"log_scale", "bias"}
    assert parts["logit_scale"].item() == pytest.approx(10.0)
    assert parts["logit_bias"].item() == -10.0
    assert not model.clip.logit_bias.requires_grad and not model.clip.logit_scale.requires_grad
    assert model.clip.visual.proj.grad.abs().max() > 0


def test_the_bias_rests_where_it_is_not_read_or_the_scale_is_locked() -> None:
    def lock(**train: Any) -> Any:
        tree = {"run_dir": "x", "train": train}
        return config.from_tree(tree).train.model_arguments()["lock"]["logit_bias"]

    assert lock(objective={"kind": "sigmoid"}) is True
    assert lock(objective={"kind": "info_nce"}) is False
    assert lock(objective={"kind": "sigmoid"}, lock={"logit_scale": False}) is False
