"""Edited captions as negatives of InfoNCE: what is special to them beside the contract."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.base import parse
from mclclip.objectives.info_nce import InfoNCE, InfoNCEWithEdits
from mclclip.util.caption_rules import HardCaptions
from tests import objective_loops as loops

SCOPES = ("own", "global")


def features(rows: int, h: int, absent: Any = ()) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    names = ["image_features", "text_features", *(f"edited_features_{n}" for n in range(h))]
    made = {}
    for name in names:
        x = functional.normalize(torch.randn(rows, 8, generator=random, dtype=torch.float64), dim=1)
        if name.startswith("edited"):
            x[list(absent)] = 0.0
        made[name] = x.requires_grad_()
    return made


def marks(labels: list[int]) -> dict[str, Tensor]:
    return {
        "group_ids": torch.tensor(labels)[:, None],
        "sample_id": torch.arange(len(labels)),
        "logit_scale": torch.tensor(7.0, dtype=torch.float64),
    }


def loss_of(scope: Any, h: int, tile: int = 2048) -> InfoNCE:
    return InfoNCEWithEdits(HardCaptions(per_caption=h, scope=scope), tile=tile)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_an_edit_the_bits_are_those_of_the_plain_loss(scope: str, dtype: Any) -> None:
    found = []
    for loss in (InfoNCE(), loss_of(scope, 2)):
        given = features(9, 2, absent=range(9))
        given = {n: x.detach().to(dtype).requires_grad_() for n, x in given.items()}
        parts = loops.parts_of(loss, **given, **marks([0, 0, 1, 1, 1, 2, 2, 2, 3]))
        parts["loss"].backward()
        gradients = [given[n].grad for n in ("image_features", "text_features")]
        found.append([parts["loss"].detach(), *gradients])
        assert parts["rows_without_negatives"] == 1
        for name in ("edited_features_0", "edited_features_1"):
            grad = given[name].grad
            assert grad is None or not grad.any()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("tile", [2, 2048])
def test_edits_that_do_not_count_have_no_gradient(scope: str, tile: int) -> None:
    labels = [0, 0, 1, 1, 2]
    given, loss = features(5, 2, absent=[1, 4]), loss_of(scope, 2, tile)
    parts = loops.parts_of(loss, **given, **marks(labels))
    assert parts["rows_with_edits"] == (3 if scope == "own" else 4)
    names = ("edited_features_0", "edited_features_1", "image_features")
    grads = torch.autograd.grad(parts["loss"], [given[name] for name in names])
    for grad in grads[:2]:
        assert not grad[[1, 4]].any() and grad[[0, 2, 3]].any(dim=1).all()
    assert grads[2][:4].any(dim=1).all() and not grads[2][4].any()


def test_global_meets_the_edits_of_its_group_alone() -> None:
    labels = [0, 0, 1, 1]
    given = features(4, 1)
    edits = given["edited_features_0"].detach()
    turned = torch.cat([edits[:2], -edits[2:]])

    def of_image(p: int, edits: Tensor) -> float:
        group = [q for q in range(4) if labels[q] == labels[p]]
        texts = [given["text_features"][q] for q in sorted(group, key=lambda q: q != p)]
        logits = (
            7.0 * torch.stack([*texts, *(edits[q] for q in group)]) @ given["image_features"][p]
        )
        return float((logits.logsumexp(0) - logits[0]).detach())

    def loss(edits: Tensor) -> float:
        features = given | {"edited_features_0": edits}
        return float(
            loops.parts_of(loss_of("global", 1), **features, **marks(labels))["loss"].detach()
        )

    moved = sum(of_image(p, turned) - of_image(p, edits) for p in (2, 3))
    assert loss(turned) - loss(edits) == pytest.approx(moved / 8, abs=1e-12)
    assert abs(moved) > 0.1


def test_the_loss_of_features_that_say_nothing() -> None:
    given = features(4, 2, absent=[3]) | marks([0] * 4)
    for scope, of_image in (("own", 3 * math.log(6) + math.log(4)), ("global", 4 * math.log(10))):
        loss = loss_of(scope, 2)
        chance = loss.chance(*loops.split(given), loops.parts_of(loss, **given))
        assert float(chance) == pytest.approx((of_image / 4 + math.log(4)) / 2)


def test_terms_may_differ_in_the_scope() -> None:
    terms = [{"kind": "info_nce", "hard_captions": {"scope": scope}} for scope in SCOPES]
    assert parse(terms).reads.edits.per_caption == 1
