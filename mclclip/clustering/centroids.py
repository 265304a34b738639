"""The centroids that each rank holds; how all rows are compared with all of them, and assigned.

``WholeCentroids``: every rank holds all centroids and compares them with its own rows, and sums
[K, D] are added up over the ranks. ``ShardedCentroids``: each rank holds a contiguous range of the
centroids with their sums and counts, and rows travel instead. In each round every rank sends one of
its blocks to all, each rank finds the nearest of its own centroids, and the largest of one packed
int64 per row decides (ties go to the lowest id). Both add up the same integers, so their results
are equal bit for bit. With sharded centroids every rank still holds vectors [K], with 8 bytes per
centroid.

``assign_blocks`` finds the nearest centroids of all rows and passes them on block by block: the
labels of all N rows are never in memory together. One rank finds those of a block and sends them to
all ranks, so every rank sees all blocks in the order of the rows, and whatever is computed from
them is the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mclclip.clustering.arithmetic import CHOSEN, Arithmetic, choose_tile
from mclclip.clustering.nearest import (
    NOTHING,
    ROWS_PER_PASS,
    Search,
    pack,
    squared_distance,
    sums_by_halves,
    unpack,
)
from mclclip.clustering.options import Algorithm
from mclclip.clustering.rows import (
    Integers,
    Mask,
    RankRows,
    num_not_finite,
    tiles,
)
from mclclip.data.arrays import Floats
from mclclip.ranks.process_group import SINGLE, Context

SHARDED_FROM = 2**25  # numbers in all centroids: whole, they and their sums take about a GiB


def passes(num_clusters: int) -> list[range]:
    """The ids of all centroids in passes, which are handled at once. A rank holds whole passes, so
    operations on centroids have the same shapes for any number of ranks.
    """
    size = min(ROWS_PER_PASS, -(-num_clusters // 16))
    ids = range(num_clusters)
    return [ids[first : first + size] for first in ids[::size]]


def held_by(rank: int, world_size: int, num_clusters: int) -> range:
    """The ids that a rank holds where centroids are sharded: whole passes, shared out evenly."""
    cut = passes(num_clusters)
    first, stop = (len(cut) * r // world_size for r in (rank, rank + 1))
    return range(cut[first].start, cut[stop - 1].stop) if first < stop else range(0)


def hold(rows: RankRows, num_clusters: int, sharded: bool | None) -> WholeCentroids:
    """The holder of K centroids for ``rows``. ``sharded`` None: sharded if there are several ranks
    and K D is at least ``SHARDED_FROM``.
    """
    if sharded is None:
        sharded = rows.context.world_size > 1 and num_clusters * rows.dim >= SHARDED_FROM
    return (ShardedCentroids if sharded else WholeCentroids)(rows, num_clusters)


class WholeCentroids:
    """Every rank holds all centroids and compares its own rows with them.

    ``held``: the ids of the centroids that this rank holds. Tensors [k, D] of centroids, in the
    methods here, have one row for each of these ids.
    """

    def __init__(self, rows: RankRows, num_clusters: int) -> None:
        self.rows, self.num_clusters = rows, num_clusters
        self.held = range(num_clusters)
        self._rows_per_tile = choose_tile(rows.context.device, num_clusters, rows.arithmetic)[0]
        self._labels: dict[int, Tensor] = {}  # of own blocks, from the last sums
        self._sums: tuple[Tensor, Tensor] | None = None  # of own blocks, by those labels

    # --- passes of all rows ---

    def sums(self, centroids: Tensor) -> tuple[Tensor, Tensor]:
        """(int64 [k, D], int64 [k]): sums in fixed point and counts of the rows nearest to each.

        Rows that are where they were at the last call are summed already: only the others move.
        The next call may change the sums of this one.
        """
        search = self._search(centroids)
        totals = self._sums or _nothing(centroids)

        def move_run(run: tuple[tuple[Tensor, Tensor], list[int]]) -> None:
            (sums, counts), numbers = run
            for some in self.rows.merge_blocks(numbers, self._rows_per_tile):
                labels = self._move(some, search, sums, counts)
                self._labels.update(zip(some, labels, strict=True))

        runs = self.rows.runs()
        parts = [totals, *(_nothing(centroids) for _ in runs[1:])]
        self.rows.each(move_run, list(zip(parts, runs, strict=False)))
        for more_sums, more_counts in parts[1:]:
            totals[0].add_(more_sums)
            totals[1].add_(more_counts)
        self._sums = totals
        return self.rows.total(totals[0]), self.rows.total(totals[1].clone())

    def _move(
        self, numbers: list[int], search: Search, sums: Tensor, counts: Tensor
    ) -> Sequence[Tensor]:
        """Moves the rows of some blocks whose nearest centroid is another one than before from sum
        to sum; returns the labels [n] of each block.
        """
        blocks = [self.rows.block(number) for number in numbers]
        rows = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        last_labels = [self._labels[number] for number in numbers if number in self._labels]
        before = torch.cat(last_labels) if last_labels else None
        labels = [torch.zeros(0, dtype=torch.int64, device=rows.device)]
        for first in range(0, len(rows), self._rows_per_tile):
            some = slice(first, first + self._rows_per_tile)
            labels.append(search.nearest(rows[some]))
            if before is None:
                self.rows.add(sums, counts, labels[-1], rows[some])
            else:
                self.rows.move(sums, counts, before[some], labels[-1], rows[some])
        return torch.split(torch.cat(labels), [len(block) for block in blocks])

    def farthest(self, centroids: Tensor) -> Tensor:
        """int64 [k], packed: of the rows that the last ``sums`` assigned to each centroid, the
        largest squared distance, and the lowest number of a row that has it.
        """

        def distances(number: int) -> Tensor:
            nearest = centroids[self._labels[number]]
            return self._distances(nearest, self.rows.block(number), self.rows.ids(number))

        largest = torch.full((len(centroids),), NOTHING, device=centroids.device)
        numbers = self.rows.local_blocks
        for number, packed in zip(numbers, self.rows.each(distances, numbers), strict=True):
            largest.scatter_reduce_(0, self._labels[number], packed, "amax")
        return self.rows.largest(largest)

    def nearest(self, centroids: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields for each own block its number, its rows [n, D], and packed int64 [n, count]: the
        scores and ids of the nearest ``count`` of all centroids.
        """
        search, step = self._search(centroids), self.rows.num_threads

        def search_block(number: int) -> tuple[int, Tensor, Tensor]:
            block = self.rows.block(number)
            return number, block, search.best(block, count)

        for first in range(0, len(self.rows.local_blocks), step):
            yield from self.rows.each(search_block, self.rows.local_blocks[first : first + step])

    def send_to_all(self, local: Tensor) -> Tensor:
        """Sends [n, ...], made of one of this rank's blocks, to all ranks: returns [W, m, ...] in
        rank order, padded to m, the most rows of any block. A rank without a block gives n = 0.
        """
        most = int(np.diff(self.rows.starts).max())
        padded = local.new_zeros((most, *local.shape[1:]))
        padded[: len(local)] = local
        return self.rows.of_all(padded)

    # --- over centroids ---

    def take(self, ids: Integers) -> Tensor:
        """The first centroids [k, D] that this rank holds: the rows with the ascending numbers
        ``ids`` [K] are the first centroids of all clusters.
        """
        taken = torch.empty((len(self.held), self.rows.dim), device=self.rows.context.device)
        for some in passes(self.num_clusters):
            gathered = self.rows.gather(ids[some.start : some.stop])
            if some.start in self.held:
                taken[some.start - self.held.start : some.stop - self.held.start] = gathered
        return taken

    def passes(self) -> list[slice]:
        """The passes of the centroids that this rank holds, as slices of its tensors."""
        start = self.held.start
        held = [some for some in passes(self.num_clusters) if some.start in self.held]
        return [slice(some.start - start, some.stop - start) for some in held]

    def everywhere(self, x: Tensor) -> Tensor:
        """Numbers [K] of all centroids, on every rank's CPU, from each rank's [k]."""
        return self.rows.of_first_rank(x).cpu()

    def agreed(self, centroids: Tensor) -> Tensor:
        """Centroids that are equal on all ranks. Where several ranks have computed them, rank 0's
        are taken, as unlike machines may compute other last bits.
        """
        return self.rows.of_first_rank(centroids)

    # --- details ---

    def _search(self, centroids: Tensor) -> Search:
        rows = self.rows
        unit = rows.algorithm == "spherical"
        return Search(centroids, rows.algorithm, self.held.start, rows.arithmetic, unit_rows=unit)

    def _distances(self, nearest: Tensor, rows: Tensor, ids: Integers) -> Tensor:
        distances = squared_distance(nearest, rows).float().to(rows.device)
        return pack(distances, torch.from_numpy(ids).to(rows.device))


class ShardedCentroids(WholeCentroids):
    """Each rank holds the ids ``held_by`` and sees all rows, one block of every rank at a time."""

    def __init__(self, rows: RankRows, num_clusters: int) -> None:
        super().__init__(rows, num_clusters)
        self.held = held_by(rows.context.rank, rows.context.world_size, num_clusters)

    def sums(self, centroids: Tensor) -> tuple[Tensor, Tensor]:
        """See WholeCentroids; of this rank's centroids."""
        search = self._search(centroids)
        sums, counts = _nothing(centroids)
        for numbers, blocks in self._rounds():
            best = torch.cat(self.rows.each(search.best, blocks))[:, 0]
            labels = unpack(self.rows.largest(best))[1]
            parts = torch.split(labels, [len(block) for block in blocks])
            for number, block, some in zip(numbers, blocks, parts, strict=True):
                if number % self.rows.context.world_size == self.rows.context.rank:
                    self._labels[number] = some
                here = torch.nonzero(self._here(some)).flatten()
                for ids in tiles(here, self._rows_per_tile):
                    self.rows.add(sums, counts, some[ids] - self.held.start, block[ids])
        return sums, counts

    def farthest(self, centroids: Tensor) -> Tensor:
        """See WholeCentroids; of this rank's centroids."""
        largest = torch.full((len(centroids),), NOTHING, device=centroids.device)
        none = torch.zeros(0, dtype=torch.int64, device=centroids.device)
        for numbers, blocks in self._rounds():
            labels = self.send_to_all(self._labels.get(numbers[0] + self.rows.context.rank, none))
            for number, block, some in zip(numbers, blocks, labels, strict=False):
                here = self._here(some[: len(block)])
                places = some[: len(block)][here] - self.held.start
                ids = self.rows.ids(number)[here.cpu().numpy()]
                packed = self._distances(centroids[places], block[here], ids)
                largest.scatter_reduce_(0, places, packed, "amax")
        return largest

    def nearest(self, centroids: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See WholeCentroids; the best of those that all ranks find among their centroids."""
        search, rank = self._search(centroids), self.rows.context.rank
        for numbers, blocks in self._rounds():
            best = self.rows.each(lambda block: search.best(block, count), blocks)
            every = self.rows.of_all(torch.cat(best)).movedim(0, 1).flatten(1)
            merged = every.sort(dim=1, descending=True).values[:, :count]
            parts = torch.split(merged, [len(block) for block in blocks])
            if rank < len(numbers):
                yield numbers[rank], blocks[rank], parts[rank]

    def everywhere(self, x: Tensor) -> Tensor:
        """See WholeCentroids; each rank fills in its range of ids."""
        every = torch.zeros(self.num_clusters, dtype=x.dtype, device=x.device)
        every[self.held.start : self.held.stop] = x
        return self.rows.total(every).cpu()

    def agreed(self, centroids: Tensor) -> Tensor:
        """See WholeCentroids; here no two ranks compute the same centroid."""
        return centroids

    def _here(self, labels: Tensor) -> Tensor:
        """bool [n]: whether a row's nearest centroid is one of this rank's."""
        return (labels >= self.held.start) & (labels < self.held.stop)

    def _rounds(self) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Yields, round by round, the numbers and rows of one block of every rank, in rank order;
        the last round may have fewer.
        """
        every, world_size = list(range(len(self.rows.blocks))), self.rows.context.world_size
        for first in every[::world_size]:
            numbers, mine = every[first : first + world_size], first + self.rows.context.rank
            none = torch.zeros((0, self.rows.dim), device=self.rows.context.device)
            sent = self.send_to_all(self.rows.block(mine) if mine in numbers else none)
            sizes = [len(self.rows.ids(number)) for number in numbers]
            yield numbers, [rows[:size] for rows, size in zip(sent, sizes, strict=False)]


def _nothing(centroids: Tensor) -> tuple[Tensor, Tensor]:
    sums = torch.zeros_like(centroids, dtype=torch.int64)
    return sums, torch.zeros(len(centroids), dtype=torch.int64, device=centroids.device)


# --- the nearest centroids of all rows ---


@dataclass(frozen=True)
class Assignment:
    """The L nearest centroids of n rows, nearest first, ties to the lowest id, on the CPU.

    ``labels`` int32 [n, L], -1 where the row is not valid; ``distances`` float32 [n, L]: 1 - cosine
    (spherical) or the squared distance, 0 where the row is not valid.
    """

    labels: Tensor
    distances: Tensor


Block = tuple[slice, Assignment]  # the row numbers of a block, and its assignment


def assign_blocks(
    blocks: Sequence[Floats],
    centroids: Tensor,
    *,
    algorithm: Algorithm = "spherical",
    labels_per_sample: int = 1,
    held: range | None = None,
    valid: Mask | None = None,
    context: Context = SINGLE,
    arithmetic: Arithmetic = CHOSEN,
) -> Iterator[Block]:
    """Yields the nearest ``labels_per_sample`` centroids of the rows of each block, in order, on
    every rank. The ranks work together, so each of them has to go through all blocks.

    ``centroids`` [K, D] are all of them, or those with the ids ``held`` (``Clustering``) where
    they are sharded. What ``arithmetic`` leaves open is chosen for the device. A rank's memory
    holds as many blocks as there are ranks, whatever their number. Raises ValueError for more
    labels than centroids and for another width than the rows', and, after the last block, for NaN
    or infinite rows: on all ranks alike.
    """
    rows = RankRows(blocks, valid, algorithm, context, 0, arithmetic)
    if centroids.ndim != 2 or centroids.shape[1] != rows.dim:
        raise ValueError(f"centroids are {list(centroids.shape)}: wanted [K, {rows.dim}]")
    stop = len(centroids) if held is None else held.stop
    num_clusters = int(rows.largest(torch.tensor(stop)))
    if not 1 <= labels_per_sample <= num_clusters:
        raise ValueError(
            f"labels_per_sample is {labels_per_sample}: wanted 1 to {num_clusters:,}, the number "
            "of centroids"
        )
    # Summed over ranks, so that all agree even where one rank happens to hold all centroids.
    shards = int(rows.total(torch.tensor(int(held is not None and len(held) < num_clusters))))
    holder = hold(rows, num_clusters, sharded=shards > 0)
    return _in_order(holder, centroids, labels_per_sample)


class Tally:
    """Counts of clusters and the sum of distances, added up while blocks go by."""

    def __init__(self, num_clusters: int) -> None:
        self.counts = torch.zeros(num_clusters, dtype=torch.int64)
        self._distances = 0.0

    def of(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yields the same blocks, and counts each as it goes by."""
        for some, near in blocks:
            labels = near.labels[:, 0][near.labels[:, 0] >= 0].long()
            self.counts.index_add_(0, labels, torch.ones_like(labels))
            self._distances += float(near.distances[:, 0].double().sum())
            yield some, near

    @property
    def inertia(self) -> float:
        """The sum of the distances, which rounding may not take below zero."""
        return max(self._distances, 0.0)


def _in_order(holder: WholeCentroids, centroids: Tensor, count: int) -> Iterator[Block]:
    """Yields all blocks in order. In each round every rank finds the nearest centroids of one of
    its blocks and sends them to all ranks.
    """
    rows, num_blocks, bad = holder.rows, len(holder.rows.blocks), 0
    with rows.torch_settings():
        results = holder.nearest(rows.to_device(centroids), count)
        for first in range(0, num_blocks, rows.context.world_size):
            packed = torch.zeros((0, count), dtype=torch.int64, device=rows.context.device)
            # In the last round a rank may have no block, but other ranks may need its centroids.
            if (result := next(results, None)) is not None:
                _, block, by_score = result
                scores, nearest = unpack(by_score)
                packed = pack(_distances(block, scores, rows.algorithm), nearest)
                bad += num_not_finite(block)
            sent = holder.send_to_all(packed).cpu()
            for number, some in zip(range(first, num_blocks), sent, strict=False):
                yield slice(*rows.starts[number : number + 2]), assign_block(rows, number, some)
        rows.refuse_not_finite(bad)


def assign_block(rows: RankRows, number: int, packed: Tensor) -> Assignment:
    """The assignment of all rows of a block. ``packed`` [m, L] begins with the distances and ids of
    its valid rows.
    """
    first, stop = rows.starts[number : number + 2]
    valid = torch.from_numpy(rows.ids(number) - first)
    distances, nearest = unpack(packed[: len(valid)])
    shape = stop - first, packed.shape[1]
    near = Assignment(torch.full(shape, -1, dtype=torch.int32), torch.zeros(shape))
    near.labels[valid] = nearest.int()
    near.distances[valid] = distances
    return near


def _distances(block: Tensor, scores: Tensor, algorithm: Algorithm) -> Tensor:
    """Distances [n, L] from scores: 1 - x.c, or |x|^2 - 2 (x.c - |c|^2 / 2)."""
    if algorithm == "spherical":
        return 1.0 - scores
    return (sums_by_halves(block.square())[:, None] - 2.0 * scores).clamp_min(0.0)
