"""Losses of rows against candidates of another class, by the cosine of gated features, in tiles.

Source: SimLAP (Wu et al., "Rethinking Positive Pairs in Contrastive Learning", 2024), Eq. 2 with
the logarithm that Eq. 1 and 2 intend. The cosine of z * g and k * g, with the gates g of the row,
is two matrix products:

    (z * g * g) K^T / (|z * g| sqrt((g * g) (K * K)^T))

so that no tensor [rows, candidates, D] is made. Scores are computed a tile at a time, twice in the
forward and once more in the backward; memory is linear in rows and candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TINY = 1e-24  # of a squared length
_Tile = tuple[slice, slice]


@dataclass(frozen=True)
class ClassPairs:
    """Which candidates are positives and negatives of a row of class ``labels``.

    A candidate counts where its group is the row's. It is a positive where its class is the row's
    ``partners`` and its sample another one, a negative where its class is neither the row's nor the
    partner; the rest of the row's own class is ignored. A partner of -1 is nobody's class.

    ``labels``, ``partners``, ``sample_id`` and ``groups`` are [b] int64 of the rows;
    ``all_labels``, ``all_sample_ids`` and ``all_groups`` [N] int64 of the candidates.
    """

    labels: Tensor
    partners: Tensor
    sample_id: Tensor
    groups: Tensor
    all_labels: Tensor
    all_sample_ids: Tensor
    all_groups: Tensor

    def masks(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Positives and negatives of a tile, each bool [r, c]."""
        rows, columns = tile
        theirs, partners = self.all_labels[columns], self.partners[rows, None]
        same_group = self.groups[rows, None] == self.all_groups[columns]
        positive = (partners == theirs) & same_group
        negative = same_group & ~positive & (self.labels[rows, None] != theirs)
        positive &= self.sample_id[rows, None] != self.all_sample_ids[columns]
        return positive, negative


def gated_queries(rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Features and gates [b, D] -> the arguments ``queries`` and ``weights`` of ``pair_losses``.

    With them a score is the cosine of the gated row and the gated candidate. It does not depend on
    the lengths of rows, gates (which are brought to a largest value of 1) and candidates.
    """
    gates = gates / gates.detach().amax(dim=1, keepdim=True).clamp_min(_TINY)
    weights = gates.square()
    length = torch.linalg.vector_norm(rows * gates, dim=1, keepdim=True)
    return rows * weights / length.clamp_min(_TINY**0.5), weights


# A compiler would unroll the loop over tiles.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def pair_losses(
    queries: Tensor, weights: Tensor | None, keys: Tensor, pairs: ClassPairs, tile: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's loss: the mean, over its positives, of the cross-entropy of one positive among
    itself and the row's negatives.

    Args:
        queries: [b, D], already multiplied by the logit scale.
        weights: [b, D], at least 0; scores are queries @ keys.T / sqrt(weights @ (keys^2).T). None:
            they are queries @ keys.T.
        keys: [N, D], of the queries' dtype.
        pairs: which candidates are positives and negatives.
        tile: rows and candidates whose scores are computed at a time.

    Returns:
        losses [b], differentiable once in queries, weights and keys, 0 for rows without a positive
        or without a negative; numbers of positives and of negatives, int64 [b] each.
        Raises RuntimeError where a second derivative is prepared (create_graph=True).
    """
    losses, positives, negatives = _PairLosses.apply(  # type: ignore[no-untyped-call]
        queries, weights, keys, pairs, tile
    )
    return losses, positives, negatives


class _Tiles:
    """Scores of one matrix, a tile at a time."""

    def __init__(
        self, queries: Tensor, weights: Tensor | None, keys: Tensor, pairs: ClassPairs, tile: int
    ) -> None:
        self.queries, self.weights, self.keys, self.pairs = queries, weights, keys, pairs
        self.tile = tile

    def row_blocks(self) -> list[slice]:
        return _blocks(len(self.queries), self.tile)

    def of(self, rows: slice) -> Iterator[_Tile]:
        yield from ((rows, columns) for columns in _blocks(len(self.keys), self.tile))

    def scores(self, tile: _Tile) -> tuple[Tensor, Tensor | None]:
        """Scores [r, c], and what the products were multiplied by (None: nothing)."""
        rows, columns = tile
        keys = self.keys[columns]
        products = self.queries[rows] @ keys.T
        if self.weights is None:
            return products, None
        scale = (self.weights[rows] @ keys.square().T).clamp_min_(_TINY).rsqrt_()
        return products.mul_(scale), scale


def _blocks(length: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, length, size)]


def _stream(tiles: _Tiles, rows: slice) -> tuple[Tensor, ...]:
    """Of one row block, [r] each: sums over positives of their losses and of their pulls, the
    log-sum-exp of negatives, and the numbers of positives and negatives."""
    maximum = tiles.queries.new_full((len(tiles.queries[rows]),), float("-inf"))
    total, loss, pull = (torch.zeros_like(maximum) for _ in range(3))
    positives, negatives = (torch.zeros_like(maximum, dtype=torch.int64) for _ in range(2))
    for tile in tiles.of(rows):
        positive, negative = tiles.pairs.masks(tile)
        positives += positive.sum(dim=1)
        negatives += negative.sum(dim=1)
        scores = tiles.scores(tile)[0].masked_fill_(~negative, float("-inf"))
        previous, maximum = maximum, torch.maximum(maximum, scores.amax(dim=1))
        finite = maximum.clamp_min(torch.finfo(maximum.dtype).min)  # -inf minus itself is nan
        total.mul_((previous - finite).exp_())
        total.add_(scores.sub_(finite[:, None]).exp_().sum(dim=1))
    normalizer = maximum + total.log()
    for tile in tiles.of(rows):
        ahead = normalizer[:, None] - tiles.scores(tile)[0]
        ahead.masked_fill_(~tiles.pairs.masks(tile)[0], float("-inf"))
        loss += torch.logaddexp(ahead, torch.zeros_like(ahead)).sum(dim=1)
        pull += ahead.sigmoid_().sum(dim=1)
    return loss, pull, normalizer, positives, negatives


class _PairLosses(torch.autograd.Function):
    """See ``pair_losses``."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        weights: Tensor | None,
        keys: Tensor,
        pairs: ClassPairs,
        tile: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tiles = _Tiles(queries, weights, keys, pairs, tile)
        found = [_stream(tiles, rows) for rows in tiles.row_blocks()]
        loss, pull, normalizer, positives, negatives = map(torch.cat, zip(*found, strict=True))
        share = positives.clamp_min(1).to(loss.dtype).reciprocal()
        ctx.save_for_backward(queries, weights, keys, pull * share, normalizer, share)
        ctx.pairs, ctx.tile = pairs, tile
        ctx.mark_non_differentiable(positives, negatives)
        return loss * share, positives, negatives

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, *_: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the loss of gated pairs was differentiated with create_graph=True: it has no "
                "second derivative; leave create_graph out"
            )
        queries, weights, keys, pull, normalizer, share = ctx.saved_tensors
        tiles = _Tiles(queries, weights, keys, ctx.pairs, ctx.tile)
        of_queries = torch.zeros_like(queries)
        of_weights = None if weights is None else torch.zeros_like(weights)
        of_keys = torch.zeros_like(keys) if ctx.needs_input_grad[2] else None
        for rows in tiles.row_blocks():
            for tile in tiles.of(rows):
                columns, own = tile[1], keys[tile[1]]
                scores, scale = tiles.scores(tile)
                masks = tiles.pairs.masks(tile)
                slope = _slope(scores, masks, normalizer[rows], pull[rows], share[rows])
                slope.mul_(grad[rows, None])
                if scale is not None and of_weights is not None:
                    slope.mul_(scale)
                    of_squares = scores.mul_(slope).mul_(scale).mul_(-0.5)
                    of_weights[rows].addmm_(of_squares, own.square())
                    if of_keys is not None:
                        of_keys[columns].addcmul_(own, of_squares.T @ weights[rows], value=2.0)
                of_queries[rows].addmm_(slope, own)
                if of_keys is not None:
                    of_keys[columns].addmm_(slope.T, queries[rows])
        return of_queries, of_weights, of_keys, None, None


def _slope(
    scores: Tensor,
    masks: tuple[Tensor, Tensor],
    normalizer: Tensor,
    pull: Tensor,
    share: Tensor,
) -> Tensor:
    """[r, c]: derivatives of the rows' losses by their scores."""
    positive, negative = masks
    ahead = normalizer[:, None] - scores
    slope = (-ahead).exp_().mul_(pull[:, None]).masked_fill_(~negative, 0.0)
    return slope.sub_(ahead.sigmoid_().mul_(share[:, None]).masked_fill_(~positive, 0.0))
