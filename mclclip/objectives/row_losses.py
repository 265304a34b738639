"""Contrastive losses of the rows of a similarity matrix, which is computed in tiles, never whole.

Row i has a query and an own pair, the column of its own key. Its loss needs the log-sum-exp of its
logits. That is streamed over the row's tiles as a running maximum and a sum (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867). The backward
computes every tile again from the saved log-sum-exp, as FlashAttention does (Dao et al., 2022,
arXiv:2205.14135). Memory is linear in rows and columns; the price is one more matrix product.

The own pair is in the denominator of every row, so the stream begins with it, outside of the tiles.
Inside of a tile it is masked like every pair of one sample. A row without negatives therefore has
loss 0 and gradient 0 exactly.

``row_losses`` is the plain loss. Losses that weigh their negatives otherwise are built of three
functions: the log-sum-exp of the negatives (``log_sums``), their number (``count_columns``) and
sums of keys (``sum_columns``). The three count other columns than negatives if ``Pairs.columns``
says so. ``divergences`` compares the rows' softmaxes with those of another matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mclclip.objectives.pairs import Pairs, blocks
from mclclip.ranks.process_group import choose_no_autocast, not_compiled


# Not compiled, because a compiler would unroll the loop over tiles.
@not_compiled
def row_losses(queries: Tensor, keys: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Returns each row's InfoNCE loss, and which rows have no negative.

    Row p loses -a_pp + log(exp(a_pp) + sum over its negatives q of exp(a_pq)); a are the logits.

    Args:
        queries: [b, D], already multiplied by the logit scale: a = queries @ keys.T.
        keys: [B, D], of the queries' dtype, float32 or float64.
        pairs: which columns count.

    Returns:
        The losses [b], differentiable once in queries and keys, and bool [b]. The arithmetic is in
        the tensors' dtype, under autocast too. The backward raises RuntimeError if it is asked for
        a second derivative (create_graph=True).
    """
    losses, alone = _RowLosses.apply(queries, keys, pairs)  # type: ignore[no-untyped-call]
    return losses, alone


@not_compiled
def log_sums(
    queries: Tensor, keys: Tensor, pairs: Pairs, factors: tuple[float, ...] = (1.0,)
) -> Tensor:
    """Returns log(sum over its negatives q of exp(f * L_pq)) of each row p and factor f > 0.

    The shape is [len(factors), b]. A row without negatives has -inf, with gradient 0. Matrix
    products are made once for all factors. Arguments, arithmetic and errors are those of
    ``row_losses``.
    """
    sums: Tensor = _LogSums.apply(queries, keys, pairs, factors)  # type: ignore[no-untyped-call]
    return sums


@not_compiled
def sum_columns(keys: Tensor, pairs: Pairs) -> Tensor:
    """Returns the sum of the keys that each row counts, each times its weight (``Pairs.weights``),
    [b, D]; differentiable once in ``keys``."""
    sums: Tensor = _SumColumns.apply(keys, pairs)  # type: ignore[no-untyped-call]
    return sums


@not_compiled
def count_columns(pairs: Pairs) -> Tensor:
    """Returns how many columns each row counts (``pairs.columns``), int64 [b]."""
    counts = torch.zeros_like(pairs.sample_id)
    for rows, columns in pairs.tiles():
        counts[rows] += (~pairs.masked(rows, columns)).sum(dim=1)
    return counts


@not_compiled
def sum_weights(pairs: Pairs, dtype: torch.dtype) -> Tensor:
    """Returns the sum of the weights of the columns that each row counts, [b]."""
    sums = torch.zeros(len(pairs.groups), dtype=dtype, device=pairs.groups.device)
    for rows, columns in pairs.tiles():
        sums[rows] += pairs.weights(rows, columns, dtype).sum(dim=1)
    return sums


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
    """Returns KL(softmax(base L) || softmax(L)) of each row, [b], over its negatives and, if
    ``with_own``, its own pair.

    L = queries @ keys.T and base L = base_queries @ base_keys.T; the two widths may differ. The
    result is differentiable once in ``queries`` and ``keys``. It is 0, with gradient 0, for a row
    that has nothing to compare, and exactly so if both matrices are equal. Arithmetic and errors
    are those of ``row_losses``.
    """
    rows: Tensor = _Divergences.apply(  # type: ignore[no-untyped-call]
        queries, keys, base_queries, base_keys, pairs, with_own
    )
    return rows


class Tiles:
    """Computes the tiles of a similarity matrix, each into the memory of the one before."""

    def __init__(self, queries: Tensor, keys: Tensor, pairs: Pairs) -> None:
        self.queries, self.keys, self.pairs, tile = queries, keys, pairs, pairs.tile
        self._memory = queries.new_empty(min(tile, len(queries)) * min(tile, len(keys)))

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """Returns the logits of one tile, [r, c], -inf if a row does not count a column; the next
        call overwrites them."""
        queries, keys = self.queries[rows], self.keys[columns]
        shape = (len(queries), len(keys))
        out = torch.mm(queries, keys.T, out=self._memory[: shape[0] * shape[1]].view(shape))
        return out.masked_fill_(self.pairs.masked(rows, columns), float("-inf"))


def _stream(
    tiles: Tiles, start: Tensor, weight: float, factors: Sequence[float] = (1.0,)
) -> tuple[Tensor, Tensor, Tensor]:
    """Streams the sums of exp(factor * logit) of all rows over their tiles.

    A row's sum begins with ``weight`` times exp(factor * ``start``). Returns its log as two parts,
    m [b] and l [b, number of factors], so that it is factor * m + l; and bool [b]: the row has no
    negative.
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


def _pull(
    ctx: Any, tiles: Tiles, shares: Callable[[slice, slice], Tensor], queries: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Pulls gradients back through the logits. Returns the sums over tiles of shares @ keys, for
    the queries, and of shares.T @ ``queries``, for the keys; None if autograd does not ask for it.

    ``shares(rows, columns)`` gives the gradient of a tile's logits, [r, c], up to a factor per row
    that ``queries``, or the caller, applies.
    """
    grad_queries = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
    grad_keys = torch.zeros_like(tiles.keys) if ctx.needs_input_grad[1] else None
    for rows, columns in tiles.pairs.tiles():
        share = shares(rows, columns)
        if grad_queries is not None:
            grad_queries[rows].addmm_(share, tiles.keys[columns])
        if grad_keys is not None:
            grad_keys[columns].addmm_(share.T, queries[rows])
        del share  # frees its memory before the next one is computed
    return grad_queries, grad_keys


def to_fp32(features: Tensor) -> Tensor:
    """Returns the features in fp32; float64 ones stay as they are."""
    return features if features.dtype == torch.float64 else features.float()


def softplus_of_difference(log_sums: Tensor, positives: Tensor | float = 0.0) -> Tensor:
    """Returns log(1 + exp(log_sums - positives)), the loss of rows of which the log-sum-exps of
    negatives and the logits of own pairs are known, [b].

    It is 0, with gradient 0, if a log-sum-exp is -inf, as without negatives. Unlike torch's
    softplus it is exact for large differences too.
    """
    difference = log_sums - positives
    return torch.logaddexp(difference, torch.zeros_like(difference))


def refuse_second_derivative(loss: str = "the contrastive loss") -> None:
    """Raises RuntimeError if the backward that calls this is asked for a second derivative.

    torch's ``once_differentiable`` says nothing if the incoming gradient is a constant.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{loss} was differentiated with create_graph=True: it has no second derivative; leave "
            "create_graph out"
        )


class _RowLosses(torch.autograd.Function):
    """Computes ``row_losses`` and its gradients."""

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
            grad_queries, grad_keys = _pull(ctx, tiles, shares, weighted)
            pull = torch.expm1(-losses)[:, None]  # the own pair's share of the row's sum, minus 1
            if grad_queries is not None:
                grad_queries.addcmul_(pull, ctx.pairs.positive_keys(keys)).mul_(grad[:, None])
            if grad_keys is not None:
                ctx.pairs.positive_keys(grad_keys).addcmul_(pull, weighted)
        return grad_queries, grad_keys, None


class _LogSums(torch.autograd.Function):
    """Computes ``log_sums`` and its gradients."""

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
            # Rows without negatives: any finite number makes their shares 0.
            normalizers = sums.masked_fill(sums == float("-inf"), 0.0)

            def shares(rows: slice, columns: slice) -> Tensor:
                logits = tiles.logits(rows, columns)
                total = torch.zeros_like(logits)
                for factor, normalizer, g in zip(ctx.factors, normalizers, grad, strict=True):
                    share = (logits * factor).sub_(normalizer[rows, None]).exp_()
                    total.addcmul_(share, factor * g[rows, None])
                return total

            grad_queries, grad_keys = _pull(ctx, tiles, shares, queries)
        return grad_queries, grad_keys, None, None


class _SumColumns(torch.autograd.Function):
    """Computes ``sum_columns`` and its gradient."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        sums = keys.new_zeros(len(pairs.groups), keys.shape[1])
        with choose_no_autocast(keys.device):
            for rows, columns in pairs.tiles():
                sums[rows].addmm_(pairs.weights(rows, columns, keys.dtype), keys[columns])
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative()
        pairs = ctx.pairs
        grad_keys = grad.new_zeros(len(pairs.all_groups), grad.shape[1])
        with choose_no_autocast(grad.device):
            for rows, columns in pairs.tiles():
                counted = pairs.weights(rows, columns, grad.dtype)
                grad_keys[columns].addmm_(counted.T, grad[rows])
                del counted  # frees its memory before the next one is computed
        return grad_keys, None


class _Divergences(torch.autograd.Function):
    """Computes ``divergences`` and its gradients: two log-sum-exps and one weighted sum per row, in
    one pass over the tiles."""

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
            starts = [pairs.positive_logits(*side) if with_own else lowest for side in every]
            streamed = [
                _stream_divergence(
                    tiles, base, rows, starts[0][rows], starts[1][rows], float(with_own)
                )
                for rows in blocks(len(queries), pairs.tile)
            ]
        by_row, sums, base_sums = (torch.cat(parts) for parts in zip(*streamed, strict=True))
        ctx.save_for_backward(queries, keys, base_queries, base_keys, *starts, sums, base_sums)
        ctx.pairs, ctx.with_own = pairs, with_own
        return by_row

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the divergence")
        queries, keys, base_queries, base_keys, start, base_start, *sums = ctx.saved_tensors
        pairs = ctx.pairs
        with choose_no_autocast(queries.device):
            tiles, base = Tiles(queries, keys, pairs), Tiles(base_queries, base_keys, pairs)
            # Rows with nothing to compare: any finite number makes their shares 0.
            total, base_total = (each.masked_fill(each == float("-inf"), 0.0) for each in sums)

            def shares(rows: slice, columns: slice) -> Tensor:
                share = tiles.logits(rows, columns).sub_(total[rows, None]).exp_()
                share -= base.logits(rows, columns).sub_(base_total[rows, None]).exp_()
                return share.mul_(grad[rows, None])

            grad_queries, grad_keys = _pull(ctx, tiles, shares, queries)
            if ctx.with_own:
                share = (start - total).exp() - (base_start - base_total).exp()
                share = (share * grad)[:, None]
                if grad_queries is not None:
                    grad_queries.addcmul_(share, pairs.positive_keys(keys))
                if grad_keys is not None:
                    pairs.positive_keys(grad_keys).addcmul_(share, queries)
        return grad_queries, grad_keys, None, None, None, None


def _stream_divergence(
    tiles: Tiles, base: Tiles, rows: slice, start: Tensor, base_start: Tensor, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the divergences of some rows, [r], and the log-sum-exps of their logits in both
    matrices; a sum begins with ``weight`` times exp(start)."""
    maximum, base_maximum = start, base_start
    total, base_total = (torch.full_like(start, weight) for _ in range(2))
    gaps = weight * (base_start - start)  # the sum of exp(base L - base_maximum) (base L - L)
    for columns in blocks(len(tiles.keys), tiles.pairs.tile):
        logits, base_logits = tiles.logits(rows, columns), base.logits(rows, columns)
        gap = (base_logits - logits).masked_fill_(base_logits == float("-inf"), 0.0)
        previous, maximum = maximum, torch.maximum(maximum, logits.amax(dim=1))
        total = total * (previous - maximum).exp() + logits.sub_(maximum[:, None]).exp_().sum(dim=1)
        previous, base_maximum = base_maximum, torch.maximum(base_maximum, base_logits.amax(dim=1))
        share = base_logits.sub_(base_maximum[:, None]).exp_()
        shrink = (previous - base_maximum).exp()
        base_total = base_total * shrink + share.sum(dim=1)
        gaps = gaps * shrink + gap.mul_(share).sum(dim=1)
    sums, base_sums = maximum + total.log(), base_maximum + base_total.log()
    by_row = gaps / base_total + (maximum - base_maximum) + (total.log() - base_total.log())
    return torch.where(base_total == 0.0, 0.0, by_row), sums, base_sums
