"""Losses against those of open_clip, of pytorch-metric-learning, and torch's own functions on whole
matrices of logits: value and gradient."""

from __future__ import annotations

from typing import Any

import mclclip.util.torchvision_fix  # noqa: F401

# isort: split
import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.base import Objective
from mclclip.objectives.class_centers import Margin, ShardedClassCenters
from mclclip.objectives.contrast import Temperature
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.mlcd import ClassCenterLoss
from mclclip.objectives.sigmoid import Sigmoid
from mclclip.objectives.supcon import SupervisedContrast
from tests import objective_loops as loops


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tile", [1024, 5])
@pytest.mark.parametrize(("kind", "in_fp32"), [("info_nce", 1e-6), ("sigmoid", 1e-5)])
def test_one_group_is_the_loss_of_open_clip(
    kind: str, tile: int, dtype: torch.dtype, in_fp32: float
) -> None:
    random = torch.Generator().manual_seed(0)
    tolerance = 1e-12 if dtype == torch.float64 else in_fp32
    image, text = (torch.randn(16, 8, generator=random, dtype=dtype) for _ in range(2))
    scale, bias = (torch.tensor(value, dtype=dtype) for value in (10.0, -10.0))
    leaves = [x.requires_grad_() for x in (image, text, scale)]
    unit = [functional.normalize(x, dim=-1) for x in (image, text)]
    given = {"image_features": unit[0], "text_features": unit[1], "logit_scale": scale}
    given |= {"group_ids": torch.full((16, 1), 4), "sample_id": torch.arange(16)}
    if kind == "info_nce":
        objective: Objective = InfoNCE(tile=tile)
        expected = ClipLoss()(*unit, scale)
    else:
        leaves.append(bias.requires_grad_())
        objective = Sigmoid(tile=tile)
        given["logit_bias"] = bias
        expected = SigLipLoss()(*unit, scale, bias)
    found = loops.parts_of(objective, **given)
    loops.close(found["loss"], expected, tolerance)
    assert found["rows_without_negatives"] == 0
    for mine, theirs in zip(
        torch.autograd.grad(found["loss"], leaves, retain_graph=True),
        torch.autograd.grad(expected, leaves),
        strict=True,
    ):
        loops.close(mine, theirs, tolerance)


@pytest.mark.parametrize(("kind", "num_views"), [("nt_xent", 2), ("supcon", 2), ("supcon", 1)])
def test_losses_between_views_are_those_of_pytorch_metric_learning(
    kind: str, num_views: int
) -> None:
    """With one view some of the twelve rows have no positive: theirs leaves them out too."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    batch = loops.draw(2, rows=12, classes=6, dim=8)
    twin, temperature = batch.rows(slice(None)), Temperature(0.2)
    objective: Objective = SupervisedContrast(num_views, temperature=temperature)
    classes, theirs = batch.classes, losses.SupConLoss(0.2)
    assert len(classes.unique(return_counts=True)[1].unique()) > 1
    if kind == "nt_xent":
        objective = InfoNCE("views", temperature, tile=7)
        classes, theirs = torch.arange(12), losses.NTXentLoss(0.2)
    expected = theirs(torch.cat([twin.first, twin.second][:num_views]), classes.repeat(num_views))
    expected.backward()
    loops.close(batch.run(objective)["loss"].detach(), expected.detach(), 1e-10)
    for mine, other in zip(batch.gradients(), twin.gradients(), strict=True):
        loops.close(mine, other, 1e-10)


# --- class centers -------------------------------------------------------------------------------

K, D, B, L, SCALE = 50, 16, 32, 4, 30.0


def make() -> tuple[Tensor, Tensor, Tensor]:
    """Class centers, features and labels."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(K, D, generator=random, dtype=torch.float64)
    features = torch.randn(B, D, generator=random, dtype=torch.float64)
    labels = torch.stack([torch.randperm(K, generator=random)[:L] for _ in range(B)])
    return rows, features, labels


def ours(kind: Any, margin: Margin, labels: Tensor) -> tuple[Tensor, Any, Any]:
    rows, features, _ = make()
    centers = ShardedClassCenters(K, D, lambda a, b: rows[a:b], dtype=torch.float64)
    objective = ClassCenterLoss(centers, kind, scale=SCALE, margin=margin, tile=11)
    unit = functional.normalize(features.requires_grad_(), dim=1)
    loss = loops.parts_of(objective, image_features=unit, classes=labels)["loss"]
    loss.backward()
    return loss.detach(), features.grad, centers.grad  # all classes are touched


def theirs(kind: str, margin: float, labels: Tensor) -> tuple[Tensor, Any, Any]:
    """Eq. 4 as a log-sum-exp over all pairs of a positive and a negative; Eq. 5 as two of them;
    the softmax as torch's cross-entropy of logits with ArcFace's margin on the target."""
    rows, features, _ = (x.requires_grad_() if x.is_floating_point() else x for x in make())
    cosine = functional.normalize(features, dim=1) @ functional.normalize(rows, dim=1).T
    own = functional.one_hot(labels, K).sum(dim=1).bool()
    logits = SCALE * torch.where(own, torch.cos(torch.arccos(cosine) + margin), cosine)
    zero = torch.zeros(B, 1, dtype=torch.float64)
    positives = logits.gather(1, labels)
    negatives = logits[~own].view(B, K - labels.shape[1])
    if kind == "single_label":
        loss = functional.cross_entropy(logits, labels[:, 0])
    elif kind == "mlc":
        pairs = (negatives[:, None] - positives[:, :, None]).flatten(1)
        loss = torch.logsumexp(torch.cat([zero, pairs], dim=1), dim=1).mean()
    else:
        terms = [torch.cat([zero, x], dim=1) for x in (-positives, negatives)]
        loss = torch.stack([torch.logsumexp(x, dim=1).mean() for x in terms]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), features.grad, rows.grad


@pytest.mark.parametrize("margin", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["mlcd", "mlc", "single_label"])
def test_whole_logits(kind: str, margin: float) -> None:
    labels = make()[2]
    labels = labels[:, :1] if kind == "single_label" else labels
    exact = Margin("arc", margin) if margin else Margin("none")
    for got, want in zip(ours(kind, exact, labels), theirs(kind, margin, labels), strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)
