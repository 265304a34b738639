"""Near copies: masked, positives, or open_clip's negatives; and edited captions as negatives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.base import Objective, ObjectiveInputs, parse
from mclclip.objectives.info_nce import InfoNCE, InfoNCEWithEdits
from mclclip.ranks.process_group import SINGLE
from mclclip.util.caption_rules import HardCaptions
from tests import objective_loops as loops
from tests.contracts.test_objectives import Towers

FIELDS = [
    ("info_nce", "masked"),
    ("info_nce", "positives"),
    ("ifm", "masked"),
    ("hcl", "masked"),
    ("sigmoid", "masked"),
    ("sigmoid", "positives"),
]


def built(kind: str, role: str, precision: str = "float64", **near: Any) -> Objective:
    model: Any = Towers()
    how = {} if role == "negatives" else {"near_copies": {"role": role, **near}}
    options = parse({"kind": kind, **how})
    assert bool(options.reads.digests) == (role != "negatives" and not near)
    assert bool(options.reads.encoders) == bool(near)
    return options.build(ObjectiveInputs(model, SINGLE, 0, precision))


def run(objective: Objective, batch: loops.Batch, **base: Tensor) -> dict[str, Tensor]:
    """The objective's parts; the loss has been pulled back."""
    image, text = batch.unit()
    features = {"image_features": image, "text_features": text, "logit_scale": batch.scale}
    features["logit_bias"] = torch.tensor(-2.0, dtype=image.dtype)
    marks = {"group_ids": batch.group_ids[:, None], "sample_id": batch.sample_id}
    digests = dict(zip(loops.DIGESTS, batch.digests, strict=False))
    parts = loops.parts_of(objective, **features, **marks, **digests, **base)
    parts["loss"].backward()
    return parts


def stored(rows: int, seed: int = 0, dim: int = 4) -> dict[str, Tensor]:
    """Stage 0's embeddings, at random."""
    random = torch.Generator().manual_seed(seed)
    return {
        f"base_{name}_features": functional.normalize(torch.randn(rows, dim, generator=random))
        for name in ("image", "text")
    }


@pytest.mark.parametrize("by", ["bytes", "embeddings"])
@pytest.mark.parametrize(("kind", "how"), FIELDS)
def test_without_near_copies_the_bits_are_those_of_negatives(kind: str, how: str, by: str) -> None:
    plain = loops.draw(3, 12, groups=2, dtype=torch.float32)
    batch = plain.rows(slice(None))
    expected = run(built(kind, "negatives", "fp32"), plain)
    if by == "bytes":
        batch.digests = torch.arange(12) * 2**40, -torch.arange(12)
        found = run(built(kind, how, "fp32"), batch)
    else:
        found = run(built(kind, how, "fp32", threshold=1.01), batch, **stored(12))
    assert found.pop("near_copies") == 0 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    for mine, theirs in zip(batch.gradients(), plain.gradients(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("kind", "how"), FIELDS)
def test_embeddings_of_equal_captions_give_the_loss_of_their_bytes(kind: str, how: str) -> None:
    """Where equal captions and pictures have one embedding, and others have unlike ones."""
    marks = torch.tensor([0, 0, 1, 2, 3, 1, 4, 5]), torch.tensor([0, 1, 2, 2, 3, 4, 5, 6])
    one = loops.draw(5, 8, groups=2)
    one.digests = marks
    two = one.rows(slice(None))
    two.digests = ()
    images, texts = torch.eye(8)[marks[1]], torch.eye(8)[marks[0]]
    base = {"base_image_features": images, "base_text_features": texts}
    by_bytes = run(built(kind, how), one)
    by_rows = run(built(kind, how, threshold=0.9), two, **base)
    assert by_bytes["near_copies"] == by_rows["near_copies"] > 0
    for name in by_bytes:
        loops.close(by_bytes[name].detach(), by_rows[name].detach())
    for mine, theirs in zip(one.gradients(), two.gradients(), strict=True):
        loops.close(mine, theirs)


def test_a_margin_is_counted_from_the_own_pair() -> None:
    """GIST: only row 0, whose own cosine is small, has near copies."""
    images = torch.eye(4, dtype=torch.float64)
    texts = images.clone()
    texts[0] = functional.normalize(torch.tensor([0.3, 0.9, 0.0, 0.0], dtype=torch.float64), dim=0)
    base = {"base_image_features": images, "base_text_features": texts}
    for margin, count in ((0.0, 1), (0.2, 2), (0.4, 3 + 1)):
        batch = loops.draw(2, 4)
        parts = run(built("info_nce", "masked", margin=margin), batch, **base)
        assert parts["near_copies"] == count, margin


@pytest.mark.parametrize("kind", ["info_nce", "ifm", "hcl"])
def test_rows_whose_others_are_all_masked_have_loss_0(kind: str) -> None:
    """Some by their caption, some by their picture; the pairs of a group count once."""
    batch = loops.draw(4, 6, dtype=torch.float32)
    batch.group_ids = torch.tensor([0, 0, 0, 1, 1, 1])
    batch.digests = torch.tensor([7, 7, 7, 1, 2, 3]), torch.tensor([1, 2, 3, 4, 4, 5])
    parts = run(built(kind, "masked", "fp32"), batch)
    assert parts["rows_without_negatives"] == 3 and parts["near_copies"] == 6 + 2
    for gradient in batch.gradients()[:2]:
        assert torch.equal(gradient[:3], torch.zeros_like(gradient[:3]))
        assert (gradient[3:] != 0).all()
    batch.digests = torch.zeros(6, dtype=torch.int64), torch.arange(6)
    assert run(built(kind, "masked", "fp32"), batch)["loss"] == 0


def test_rows_without_negatives_pull_all_their_positives() -> None:
    """Of n equal rows with equal features the loss is log n: each has its share of 1 / n."""
    batch = loops.draw(4, 5)
    batch.digests = torch.zeros(5, dtype=torch.int64), torch.arange(5)
    parts = run(built("info_nce", "positives"), batch)
    with torch.no_grad():
        batch.first[:], batch.second[:] = batch.first[0], batch.second[0]
    alike = run(built("info_nce", "positives"), batch)
    assert alike["loss"].item() == pytest.approx(math.log(5)) and parts["loss"] > math.log(5)
    assert parts["near_copies"] == 20 and parts["rows_without_negatives"] == 0


def test_positives_of_one_caption_change_nothing_in_info_nce() -> None:
    """Its features are equal, so that over a direction the means of positives are the own pairs;
    masking differs."""
    found = {}
    for how in ("negatives", "positives", "masked"):
        batch = loops.draw(7, 6, groups=2)
        with torch.no_grad():
            batch.group_ids[:3], batch.second[:3] = 0, batch.second[0]
        batch.digests = torch.tensor([0, 0, 0, 1, 2, 3]), torch.arange(6)
        loss = run(built("info_nce", how), batch)["loss"].detach()
        first, second, scale = batch.gradients()
        # What reaches the weights is the sum of the gradients of the equal features.
        found[how] = [loss, first, second[:3].sum(dim=0), second[3:], scale]
    for mine, theirs in zip(found["positives"], found["negatives"], strict=True):
        loops.close(mine, theirs)
    assert found["masked"][0] < found["negatives"][0] - 0.01


@pytest.mark.parametrize(("kind", "how"), FIELDS)
def test_loss_of_features_that_are_alike_is_chance(kind: str, how: str) -> None:
    """The mean over directions and rows of what a row expects of texts that say nothing."""
    batch = loops.draw(5, 8, groups=2)
    batch.digests = torch.tensor([0, 0, 1, 1, 2, 3, 4, 5]), torch.arange(8)
    objective = built(kind, how)
    parts = run(objective, batch)
    with torch.no_grad():
        for side in (batch.first, batch.second):
            side[:] = 1.0
    image, text = (side.detach() for side in batch.unit())
    marks = {"group_ids": batch.group_ids[:, None], "sample_id": batch.sample_id}
    marks |= dict(zip(loops.DIGESTS, batch.digests, strict=True))
    given = {"image_features": image, "text_features": text, **marks}
    chance = objective.chance(*loops.split(given), {n: part.detach() for n, part in parts.items()})
    assert chance is not None
    if kind != "sigmoid":
        loops.close(chance, run(objective, batch)["loss"].detach())
        return
    # No logit of all pairs has a smaller loss.
    best = 0.0
    for reach in (8.0, 0.5, 0.03):  # from -8 to 8, and then about the best of these
        losses, biases = [], best + torch.linspace(-reach, reach, 33, dtype=torch.float64)
        for bias in biases:
            given |= {"logit_scale": torch.tensor(1e-9).double(), "logit_bias": bias}
            losses.append(loops.parts_of(objective, **given)["loss"])
        best = float(biases[torch.stack(losses).argmin()])
    of_one_row = 8 * torch.ones(())  # the least loss of one logit per row is no more than that
    assert 0 < chance <= torch.stack(losses).min() + 1e-6 < of_one_row


# --- edited captions ------------------------------------------------------------------------------


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


def loss_of(scope: Any, h: int) -> InfoNCE:
    return InfoNCEWithEdits(HardCaptions(per_caption=h, scope=scope))


@pytest.mark.parametrize("scope", SCOPES)
def test_without_an_edit_the_bits_are_those_of_the_plain_loss(scope: str) -> None:
    found = []
    for loss in (InfoNCE(), loss_of(scope, 2)):
        given = features(9, 2, absent=range(9))
        given = {n: x.detach().float().requires_grad_() for n, x in given.items()}
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
def test_edits_that_do_not_count_have_no_gradient(scope: str) -> None:
    labels = [0, 0, 1, 1, 2]
    given, loss = features(5, 2, absent=[1, 4]), loss_of(scope, 2)
    parts = loops.parts_of(loss, **given, **marks(labels))
    assert parts["rows_with_edits"] == (3 if scope == "own" else 4)
    names = ("edited_features_0", "edited_features_1", "image_features")
    grads = torch.autograd.grad(parts["loss"], [given[name] for name in names])
    for grad in grads[:2]:
        assert not grad[[1, 4]].any() and grad[[0, 2, 3]].any(dim=1).all()
    assert grads[2][:4].any(dim=1).all() and not grads[2][4].any()


def test_the_loss_of_features_that_say_nothing() -> None:
    given = features(4, 2, absent=[3]) | marks([0] * 4)
    for scope, of_image in (("own", 3 * math.log(6) + math.log(4)), ("global", 4 * math.log(10))):
        loss = loss_of(scope, 2)
        chance = loss.chance(*loops.split(given), loops.parts_of(loss, **given))
        assert float(chance) == pytest.approx((of_image / 4 + math.log(4)) / 2)


def test_terms_may_differ_in_the_scope() -> None:
    terms = [{"kind": "info_nce", "hard_captions": {"scope": scope}} for scope in SCOPES]
    assert parse(terms).reads.edits.per_caption == 1
