"""The nearest centroids of rows: a matrix product finds candidates, and exact scores decide.

The score of a row x and a centroid c is x.c (spherical) or x.c - |c|^2 / 2 (euclidean), summed by
one fixed routine that sees only the two vectors. So it does not depend on what else is compared,
on how many centroids a rank holds, or on the shape of a matrix product.

Scoring every pair that way would be slow. So a matrix product of all rows and all centroids comes
first (in bfloat16 where that is faster), and only the pairs that could still be among the nearest,
by the product's error bound, are scored. The bound follows from the Cauchy-Schwarz inequality and
from the rounding of inputs, sums and output. The error never exceeds it, so the result is that of
scoring all pairs. The mean centroid is subtracted first: this shifts all scores of a row by the
same amount, and tightens the bound where embeddings share a direction.

arithmetic.py chooses the arithmetic for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mclclip.clustering.arithmetic import (
    CHOSEN,
    Arithmetic,
    Scores,
    choose_products,
    choose_rounding,
    choose_scores,
    choose_tile,
)
from mclclip.clustering.options import Algorithm
from mclclip.clustering.rows import tiles
from mclclip.util.pair_products import pair_products

NOTHING = -(2**63)  # packed: no candidate
ROWS_PER_PASS = 1024  # centroids that are handled in one operation
FEW = 64  # centroids that are searched one by one
_CONSTANT_COLUMNS = 4  # of the euclidean product: three hold -|c|^2 / 2, the fourth is zero
_LEAST_PART = 8  # numbers of a row in the shortest part whose sum a product may round by itself
_UNIT = 1.0 + 2.0**-10  # length of a row that was scaled to 1 in float32, at most
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


class Search:
    """Finds the nearest of centroids float32 [k, D], whose ids count from ``first_id``.

    Holds a second copy of the centroids, in the type of the products. ``arithmetic`` forces how to
    compute; what it leaves open is chosen for the centroids' device. ``unit_rows`` says that rows
    will have unit length, or are zeros, so that they need not be measured for the error bound.
    """

    def __init__(
        self,
        centroids: Tensor,
        algorithm: Algorithm,
        first_id: int = 0,
        arithmetic: Arithmetic = CHOSEN,
        *,
        unit_rows: bool = False,
    ) -> None:
        device = centroids.device
        self._unit_rows = unit_rows
        products = choose_products(device, len(centroids), arithmetic)
        self.rounding = choose_rounding(device, products, arithmetic)
        self._scores = choose_scores(device, arithmetic)
        self._rows_per_tile, self._columns_per_tile = choose_tile(
            device, len(centroids), arithmetic
        )
        self.centroids, self.first_id = centroids, first_id
        self.half_squares = half_squares(centroids) if algorithm == "euclidean" else None
        self._extra = 0 if self.half_squares is None else _CONSTANT_COLUMNS
        self.coarse = torch.zeros(
            (_padded(len(centroids)), centroids.shape[1] + self._extra),
            dtype=torch.bfloat16 if products == "bfloat16" else torch.float32,
            device=device,
        )
        # The largest |c|^2 / 2, and the largest lengths: of the centroids, of the shifted
        # centroids, and of what casting these to the type of the products takes off.
        self._constant = self._length = self._shifted = self._lost = 0.0
        if self.half_squares is not None and len(centroids):
            self._constant = float(self.half_squares.max())
        # Any common shift keeps the ranking; that by the mean tightens the error bound.
        mean = centroids.mean(dim=0)
        for first in range(0, len(centroids), ROWS_PER_PASS):
            self._cast(slice(first, min(first + ROWS_PER_PASS, len(centroids))), mean)

    def _cast(self, some: slice, mean: Tensor) -> None:
        """Fills the second copy for a slice of the centroids, and measures what it loses."""
        centroids, coarse = self.centroids[some], self.coarse[some]
        dim = centroids.shape[1]
        shifted = centroids - mean
        coarse[:, :dim] = shifted
        if self.half_squares is not None:
            # Each centroid's constant in three columns of 8 bits, which no product rounds.
            left = -self.half_squares[some]
            for column in range(dim, dim + 3):
                coarse[:, column] = left.bfloat16()
                left = left - coarse[:, column].float()
        lost = _longest(shifted - coarse[:, :dim].float())
        self._length = max(self._length, _longest(centroids))
        self._shifted = max(self._shifted, _longest(shifted))
        self._lost = max(self._lost, lost)

    def best(self, rows: Tensor, count: int = 1) -> Tensor:
        """int64 [n, count]: the packed scores and ids of the nearest ``count`` centroids of rows
        [n, D], best first, the lowest id of equals; ``NOTHING`` where there are fewer.
        """
        best = [self._tile(part, count) for part in tiles(rows, self._rows_per_tile)]
        return torch.cat(best) if best else rows.new_zeros((0, count), dtype=torch.int64)

    def nearest(self, rows: Tensor) -> Tensor:
        """int64 [n]: the ids that ``best`` finds for finite rows [n, D], at least one and at most a
        tile (``choose_tile``), of one centroid or more.

        A row for which the product leaves one candidate, as it mostly does, is not scored.
        """
        row, centroid = self._candidates(rows, 1)
        # Every row has a candidate, so where each has one the pairs are in the order of the rows.
        if len(row) == len(rows):
            return centroid + self.first_id
        nearest = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        nearest[row] = centroid + self.first_id  # of several any, until they are scored
        several = torch.bincount(row, minlength=len(rows)) > 1
        open_ = torch.nonzero(several[row]).flatten()
        row, centroid = row[open_], centroid[open_]
        packed = self._packed(rows, row, centroid)
        nearest[row] = unpack(_largest(packed, row, len(rows), 1)[row, 0])[1]
        return nearest

    def _tile(self, rows: Tensor, count: int) -> Tensor:
        if not len(self.centroids):
            return torch.full((len(rows), count), NOTHING, device=rows.device)
        row, centroid = self._candidates(rows, count)
        return _largest(self._packed(rows, row, centroid), row, len(rows), count)

    def _packed(self, rows: Tensor, row: Tensor, centroid: Tensor) -> Tensor:
        """One int64 for each pair (row, centroid) [P], which sorts by score and then by the lowest
        id (``pack``); ``row`` must ascend."""
        scores = score_pairs(rows, self.centroids, row, centroid, self._scores)
        if self.half_squares is not None:
            scores -= self.half_squares[centroid]
        return pack(scores, centroid + self.first_id)

    def _candidates(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Row and centroid [P] of all pairs that may be among the ``count`` best of their row,
        sorted by row."""
        coarse, error = self.bound_errors(rows)
        top = torch.full((len(rows), count), -torch.inf, device=rows.device)
        if len(self.coarse) <= FEW:  # without groups, and without padding
            scores = multiply(coarse, self.coarse).float()
            threshold = self.find_threshold(_top(top, scores)[:, -1:], error)
            row, centroid = torch.nonzero(scores >= threshold).unbind(1)
            return row, centroid
        threshold, candidates = top[:, -1:], []
        step = self._columns_per_tile
        for first in range(0, len(self.coarse), step):
            scores = multiply(coarse, self.coarse[first : first + step])
            scores[:, max(len(self.centroids) - first, 0) :] = -torch.inf  # the padding
            # A group is searched only if its maximum is a candidate. Its columns are no neighbours,
            # so that one vector operation takes the maxima of many groups at once.
            num_groups = 32 if scores.shape[1] < 512 else scores.shape[1] // 16
            scores = scores.view(len(rows), -1, num_groups)
            maxima = scores.amax(dim=1).float()
            # These maxima belong to different centroids, so the count-th largest of them is a lower
            # bound of the count-th best score.
            top = _top(top, maxima)
            threshold = self.find_threshold(top[:, -1:], error)
            row, group = torch.nonzero(maxima >= threshold).unbind(1)
            members = scores[row, :, group].float()
            open_ = (members >= threshold[row]) & (members > -torch.inf)
            which, member = torch.nonzero(open_).unbind(1)
            ids = first + member * scores.shape[2] + group[which]
            candidates.append((row[which], ids, members[which, member]))
        if len(candidates) == 1:
            return candidates[0][:2]
        row, ids, coarse_scores = (torch.cat(parts) for parts in zip(*candidates, strict=True))
        near_enough = torch.nonzero(coarse_scores >= threshold.flatten()[row]).flatten()
        near_enough = near_enough[row[near_enough].sort(stable=True).indices]
        return row[near_enough], ids[near_enough]

    def bound_errors(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, D] in the type of the products, and the error bound of a row's products: [n, 1],
        or [1, 1] where it is that of all.

        The bound covers the errors of the product (before its output is rounded) and of the score
        from ``score_pairs`` together.
        """
        coarse = rows.to(self.coarse.dtype)
        if self._unit_rows:
            lengths = rows.new_full((1, 1), _UNIT)
        else:
            lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        error = lengths * self._lost
        if coarse.dtype != rows.dtype:  # each number by up to 2^-8 of itself
            error = error + lengths * (self._shifted + self._lost) * 2.0**-8
        if self.rounding == "inputs":  # each by up to 2^-7 of itself, where 8 bits are kept
            error = error + lengths * self._shifted * 2.0**-6
        if self.rounding == "partial_sums":
            # Up to as many roundings as parts, and one more, each by 2^-8 of what is summed so far.
            parts = -(-self.coarse.shape[1] // _LEAST_PART)
            growth = (1.0 + 2.0**-8) ** (parts + 1) - 1.0
            summed = lengths * (self._shifted + self._lost) + self._constant
            error = error + growth * (1.0 + 2.0**-6) * summed
        # Sums in float32, in any order, of the product and of the score; and the shift itself.
        rounding = 2.0 * (rows.shape[1] + 16) * 2.0**-24
        error = error + rounding * (lengths * (self._shifted + self._length) + 2.0 * self._constant)
        # Products may flush subnormal numbers to zero.
        error = error + 2.0**-110 * (lengths + self._shifted + 1.0)
        if self._extra:
            ones = torch.ones((len(rows), self._extra), dtype=coarse.dtype, device=rows.device)
            coarse = torch.cat([coarse, ones], dim=1)
        return coarse, error

    def find_threshold(self, bound: Tensor, error: Tensor) -> Tensor:
        """The product [n, 1] below which a centroid is no candidate, given that enough centroids
        have a product of at least ``bound`` [n, 1].
        """
        if self.coarse.dtype == torch.bfloat16:  # the output is rounded once more
            error = error + 2.0**-8 * bound.abs()
        # Twice: one product may be too high and the other too low. 1/16 covers second-order terms.
        return bound - (2.0 + 1 / 16) * error


def multiply(rows: Tensor, columns: Tensor) -> Tensor:
    """[n, k]: the dot products of all ``rows`` [n, D] and ``columns`` [k, D]. Tests replace it."""
    if len(columns) <= FEW:  # many rows times few columns take a BLAS 1.2 times as long
        return (columns @ rows.T).T
    return rows @ columns.T


def squared_distance(centroids: Tensor, rows: Tensor) -> Tensor:
    """float64 [n] on the CPU: distances of rows [n, D] to centroids [n, D] or [D].

    They are computed from differences, because the rounding of products would give equal rows a
    distance; a distance that float32's rounding alone could make is set to zero.
    """
    squared = sums_by_halves((rows - centroids).square_())
    same = squared <= SAME_ROW * sums_by_halves(rows.square())
    return squared.masked_fill(same, 0.0).double().cpu()


def half_squares(centroids: Tensor) -> Tensor:
    """[k]: |c|^2 / 2 of centroids [k, D], each independent of the other centroids."""
    parts = torch.split(centroids, ROWS_PER_PASS)
    halves = [sums_by_halves(part.square()) / 2.0 for part in parts]
    return torch.cat([centroids.new_zeros(0), *halves])


def sums_by_halves(x: Tensor) -> Tensor:
    """[n]: the sums of the rows of [n, D], each in one order of additions.

    The order of ``torch.sum`` on a GPU depends on the number of rows, and, where D is no multiple
    of 4, on where a row lies in memory.
    """
    missing = (1 << max(x.shape[1] - 1, 0).bit_length()) - x.shape[1]
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    while x.shape[1] > 1:
        left, right = x.chunk(2, dim=1)
        x = left + right
    return x.flatten()


def _padded(num_centroids: int) -> int:
    """Columns of the products for so many centroids: groups of equal size cut it."""
    lanes = 1 if num_centroids <= FEW else 32 if num_centroids < 512 else 512
    return -(-num_centroids // lanes) * lanes


def _top(top: Tensor, more: Tensor) -> Tensor:
    """Merges the best scores so far with a new tile's, and keeps as many, descending."""
    if top.shape[1] == 1:
        return torch.maximum(top, more.amax(dim=1, keepdim=True))
    return torch.cat([top, more], dim=1).topk(top.shape[1], dim=1).values


def _longest(rows: Tensor) -> float:
    """The length of the longest row, rounded up."""
    return float(torch.linalg.vector_norm(rows, dim=1).max()) * (1.0 + 2.0**-16)


def score_pairs(
    rows: Tensor, centroids: Tensor, row: Tensor, centroid: Tensor, scores: Scores
) -> Tensor:
    """float32 [P]: the products of rows[row] and centroids[centroid], where ``row`` ascends.

    Each depends on its two vectors and on ``scores`` alone.
    """
    if scores == "blocks":
        return _scored_in_blocks(rows, centroids, row, centroid)
    starts = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
    starts[1:] = torch.bincount(row, minlength=len(rows)).cumsum(0)
    return pair_products(rows, centroids, starts, centroid)


def _scored_in_blocks(rows: Tensor, centroids: Tensor, row: Tensor, centroid: Tensor) -> Tensor:
    """``score_pairs`` by torch, which copies both rows of every pair of a block."""
    size = 65_536
    parts = zip(torch.split(row, size), torch.split(centroid, size), strict=True)
    products = [sums_by_halves(rows[r] * centroids[c]) for r, c in parts]
    return torch.cat([rows.new_zeros(0), *products])


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
    is_top = place < count
    largest = torch.full((num_rows, count), NOTHING, device=packed.device)
    largest[row[is_top], place[is_top]] = packed[is_top]
    return largest
