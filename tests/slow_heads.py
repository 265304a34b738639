"""The losses over class centers written out: every class on one process, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers import Margin


def dense_loss(
    kind: str,
    rows: Tensor,
    features: Tensor,
    labels: Tensor,
    negatives: Sequence[int],
    scale: float,
    margin: Margin,
) -> Tensor:
    """Mean over the rows that have a label, of sums over all their classes."""
    unit, centers = functional.normalize(features, dim=1), functional.normalize(rows, dim=1)
    cosine = unit @ centers.T
    losses = []
    for i, own in enumerate(labels.tolist()):
        positives = [j for j in (own[:1] if kind == "single_label" else own) if j >= 0]
        if not positives:
            continue
        p = torch.stack([torch.exp(-scale * margin(cosine[i, j])) for j in positives]).sum()
        others = [torch.exp(scale * cosine[i, j]) for j in negatives if j not in positives]
        n = torch.stack([*others, torch.zeros_like(p)]).sum()
        coupled = torch.log(1 + p * n)
        losses.append(torch.log(1 + p) + torch.log(1 + n) if kind == "mlcd" else coupled)
    return torch.stack(losses).mean()


class SlowLazyAdamW:
    """AdamW in which a row moves in the steps that touch it only, and counts only those."""

    def __init__(self, rows: Tensor, betas: tuple[float, float], eps: float, decay: float) -> None:
        self.rows, self.betas, self.eps, self.decay = rows, betas, eps, decay
        self.first, self.second = torch.zeros_like(rows), torch.zeros_like(rows)
        self.count = [0] * len(rows)

    @torch.no_grad()
    def step(self, grad: Tensor, touched: Sequence[int], lr: float) -> None:
        """Moves the rows ``touched`` along ``grad`` [K, D]."""
        one, two = self.betas
        for j in touched:
            self.count[j] += 1
            self.first[j] = one * self.first[j] + (1 - one) * grad[j]
            self.second[j] = two * self.second[j] + (1 - two) * grad[j] ** 2
            first = self.first[j] / (1 - one ** self.count[j])
            second = self.second[j] / (1 - two ** self.count[j])
            self.rows[j] -= lr * self.decay * self.rows[j]
            self.rows[j] -= lr * first / (second.sqrt() + self.eps)
