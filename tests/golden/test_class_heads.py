"""The losses over class centers against torch's own functions on whole matrices of logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers import Margin, ShardedClassCenters
from mclclip.objectives.mlcd import ClassCenterLoss
from tests.objective_loops import parts_of

K, D, B, L, SCALE = 50, 16, 32, 4, 30.0


def make() -> tuple[Tensor, Tensor, Tensor]:
    """Class centers, features and labels."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(K, D, generator=random, dtype=torch.float64)
    features = torch.randn(B, D, generator=random, dtype=torch.float64)
    labels = torch.stack([torch.randperm(K, generator=random)[:L] for _ in range(B)])
    return rows, features, labels


def ours(kind: str, margin: Margin, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, features, _ = make()
    centers = ShardedClassCenters(K, D, lambda a, b: rows[a:b], dtype=torch.float64)
    features.requires_grad_()
    objective = ClassCenterLoss(centers, kind, scale=SCALE, margin=margin, tile=11)  # type: ignore[arg-type]
    unit = functional.normalize(features, dim=1)
    loss = parts_of(objective, image_features=unit, classes=labels)["loss"]
    loss.backward()
    assert features.grad is not None and centers.grad is not None
    return loss.detach(), features.grad, centers.grad  # all classes are touched


def theirs(kind: str, margin: float, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 4 as a log-sum-exp over all pairs of a positive and a negative; Eq. 5 as two of them;
    the softmax as torch's cross-entropy of logits with ArcFace's margin on the target."""
    rows, features, _ = make()
    rows.requires_grad_()
    features.requires_grad_()
    cosine = functional.normalize(features, dim=1) @ functional.normalize(rows, dim=1).T
    own = functional.one_hot(labels, K).sum(dim=1).bool()
    angle = torch.arccos(cosine)
    logits = SCALE * torch.where(own, torch.cos(angle + margin), cosine)
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
        loss = sum(torch.logsumexp(x, dim=1).mean() for x in terms)  # type: ignore[assignment]
    loss.backward()  # type: ignore[no-untyped-call]
    assert features.grad is not None and rows.grad is not None
    return loss.detach(), features.grad, rows.grad


@pytest.mark.parametrize("margin", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["mlcd", "mlc", "single_label"])
def test_whole_logits(kind: str, margin: float) -> None:
    labels = make()[2]
    labels = labels[:, :1] if kind == "single_label" else labels
    exact = Margin("arc", margin) if margin else Margin("none")
    for got, want in zip(ours(kind, exact, labels), theirs(kind, margin, labels), strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)
