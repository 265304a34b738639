"""Finds the nearest centroids of rows: a matrix product gives candidates, exact scores decide.

The score of a row x and a centroid c is x.c (spherical) or x.c - |c|^2 / 2 (euclidean). It is
summed by one fixed routine that sees only these two vectors. So it does not depend on the other
rows and centroids, on how many centroids a rank holds, or on the shape of a matrix product.

Scoring every pair that way would be slow. So all rows and all centroids are multiplied first, as
matrices (in bfloat16 if that is faster). Then only those pairs are scored that could still be among
the nearest, given the largest error that the product can have. This error bound follows from the
Cauchy-Schwarz inequality and the rounding of inputs, sums and output; the error never exceeds it.
So the result is that of scoring all pairs. The mean centroid is subtracted first: this changes all
scores of a row by the same amount, and makes the bound tighter if embeddings share a direction.

arithmetic.py chooses how to compute on a device.
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
from mclclip.util.pair_products import pair_products, starts_of

NOTHING = -(2**63)  # stands in a packed tensor where there is no candidate
ROWS_PER_PASS = 1024  # so many centroids are handled in one operation
FEW = 64  # up to so many centroids are searched without groups (``_candidates``)
_CONSTANT_COLUMNS = 4  # extra columns of euclidean products: three hold -|c|^2 / 2, one is zero
_LEAST_PART = 8  # a product may round the sum of so many numbers of a row by itself, not of fewer
_UNIT = 1.0 + 2.0**-10  # upper bound of the length of a row that was scaled to 1 in float32
_LOW_32 = 2**32 - 1
SAME_ROW = 1e-12  # rounding can give equal rows a squared distance of this share of |row|^2


def pack(values: Tensor, ids: Tensor) -> Tensor:
    """Packs float32 values and ids (0 to 2^32 - 1) into one int64 each.

    Comparing packed numbers compares the values; if these are equal, the lower id is the larger
    number.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes minus zero equal to zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.long() * 2**32 + (_LOW_32 - ids)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the float32 values and the int64 ids that ``pack`` packed."""
    ordered = (packed >> 32).int()
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), _LOW_32 - (packed & _LOW_32)


class Search:
    """Finds, for rows, the nearest of the ``centroids`` float32 [k, D].

    The centroids have the ids ``first_id``, ``first_id`` + 1, ... A second copy of them is held in
    the type of the products. ``unit_rows`` promises that all rows have unit length or are zeros, so
    that their lengths need not be measured.
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
        # _constant is the largest |c|^2 / 2. The others are largest lengths: of the centroids, of
        # the centroids minus their mean, and of the errors of casting these.
        self._constant = self._length = self._shifted = self._lost = 0.0
        if self.half_squares is not None and len(centroids):
            self._constant = float(self.half_squares.max())
        # Subtracting one vector from all centroids keeps their order; the mean makes the error
        # bound tight.
        mean = centroids.mean(dim=0)
        for first in range(0, len(centroids), ROWS_PER_PASS):
            self._cast(slice(first, min(first + ROWS_PER_PASS, len(centroids))), mean)

    def _cast(self, some: slice, mean: Tensor) -> None:
        """Fills the second copy for a slice of the centroids, and measures its rounding errors."""
        centroids, coarse = self.centroids[some], self.coarse[some]
        dim = centroids.shape[1]
        shifted = centroids - mean
        coarse[:, :dim] = shifted
        if self.half_squares is not None:
            # Three columns of 8 bits hold each centroid's constant exactly; no product rounds them.
            left = -self.half_squares[some]
            for column in range(dim, dim + 3):
                coarse[:, column] = left.bfloat16()
                left = left - coarse[:, column].float()
        lost = _longest(shifted - coarse[:, :dim].float())
        self._length = max(self._length, _longest(centroids))
        self._shifted = max(self._shifted, _longest(shifted))
        self._lost = max(self._lost, lost)

    def best(self, rows: Tensor, count: int = 1) -> Tensor:
        """Returns the nearest ``count`` centroids of rows [n, D] as ``pack(score, id)``.

        int64 [n, count], nearest first, of equals the lowest id first; ``NOTHING`` if there are
        fewer centroids.
        """
        if not len(self.centroids):
            return torch.full((len(rows), count), NOTHING, device=rows.device)
        best = [rows.new_zeros((0, count), dtype=torch.int64)]
        for part in tiles(rows, self._rows_per_tile):
            row, centroid = self._candidates(part, count)
            best.append(_largest(self._packed(part, row, centroid), row, len(part), count))
        return torch.cat(best)

    def nearest(self, rows: Tensor) -> Tensor:
        """Returns the ids int64 [n] of the nearest centroids of rows [n, D], as ``best`` does.

        It is faster than ``best``: a row with one candidate is not scored. There must be at least
        one centroid, and at least one row and at most a tile (``choose_tile``); rows are finite.
        """
        row, centroid = self._candidates(rows, 1)
        # Every row has a candidate. If each has just one, the pairs are in the order of the rows.
        if len(row) == len(rows):
            return centroid + self.first_id
        nearest = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        nearest[row] = centroid + self.first_id  # rows with several candidates are set below
        several = torch.bincount(row, minlength=len(rows)) > 1
        open_ = torch.nonzero(several[row]).flatten()
        row, centroid = row[open_], centroid[open_]
        packed = self._packed(rows, row, centroid)
        nearest[row] = unpack(_largest(packed, row, len(rows), 1)[row, 0])[1]
        return nearest

    def _packed(self, rows: Tensor, row: Tensor, centroid: Tensor) -> Tensor:
        """Scores the pairs (row, centroid) [P]; returns ``pack(score, id)`` [P]. ``row`` must
        ascend."""
        scores = score_pairs(rows, self.centroids, row, centroid, self._scores)
        if self.half_squares is not None:
            scores -= self.half_squares[centroid]
        return pack(scores, centroid + self.first_id)

    def _candidates(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns row [P] and centroid [P] of all pairs that may be among the ``count`` nearest of
        their row, sorted by row."""
        coarse, error = self.bound_errors(rows)
        top = torch.full((len(rows), count), -torch.inf, device=rows.device)
        if len(self.coarse) <= FEW:  # then there are neither groups nor padding
            scores = multiply(coarse, self.coarse).float()
            threshold = self.find_threshold(_top(top, scores)[:, -1:], error)
            row, centroid = torch.nonzero(scores >= threshold).unbind(1)
            return row, centroid
        threshold, candidates = top[:, -1:], []
        step = self._columns_per_tile
        for first in range(0, len(self.coarse), step):
            scores = multiply(coarse, self.coarse[first : first + step])
            scores[:, max(len(self.centroids) - first, 0) :] = -torch.inf  # the padding
            # Columns form groups, and a group is searched only if its maximum is a candidate. The
            # columns of a group are not adjacent, so that one vector operation takes the maxima of
            # many groups at once.
            num_groups = 32 if scores.shape[1] < 512 else scores.shape[1] // 16
            scores = scores.view(len(rows), -1, num_groups)
            maxima = scores.amax(dim=1).float()
            # The maxima belong to different centroids. So the count-th largest of them is at most
            # the count-th best score.
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
        """Returns rows [n, D] cast to the type of the products, and a bound [n, 1] of the error of
        each row's products ([1, 1] if it is the same for all rows).

        The bound is for the error of the product, before its output is rounded, plus the error of
        the score from ``score_pairs``.
        """
        coarse = rows.to(self.coarse.dtype)
        if self._unit_rows:
            lengths = rows.new_full((1, 1), _UNIT)
        else:
            lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        error = lengths * self._lost
        if coarse.dtype != rows.dtype:  # casting changes a number by up to 2^-8 of it
            error = error + lengths * (self._shifted + self._lost) * 2.0**-8
        if self.rounding == "inputs":  # keeping 8 bits changes a number by up to 2^-7 of it
            error = error + lengths * self._shifted * 2.0**-6
        if self.rounding == "partial_sums":
            # There is at most one rounding per part, and one more. Each is by up to 2^-8 of the sum
            # so far.
            parts = -(-self.coarse.shape[1] // _LEAST_PART)
            growth = (1.0 + 2.0**-8) ** (parts + 1) - 1.0
            summed = lengths * (self._shifted + self._lost) + self._constant
            error = error + growth * (1.0 + 2.0**-6) * summed
        # The next two lines bound the rounding of float32 sums, in any order, in the product and in
        # the score, and that of subtracting the mean.
        rounding = 2.0 * (rows.shape[1] + 16) * 2.0**-24
        error = error + rounding * (lengths * (self._shifted + self._length) + 2.0 * self._constant)
        # Products may flush subnormal numbers to zero.
        error = error + 2.0**-110 * (lengths + self._shifted + 1.0)
        if self._extra:
            ones = torch.ones((len(rows), self._extra), dtype=coarse.dtype, device=rows.device)
            coarse = torch.cat([coarse, ones], dim=1)
        return coarse, error

    def find_threshold(self, bound: Tensor, error: Tensor) -> Tensor:
        """Returns the product [n, 1] below which a centroid is no candidate.

        ``bound`` [n, 1] is the count-th largest product of each row so far.
        """
        if self.coarse.dtype == torch.bfloat16:  # the output is rounded once more
            error = error + 2.0**-8 * bound.abs()
        # Twice the error, since one product may be too high and the other too low; 1/16 is for
        # second-order terms.
        return bound - (2.0 + 1 / 16) * error


def multiply(rows: Tensor, columns: Tensor) -> Tensor:
    """Returns [n, k], the dot products of all ``rows`` [n, D] and all ``columns`` [k, D]. Tests
    replace this function."""
    if len(columns) <= FEW:  # in the other order a BLAS takes 1.2 times as long
        return (columns @ rows.T).T
    return rows @ columns.T


def squared_distance(centroids: Tensor, rows: Tensor) -> Tensor:
    """Returns squared distances, float64 [n] on the CPU, of rows [n, D] to centroids [n, D] or [D].

    They are sums of squared differences: from products, equal rows would get a distance by
    rounding. A distance so small that rounding in float32 explains it is set to zero.
    """
    squared = sums_by_halves((rows - centroids).square_())
    same = squared <= SAME_ROW * sums_by_halves(rows.square())
    return squared.masked_fill(same, 0.0).double().cpu()


def half_squares(centroids: Tensor) -> Tensor:
    """Returns |c|^2 / 2 [k] of centroids [k, D]; each value depends on its centroid only."""
    parts = torch.split(centroids, ROWS_PER_PASS)
    halves = [sums_by_halves(part.square()) / 2.0 for part in parts]
    return torch.cat([centroids.new_zeros(0), *halves])


def sums_by_halves(x: Tensor) -> Tensor:
    """Returns the sum of each row of [n, D]; the order of additions depends on D only.

    That of ``torch.sum`` on a GPU depends on the number of rows, and, if D is not a multiple of 4,
    on where a row lies in memory.
    """
    missing = (1 << max(x.shape[1] - 1, 0).bit_length()) - x.shape[1]
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    while x.shape[1] > 1:
        left, right = x.chunk(2, dim=1)
        x = left + right
    return x.flatten()


def _padded(num_centroids: int) -> int:
    """Rounds a number of centroids up, so that groups of equal size divide the columns."""
    lanes = 1 if num_centroids <= FEW else 32 if num_centroids < 512 else 512
    return -(-num_centroids // lanes) * lanes


def _top(top: Tensor, more: Tensor) -> Tensor:
    """Returns the largest products of ``top`` [n, count] and ``more`` [n, m]: [n, count],
    descending."""
    if top.shape[1] == 1:
        return torch.maximum(top, more.amax(dim=1, keepdim=True))
    return torch.cat([top, more], dim=1).topk(top.shape[1], dim=1).values


def _longest(rows: Tensor) -> float:
    """The length of the longest row, rounded up."""
    return float(torch.linalg.vector_norm(rows, dim=1).max()) * (1.0 + 2.0**-16)


def score_pairs(
    rows: Tensor, centroids: Tensor, row: Tensor, centroid: Tensor, scores: Scores
) -> Tensor:
    """Returns the products float32 [P] of rows[row[p]] and centroids[centroid[p]]; ``row`` ascends.

    Each product depends only on its two vectors and on the routine ``scores``.
    """
    if scores == "blocks":  # copies both vectors of every pair of a block
        size = 65_536
        parts = zip(torch.split(row, size), torch.split(centroid, size), strict=True)
        products = [sums_by_halves(rows[r] * centroids[c]) for r, c in parts]
        return torch.cat([rows.new_zeros(0), *products])
    starts = starts_of(torch.bincount(row, minlength=len(rows)))
    return pair_products(rows, centroids, starts, centroid)


def _largest(packed: Tensor, row: Tensor, num_rows: int, count: int) -> Tensor:
    """Returns the ``count`` largest ``packed`` numbers [P] of each row: [num_rows, count],
    descending. ``row`` [P] says to which row each belongs."""
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
