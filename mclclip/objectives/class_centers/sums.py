"""Sums over positive and negative classes of a batch, with class centers shared out over the ranks.

Of row i with the unit feature e and unit class centers w, and scores s = scale * (e . w):

    P_i = sum of exp(-scale * phi(e . w_j)) over its positives j,
    N_i = sum of exp(s_ij) over the drawn negatives j that are not its positives.

MLCD, MLC and the softmax loss are functions of these two numbers (algorithms of PartialFC, An et
al., 2021, and MLCD, Eq. 4 to 6). Forward, beside the gathering of features and labels, one sum of
[B, 2] over the ranks; backward, one reduction of the features' gradient to its owners. Scores are
computed in tiles, twice, and never exist whole. P and N are summed in float64, whose exponents hold
both exp(-scale) and exp(scale): so no largest score has to be agreed on first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mclclip.objectives.class_centers.batch import ClassBatch, starts_of, weighted_sums
from mclclip.objectives.class_centers.margins import Margin
from mclclip.objectives.class_centers.rows import ShardedClassCenters
from mclclip.pair_products import pair_products
from mclclip.ranks import collectives


@dataclass(frozen=True)
class Sums:
    """Sums of the global batch, alike on every rank: log P and log N [B], and which rows count.

    A row without a positive does not count. ``figures``: what this rank saw; mean over ranks, or
    the largest for names with ``max``.
    """

    log_p: Tensor
    log_n: Tensor
    counted: Tensor
    figures: dict[str, Tensor]


# A compiler would unroll the loops over tiles, and compile again for every step's negatives.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def class_sums(
    features: Tensor,
    labels: Tensor,
    centers: ShardedClassCenters,
    *,
    scale: float,
    margin: Margin,
    tile: int | None = None,
) -> Sums:
    """log P and log N of every row of the global batch (see the head of this module).

    Args:
        features: [b, D] of this rank, unit length, float32 or float64. All ranks have the same b.
        labels: [b, l] int64, classes that are positive; -1: none. In main memory, or the host
            waits for them.
        centers: after ``begin`` of this step. Their gradient is added to them in the backward.
        scale: multiplier of cosines.
        tile: rows and classes of the scores that are computed at a time.

    Returns:
        Sums, differentiable once. The gradient of ``features`` is world_size times that of a loss
        of the global batch which every rank computes alike, for engines that average over ranks.
    """
    with torch.autocast(features.device.type, enabled=False):
        every = collectives.gather(labels.cpu().int()).long()
        batch = ClassBatch(centers, every, scale, margin, tile or _tile(features.device))
        log_p, log_n = _ClassSums.apply(features, batch)  # type: ignore[no-untyped-call]
    return Sums(log_p, log_n, batch.counted, batch.figures)


def _tile(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 2048


def _positive_sums(batch: ClassBatch, features: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of P, float64 [B], and the cosines of its pairs [n]."""
    cosine = pair_products(features, batch.centers.rows, batch.row_starts, batch.positives)
    cosine *= batch.inverse[batch.of_positives]
    terms = torch.exp(-batch.scale * batch.margin(cosine).double())
    sums = terms.new_zeros(batch.shape).masked_scatter_(batch.own, terms).sum(dim=1)
    return sums, cosine


def _negative_sums(batch: ClassBatch, features: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of N, float64 [B], and the largest cosine of a negative."""
    scaled = features * batch.scale
    memory = batch.memory(features)
    sums = features.new_zeros(len(features), dtype=torch.float64)
    largest = features.new_full((), -batch.scale)
    for centers, _, tiles in batch.negative_blocks():
        for rows, number in tiles:
            scores = batch.scores(scaled[rows], centers, number, memory)
            top = scores.amax(dim=1).clamp_min_(-batch.scale)  # -inf where none counts
            largest = torch.maximum(largest, top.amax())
            terms = scores.sub_(top[:, None]).exp_().sum(dim=1)
            sums[rows] += terms.double() * top.double().exp_()
    return sums, largest / batch.scale


class _ClassSums(torch.autograd.Function):
    """See ``class_sums``."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, batch: ClassBatch) -> tuple[Tensor, Tensor]:
        every = collectives.gather(features)
        positive, cosine = _positive_sums(batch, every)
        negative, largest = _negative_sums(batch, every)
        sums = collectives.all_reduce_sum(torch.stack([positive, negative], dim=1))
        log_p, log_n = (column.log().to(every.dtype) for column in sums.unbind(dim=1))
        batch.figures = _figures(batch, cosine, largest)
        ctx.save_for_backward(every, cosine, log_p, log_n)
        ctx.batch = batch
        return log_p, log_n

    @staticmethod
    def backward(ctx: Any, grad_p: Tensor, grad_n: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the loss of the class centers was differentiated with create_graph=True: it has "
                "no second derivative; leave create_graph out"
            )
        every, cosine, log_p, log_n = ctx.saved_tensors
        batch: ClassBatch = ctx.batch
        with torch.autocast(every.device.type, enabled=False):
            weights = _positive_weights(batch, cosine, log_p, grad_p)
            grad = weighted_sums(batch.centers.rows, batch.positives, batch.row_starts, weights)
            of_centers = _pull_centers(batch, every, cosine, weights)
            _pull_negatives(batch, every, _finite(log_n), grad_n, grad, of_centers)
            batch.centers.add_gradient(batch.touched_here, of_centers)
            # Engines average over the ranks what is a sum here.
            own = collectives.sum_to_owner(grad) * collectives.world_size()
        return own, None


def _finite(log_sum: Tensor) -> Tensor:
    """An empty sum has no terms: their share of it becomes 0, not inf."""
    return log_sum.masked_fill(log_sum == float("-inf"), float("inf"))


def _positive_weights(batch: ClassBatch, cosine: Tensor, log_p: Tensor, grad_p: Tensor) -> Tensor:
    """[n]: the gradient, through P, of the products (feature . class center) of the pairs."""
    shares = torch.exp(-batch.scale * batch.margin(cosine) - log_p[batch.row])
    slope = batch.margin.derivative(cosine) * batch.inverse[batch.of_positives]
    return -batch.scale * grad_p[batch.row] * shares * slope


def _pull_centers(batch: ClassBatch, features: Tensor, cosine: Tensor, weights: Tensor) -> Tensor:
    """[t, D]: the gradient of the touched class centers through P, out of the loss scale."""
    pairs, starts = batch.by_class, starts_of(batch.uses)
    weights = weights[pairs] / batch.centers.loss_scale
    grad = weighted_sums(features, batch.row[pairs], starts, weights)
    # The normalisation lets through what is across a class center, and not what is along it.
    along = weighted_sums(cosine[:, None], pairs, starts, weights) * batch.inverse[:, None]
    for first in range(0, len(grad), batch.tile):
        part = slice(first, first + batch.tile)
        rows = batch.centers.rows.index_select(0, batch.touched[part])
        grad[part].addcmul_(rows, along[part], value=-1.0)
    return grad


def _pull_negatives(
    batch: ClassBatch, features: Tensor, log_n: Tensor, grad_n: Tensor, grad: Tensor, out: Tensor
) -> None:
    """Adds the gradients through N: of the features to ``grad``, of the touched class centers to
    ``out``."""
    weights, scaled = batch.scale * grad_n, features * batch.scale
    memory = batch.memory(features)
    for centers, places, tiles in batch.negative_blocks():
        of_centers = torch.zeros_like(centers)
        for rows, number in tiles:
            scores = batch.scores(scaled[rows], centers, number, memory)
            shares = scores.sub_(log_n[rows, None]).exp_().mul_(weights[rows, None])
            grad[rows].addmm_(shares, centers)
            of_centers.addmm_(shares.T, features[rows])
        along = (of_centers * centers).sum(dim=1, keepdim=True)
        of_centers.addcmul_(centers, along, value=-1.0)
        of_centers.mul_(batch.inverse[places, None] / batch.centers.loss_scale)
        out.index_add_(0, places, of_centers)  # no place twice: in any order


def _figures(batch: ClassBatch, cosine: Tensor, largest: Tensor) -> dict[str, Tensor]:
    """This rank's share of what tells how the classes are doing; without any collective."""
    ranks = collectives.world_size()
    return {
        "positive_cosine": cosine.sum() * ranks / batch.num_positives,
        "max_negative_cosine": largest,
        "positives_per_row": batch.num_positives / batch.counted.sum().clamp_min(1),
        "distinct_positives": (batch.uses > 0).sum() * ranks,
        "conflicts": (batch.uses[batch.of_negatives] > 0).sum() * ranks,
    }
