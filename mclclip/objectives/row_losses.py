"""Contrastive losses of rows of a similarity matrix that is computed in tiles and never held whole.

The log-sum-exp of a row is streamed over its tiles as a running maximum and a sum (Milakov and
Gimelshein, 2018), and the backward computes every tile again from the saved log-sum-exp, as
FlashAttention does (Dao et al., 2022). Memory is linear in rows and columns; the price is one more
matrix product.

The own pair is in every row's denominator, so it begins the stream, outside the tiles; in a tile
it is one of equal ids and masked like every repeated sample. A row without negatives therefore has
loss 0 and gradient 0 exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Rows among the columns: row i's own pair is column ``first`` + i; a column is a negative of
    a row where its group is the row's and its sample is not.

    ``groups`` and ``sample_id`` are [b] int64 of the rows, ``all_groups`` and ``all_sample_ids``
    [B] int64 of the columns.
    """

    groups: Tensor
    sample_id: Tensor
    all_groups: Tensor
    all_sample_ids: Tensor
    first: int


# A compiler would unroll the loop over tiles.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def row_losses(queries: Tensor, keys: Tensor, pairs: Pairs, tile: int) -> tuple[Tensor, Tensor]:
    """Each row's -L_pp + log of the sum of exp L_pq over its own pair p and its negatives q.

    Args:
        queries: [b, D], already multiplied by the logit scale: L = queries @ keys.T.
        keys: [B, D], of the queries' dtype, float32 or float64.
        pairs: which columns count.
        tile: rows and columns of L that are computed at a time.

    Returns:
        losses [b], differentiable once in queries and keys, and bool [b]: the row has no negative.
        The arithmetic is in the dtype given, under autocast too. Raises RuntimeError where a second
        derivative is prepared (create_graph=True).
    """
    losses, alone = _RowLosses.apply(queries, keys, pairs, tile)  # type: ignore[no-untyped-call]
    return losses, alone


class _Tiles:
    """The tiles of one matrix, written into the same memory one after the other."""

    def __init__(self, queries: Tensor, keys: Tensor, pairs: Pairs, tile: int) -> None:
        self.queries, self.keys, self.pairs = queries, keys, pairs
        self.row_blocks = _blocks(len(queries), tile)
        self.column_blocks = _blocks(len(keys), tile)
        self._memory = queries.new_empty(min(tile, len(queries)) * min(tile, len(keys)))

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """[r, c], -inf where the pair is no negative; valid until the next call."""
        queries, keys, pairs = self.queries[rows], self.keys[columns], self.pairs
        shape = (len(queries), len(keys))
        out = torch.mm(queries, keys.T, out=self._memory[: shape[0] * shape[1]].view(shape))
        masked = pairs.groups[rows, None] != pairs.all_groups[columns]
        masked |= pairs.sample_id[rows, None] == pairs.all_sample_ids[columns]
        return out.masked_fill_(masked, float("-inf"))

    def own_keys(self) -> Tensor:
        """[b, D]: the keys of the rows' own pairs."""
        return self.keys[self.pairs.first : self.pairs.first + len(self.queries)]


def _blocks(length: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, length, size)]


def _stream(tiles: _Tiles, rows: slice, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns losses, log-sum-exps and rows without a negative, each [r], of one row block with
    the logits ``positive`` [r] of its own pairs."""
    hardest = torch.full_like(positive, float("-inf"))  # highest logit of a negative so far
    maximum, total = positive, torch.ones_like(positive)
    for columns in tiles.column_blocks:
        logits = tiles.logits(rows, columns)
        hardest = torch.maximum(hardest, logits.amax(dim=1))
        previous, maximum = maximum, torch.maximum(positive, hardest)
        total.mul_((previous - maximum).exp_())
        total.add_(logits.sub_(maximum[:, None]).exp_().sum(dim=1))
    log_total = total.log()
    return maximum - positive + log_total, maximum + log_total, hardest == float("-inf")


class _RowLosses(torch.autograd.Function):
    """See ``row_losses``."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, pairs: Pairs, tile: int
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(queries.device.type, enabled=False):
            tiles = _Tiles(queries, keys, pairs, tile)
            positive = torch.linalg.vecdot(queries, tiles.own_keys())
            found = [_stream(tiles, rows, positive[rows]) for rows in tiles.row_blocks]
        losses, normalizers, alone = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(queries, keys, losses, normalizers)
        ctx.pairs, ctx.tile = pairs, tile
        ctx.mark_non_differentiable(alone)
        return losses, alone

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            # torch's once_differentiable is silent where the incoming gradient is a constant.
            raise RuntimeError(
                "the contrastive loss was differentiated with create_graph=True: it has no second "
                "derivative; leave create_graph out"
            )
        queries, keys, losses, normalizers = ctx.saved_tensors
        grad_queries = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
        grad_keys = torch.zeros_like(keys) if ctx.needs_input_grad[1] else None
        with torch.autocast(queries.device.type, enabled=False):
            tiles = _Tiles(queries, keys, ctx.pairs, ctx.tile)
            weighted = grad[:, None] * queries
            own = torch.expm1(-losses)[:, None]  # the own pair's share of the row's sum, minus 1
            for rows in tiles.row_blocks:
                for columns in tiles.column_blocks:
                    shares = tiles.logits(rows, columns).sub_(normalizers[rows, None]).exp_()
                    if grad_queries is not None:
                        grad_queries[rows].addmm_(shares, keys[columns])
                    if grad_keys is not None:
                        grad_keys[columns].addmm_(shares.T, weighted[rows])
            if grad_queries is not None:
                grad_queries.addcmul_(own, tiles.own_keys()).mul_(grad[:, None])
            if grad_keys is not None:
                first = ctx.pairs.first
                grad_keys[first : first + len(queries)].addcmul_(own, weighted)
        return grad_queries, grad_keys, None, None
