"""The head written plainly, as published copies do: all logits at once, and autograd.

``ReferenceHead`` computes what ``ClassCenterLoss`` does, loss and gradients, for comparison only.
Its [B, n] logits exist whole, with what autograd keeps of them. With ``per_label`` it gathers the
positives one label at a time, and sends P and N in all-reduces of their own, forward and backward.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers import Margin, ShardedClassCenters
from mclclip.objectives.mlcd import Kind
from mclclip.ranks import collectives


class ReferenceHead:
    """A callable with the arguments and the loss of ``ClassCenterLoss``; see above."""

    def __init__(
        self,
        centers: ShardedClassCenters,
        kind: Kind,
        *,
        scale: float = 64.0,
        margin: Margin | None = None,
        per_label: bool = False,
    ) -> None:
        self.centers, self.kind, self.scale = centers, kind, scale
        self.margin, self.per_label = margin or Margin(), per_label

    def __call__(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """``loss``; its backward gives the class centers their gradient, as ours does."""
        labels = labels[:, :1] if self.kind == "single_label" else labels
        every, labels = collectives.gather_with_grad(features), collectives.gather(labels)
        local = labels - self.centers.start
        own = (labels >= self.centers.start) & (labels < self.centers.stop)
        negatives = self.centers.negatives(labels.cpu()).to(labels.device)
        touched = torch.unique(torch.cat([negatives, local[own]]))
        rows = self.centers.rows[touched].requires_grad_()
        keep = partial(self._keep, touched)
        rows.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]
        unit = functional.normalize(rows, dim=1)
        place = torch.searchsorted(touched, local.masked_fill(~own, 0)).clamp_max(len(touched) - 1)
        p = self._positive_sum(every, unit, place, own)
        n = self._negative_sum(
            every, unit[torch.searchsorted(touched, negatives)], negatives, local
        )
        if self.per_label:
            p, n = collectives.all_reduce_with_grad(p), collectives.all_reduce_with_grad(n)
        else:
            p, n = collectives.all_reduce_with_grad(torch.stack([p, n])).unbind()
        log_p, log_n, zero = p.log(), n.log(), torch.zeros_like(p)
        if self.kind == "mlcd":
            terms = torch.logaddexp(log_p, zero) + torch.logaddexp(log_n, zero)
        else:
            terms = torch.logaddexp(log_p + log_n, zero)
        return {"loss": terms.mean()}

    def _positive_sum(self, every: Tensor, unit: Tensor, place: Tensor, own: Tensor) -> Tensor:
        """[B]: this rank's part of P."""
        columns = range(place.shape[1])
        groups = [slice(j, j + 1) for j in columns] if self.per_label else [slice(None)]
        total = torch.zeros_like(every[:, 0])
        for group in groups:
            cosine = (every[:, None] * unit[place[:, group]]).sum(dim=2)
            terms = torch.exp(-self.scale * self.margin(cosine))
            total = total + terms.masked_fill(~own[:, group], 0.0).sum(dim=1)
        return total

    def _negative_sum(
        self, every: Tensor, centers: Tensor, negatives: Tensor, local: Tensor
    ) -> Tensor:
        """[B]: this rank's part of N, through the whole of the logits."""
        logits = self.scale * (every @ centers.T)
        column = torch.searchsorted(negatives, local).clamp_max(len(negatives) - 1)
        row, label = (negatives[column] == local).nonzero(as_tuple=True)
        logits[row, column[row, label]] = float("-inf")
        return logits.exp().sum(dim=1)

    def _keep(self, touched: Tensor, rows: Tensor) -> None:
        """Every rank computes the same loss, so it comes back once from each."""
        assert rows.grad is not None
        self.centers.add_gradient(touched.cpu(), rows.grad / collectives.world_size())
        rows.grad = None
