"""The sigmoid loss: SigLIP's formula pair by pair; invariants in value and gradient; options."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
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
NAMES = ("image", "text", "scale", "bias")


class Inputs:
    """Raw features, scale and bias with gradient; ``run`` gives the loss and the gradients."""

    def __init__(self, seed: int, rows: int, groups: int = 1, dtype: Any = torch.float64) -> None:
        random = torch.Generator().manual_seed(seed)
        self.image, self.text = (
            torch.randn(rows, 6, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
            for _ in range(2)
        )
        self.scale = torch.tensor(7.0, dtype=dtype, requires_grad=True)
        self.bias = torch.tensor(-2.0, dtype=dtype, requires_grad=True)
        self.group_ids = torch.randint(0, groups, (rows,), generator=random)
        self.sample_id = torch.randperm(1000, generator=random)[:rows]

    def run(self, loss_of: Callable[[Inputs, Tensor, Tensor], Tensor]) -> list[Tensor]:
        """The loss and the gradients of the four inputs."""
        unit = [functional.normalize(x, dim=-1) for x in (self.image, self.text)]
        loss = loss_of(self, *unit)
        return [loss.detach(), *torch.autograd.grad(loss, [getattr(self, n) for n in NAMES])]


def fast(inputs: Inputs, image: Tensor, text: Tensor) -> Tensor:
    return found(inputs, image, text)["loss"]


def found(inputs: Inputs, image: Tensor, text: Tensor) -> dict[str, Tensor]:
    return parts_of(
        Sigmoid(),
        image_features=image,
        text_features=text,
        logit_scale=inputs.scale,
        logit_bias=inputs.bias,
        group_ids=inputs.group_ids[:, None],
        sample_id=inputs.sample_id,
    )


def test_large_logits_stay_finite() -> None:
    inputs = Inputs(7, 5, dtype=torch.float32)
    inputs.scale = torch.tensor(1e4, requires_grad=True)
    assert all(torch.isfinite(value).all() for value in inputs.run(fast))


def test_texts_without_gradient_change_nothing_else() -> None:
    inputs = Inputs(11, 6, groups=2)
    expected = inputs.run(fast)
    text = functional.normalize(inputs.text, dim=-1).detach()
    loss = fast(inputs, functional.normalize(inputs.image, dim=-1), text)
    wanted = (inputs.image, inputs.scale, inputs.bias)
    found = torch.autograd.grad(loss, wanted)
    for mine, theirs in zip(found, (expected[n] for n in (1, 3, 4)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


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


def test_rows_without_negatives_are_counted_and_keep_their_own_pair() -> None:
    inputs = Inputs(5, 4)
    inputs.group_ids = torch.tensor([0, 1, 2, 2])
    inputs.sample_id = torch.tensor([3, 4, 5, 5])  # a sample repeated is no negative
    unit = [functional.normalize(x.detach(), dim=-1) for x in (inputs.image, inputs.text)]
    result = found(inputs, *unit)
    assert int(result["rows_without_negatives"]) == 4
    logits = inputs.scale * (unit[0] * unit[1]).sum(dim=1) + inputs.bias
    torch.testing.assert_close(result["loss"], -functional.logsigmoid(logits).mean())
