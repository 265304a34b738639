"""k-means in two levels, for a million clusters and more: split, cluster, merge.

All rows are clustered into a few groups; the K clusters are divided among the groups in proportion
to their rows; each group is clustered by itself; and in the end rows are assigned to the nearest of
all centroids. During the iterations a row is compared with the centroids of its group alone: with
sqrt(K) groups an iteration of both levels costs 2 / sqrt(K) of a flat one. UNICOM clusters LAION
this way.

One rank clusters a whole group, and reads the group's rows into its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip.clustering import kmeans
from mclclip.clustering.arithmetic import CHOSEN, Arithmetic
from mclclip.clustering.centroids import assign_blocks, hold
from mclclip.clustering.kmeans import is_plus_plus
from mclclip.clustering.options import Algorithm, Init
from mclclip.clustering.rows import Integers, Mask, Rows
from mclclip.data.arrays import Floats, cut_blocks
from mclclip.ranks import collectives
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.ranks.sharded_rows import deal

log = logging.getLogger("mclclip")

_SPLIT, _GROUP = 3, 4  # words of the seeds of the first and of the second level


def fit(
    blocks: Sequence[Floats],
    num_clusters: int,
    *,
    num_splits: int | None = None,
    algorithm: Algorithm = "spherical",
    seed: int | Sequence[int] = 0,
    valid: Mask | None = None,
    context: Context = SINGLE,
    sharded: bool | None = None,
    init: Init = "auto",
    arithmetic: Arithmetic = CHOSEN,
    **options: Any,
) -> kmeans.Clustering:
    """Clusters the rows of ``blocks`` into K in two levels; centroids are in the order of groups.

    ``kmeans.fit`` makes ``num_splits`` groups (None: about the square root of K) of all rows, and
    the clusters of each group, with ``options``. ``seed``, ``valid``, ``context``, ``sharded`` and
    ``arithmetic`` are those of ``kmeans.fit``. With ``init`` ``auto`` all groups start in the way
    that suits the group with the most clusters.
    The result is the same for any number of ranks. Clusters may be empty: where a group has fewer
    distinct rows than clusters, or where all rows of a cluster lie nearer to one of another group.
    ``iterations`` is the largest of any group's. Raises ValueError for more clusters than rows, for
    more splits than clusters, and as ``kmeans.fit`` does.
    """
    words = [seed] if isinstance(seed, int) else list(seed)
    rows = Rows(blocks, valid, algorithm, context, 0, arithmetic)
    if not 1 <= num_clusters <= rows.num_valid:
        raise ValueError(kmeans.too_many(num_clusters, f"{rows.num_valid:,} usable rows"))
    splits = num_splits or max(1, round(num_clusters**0.5))
    if splits > num_clusters:
        raise ValueError(
            f"num_splits is {splits:,}, but there are {num_clusters:,} clusters: set "
            "cluster.num_splits to at most that"
        )
    groups = _split(rows, splits, words, options | {"init": init})
    shares = share_out(num_clusters, np.array([len(ids) for ids in groups]))
    options |= {"init": "plus_plus" if is_plus_plus(init, int(shares.max())) else "random"}
    log.info(
        "k-means: %d groups of up to %d rows, of up to %d clusters each",
        splits, max(len(ids) for ids in groups), shares.max(),
    )  # fmt: skip
    of_groups = _cluster_groups(rows, groups, shares, words, options)
    held = hold(rows, num_clusters, sharded).held
    centroids = _exchange(rows, of_groups, shares, held)
    most = torch.tensor(max((result.iterations for result in of_groups.values()), default=0))
    return kmeans.Clustering(
        centroids=centroids,
        held=held,
        num_clusters=num_clusters,
        iterations=int(rows.largest(most)),
    )


def share_out(num_clusters: int, sizes: Integers) -> Integers:
    """int64 [G]: how many clusters each group of ``sizes`` [G] rows gets; their sum is K.

    Shares are proportional to the sizes. Every group that has rows gets at least one cluster, and
    no group gets more than its rows; the rest goes to the largest remainders, to the first of
    equals. K must lie between the number of groups that have rows and the number of all rows.
    """
    exact = num_clusters * sizes / sizes.sum()
    shares: Integers = np.maximum(np.floor(exact).astype(np.int64), np.minimum(sizes, 1))
    while (missing := num_clusters - int(shares.sum())) != 0:
        step = 1 if missing > 0 else -1
        # The groups farthest from their exact shares, which never exceed their rows.
        room = shares > (0 if step > 0 else 1)
        order = np.argsort(-step * (exact - shares), kind="stable")
        shares[order[room[order]][: abs(missing)]] += step
    return shares


def _split(rows: Rows, splits: int, words: list[int], options: dict[str, Any]) -> list[Integers]:
    """Clusters all rows into groups; returns the ascending row numbers of each group."""
    common: dict[str, Any] = {"algorithm": rows.algorithm, "valid": rows.valid}
    common |= {"context": rows.context, "arithmetic": rows.arithmetic}
    level = kmeans.fit(rows.blocks, splits, seed=[*words, _SPLIT], **common, **options)
    labels = np.empty(rows.num_rows, dtype=np.int32)
    for some, near in assign_blocks(rows.blocks, level.centroids, held=level.held, **common):
        labels[some] = near.labels[:, 0]
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(splits + 1))
    return [order[first:stop] for first, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _cluster_groups(
    rows: Rows, groups: list[Integers], shares: Integers, words: list[int], options: dict[str, Any]
) -> dict[int, kmeans.KMeans]:
    """Clusters each group on one rank. Returns the groups of this rank, by number."""
    context = rows.context
    costs = [len(ids) * int(share) for ids, share in zip(groups, shares, strict=True)]
    own = deal(costs, context.world_size)[context.rank]
    alone = Context(device=context.device)

    def cluster(group: int) -> kmeans.KMeans:
        return kmeans.fit(
            cut_blocks([rows.read(groups[group])]),
            int(shares[group]),
            algorithm=rows.algorithm,
            seed=[*words, _GROUP, group],
            keep_empty=True,
            context=alone,
            arithmetic=rows.arithmetic,
            **options,
        )

    def cluster_own() -> dict[int, kmeans.KMeans]:
        return {group: cluster(group) for group in own if shares[group]}

    return cluster_own() if context.world_size == 1 else collectives.together(cluster_own)


def _exchange(
    rows: Rows, of_groups: dict[int, kmeans.KMeans], shares: Integers, held: range
) -> Tensor:
    """Sends the centroids of one group after the other to all ranks, and returns those with the ids
    ``held``, which this rank keeps.
    """
    own = torch.empty((len(held), rows.dim))
    first = 0
    for group, share in enumerate(shares.tolist()):
        centroids = (
            of_groups[group].centroids if group in of_groups else torch.zeros(share, rows.dim)
        )
        centroids = rows.total(centroids).cpu() + 0.0
        start, stop = max(first, held.start), min(first + share, held.stop)
        if start < stop:
            own[start - held.start : stop - held.start] = centroids[start - first : stop - first]
        first += share
    return own
