"""The nearest centroids of rows: a coarse product finds the few that can be, exact scores decide.

The score of a row x and a centroid c is x.c (spherical) or x.c - |c|^2 / 2 (euclidean), summed by
one fixed routine that sees only the two vectors. So it does not depend on what else is compared,
on how many centroids a rank holds, or on the shape of a matrix product.

Scoring every pair that way would be slow. A matrix product of all pairs (in bfloat16 where the
machine multiplies that faster) comes first, and only the pairs that its error bound leaves open
are scored. The bound is Cauchy and Schwarz's, of the rounding of inputs, sum and output: it is
never exceeded, so the result is that of scoring all pairs. Subtracting the mean centroid, which
shifts all scores of a row alike, makes the bound narrow where embeddings share a direction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mclclip.parallel.pair_products import pair_products
from mclclip.parallel.row_blocks import Algorithm, tiles

NOTHING = -(2**63)  # packed: no candidate
ROWS_PER_PASS = 1024  # rows of centroids that are changed in one operation
_CPU_COLUMNS, _GPU_COLUMNS = 2048, 16_384  # of a tile of scores; a CPU's stays in the cache
_GROUPED = 512  # columns from which, of 16 scores, only the largest is looked at first
_COARSE_FROM = 64  # centroids, below which casting rows to bfloat16 costs more than it saves
_LOW_32 = 2**32 - 1
SAME_ROW = 1e-12  # squared distance, as a share of |row|^2, that float32's rounding may make


def pack(values: Tensor, ids: Tensor) -> Tensor:
    """float32 values and ids (0 to 2^32 - 1) as int64, ordered by value, then by the lower id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: minus zero is no smaller than zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.long() * 2**32 + (_LOW_32 - ids)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(float32 values, int64 ids) of ``pack``."""
    ordered = (packed >> 32).int()
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), _LOW_32 - (packed & _LOW_32)


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a row of a tile and a centroid, and the coarse score of each."""

    row: Tensor
    centroid: Tensor
    coarse: Tensor


class Search:
    """``best(rows, count)`` of centroids [k, D] with the ids ``first_id``, ``first_id`` + 1, ...

    Holds a second, coarser copy of the centroids.
    """

    def __init__(self, centroids: Tensor, algorithm: Algorithm, first_id: int = 0) -> None:
        self.centroids, self.first_id = centroids, first_id
        self.half_squares = half_squares(centroids) if algorithm == "euclidean" else None
        coarse = len(centroids) >= _COARSE_FROM and _multiplies_bfloat16(centroids.device)
        dtype = torch.bfloat16 if coarse else torch.float32
        self._extra = 0 if self.half_squares is None else 4
        lanes = _GROUPED if len(centroids) >= _GROUPED else 32 if coarse else 16
        padded = -(-len(centroids) // lanes) * lanes
        width = centroids.shape[1] + self._extra
        self._coarse = torch.zeros((padded, width), dtype=dtype, device=centroids.device)
        # Largest lengths: of the centroids, of the shifted ones, and of what the cast takes off.
        self._length = self._shifted = self._lost = 0.0
        mean = _mean(centroids)
        for first in range(0, len(centroids), ROWS_PER_PASS):
            self._cast(slice(first, min(first + ROWS_PER_PASS, len(centroids))), mean)

    def _cast(self, some: slice, mean: Tensor) -> None:
        """The coarse copy of a slice of the centroids, and how far it may be off."""
        centroids, coarse = self.centroids[some], self._coarse[some]
        dim = centroids.shape[1]
        shifted = centroids - mean
        coarse[:, :dim] = shifted
        if self.half_squares is not None:
            # The constant of each centroid in three more columns, 8 bits in each.
            left = -self.half_squares[some]
            for column in range(dim, dim + 3):
                coarse[:, column] = left
                left = left - coarse[:, column].float()
        lost = _longest(shifted - coarse[:, :dim].float())
        self._length = max(self._length, _longest(centroids))
        self._shifted = max(self._shifted, _longest(shifted))
        self._lost = max(self._lost, lost)

    def best(self, rows: Tensor, count: int = 1) -> Tensor:
        """int64 [n, count]: the packed scores and ids of the nearest ``count`` centroids of rows
        [n, D], best first, the lowest id of equals; ``NOTHING`` where there are fewer.
        """
        found = [self._tile(part, count) for part in tiles(rows)]
        return torch.cat(found) if found else rows.new_zeros((0, count), dtype=torch.int64)

    def _tile(self, rows: Tensor, count: int) -> Tensor:
        if not len(self.centroids):
            return torch.full((len(rows), count), NOTHING, device=rows.device)
        pairs = self._candidates(rows, count)
        scores = _dot(rows, self.centroids, pairs.row, pairs.centroid)
        if self.half_squares is not None:
            scores -= self.half_squares[pairs.centroid]
        packed = pack(scores, pairs.centroid + self.first_id)
        return _largest(packed, pairs.row, len(rows), count)

    def _candidates(self, rows: Tensor, count: int) -> _Pairs:
        """All pairs that may be among the ``count`` best of their row, sorted by row."""
        coarse, error = self._lower(rows)
        top = torch.full((len(rows), count), -torch.inf, device=rows.device)
        threshold, found = top[:, -1:], []
        step = _CPU_COLUMNS if rows.device.type == "cpu" else _GPU_COLUMNS
        for first in range(0, len(self._coarse), step):
            scores = coarse @ self._coarse[first : first + step].T
            scores[:, max(len(self.centroids) - first, 0) :] = -torch.inf  # the padding
            # Groups of columns that lie apart: so their maxima are taken of whole vectors.
            scores = scores.view(len(rows), -1, _num_groups(scores.shape[1]))
            maxima = scores.amax(dim=1).float()
            # Maxima are scores of different centroids: the last of ``count`` is a lower bound.
            top = _top(top, maxima)
            threshold = self._threshold(top[:, -1:], error)
            row, group = torch.nonzero(maxima >= threshold).unbind(1)
            members = scores[row, :, group].float()
            open_ = (members >= threshold[row]) & (members > -torch.inf)
            which, member = torch.nonzero(open_).unbind(1)
            ids = first + member * scores.shape[2] + group[which]
            found.append(_Pairs(row[which], ids, members[which, member]))
        if len(found) == 1:
            return found[0]
        row = torch.cat([pairs.row for pairs in found])
        coarse_scores = torch.cat([pairs.coarse for pairs in found])
        kept = torch.nonzero(coarse_scores >= threshold.flatten()[row]).flatten()
        kept = kept[row[kept].sort(stable=True).indices]
        ids = torch.cat([pairs.centroid for pairs in found])
        return _Pairs(row[kept], ids[kept], coarse_scores[kept])

    def _lower(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows as they enter the product, and [n, 1] how far a sum of theirs may be off."""
        coarse = rows.to(self._coarse.dtype)
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        error = lengths * self._lost
        if coarse.dtype != rows.dtype:
            lost = torch.linalg.vector_norm(coarse.float().sub_(rows), dim=1, keepdim=True)
            error = error + lost * (self._shifted + self._lost)
        elif torch.get_float32_matmul_precision() != "highest":  # products may round their inputs
            error = error + lengths * self._shifted * 2.0**-6
        # Sums in float32, in any order, of the product and of the score; and the shift itself.
        rounding = 2.0 * (rows.shape[1] + 16) * 2.0**-24
        constants = 0.0 if self.half_squares is None else float(self.half_squares.max())
        error = error + rounding * (lengths * (self._shifted + self._length) + 2.0 * constants)
        error = error + 2.0**-110 * (lengths + self._shifted + 1.0)  # what products take for zero
        if self._extra:
            ones = torch.ones((len(rows), self._extra), dtype=coarse.dtype, device=rows.device)
            coarse = torch.cat([coarse, ones], dim=1)
        return coarse, error

    def _threshold(self, bound: Tensor, error: Tensor) -> Tensor:
        """What a coarse score has to reach, where that of a better centroid is ``bound``."""
        if self._coarse.dtype == torch.bfloat16:  # the product is rounded once more
            error = error + 2.0**-8 * bound.abs()
        # Twice: the better one may be too high and the other too low; 1 / 16 for second orders.
        return bound - (2.0 + 1 / 16) * error


def squared_distance(centroids: Tensor, rows: Tensor) -> Tensor:
    """float64 [n] on the CPU: of rows [n, D] to centroids [n, D] or [D]; zero for the same row.

    From differences, not from products, whose rounding would set equal rows apart.
    """
    squared = (rows - centroids).square().sum(dim=1)
    same = squared <= SAME_ROW * rows.square().sum(dim=1)
    return squared.masked_fill(same, 0.0).double().cpu()


def half_squares(centroids: Tensor) -> Tensor:
    """|c|^2 / 2 of centroids [k, D]; of each by itself, whatever lies beside it."""
    parts = torch.split(centroids, ROWS_PER_PASS)
    return torch.cat([part.square().sum(dim=1) / 2.0 for part in parts])


def _num_groups(columns: int) -> int:
    """Into how many groups the columns of a tile are put; few columns are their own groups."""
    if columns <= _COARSE_FROM:
        return columns
    return columns // 16 if columns % _GROUPED == 0 else 32


def _top(top: Tensor, more: Tensor) -> Tensor:
    """The largest [n, count] of both, descending."""
    if top.shape[1] == 1:
        return torch.maximum(top, more.amax(dim=1, keepdim=True))
    return torch.cat([top, more], dim=1).topk(top.shape[1], dim=1).values


def _mean(centroids: Tensor) -> Tensor:
    """Some vector near all of them: any would do."""
    return centroids.mean(dim=0) if len(centroids) else centroids.new_zeros(centroids.shape[1])


def _longest(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dim=1).max()) * (1.0 + 2.0**-16)


def _dot(rows: Tensor, centroids: Tensor, row: Tensor, centroid: Tensor) -> Tensor:
    """float32 [P]: rows[row] . centroids[centroid], ``row`` ascending; each depends on its two
    vectors alone.
    """
    if rows.device.type != "cpu":
        return _dot_in_blocks(rows, centroids, row, centroid)
    starts = torch.zeros(len(rows) + 1, dtype=torch.int64)
    starts[1:] = torch.bincount(row, minlength=len(rows)).cumsum(0)
    return pair_products(rows, centroids, starts, centroid)


def _dot_in_blocks(rows: Tensor, centroids: Tensor, row: Tensor, centroid: Tensor) -> Tensor:
    """``_dot`` where the order of a sum follows from the tensor's shape: it is always the same."""
    size = 8192
    padding = -len(row) % size
    row = torch.nn.functional.pad(row, (0, padding))
    centroid = torch.nn.functional.pad(centroid, (0, padding))
    parts = zip(torch.split(row, size), torch.split(centroid, size), strict=True)
    products = [(rows[r] * centroids[c]).sum(dim=1) for r, c in parts]
    found = torch.cat(products) if products else rows.new_zeros(0)
    return found[: len(found) - padding]


def _largest(packed: Tensor, row: Tensor, num_rows: int, count: int) -> Tensor:
    """[num_rows, count]: the largest ``packed`` of each row, descending."""
    if count == 1:
        none = torch.full((num_rows,), NOTHING, device=packed.device)
        return none.scatter_reduce_(0, row, packed, "amax")[:, None]
    order = packed.sort(descending=True).indices
    order = order[row[order].sort(stable=True).indices]
    row, packed = row[order], packed[order]
    per_row = torch.bincount(row, minlength=num_rows)
    place = torch.arange(len(row), device=row.device) - (per_row.cumsum(0) - per_row)[row]
    kept = place < count
    largest = torch.full((num_rows, count), NOTHING, device=packed.device)
    largest[row[kept], place[kept]] = packed[kept]
    return largest


def _multiplies_bfloat16(device: torch.device) -> bool:
    """True where a product of bfloat16 is faster than one of float32, and rounds its sums once."""
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
