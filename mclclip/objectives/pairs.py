"""Which columns of a similarity matrix count for which row: its own pair, negatives, near copies.

The matrix is computed in tiles, never whole (`row_losses`), and so is the mask. Near copies are
found by one more matrix product for each embedding that is compared. Between captions they are
kept, a byte for each pair, for the other direction, other widths and the backward pass, unless
there are more than 2^28 pairs; elsewhere they are found again in every tile.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from mclclip.ranks import collectives
from mclclip.ranks.process_group import choose_no_autocast

TILE = 2048  # rows and columns
MOST_KEPT = 2**28  # pairs
Columns = Literal["negatives", "near", "others"]


@dataclass(frozen=True)
class Pairs:
    """Says which columns of a similarity matrix count for which row: its own pair, its negatives.

    Rows are this rank's samples, columns those of all ranks. The own pair of row i is column
    ``first`` + i. A column is a negative of a row if both have the same group, and they are no near
    copies: they have neither the same sample id nor an equal digest (of a caption or a picture),
    and no cosine of their embeddings of stage 0 is above the row's bound.

    groups, sample_id            int64 [b], of the rows
    all_groups, all_sample_ids   int64 [B], of the columns
    classes, all_classes         the same of their classes, for losses that read them
    digests, all_digests         the same of their digests, if near copies are told by these
    base, all_base               unit embeddings of stage 0, [b, D] each, and those of the columns
                                 that they are compared with, [B, D], if near copies are told by
                                 cosines
    bounds                       [b], of the rows: a column with a larger cosine is a near copy
    tile                         how many rows and columns are computed at a time
    columns                      what a row counts: its ``negatives``; or, without its own pair, the
                                 columns of its group that are ``near`` copies of it; or all
                                 ``others`` of its group
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
    base: tuple[Tensor, ...] = ()
    all_base: tuple[Tensor, ...] = ()
    bounds: Tensor | None = None
    columns: Columns = "negatives"
    _near: dict[tuple[int, int], Tensor] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def over_ranks(cls, groups: Tensor, sample_id: Tensor, tile: int) -> Pairs:
        """Returns this rank's rows among the columns of all ranks. A collective."""
        return cls(
            groups,
            sample_id,
            collectives.gather(groups),
            collectives.gather(sample_id),
            collectives.rank() * len(groups),
            tile,
        )

    def among_views(self, num_views: int, own_view: int) -> Pairs:
        """Returns the same rows among the columns of several views, [num_views * B]; the own pair
        is in the view ``own_view``."""
        first = self.first + own_view * len(self.all_groups)
        return self._with_columns(lambda every: torch.cat([every] * num_views), first)

    def keeping_near(self) -> Pairs:
        """Returns the same, which finds the near copies of each tile once, and keeps them."""
        many = len(self.groups) * len(self.all_groups) > MOST_KEPT
        return replace(self, _near=None if many else {})

    def chunk(self, columns: slice) -> Pairs:
        """Returns the same rows among some of the columns."""
        return self._with_columns(lambda every: every[columns], self.first - columns.start)

    def _with_columns(self, change: Callable[[Tensor], Tensor], first: int) -> Pairs:
        """Returns the same rows, with every tensor of the columns changed."""
        return replace(
            self,
            all_groups=change(self.all_groups),
            all_sample_ids=change(self.all_sample_ids),
            all_classes=None if self.all_classes is None else change(self.all_classes),
            all_digests=tuple(map(change, self.all_digests)),
            all_base=tuple(map(change, self.all_base)),
            first=first,
            _near=None,
        )

    def positive_keys(self, keys: Tensor) -> Tensor:
        """Returns the keys of the rows' own pairs, [b, D], out of the columns' keys [B, D]."""
        return keys[self.first : self.first + len(self.groups)]

    def positive_logits(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns the logits of the rows' own pairs, [b]."""
        return (queries * self.positive_keys(keys)).sum(dim=1)

    def positives_of_class(self) -> Pairs:
        """Returns pairs that count the columns of a row's group and class, but for its own sample
        and its near copies. A class below 0 is none: such rows and columns count nothing."""
        assert self.classes is not None and self.all_classes is not None
        num = self.all_classes.max() + 1
        return replace(
            self,
            groups=torch.where(self.classes < 0, -1, self.groups * num + self.classes),
            all_groups=torch.where(
                self.all_classes < 0, -2, self.all_groups * num + self.all_classes
            ),
        )

    def masked(self, rows: slice, columns: slice) -> Tensor:
        """Returns bool [r, c] of a tile: True where the row does not count the column."""
        excluded = self.groups[rows, None] != self.all_groups[columns]
        if self.columns != "others":
            near = self.sample_id[rows, None] == self.all_sample_ids[columns]
            for of_rows, of_columns in zip(self.digests, self.all_digests, strict=True):
                near |= of_rows[rows, None] == of_columns[columns]
            if self.bounds is not None:
                near |= self._above(rows, columns, self.bounds)
            excluded |= near if self.columns == "negatives" else near.logical_not_()
        if self.columns != "negatives":  # of which the own pair, of one sample, is none
            excluded.diagonal(rows.start + self.first - columns.start).fill_(True)
        return excluded

    def weights(self, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """Returns the weights [r, c] of a tile's columns: 0 where the row does not count it, else
        1; of near copies that are told by cosines, the largest of these, within [0, 1]."""
        counted = (~self.masked(rows, columns)).to(dtype)
        if self.columns == "near" and self.bounds is not None:
            same = self.sample_id[rows, None] == self.all_sample_ids[columns]
            counted *= self._cosines(rows, columns).clamp_(0.0, 1.0).masked_fill_(same, 1.0)
        return counted

    def _above(self, rows: slice, columns: slice, bounds: Tensor) -> Tensor:
        """Returns bool [r, c] of a tile: its largest cosine is above the row's bound."""
        tile = rows.start, columns.start
        if self._near is not None and tile in self._near:
            return self._near[tile]
        above = self._cosines(rows, columns) > bounds[rows, None]
        if self._near is not None:
            self._near[tile] = above
        return above

    def _cosines(self, rows: slice, columns: slice) -> Tensor:
        """Returns the largest cosines of the embeddings of a tile's rows and columns, [r, c]."""
        with choose_no_autocast(self.groups.device):
            every = [
                of_rows[rows] @ of_columns[columns].T
                for of_rows, of_columns in zip(self.base, self.all_base, strict=True)
            ]
        return functools.reduce(torch.maximum, every)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yields the rows and columns of each tile, row by row."""
        every = blocks(len(self.all_groups), self.tile)
        return itertools.product(blocks(len(self.groups), self.tile), every)


def blocks(length: int, size: int) -> list[slice]:
    """Returns slices of at most ``size`` numbers that together cover ``range(length)``."""
    return [slice(first, first + size) for first in range(0, length, size)]
