"""Contrastive losses of rows of a similarity matrix that is computed in tiles and never held whole.

The log-sum-exp of a row is streamed over its tiles as a running maximum and a sum (Milakov and
Gimelshein, 2018), and the backward computes every tile again from the saved log-sum-exp, as
FlashAttention does (Dao et al., 2022). Memory is linear in rows and columns; the price is one more
matrix product.

The own pair is in every row's denominator, so it begins the stream, outside the tiles; in a tile
it is one of equal ids and masked like every repeated sample. A row without negatives therefore has
loss 0 and gradient 0 exactly.

Losses that weigh their negatives otherwise are made of the negatives' log-sum-exp alone
(``log_sums``), of their number (``count_columns``) and of sums of keys (``sum_columns``). The same
three are over other columns than negatives where ``Pairs.columns`` says so. ``divergences``
compares the rows' softmaxes with those of another matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mclclip.ranks import collectives
from mclclip.ranks.process_group import not_compiled


def choose_no_autocast(device: torch.device) -> torch.autocast:
    """Arithmetic in the dtype of the tensors, whatever surrounds it."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


TILE = 2048
Columns = Literal["negatives", "equal", "others"]


@dataclass(frozen=True)
class Pairs:
    """Rows among the columns: row i's own pair is column ``first`` + i; a column is a negative of
    a row where its group is the row's and its sample is not, nor any of its digests.

    ``groups`` and ``sample_id`` are [b] int64 of the rows, ``all_groups`` and ``all_sample_ids``
    [B] int64 of the columns; so are ``classes`` and ``all_classes``, where a loss reads them, and
    each of ``digests`` and ``all_digests``. ``tile`` is how many rows and columns are computed at a
    time.

    ``columns`` says which columns of its group a row counts: its ``negatives``, or without its own
    pair those that are ``equal`` to it, by their sample or by a digest, or all ``others``.
    """

    groups: Tensor
    sample_id: Tensor
    all_groups: Tensor
    all_sample_ids: Tensor
    first: int
    tile: int = TILE
    classes: Tensor | None = None
    all_classes: Tensor | None = None
    digests: tuple[Tensor, ...] = ()
    all_digests: tuple[Tensor, ...] = ()
    columns: Columns = "negatives"

    @classmethod
    def over_ranks(
        cls, groups: Tensor, sample_id: Tensor, tile: int, digests: Sequence[Tensor] = ()
    ) -> Pairs:
        """This rank's rows among the columns of all ranks; a collective."""
        marks = groups, sample_id, *digests
        all_groups, all_sample_ids, *all_digests = map(collectives.gather, marks)
        return cls(
            groups,
            sample_id,
            all_groups,
            all_sample_ids,
            collectives.rank() * len(groups),
            tile,
            digests=tuple(digests),
            all_digests=tuple(all_digests),
        )

    def positive_keys(self, keys: Tensor) -> Tensor:
        """[b, D]: of the columns' keys [B, D], those of the rows' own pairs."""
        return keys[self.first : self.first + len(self.groups)]

    def positive_logits(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[b]: the products of the rows' queries and their own keys."""
        return (queries * self.positive_keys(keys)).sum(dim=1)

    def positives_of_class(self) -> Pairs:
        """Returns pairs whose "negatives" are the columns of a row's class but its own sample."""
        assert self.classes is not None and self.all_classes is not None
        num = self.all_classes.max() + 1
        groups, all_groups = (
            self.groups * num + self.classes,
            self.all_groups * num + self.all_classes,
        )
        return replace(self, groups=groups, all_groups=all_groups)

    def masked(self, rows: slice, columns: slice) -> Tensor:
        """Bool [r, c]: True where the column must be left out of the row's sum."""
        excluded = self.groups[rows, None] != self.all_groups[columns]
        if self.columns != "others":
            equal = self.sample_id[rows, None] == self.all_sample_ids[columns]
            for of_rows, of_columns in zip(self.digests, self.all_digests, strict=True):
                equal |= of_rows[rows, None] == of_columns[columns]
            excluded |= equal if self.columns == "negatives" else equal.logical_not_()
        if self.columns != "negatives":  # there the own pair is one of equal samples
            excluded.diagonal(rows.start + self.first - columns.start).fill_(True)
        return excluded

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of each tile, row by row."""
        every = blocks(len(self.all_groups), self.tile)
        return itertools.product(blocks(len(self.groups), self.tile), every)


# A compiler would unroll the loop over tiles.
@not_compiled
def row_losses(queries: Tensor, keys: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Each row's -L_pp + log of the sum of exp L_pq over its own pair p and its negatives q.

    Args:
        queries: [b, D], already multiplied by the logit scale: L = queries @ keys.T.
        keys: [B, D], of the queries' dtype, float32 or float64.
        pairs: which columns count.

    Returns:
        losses [b], differentiable once in queries and keys, and bool [b]: the row has no negative.
        The arithmetic is in the dtype given, under autocast too. Raises RuntimeError where a second
        derivative is prepared (create_graph=True).
    """
    losses, alone = _RowLosses.apply(queries, keys, pairs)  # type: ignore[no-untyped-call]
    return losses, alone


@not_compiled
def log_sums(
    queries: Tensor, keys: Tensor, pairs: Pairs, factors: tuple[float, ...] = (1.0,)
) -> Tensor:
    """Each row's log of the sum of exp(f * L_pq) over its negatives q, for every factor f > 0.

    [len(factors), b], -inf where a row has no negatives, with gradient 0. Other arguments,
    arithmetic and errors are those of ``row_losses``. All factors share the products.
    """
    sums: Tensor = _LogSums.apply(queries, keys, pairs, factors)  # type: ignore[no-untyped-call]
    return sums


@not_compiled
def sum_columns(keys: Tensor, pairs: Pairs) -> Tensor:
    """Returns the sum of the keys that each row counts, [b, D], differentiable once in ``keys``."""
    sums: Tensor = _SumColumns.apply(keys, pairs)  # type: ignore[no-untyped-call]
    return sums


@not_compiled
def count_columns(pairs: Pairs) -> Tensor:
    """Returns how many columns each row counts, as ``pairs.columns`` says; int64 [b]."""
    counts = torch.zeros_like(pairs.sample_id)
    for rows, columns in pairs.tiles():
        counts[rows] += (~pairs.masked(rows, columns)).sum(dim=1)
    return counts


@not_compiled
def divergences(
    queries: Tensor,
    keys: Tensor,
    base_queries: Tensor,
    base_keys: Tensor,
    pairs: Pairs,
    *,
    with_own: bool,
) -> Tensor:
    """Each row's KL divergence of softmax(L) from softmax(base L), [b], over its negatives and,
    ``with_own``, its own pair.

    L = queries @ keys.T and base L = base_queries @ base_keys.T, each of its own width; arithmetic
    and errors are those of ``row_losses``. Differentiable once in ``queries`` and ``keys``. A row
    with nothing to compare has 0 and gradient 0, and so have, exactly, equal matrices.
    """
    rows: Tensor = _Divergences.apply(  # type: ignore[no-untyped-call]
        queries, keys, base_queries, base_keys, pairs, with_own
    )
    return rows


class Tiles:
    """The tiles of one matrix, written into the same memory one after the other."""

    def __init__(self, queries: Tensor, keys: Tensor, pairs: Pairs) -> None:
        self.queries, self.keys, self.pairs, tile = queries, keys, pairs, pairs.tile
        self._memory = queries.new_empty(min(tile, len(queries)) * min(tile, len(keys)))

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """[r, c] scores of one tile, -inf where left out; the next call overwrites them."""
        queries, keys = self.queries[rows], self.keys[columns]
        shape = (len(queries), len(keys))
        out = torch.mm(queries, keys.T, out=self._memory[: shape[0] * shape[1]].view(shape))
        return out.masked_fill_(self.pairs.masked(rows, columns), float("-inf"))


def blocks(length: int, size: int) -> list[slice]:
    """Slices of at most ``size`` that cover ``length``."""
    return [slice(first, first + size) for first in range(0, length, size)]


def _stream(
    tiles: Tiles, start: Tensor, weight: float, factors: Sequence[float] = (1.0,)
) -> tuple[Tensor, Tensor, Tensor]:
    """Streams all rows over their negatives, from ``weight`` times the exp of ``start`` [b].

    Returns m [b] and l [b, f], with factor * m + l the log of the sum of exp(factor * logit), and
    the rows without a negative.
    """
    streamed = []
    for rows in blocks(len(tiles.queries), tiles.pairs.tile):
        first = start[rows]
        hardest = torch.full_like(first, float("-inf"))  # highest logit of a negative so far
        maximum = first
        totals = [torch.full_like(first, weight) for _ in factors]
        for columns in blocks(len(tiles.keys), tiles.pairs.tile):
            logits = tiles.logits(rows, columns)
            hardest = torch.maximum(hardest, logits.amax(dim=1))
            previous, maximum = maximum, torch.maximum(first, hardest)
            logits.sub_(maximum[:, None])
            for total, factor in zip(totals, factors, strict=True):
                total.mul_(((previous - maximum) * factor).exp_())
                scaled = logits if len(factors) == 1 and factor == 1.0 else logits * factor
                total.add_(scaled.exp_().sum(dim=1))
        streamed.append((maximum, torch.stack(totals, dim=1).log(), hardest == float("-inf")))
    maximum, log_totals, alone = (torch.cat(parts) for parts in zip(*streamed, strict=True))
    return maximum, log_totals, alone


def _pulled(
    ctx: Any, tiles: Tiles, shares: Callable[[slice, slice], Tensor], queries: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The products of ``shares`` [r, c] with keys and with ``queries``: the gradients of queries
    and of keys, which are a function's first two arguments, as far as they are wanted."""
    grad_queries = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
    grad_keys = torch.zeros_like(tiles.keys) if ctx.needs_input_grad[1] else None
    for rows, columns in tiles.pairs.tiles():
        share = shares(rows, columns)
        if grad_queries is not None:
            grad_queries[rows].addmm_(share, tiles.keys[columns])
        if grad_keys is not None:
            grad_keys[columns].addmm_(share.T, queries[rows])
        del share  # before the next one is made
    return grad_queries, grad_keys


def to_fp32(features: Tensor) -> Tensor:
    """Returns the features in fp32, or in float64 where they are."""
    return features if features.dtype == torch.float64 else features.float()


def softplus_of_difference(log_sums: Tensor, positives: Tensor | float = 0.0) -> Tensor:
    """log(1 + exp(log_sums - positives)), exact for large differences too, where torch's softplus
    is not.

    It is the loss of rows with these log-sum-exps of negatives and logits of own pairs, [b]; 0,
    with gradient 0, for rows without negatives.
    """
    difference = log_sums - positives
    return torch.logaddexp(difference, torch.zeros_like(difference))


def refuse_second_derivative(loss: str = "the contrastive loss") -> None:
    """Raises RuntimeError in a backward that prepares another.

    torch's once_differentiable is silent where the incoming gradient is a constant.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{loss} was differentiated with create_graph=True: it has no second derivative; leave "
            "create_graph out"
        )


class _RowLosses(torch.autograd.Function):
    """See ``row_losses``."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        with choose_no_autocast(queries.device):
            tiles = Tiles(queries, keys, pairs)
            positive = torch.linalg.vecdot(queries, pairs.positive_keys(keys))
            maximum, log_totals, alone = _stream(tiles, positive, 1.0)
            log_total = log_totals[:, 0]
        losses = maximum - positive + log_total
        ctx.save_for_backward(queries, keys, losses, maximum + log_total)
        ctx.pairs = pairs
        ctx.mark_non_differentiable(alone)
        return losses, alone

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_derivative()
        queries, keys, losses, normalizers = ctx.saved_tensors
        with choose_no_autocast(queries.device):
            tiles = Tiles(queries, keys, ctx.pairs)

            def shares(rows: slice, columns: slice) -> Tensor:
                return tiles.logits(rows, columns).sub_(normalizers[rows, None]).exp_()

            weighted = grad[:, None] * queries
            grad_queries, grad_keys = _pulled(ctx, tiles, shares, weighted)
            own = torch.expm1(-losses)[:, None]  # the own pair's share of the row's sum, minus 1
            if grad_queries is not None:
                grad_queries.addcmul_(own, ctx.pairs.positive_keys(keys)).mul_(grad[:, None])
            if grad_keys is not None:
                ctx.pairs.positive_keys(grad_keys).addcmul_(own, weighted)
        return grad_queries, grad_keys, None


class _LogSums(torch.autograd.Function):
    """See ``log_sums``."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, pairs: Pairs, factors: tuple[float, ...]
    ) -> Tensor:
        with choose_no_autocast(queries.device):
            tiles = Tiles(queries, keys, pairs)
            lowest = queries.new_full((len(queries),), torch.finfo(queries.dtype).min)
            maximum, log_totals, _ = _stream(tiles, lowest, 0.0, factors)
        sums = torch.stack([f * maximum + log_totals[:, i] for i, f in enumerate(factors)])
        ctx.save_for_backward(queries, keys, sums)
        ctx.pairs, ctx.factors = pairs, factors
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        refuse_second_derivative()
        queries, keys, sums = ctx.saved_tensors
        with choose_no_autocast(queries.device):
            tiles = Tiles(queries, keys, ctx.pairs)
            normalizers = sums.masked_fill(sums == float("-inf"), 0.0)  # of no negative: shares 0

            def shares(rows: slice, columns: slice) -> Tensor:
                logits = tiles.logits(rows, columns)
                total = torch.zeros_like(logits)
                for factor, normalizer, g in zip(ctx.factors, normalizers, grad, strict=True):
                    share = (logits * factor).sub_(normalizer[rows, None]).exp_()
                    total.addcmul_(share, factor * g[rows, None])
                return total

            grad_queries, grad_keys = _pulled(ctx, tiles, shares, queries)
        return grad_queries, grad_keys, None, None


class _SumColumns(torch.autograd.Function):
    """See ``sum_columns``."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        sums = keys.new_zeros(len(pairs.groups), keys.shape[1])
        with choose_no_autocast(keys.device):
            for rows, columns in pairs.tiles():
                sums[rows].addmm_((~pairs.masked(rows, columns)).to(keys), keys[columns])
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        pairs = ctx.pairs
        grad_keys = grad.new_zeros(len(pairs.all_groups), grad.shape[1])
        with choose_no_autocast(grad.device):
            for rows, columns in pairs.tiles():
                counted = (~pairs.masked(rows, columns)).to(grad)
                grad_keys[columns].addmm_(counted.T, grad[rows])
                del counted  # before the next one is made
        return grad_keys, None


class _Divergences(torch.autograd.Function):
    """See ``divergences``: two log-sum-exps and one weighted sum per row, in one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        base_queries: Tensor,
        base_keys: Tensor,
        pairs: Pairs,
        with_own: bool,
    ) -> Tensor:
        every = (queries, keys), (base_queries, base_keys)
        with choose_no_autocast(queries.device):
            tiles, base = (Tiles(*side, pairs) for side in every)
            lowest = queries.new_full((len(queries),), torch.finfo(queries.dtype).min)
            own = [pairs.positive_logits(*side) if with_own else lowest for side in every]
            streamed = [
                _stream_divergence(tiles, base, rows, own[0][rows], own[1][rows], float(with_own))
                for rows in blocks(len(queries), pairs.tile)
            ]
        by_row, sums, base_sums = (torch.cat(parts) for parts in zip(*streamed, strict=True))
        ctx.save_for_backward(queries, keys, base_queries, base_keys, *own, sums, base_sums)
        ctx.pairs, ctx.with_own = pairs, with_own
        return by_row

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the divergence")
        queries, keys, base_queries, base_keys, own, base_own, *sums = ctx.saved_tensors
        pairs = ctx.pairs
        with choose_no_autocast(queries.device):
            tiles, base = Tiles(queries, keys, pairs), Tiles(base_queries, base_keys, pairs)
            # Of rows with nothing to compare: shares 0.
            total, base_total = (each.masked_fill(each == float("-inf"), 0.0) for each in sums)

            def shares(rows: slice, columns: slice) -> Tensor:
                share = tiles.logits(rows, columns).sub_(total[rows, None]).exp_()
                share -= base.logits(rows, columns).sub_(base_total[rows, None]).exp_()
                return share.mul_(grad[rows, None])

            grad_queries, grad_keys = _pulled(ctx, tiles, shares, queries)
            if ctx.with_own:
                share = (((own - total).exp() - (base_own - base_total).exp()) * grad)[:, None]
                if grad_queries is not None:
                    grad_queries.addcmul_(share, pairs.positive_keys(keys))
                if grad_keys is not None:
                    pairs.positive_keys(grad_keys).addcmul_(share, queries)
        return grad_queries, grad_keys, None, None, None, None


def _stream_divergence(
    tiles: Tiles, base: Tiles, rows: slice, start: Tensor, base_start: Tensor, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergences of the rows [r], and the log-sum-exps of both matrices; each stream begins
    with ``weight`` times the exp of its start."""
    maximum, base_maximum = start, base_start
    total, base_total = (torch.full_like(start, weight) for _ in range(2))
    gaps = weight * (base_start - start)  # the sum of exp(base L) (base L - L), by the maximum
    for columns in blocks(len(tiles.keys), tiles.pairs.tile):
        logits, wanted = tiles.logits(rows, columns), base.logits(rows, columns)
        gap = (wanted - logits).masked_fill_(wanted == float("-inf"), 0.0)
        previous, maximum = maximum, torch.maximum(maximum, logits.amax(dim=1))
        total = total * (previous - maximum).exp() + logits.sub_(maximum[:, None]).exp_().sum(dim=1)
        previous, base_maximum = base_maximum, torch.maximum(base_maximum, wanted.amax(dim=1))
        share, shrink = wanted.sub_(base_maximum[:, None]).exp_(), (previous - base_maximum).exp()
        base_total = base_total * shrink + share.sum(dim=1)
        gaps = gaps * shrink + gap.mul_(share).sum(dim=1)
    sums, base_sums = maximum + total.log(), base_maximum + base_total.log()
    by_row = gaps / base_total + (maximum - base_maximum) + (total.log() - base_total.log())
    return torch.where(base_total == 0.0, 0.0, by_row), sums, base_sums
