"""Ranks of queries among candidates by cosine, over any number of processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mclclip.eval.features import Features, exact_float32, over_ranks
from mclclip.eval.metrics import BoolArray, IntArray, ranks_with_ties
from mclclip.pair_products import pair_products
from mclclip.ranks.process_group import SINGLE, Context

CHUNK_BYTES = 128 * 2**20
"""Size of the float32 similarity block that is held at once, without a few working copies."""

Counting = Literal["by_row", "whole"]
"""How candidates above a bound are counted: a row of the block at a time, which stays in the cache
of a processor, or over the whole block."""


def choose_counting(device: torch.device) -> Counting:
    """The faster way to count: rows on a CPU (ten times), the whole block elsewhere."""
    return "by_row" if device.type == "cpu" else "whole"


def rank_queries(
    queries: Features,
    query_image: IntArray,
    candidates: Features,
    candidate_image: IntArray,
    *,
    context: Context = SINGLE,
    chunk_bytes: int = CHUNK_BYTES,
    counting: Counting | None = None,
) -> tuple[IntArray, IntArray]:
    """Rank of each query's best candidate of the same image, in bounded memory.

    queries [Q, E], candidates [C, E]; ``query_image`` [Q] and ``candidate_image`` [C] say which
    image each row is or describes. Returns ranks with ties against and for the model (see
    ``ranks_with_ties``), equal to those of the whole matrix for any ``chunk_bytes``: similarities
    are summed in float64 and rounded to float32, so that equal features tie exactly wherever they
    stand in a block. A product in float32 comes first, and only candidates so near to the right one
    that its rounding may hide their order are summed in float64. The ranks of ``context`` divide
    the queries. Memory: some blocks of ``chunk_bytes``, and the candidates in float64. ValueError
    where features are not finite or a query has no right candidate.
    """
    if not (np.isfinite(queries).all() and np.isfinite(candidates).all()):
        raise ValueError("similarities hold NaN: the encoder's features are not finite")
    counting = counting or choose_counting(context.device)
    ranker = _Ranker.of(candidates, candidate_image, context.device, counting)
    step = max(1, chunk_bytes // (4 * len(candidates)))

    def of_share(own: slice) -> IntArray:
        ranks = np.empty((2, own.stop - own.start), dtype=np.int64)
        block = torch.empty(min(step, max(len(ranks[0]), 1)), len(candidates), device=ranker.device)
        for start in range(own.start, own.stop, step):
            chunk = slice(start, min(start + step, own.stop))
            of_chunk = ranker.ranks(queries[chunk], query_image[chunk], block)
            ranks[:, start - own.start : chunk.stop - own.start] = of_chunk
        return ranks

    strict, optimistic = np.concatenate(over_ranks(context, len(queries), of_share), axis=1)
    return strict, optimistic


@dataclass(frozen=True)
class _Ranker:
    """Candidates [C, E] as they are, on the device, and in float64; and their images [C].

    order    [C] candidates sorted by image, so that those of an image are a slice of it
    longest  largest norm of a candidate
    """

    candidates: Features
    images: IntArray
    order: IntArray
    on_device: Tensor
    exact: Tensor
    longest: float
    counting: Counting

    @classmethod
    def of(
        cls, candidates: Features, images: IntArray, device: torch.device, counting: Counting
    ) -> _Ranker:
        rows = torch.from_numpy(candidates)
        exact = rows.double()
        longest = float(exact.norm(dim=1).max())
        order = np.argsort(images, kind="stable")
        return cls(candidates, images, order, rows.to(device), exact, longest, counting)

    @property
    def device(self) -> torch.device:
        return self.on_device.device

    def ranks(self, queries: Features, images: IntArray, block: Tensor) -> IntArray:
        """[2, q] ranks of a chunk; ``block`` [>= q, C] is overwritten by its similarities."""
        left = torch.from_numpy(queries)
        exact = left.double()
        starts, right = self._right(images)
        best = np.maximum.reduceat(self._products(exact, starts, right), starts[:-1])
        near = block[: len(queries)]
        with exact_float32():
            torch.mm(left.to(self.device), self.on_device.T, out=near)
        # Rounding of a sum of E products, in any order, and of the bounds themselves.
        width = (queries.shape[1] + 8) * 2.0**-24 * exact.norm(dim=1) * self.longest
        middle = torch.from_numpy(best).double()
        low, high = ((middle + side * width).float().to(self.device) for side in (-1, 1))
        own = self._own(near, low, high, starts, right)
        count = {"by_row": _count_by_row, "whole": _count_whole}[self.counting]
        greater, rows, columns, dense = count(near, low, high, own)
        wrong = images[rows] != self.images[columns]
        rows, columns = rows[wrong], columns[wrong]
        ends = np.searchsorted(rows, np.arange(len(queries) + 1))
        values = self._products(exact, ends, columns)
        greater = greater + np.bincount(rows[values > best[rows]], minlength=len(queries))
        equal = np.bincount(rows[values == best[rows]], minlength=len(queries))
        ranks = np.stack([1 + greater + equal, 1 + greater])
        if dense.any():
            whole = similarity(queries[dense], self.candidates, self.device)
            positive = images[dense, None] == self.images[None, :]
            ranks[:, dense] = ranks_with_ties(whole, positive)
        return ranks

    def _right(self, images: IntArray) -> tuple[IntArray, IntArray]:
        """The candidates of the queries' images, one query after the other, and where each begins
        [q + 1]."""
        ranked = self.images[self.order]
        first, last = (np.searchsorted(ranked, images, side=side) for side in ("left", "right"))
        if (first == last).any():
            query = int(np.flatnonzero(first == last)[0])
            raise ValueError(f"query {query} has no positive candidate: it cannot be ranked")
        starts = np.append(0, np.cumsum(last - first))
        shift = np.repeat(first - starts[:-1], last - first)
        return starts, self.order[np.arange(starts[-1]) + shift]

    def _products(self, queries: Tensor, starts: IntArray, columns: IntArray) -> Features:
        """Products of query q with the candidates columns[starts[q]:starts[q + 1]], one query after
        the other; summed in float64, returned in float32."""
        ends, ids = torch.from_numpy(starts), torch.from_numpy(columns)
        products: Features = pair_products(queries, self.exact, ends, ids).float().numpy()
        return products

    def _own(
        self, near: Tensor, low: Tensor, high: Tensor, starts: IntArray, right: IntArray
    ) -> IntArray:
        """How many right candidates of each query [q] are between its bounds."""
        rows = torch.from_numpy(np.repeat(np.arange(len(near)), np.diff(starts))).to(self.device)
        values = near[rows, torch.from_numpy(right).to(self.device)]
        within = (values >= low[rows]) & (values <= high[rows])
        return np.bincount(rows[within].cpu().numpy(), minlength=len(near))


_Counted = tuple[IntArray, IntArray, IntArray, BoolArray]
"""Candidates above the bounds [q]; rows and columns of those between them, in order; and queries
[q] with so many of these that they are not listed. Queries with no others between the bounds than
``own`` [q] list none."""


def _count_by_row(near: Tensor, low: Tensor, high: Tensor, own: IntArray) -> _Counted:
    values, bounds = near.numpy(), (low.numpy(), high.numpy())
    num, width = near.shape
    higher, enough = np.empty((2, width), dtype=np.bool_)
    above, dense = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.bool_)
    columns: list[IntArray] = [np.empty(0, dtype=np.int64)] * num
    for row in range(num):
        np.greater(values[row], bounds[1][row], out=higher)
        np.greater_equal(values[row], bounds[0][row], out=enough)
        above[row] = np.count_nonzero(higher)
        in_doubt = np.count_nonzero(enough) - above[row]
        dense[row] = in_doubt > _most_in_doubt(width)
        if own[row] < in_doubt and not dense[row]:
            columns[row] = np.flatnonzero(enough ^ higher)
    rows = np.repeat(np.arange(num), [len(listed) for listed in columns])
    return above, rows, np.concatenate(columns), dense


def _count_whole(near: Tensor, low: Tensor, high: Tensor, own: IntArray) -> _Counted:
    higher = near > high[:, None]
    between = (near >= low[:, None]) & ~higher
    in_doubt = between.sum(dim=1).cpu().numpy()
    dense = in_doubt > _most_in_doubt(near.shape[1])
    listed = torch.from_numpy(np.flatnonzero((own < in_doubt) & ~dense)).to(near.device)
    row, column = between[listed].nonzero(as_tuple=True)
    above = higher.sum(dim=1).cpu().numpy()
    return above, listed[row].cpu().numpy(), column.cpu().numpy(), dense


def _most_in_doubt(num_candidates: int) -> float:
    """More candidates than this are cheaper in one product of matrices than one by one."""
    return 64 + num_candidates / 16


def similarity(
    queries: Features, candidates: Features, device: torch.device | None = None, block: int = 8192
) -> Features:
    """Dot products float32 [q, C], by blocks of candidates, whose float64 copies take memory."""
    out = np.empty((len(queries), len(candidates)), dtype=np.float32)
    left = torch.from_numpy(queries).to(device, torch.float64)
    for start in range(0, len(candidates), block):
        right = torch.from_numpy(candidates[start : start + block]).to(device, torch.float64)
        out[:, start : start + block] = (left @ right.T).float().cpu().numpy()
    return out
