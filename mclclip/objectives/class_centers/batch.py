"""A batch beside the classes of one rank: pairs, negatives, tiles of their scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from mclclip.objectives.class_centers.margins import Margin
from mclclip.objectives.class_centers.rows import ShardedClassCenters
from mclclip.pair_products import pair_products
from mclclip.ranks.transfer import to_device


class ClassBatch:
    """The pairs, negatives and tiles that join a batch to the classes of this rank.

    All of it follows from ``labels`` [B, l], which are in main memory: what is sorted and counted
    is so there, and only results go to the device, where lengths that depend on values would make
    the host wait. ``touched_here`` is ``touched`` in main memory.
    """

    def __init__(
        self,
        centers: ShardedClassCenters,
        labels: Tensor,
        scale: float,
        margin: Margin,
        tile: int,
    ) -> None:
        self.centers, self.scale, self.margin, self.tile = centers, scale, margin, tile
        self.shape = labels.shape
        self.counted = self._moved((labels >= 0).any(dim=1))
        self.num_positives = self._moved((labels >= 0).sum().clamp_min(1))
        self.negatives = centers.negatives(labels)
        self._find_pairs(labels)
        self.figures: dict[str, Tensor] = {}

    def _moved(self, tensor: Tensor) -> Tensor:
        moved: Tensor = to_device(tensor, self.centers.rows.device)
        return moved

    def _find_pairs(self, labels: Tensor) -> None:
        """The (row, positive) of this rank, by row, and the order in which they are by class."""
        own = (labels >= self.centers.start) & (labels < self.centers.stop)
        row, positives = own.nonzero()[:, 0], labels[own] - self.centers.start
        self.own, self.row, self.positives = map(self._moved, (own, row, positives))
        self.row_starts = self._moved(starts_of(own.sum(dim=1)))
        self.by_class = self._moved(positives.argsort(stable=True))
        self._find_touched(row, positives)

    def _find_touched(self, row: Tensor, positives: Tensor) -> None:
        """The classes that take part, and where negatives and positives are among them."""
        rows = self.centers.rows
        uses = torch.bincount(positives, minlength=len(rows))
        takes_part = uses > 0
        takes_part[self.negatives] = True
        self.touched_here = takes_part.nonzero()[:, 0]
        place = takes_part.cumsum(0) - 1
        of_negatives, of_positives = place[self.negatives], place[positives]
        self.touched, self.uses = map(self._moved, (self.touched_here, uses[self.touched_here]))
        self.of_negatives, self.of_positives = map(self._moved, (of_negatives, of_positives))
        starts = starts_of(self._moved(takes_part))
        squares = pair_products(rows, rows, starts, self.touched)
        self.inverse = squares.sqrt_().clamp_min_(1e-12).reciprocal_()
        column = _inverse(of_negatives, len(self.touched_here))[of_positives]
        drawn = column >= 0
        self._find_collisions(row[drawn], column[drawn])

    def _find_collisions(self, row: Tensor, column: Tensor) -> None:
        """Places where a row's own positive was drawn, in the order of the tiles."""
        per_column = -(-self.shape[0] // self.tile)
        number = column // self.tile * per_column + row // self.tile
        order = number.argsort(stable=True)
        in_tiles = row[order] % self.tile, column[order] % self.tile
        self._in_tiles = tuple(map(self._moved, in_tiles))
        num_tiles = per_column * -(-len(self.negatives) // self.tile)
        counts = torch.bincount(number, minlength=num_tiles)
        self._ends = [0, *counts.cumsum(0).tolist()]

    def negative_blocks(self) -> Iterator[tuple[Tensor, Tensor, list[tuple[slice, int]]]]:
        """(unit class centers [m, D], their places [m], [(rows, tile number)])."""
        rows = [slice(first, first + self.tile) for first in range(0, self.shape[0], self.tile)]
        for block, first in enumerate(range(0, len(self.negatives), self.tile)):
            places = self.of_negatives[first : first + self.tile]
            tiles = [(r, block * len(rows) + i) for i, r in enumerate(rows)]
            yield self._unit(places), places, tiles

    def scores(self, scaled: Tensor, centers: Tensor, number: int, memory: Tensor) -> Tensor:
        """[r, m]: scores of a tile, -inf for a row's own positives; valid until the next call."""
        shape = (len(scaled), len(centers))
        out = torch.mm(scaled, centers.T, out=memory[: shape[0] * shape[1]].view(shape))
        first, stop = self._ends[number], self._ends[number + 1]
        if first < stop:
            row, column = (index[first:stop] for index in self._in_tiles)
            out[row, column] = float("-inf")
        return out

    def _unit(self, places: Tensor) -> Tensor:
        """Unit class centers at these places of the touched ones."""
        return self.centers.rows.index_select(0, self.touched[places]).mul_(
            self.inverse[places, None]
        )

    def memory(self, like: Tensor) -> Tensor:
        """Room for a tile."""
        return like.new_empty(min(self.tile, self.shape[0]) * min(self.tile, len(self.negatives)))


def starts_of(counts: Tensor) -> Tensor:
    """[n + 1]: where each of n runs of these lengths starts, and where the last one ends."""
    return functional.pad(counts.cumsum(0), (1, 0))


def _inverse(places: Tensor, size: int) -> Tensor:
    """[size]: i at ``places[i]``, -1 elsewhere."""
    found = places.new_full((size,), -1)
    found[places] = torch.arange(len(places), device=places.device)
    return found


def weighted_sums(table: Tensor, ids: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Row i: the sum of ``weights[p] * table[ids[p]]`` over p from starts[i] to starts[i + 1].

    Rows are read where they are, too, and always added in the same order.
    """
    return functional.embedding_bag(
        ids, table, starts, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
