"""The nearest centroids of all rows, found and passed on block by block.

The labels of all N rows are never in memory together. One rank finds those of a block and sends
them to all ranks, so every rank sees all blocks in the order of the rows, and whatever is computed
from them is the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mclclip.clustering.arithmetic import CHOSEN, Arithmetic
from mclclip.clustering.centroids import WholeCentroids, hold
from mclclip.clustering.nearest import pack, unpack
from mclclip.clustering.options import Algorithm
from mclclip.clustering.rows import Mask, Rows, num_not_finite
from mclclip.data.arrays import Floats
from mclclip.ranks.process_group import SINGLE, Context


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

    ``centroids`` [K, D] are all of them, or those with the ids ``held`` (see kmeans.Found) where
    they are sharded. What ``arithmetic`` leaves open is chosen for the device. A rank's memory
    holds as many blocks as there are ranks, whatever their number. Raises ValueError for more
    labels than centroids and for another width than the rows', and, after the last block, for NaN
    or infinite rows: on all ranks alike.
    """
    rows = Rows(blocks, valid, algorithm, context, 0, arithmetic)
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


def assign(blocks: Sequence[Floats], centroids: Tensor, **options: Any) -> Assignment:
    """The assignment of all N rows at once, on every rank; they have to fit into its memory.

    Arguments are those of ``assign_blocks``.
    """
    every = [near for _, near in assign_blocks(blocks, centroids, **options)]
    return Assignment(
        torch.cat([near.labels for near in every]), torch.cat([near.distances for near in every])
    )


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
        found = holder.nearest(rows.to_device(centroids), count)
        for first in range(0, num_blocks, rows.context.world_size):
            packed = torch.zeros((0, count), dtype=torch.int64, device=rows.context.device)
            # In the last round a rank may have no block, but other ranks may need its centroids.
            if (own := next(found, None)) is not None:
                _, block, by_score = own
                scores, nearest = unpack(by_score)
                packed = pack(_distances(block, scores, rows.algorithm), nearest)
                bad += num_not_finite(block)
            shown = holder.shown(packed).cpu()
            for number, some in zip(range(first, num_blocks), shown, strict=False):
                yield slice(*rows.starts[number : number + 2]), _of_block(rows, number, some)
        rows.refuse_not_finite(bad)


def _of_block(rows: Rows, number: int, packed: Tensor) -> Assignment:
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
    return (block.square().sum(dim=1, keepdim=True) - 2.0 * scores).clamp_min(0.0)
