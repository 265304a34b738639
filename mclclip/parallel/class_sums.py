"""Sums over positive and negative classes of a batch, with class centers shared out over the ranks.

Of row i with the unit feature e and unit class centers w, and scores s = scale * (e . w):

    P_i = sum of exp(-scale * phi(e . w_j)) over its positives j,
    N_i = sum of exp(s_ij) over the drawn negatives j that are not its positives.

MLCD, MLC and the softmax loss are functions of these two numbers (algorithms of PartialFC, An et
al., 2021, and MLCD, Eq. 4 to 6). Forward, beside the gathering of features and labels, one sum of
[B, 2] over the ranks; backward, one reduction of the features' gradient to its owners. Scores are
computed in tiles, twice, and never exist whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mclclip.parallel import collectives
from mclclip.parallel.class_centers import ShardedClassCenters
from mclclip.parallel.margins import Margin

_LARGEST_EXPONENT = 85.0  # exp overflows fp32 beyond 88

# What is used here, torch.sparse.sampled_addmm, is not where that beta is rough.
warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)


@dataclass(frozen=True)
class Sums:
    """Of the global batch, on every rank alike: log P and log N [B], and which rows count [B].

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
        labels: [b, l] int64, classes that are positive; -1: none.
        centers: after ``begin`` of this step. Their gradient is added to them in the backward.
        scale: multiplier of cosines.
        tile: rows and classes of the scores that are computed at a time.

    Returns:
        Sums, differentiable once. The gradient of ``features`` is world_size times that of a loss
        of the global batch which every rank computes alike, for engines that average over ranks.
    """
    with torch.autocast(features.device.type, enabled=False):
        every = collectives.gather(labels.int()).long()
        batch = _Batch(centers, every, scale, margin, tile or _tile(features.device))
        log_p, log_n = _ClassSums.apply(features, batch)  # type: ignore[no-untyped-call]
    return Sums(log_p, log_n, (every >= 0).any(dim=1), batch.figures)


def _tile(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 2048


class _Batch:
    """What a batch has to do with the classes of this rank."""

    def __init__(
        self, centers: ShardedClassCenters, labels: Tensor, scale: float, margin: Margin, tile: int
    ) -> None:
        self.centers, self.scale, self.margin, self.tile = centers, scale, margin, tile
        self.shape = labels.shape
        self.num_positives = (labels >= 0).sum().clamp_min(1)
        self.negatives = centers.negatives(labels)
        # exp(shift) is divided out of sums that could overflow.
        most = scale * margin.largest
        self.shift_p = max(0.0, most + _log(labels.shape[1]) - _LARGEST_EXPONENT)
        self.shift_n = max(0.0, scale + _log(centers.num_classes) - _LARGEST_EXPONENT)
        self._find_pairs(labels)
        self._find_touched()
        self._find_collisions()
        self.figures: dict[str, Tensor] = {}

    def _find_pairs(self, labels: Tensor) -> None:
        """The (row, positive) of this rank, by class, so that memory is read in its order."""
        self.own = (labels >= self.centers.start) & (labels < self.centers.stop)
        self.by_row = labels[self.own] - self.centers.start
        self.row_starts = _starts(self.own.sum(dim=1))
        order = self.by_row.argsort(stable=True)
        self.row, self.positives = self.own.nonzero()[:, 0][order], self.by_row[order]
        self.to_rows = _inverse(order, len(order))  # x[to_rows] is x by row, for x by class

    def _find_touched(self) -> None:
        """The classes that take part, and where negatives and positives are among them."""
        rows = self.centers.rows
        uses = torch.bincount(self.positives, minlength=len(rows))
        self.class_starts = _starts(uses)
        takes_part = uses > 0
        takes_part[self.negatives] = True
        self.touched = takes_part.nonzero()[:, 0]
        self.uses = uses[self.touched]
        place = takes_part.cumsum(0) - 1
        self.of_negatives, self.of_positives = place[self.negatives], place[self.positives]
        squares = _products(rows, rows, _starts(takes_part), self.touched)
        self.inverse = squares.sqrt_().clamp_min_(1e-12).reciprocal_()

    def _find_collisions(self) -> None:
        """Where a row's own positive was drawn, in the order of the tiles."""
        column = _inverse(self.of_negatives, len(self.touched))[self.of_positives]
        drawn = column >= 0
        row, column = self.row[drawn], column[drawn]
        per_column = -(-self.shape[0] // self.tile)
        number = column // self.tile * per_column + row // self.tile
        order = number.argsort(stable=True)
        self._collisions = row[order] % self.tile, column[order] % self.tile
        num_tiles = per_column * -(-len(self.negatives) // self.tile)
        counts = torch.bincount(number, minlength=num_tiles)
        self._ends = [0, *counts.cumsum(0).tolist()]

    def negative_blocks(self) -> Iterator[tuple[Tensor, Tensor, list[tuple[slice, int]]]]:
        """(unit class centers [m, D], their places [m], [(rows, tile number)])."""
        rows = [slice(first, first + self.tile) for first in range(0, self.shape[0], self.tile)]
        for block, first in enumerate(range(0, len(self.negatives), self.tile)):
            places = self.of_negatives[first : first + self.tile]
            centers = self.centers.rows.index_select(0, self.touched[places])
            centers.mul_(self.inverse[places, None])
            yield centers, places, [(r, block * len(rows) + i) for i, r in enumerate(rows)]

    def scores(self, scaled: Tensor, centers: Tensor, number: int, memory: Tensor) -> Tensor:
        """[r, m]: scores of a tile, -inf for a row's own positives; valid until the next call."""
        shape = (len(scaled), len(centers))
        out = torch.mm(scaled, centers.T, out=memory[: shape[0] * shape[1]].view(shape))
        first, stop = self._ends[number], self._ends[number + 1]
        if first < stop:
            row, column = (index[first:stop] for index in self._collisions)
            out[row, column] = float("-inf")
        return out

    def memory(self, like: Tensor) -> Tensor:
        """Room for a tile."""
        return like.new_empty(min(self.tile, self.shape[0]) * min(self.tile, len(self.negatives)))


def _starts(counts: Tensor) -> Tensor:
    """[n + 1]: where each of n runs of these lengths starts, and where the last one ends."""
    return functional.pad(counts.cumsum(0), (1, 0))


def _inverse(places: Tensor, size: int) -> Tensor:
    """[size]: i at ``places[i]``, -1 elsewhere."""
    found = places.new_full((size,), -1)
    found[places] = torch.arange(len(places), device=places.device)
    return found


def _products(left: Tensor, right: Tensor, starts: Tensor, ids: Tensor) -> Tensor:
    """[n]: at p from starts[i] to starts[i + 1], the product of left[i] and right[ids[p]].

    Rows are read where they are: no copy of them [n, D] exists.
    """
    values = left.new_zeros(len(ids))
    size = len(left), len(right)
    wanted = torch.sparse_csr_tensor(starts, ids, values, size, check_invariants=False)
    found: Tensor = torch.sparse.sampled_addmm(wanted, left, right.T).values()
    return found


def _weighted_sums(table: Tensor, ids: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Row i: the sum of ``weights[p] * table[ids[p]]`` over p from starts[i] to starts[i + 1].

    Rows are read where they are, too, and always added in the same order.
    """
    return functional.embedding_bag(
        ids, table, starts, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


def _log(count: int) -> float:
    return float(torch.tensor(float(count), dtype=torch.float64).log())


def _positive_sums(batch: _Batch, features: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of P / exp(shift) [B], and the cosines of its pairs [n]."""
    cosine = _products(batch.centers.rows, features, batch.class_starts, batch.row)
    cosine *= batch.inverse[batch.of_positives]
    exponents = -batch.scale * batch.margin(cosine) - batch.shift_p
    terms = features.new_zeros(batch.shape).masked_scatter_(
        batch.own, exponents.exp_()[batch.to_rows]
    )
    return terms.sum(dim=1), cosine


def _negative_sums(batch: _Batch, features: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of N / exp(shift) [B], and the largest cosine of a negative."""
    scaled, memory = features * batch.scale, batch.memory(features)
    sums = features.new_zeros(len(features))
    largest = features.new_tensor(-batch.scale)
    for centers, _, tiles in batch.negative_blocks():
        for rows, number in tiles:
            scores = batch.scores(scaled[rows], centers, number, memory)
            largest = torch.maximum(largest, scores.amax())
            if batch.shift_n:
                scores.sub_(batch.shift_n)
            sums[rows] += scores.exp_().sum(dim=1)
    return sums, largest / batch.scale


class _ClassSums(torch.autograd.Function):
    """See ``class_sums``."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, batch: _Batch) -> tuple[Tensor, Tensor]:
        every = collectives.gather(features)
        positive, cosine = _positive_sums(batch, every)
        negative, largest = _negative_sums(batch, every)
        sums = collectives.all_reduce_sum(torch.stack([positive, negative], dim=1))
        log_p = sums[:, 0].log() + batch.shift_p
        log_n = sums[:, 1].log() + batch.shift_n
        batch.figures = _figures(batch, cosine, largest)
        ctx.save_for_backward(every, cosine, log_p, log_n)
        ctx.batch, ctx.num_rows = batch, len(features)
        return log_p, log_n

    @staticmethod
    def backward(ctx: Any, grad_p: Tensor, grad_n: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the loss of the class centers was differentiated with create_graph=True: it has "
                "no second derivative; leave create_graph out"
            )
        every, cosine, log_p, log_n = ctx.saved_tensors
        batch: _Batch = ctx.batch
        with torch.autocast(every.device.type, enabled=False):
            weights = _positive_weights(batch, cosine, _finite(log_p), grad_p)
            grad = _weighted_sums(
                batch.centers.rows, batch.by_row, batch.row_starts, weights[batch.to_rows]
            )
            of_centers = _pull_centers(batch, every, cosine, weights)
            _pull_negatives(batch, every, _finite(log_n), grad_n, grad, of_centers)
            batch.centers.add_gradient(batch.touched, of_centers)
            # Engines average over the ranks what is a sum here.
            own = collectives.sum_to_owner(grad) * collectives.world_size()
        return own, None


def _finite(log_sum: Tensor) -> Tensor:
    """An empty sum has no terms: their share of it becomes 0, not inf."""
    return log_sum.masked_fill(log_sum == float("-inf"), float("inf"))


def _positive_weights(batch: _Batch, cosine: Tensor, log_p: Tensor, grad_p: Tensor) -> Tensor:
    """[n]: the gradient, through P, of the products (feature . class center) of the pairs."""
    shares = torch.exp(-batch.scale * batch.margin(cosine) - log_p[batch.row])
    slope = batch.margin.derivative(cosine) * batch.inverse[batch.of_positives]
    return -batch.scale * grad_p[batch.row] * shares * slope


def _pull_centers(batch: _Batch, features: Tensor, cosine: Tensor, weights: Tensor) -> Tensor:
    """[t, D]: the gradient of the touched class centers through P, out of the loss scale."""
    weights, starts = weights / batch.centers.loss_scale, _starts(batch.uses)
    grad = _weighted_sums(features, batch.row, starts, weights)
    # The normalisation lets through what is across a class center, and not what is along it.
    pairs = torch.arange(len(weights), device=weights.device)
    along = _weighted_sums(cosine[:, None], pairs, starts, weights) * batch.inverse[:, None]
    for first in range(0, len(grad), batch.tile):
        part = slice(first, first + batch.tile)
        rows = batch.centers.rows.index_select(0, batch.touched[part])
        grad[part].addcmul_(rows, along[part], value=-1.0)
    return grad


def _pull_negatives(
    batch: _Batch,
    features: Tensor,
    log_n: Tensor,
    grad_n: Tensor,
    grad: Tensor,
    grad_centers: Tensor,
) -> None:
    """Adds the gradients through N: of the features to ``grad``, of the touched class centers to
    ``grad_centers``."""
    scaled, memory = features * batch.scale, batch.memory(features)
    weights = (batch.scale * grad_n)[:, None]
    for centers, places, tiles in batch.negative_blocks():
        of_centers = torch.zeros_like(centers)
        for rows, number in tiles:
            scores = batch.scores(scaled[rows], centers, number, memory)
            shares = scores.sub_(log_n[rows, None]).exp_().mul_(weights[rows])
            grad[rows].addmm_(shares, centers)
            of_centers.addmm_(shares.T, features[rows])
        along = (of_centers * centers).sum(dim=1, keepdim=True)
        of_centers.addcmul_(centers, along, value=-1.0)
        of_centers.mul_(batch.inverse[places, None] / batch.centers.loss_scale)
        grad_centers.index_add_(0, places, of_centers)  # no place twice: in any order


def _figures(batch: _Batch, cosine: Tensor, largest: Tensor) -> dict[str, Tensor]:
    """This rank's share of what tells how the classes are doing; without any collective."""
    ranks = collectives.world_size()
    return {
        "positive_cosine": cosine.sum() * ranks / batch.num_positives,
        "max_negative_cosine": largest,
        "distinct_positives": (batch.uses > 0).sum() * ranks,
        "conflicts": (batch.uses[batch.of_negatives] > 0).sum() * ranks,
    }
