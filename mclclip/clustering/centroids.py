"""Divides the centroids among ranks, compares all rows with all centroids, and assigns the rows.

``WholeCentroids``: every rank holds all centroids and compares its rows with them; sums [K, D] are
added up over the ranks. ``ShardedCentroids``: each rank holds a contiguous range of the centroids
with their sums and counts, and rows are sent instead. In each round every rank sends one of its
blocks to all ranks, each rank finds the nearest of the centroids that it holds, and the maximum
over ranks of one packed int64 per row decides (ties go to the lowest id). Both ways add up the same
integers, so their results are equal bit for bit. With sharded centroids every rank still holds some
vectors [K], of 8 bytes per centroid.

``assign_blocks`` finds the nearest centroids of all rows and yields them block by block, since the
labels of all N rows may not fit into memory. One rank finds those of a block and sends them to all
ranks. So every rank sees all blocks in the order of the rows, and whatever is computed from them is
the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mclclip.clustering.arithmetic import choose_tile
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
from mclclip.clustering.rows import Integers, RankRows, num_not_finite, tiles

SHARDED_FROM = 2**25  # K D from which centroids are sharded: with their sums they take about a GiB


def passes(num_clusters: int) -> list[range]:
    """Cuts the ids of all centroids into passes; the centroids of a pass are handled at once.

    A rank holds whole passes, so operations on centroids have the same shapes for any number of
    ranks.
    """
    size = min(ROWS_PER_PASS, -(-num_clusters // 16))
    ids = range(num_clusters)
    return [ids[first : first + size] for first in ids[::size]]


def held_by(rank: int, world_size: int, num_clusters: int) -> range:
    """The ids of the centroids that a rank holds if they are sharded: whole passes, as many for
    each rank as possible."""
    cut = passes(num_clusters)
    first, stop = (len(cut) * r // world_size for r in (rank, rank + 1))
    return range(cut[first].start, cut[stop - 1].stop) if first < stop else range(0)


def hold(rows: RankRows, num_clusters: int, sharded: bool | None) -> WholeCentroids:
    """Returns the holder of K centroids for ``rows``: sharded or whole.

    ``sharded`` None: sharded if there are several ranks and K D is at least ``SHARDED_FROM``.
    """
    if sharded is None:
        sharded = rows.context.world_size > 1 and num_clusters * rows.dim >= SHARDED_FROM
    return (ShardedCentroids if sharded else WholeCentroids)(rows, num_clusters)


class WholeCentroids:
    """Every rank holds all centroids and compares its own rows with them.

    ``held`` is the range of the ids that this rank holds: here all. In the methods below, tensors
    [k, ...] have one row for each of these ids.
    """

    def __init__(self, rows: RankRows, num_clusters: int) -> None:
        self.rows, self.num_clusters = rows, num_clusters
        self.held = range(num_clusters)
        self._rows_per_tile = choose_tile(rows.context.device, num_clusters, rows.arithmetic)[0]
        # Of this rank's blocks: their labels at the last ``sums`` by block number, and the sums
        # [K, D] and counts [K] by these labels.
        self._labels: dict[int, Tensor] = {}
        self._sums: tuple[Tensor, Tensor] | None = None

    # --- passes of all rows ---

    def sums(self, centroids: Tensor) -> tuple[Tensor, Tensor]:
        """Assigns all rows; returns sums int64 [k, D] (see ``RankRows``) and counts int64 [k] of
        the rows that are nearest to each centroid.

        Only rows whose nearest centroid has changed since the last call are moved from sum to sum.
        The returned tensors may change at the next call.
        """
        search = self._search(centroids)
        totals = self._sums or _nothing(centroids)

        def move_run(run: tuple[tuple[Tensor, Tensor], list[int]]) -> None:
            (sums, counts), numbers = run
            for some in self.rows.merge_blocks(numbers, self._rows_per_tile):
                labels = self._move(some, search, sums, counts)
                self._labels.update(zip(some, labels, strict=True))

        # The numbers of this rank's blocks, a list for each thread that has some.
        numbers, threads = self.rows.local_blocks, range(self.rows.num_threads)
        runs = [run for first in threads if (run := numbers[first :: len(threads)])]
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
        """Assigns the rows of some blocks, and updates ``sums`` and ``counts`` for those whose
        nearest centroid has changed; returns the labels [n] of each block.
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
        """For each held centroid: its farthest row among those last assigned by ``sums``, as
        ``pack(squared distance, row number)``; int64 [k]. Ties take the lowest number.
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
        """Yields for each block of this rank its number, its rows [n, D], and the nearest ``count``
        of all centroids as ``pack(score, id)``; int64 [n, count].
        """
        search, step = self._search(centroids), self.rows.num_threads

        def search_block(number: int) -> tuple[int, Tensor, Tensor]:
            block = self.rows.block(number)
            return number, block, search.best(block, count)

        for first in range(0, len(self.rows.local_blocks), step):
            yield from self.rows.each(search_block, self.rows.local_blocks[first : first + step])

    def send_to_all(self, local: Tensor) -> Tensor:
        """Sends a tensor [n, ...], such as the rows of a block, from every rank to all W ranks.

        Returns [W, m, ...] in rank order, padded with zeros to m, the number of rows of the largest
        block. A rank that has nothing to send passes n = 0.
        """
        most = int(np.diff(self.rows.starts).max())
        padded = local.new_zeros((most, *local.shape[1:]))
        padded[: len(local)] = local
        return self.rows.of_all(padded)

    # --- over centroids ---

    def take(self, ids: Integers) -> Tensor:
        """The first centroids [k, D]: row ``ids[n]`` becomes centroid n; ``ids`` [K] ascend."""
        taken = torch.empty((len(self.held), self.rows.dim), device=self.rows.context.device)
        for some in passes(self.num_clusters):
            gathered = self.rows.gather(ids[some.start : some.stop])
            if some.start in self.held:
                taken[some.start - self.held.start : some.stop - self.held.start] = gathered
        return taken

    def passes(self) -> list[slice]:
        """The passes that this rank holds, as slices of its tensors [k, ...]."""
        start = self.held.start
        held = [some for some in passes(self.num_clusters) if some.start in self.held]
        return [slice(some.start - start, some.stop - start) for some in held]

    def everywhere(self, x: Tensor) -> Tensor:
        """Joins a value per held centroid [k] from every rank to [K], on every rank's CPU."""
        return self.rows.of_first_rank(x).cpu()

    def agreed(self, centroids: Tensor) -> Tensor:
        """Makes centroids that several ranks have computed equal on all: takes rank 0's, since
        unlike machines may compute other last bits.
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
    """Each rank holds a part of the centroids (``held_by``) and sees all rows, one block of every
    rank at a time."""

    def __init__(self, rows: RankRows, num_clusters: int) -> None:
        super().__init__(rows, num_clusters)
        self.held = held_by(rows.context.rank, rows.context.world_size, num_clusters)

    def sums(self, centroids: Tensor) -> tuple[Tensor, Tensor]:
        """As in WholeCentroids, for the centroids of this rank."""
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
        """As in WholeCentroids, for the centroids of this rank."""
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
        """As in WholeCentroids: the best of what every rank finds among its centroids."""
        search, rank = self._search(centroids), self.rows.context.rank
        for numbers, blocks in self._rounds():
            best = self.rows.each(lambda block: search.best(block, count), blocks)
            every = self.rows.of_all(torch.cat(best)).movedim(0, 1).flatten(1)
            merged = every.sort(dim=1, descending=True).values[:, :count]
            parts = torch.split(merged, [len(block) for block in blocks])
            if rank < len(numbers):
                yield numbers[rank], blocks[rank], parts[rank]

    def everywhere(self, x: Tensor) -> Tensor:
        """As in WholeCentroids: each rank fills in its range of ids."""
        every = torch.zeros(self.num_clusters, dtype=x.dtype, device=x.device)
        every[self.held.start : self.held.stop] = x
        return self.rows.total(every).cpu()

    def agreed(self, centroids: Tensor) -> Tensor:
        """As in WholeCentroids; nothing is to do, since one rank computes each centroid."""
        return centroids

    def _here(self, labels: Tensor) -> Tensor:
        """Returns bool [n]: True for labels [n] that are ids of this rank's centroids."""
        return (labels >= self.held.start) & (labels < self.held.stop)

    def _rounds(self) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Yields in each round the numbers and the rows of one block of every rank, in rank order.

        In the last round some ranks may have no block.
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
    """The L nearest centroids of n rows, nearest first, ties to the lowest id; on the CPU.

    labels     int32 [n, L], ids of centroids; -1 if the row is not valid
    distances  float32 [n, L], 1 - cosine (spherical) or the squared distance (euclidean); 0 if the
               row is not valid
    """

    labels: Tensor
    distances: Tensor


Block = tuple[slice, Assignment]  # the row numbers of a block, and its assignment


def assign_blocks(
    rows: RankRows, centroids: Tensor, labels_per_sample: int = 1, *, held: range | None = None
) -> Iterator[Block]:
    """Yields, on every rank, the nearest ``labels_per_sample`` centroids of all rows, in order, a
    block at a time. The ranks work together, so each of them must go through all blocks.

    ``centroids`` [K, D] are all centroids, or, if they are sharded, those with the ids ``held``
    (as in ``Clustering``). In each round every rank finds the nearest of one of its blocks and
    sends them to all ranks, so a rank's memory holds as many blocks as there are ranks. Raises
    ValueError after the last block, on all ranks, for NaN or infinite rows.
    """
    stop = len(centroids) if held is None else held.stop
    num_clusters = int(rows.largest(torch.tensor(stop)))
    # Summed over ranks, so that all ranks agree even if one of them holds all centroids.
    shards = int(rows.total(torch.tensor(int(held is not None and len(held) < num_clusters))))
    holder, num_blocks, bad = hold(rows, num_clusters, shards > 0), len(rows.blocks), 0
    with rows.torch_settings():
        results = holder.nearest(rows.to_device(centroids), labels_per_sample)
        for first in range(0, num_blocks, rows.context.world_size):
            shape, device = (0, labels_per_sample), rows.context.device
            packed = torch.zeros(shape, dtype=torch.int64, device=device)
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


class Tally:
    """Adds up the sizes of the clusters and the distances of the rows while blocks go by."""

    def __init__(self, num_clusters: int) -> None:
        self.counts = torch.zeros(num_clusters, dtype=torch.int64)
        self._distances = 0.0

    def of(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yields the same blocks unchanged, and adds each to the tally."""
        for some, near in blocks:
            labels = near.labels[:, 0][near.labels[:, 0] >= 0].long()
            self.counts.index_add_(0, labels, torch.ones_like(labels))
            self._distances += float(near.distances[:, 0].double().sum())
            yield some, near

    @property
    def inertia(self) -> float:
        """The sum of the distances of all rows to their nearest centroids; at least 0."""
        return max(self._distances, 0.0)


def assign_block(rows: RankRows, number: int, packed: Tensor) -> Assignment:
    """The assignment of all rows of block ``number``.

    ``packed`` [m, L] begins with ``pack(distance, id)`` of its valid rows; what follows is padding.
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
