"""Lloyd's k-means over ranks, flat or in two levels (for a million clusters and more).

The centroids are the same for any number of ranks.

rows.py says how ranks share the rows and why sums do not depend on it, nearest.py how the
nearest centroid is found, and centroids.py which rank holds which centroids, and how all rows get
their labels in the end.

Source: MCL, section 4.1. ``spherical`` assigns by cosine, ``euclidean`` by squared distance. The
authors' released code is euclidean, with scikit-learn's mini-batches; here every update uses all
rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mclclip.clustering.arithmetic import CHOSEN, Arithmetic
from mclclip.clustering.centroids import WholeCentroids, assign_blocks, hold, passes
from mclclip.clustering.nearest import ROWS_PER_PASS, squared_distance, unpack
from mclclip.clustering.options import Algorithm, Init
from mclclip.clustering.rows import Integers, Mask, RankRows
from mclclip.data.arrays import ROWS_PER_BLOCK, Floats, cut_blocks
from mclclip.ranks.collectives import all_reduce_sum, raise_on_every_rank
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.ranks.sharded_rows import balance_by_cost

log = logging.getLogger("mclclip")

PLUS_PLUS_UP_TO = 1000  # clusters, for ``auto``: the cost grows with their square
# Words of the seeds of the sample, of each start, and of the first and the second level.
_SAMPLE, _START, _SPLIT, _GROUP = 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """Centroids float32 on the CPU (unit rows if spherical).

    ``centroids`` [k, D] are those with the ids ``held``: all ``num_clusters`` of them, or this
    rank's where centroids are sharded (``each_pass`` gives all, part by part). ``iterations`` is
    the number of updates, ``restart`` the start that won.
    """

    centroids: Tensor
    held: range
    num_clusters: int
    iterations: int
    restart: int = 0


@dataclass(frozen=True, kw_only=True)
class KMeans(Clustering):
    """Centroids and how they were found.

    ``inertia`` is the sum over rows of 1 - cosine (spherical) or of the squared distance to the
    nearest centroid; ``counts`` int64 [K] is the number of rows nearest to each centroid. Both are
    those of ``assign_blocks`` with these centroids. ``history`` is the inertia before each update
    and at the end.
    """

    counts: Tensor
    inertia: float
    history: tuple[float, ...]


def fit(
    blocks: Sequence[Floats],
    num_clusters: int,
    *,
    algorithm: Algorithm = "spherical",
    seed: int | Sequence[int] = 0,
    restarts: int = 1,
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    init: Init = "auto",
    init_samples: int = 100_000,
    keep_empty: bool = False,
    valid: Mask | None = None,
    context: Context = SINGLE,
    sharded: bool | None = None,
    cache_bytes: int | None = None,
    arithmetic: Arithmetic = CHOSEN,
) -> KMeans:
    """Clusters the rows of ``blocks`` ([n_i, D] float16 or wider, given whole to each rank) into K.

    Each of ``restarts`` starts is drawn by ``seed``: ``init`` ``random`` takes K distinct usable
    rows; ``plus_plus`` draws K by k-means++ from max(init_samples, 256 K) rows, at a cost that
    grows with the square of K; ``auto`` does the latter up to 1,000 clusters. The lowest inertia
    wins, the first of equals.
    Iteration ends when an update lowers inertia by at most ``tolerance`` of itself, or after
    ``max_iterations`` updates. An empty cluster restarts at the farthest row of the largest
    cluster. Rows where ``valid`` [N] is false take no part. The ranks of ``context`` share the
    work; with ``sharded`` the centroids too (None: where there are several ranks and K D is at
    least 2^25, such as 65,536 clusters of width 512): the result is the same, memory for centroids
    is divided by the ranks (not that of a k-means++ start), and rows travel to all ranks in every
    iteration. Up to ``cache_bytes`` of a rank's rows (None: 1 GiB, half of a GPU's free memory)
    stay on its device as float32. What ``arithmetic`` leaves open is chosen for the device.

    Raises ValueError for NaN or infinite rows, and for more clusters than there are rows or (but
    with ``keep_empty``) distinct rows: on all ranks alike.
    """
    rows = RankRows(blocks, valid, algorithm, context, cache_bytes, arithmetic)
    if not 1 <= num_clusters <= rows.num_valid:
        raise ValueError(too_many(num_clusters, f"{rows.num_valid:,} usable rows"))
    holder = hold(rows, num_clusters, sharded)
    words = [seed] if isinstance(seed, int) else list(seed)
    samples = init_samples if is_plus_plus(init, num_clusters) else None
    with rows.torch_settings():
        rows.survey()
        every = (
            _lloyd(holder, start, number, max_iterations, tolerance, keep_empty)
            for number, start in enumerate(draw_starts(holder, words, restarts, samples))
        )
        return min(every, key=lambda result: result.inertia)


def draw_starts(
    holder: WholeCentroids, words: Sequence[int], restarts: int, samples: int | None
) -> Iterator[Tensor]:
    """Yields the first centroids of each start: those of them that this rank holds.

    They are drawn by k-means++ from at least ``samples`` rows, or (None) at random.
    """
    rows, num_clusters = holder.rows, holder.num_clusters
    if samples is not None:
        rng = np.random.default_rng([*words, _SAMPLE])
        sample = rows.gather(rows.draw(max(samples, 256 * num_clusters), rng))
    for number in range(max(1, restarts)):
        rng = np.random.default_rng([*words, number, _START])
        if samples is not None:
            drawn = plus_plus(rows, sample, num_clusters, rng)
            yield drawn[holder.held.start : holder.held.stop]
        else:
            yield holder.take(rows.draw(num_clusters, rng))


def is_plus_plus(init: Init, num_clusters: int) -> bool:
    """Returns True if ``init`` means k-means++ for K clusters."""
    return init == "plus_plus" or (init == "auto" and num_clusters <= PLUS_PLUS_UP_TO)


def plus_plus(
    rows: RankRows, sample: Tensor, num_clusters: int, rng: np.random.Generator
) -> Tensor:
    """K rows of ``sample`` [S, D], drawn by greedy k-means++, as centroids [K, D].

    Rows are drawn with a probability proportional to their squared distance to the nearest centroid
    so far. Of 2 + ln K draws it takes the one that lowers the sum of these distances most, as
    scikit-learn does. Where the sample has fewer distinct rows than clusters, rows repeat; then
    ``kmeans.fit`` finds empty clusters, and restarts them or raises a ValueError.
    """
    cut = (sample[i : i + ROWS_PER_BLOCK] for i in range(0, len(sample), ROWS_PER_BLOCK))
    parts = [(part, part.square().sum(dim=1, keepdim=True)) for part in cut]
    centers: list[int] = []
    nearest = np.full(len(sample), np.inf)
    drawn = rng.integers(len(sample), size=1)
    while True:
        distances = torch.cat(rows.each(partial(_squared_distances, sample[drawn]), parts)).numpy()
        lowered = np.minimum(nearest[:, None], distances)
        best = int(lowered.sum(axis=0).argmin())
        centers.append(int(drawn[best]))
        if len(centers) == num_clusters:
            return rows.of_first_rank(sample[centers])
        nearest = lowered[:, best]
        cumulative = np.cumsum(nearest)
        at = rng.random(2 + int(np.log(num_clusters))) * cumulative[-1]
        # Where all distances are zero, this draws the last row again.
        drawn = np.searchsorted(cumulative, at, "right").clip(max=len(sample) - 1)


def _squared_distances(centroids: Tensor, part: tuple[Tensor, Tensor]) -> Tensor:
    """float64 [n, C] on the CPU: distances of rows [n, D] to all centroids [C, D], where ``part``
    is the rows and their squared lengths [n, 1]. Equal vectors have distance zero.
    """
    rows, lengths = part
    squares = lengths + centroids.square().sum(dim=1)
    from_products = squares - 2.0 * (rows @ centroids.T)
    distances = from_products.double().cpu()
    near = torch.nonzero(from_products <= 1e-4 * squares)  # subtraction cancelled the digits
    row, centroid = near[:, 0], near[:, 1]
    distances[row.cpu(), centroid.cpu()] = squared_distance(centroids[centroid], rows[row])
    return distances


def each_pass(clustering: Clustering, context: Context) -> Iterator[Tensor]:
    """Yields all centroids in order, in parts [p, D], on every rank. All ranks have to call it."""
    for some in passes(clustering.num_clusters):
        part = torch.zeros((len(some), clustering.centroids.shape[1]))
        if some.start in clustering.held:
            first = some.start - clustering.held.start
            part = clustering.centroids[first : first + len(some)]
        whole = len(clustering.held) == clustering.num_clusters
        yield part if whole else all_reduce_sum(part.to(context.device)).cpu()


# --- Lloyd's iteration ---


def _lloyd(
    holder: WholeCentroids,
    start: Tensor,
    restart: int,
    max_iterations: int,
    tolerance: float,
    keep_empty: bool,
) -> KMeans:
    """Assigns rows and updates centroids until inertia settles. The centroids it returns are those
    of the last assignment. With ``keep_empty`` clusters may stay empty for lack of distinct rows.
    """
    centroids = start
    history: list[float] = []
    stuck = False  # whether no row is left to restart an empty cluster at
    while True:
        sums, own_counts = holder.sums(centroids)
        counts = holder.everywhere(own_counts)
        history.append(_inertia(holder, centroids, sums, own_counts))
        log.debug("k-means: start %d, inertia %.8g", restart, history[-1])
        settled = len(history) > 1 and history[-2] - history[-1] <= tolerance * history[-2]
        any_empty = bool((counts == 0).any())
        if (settled and (stuck or not any_empty)) or len(history) > max_iterations:
            break
        means = means_of(holder, centroids, sums, own_counts)
        if any_empty:
            stuck = not _restart(holder, centroids, means, counts, keep_empty)
        centroids = holder.agreed(means)
    return KMeans(
        centroids=centroids.cpu(),
        held=holder.held,
        num_clusters=holder.num_clusters,
        iterations=len(history) - 1,
        counts=counts,
        inertia=history[-1],
        history=tuple(history),
        restart=restart,
    )


def _inertia(holder: WholeCentroids, centroids: Tensor, sums: Tensor, counts: Tensor) -> float:
    """The inertia of the assignment that gave ``sums`` s and ``counts`` n, in float64.

    It is the sum of |x|^2 - 2 c.s + n |c|^2; half of that if spherical, as for unit vectors half of
    the squared distance is 1 - cosine.
    """
    parts = torch.zeros(len(centroids), dtype=torch.float64, device=centroids.device)
    for some in holder.passes():
        wide, total = centroids[some].double(), sums[some].double() / holder.rows.unit
        parts[some] = (wide * (wide * counts[some, None] - 2.0 * total)).sum(dim=1)
    inertia = holder.rows.squares + float(holder.everywhere(parts).numpy().sum())
    return max(inertia / 2.0 if holder.rows.algorithm == "spherical" else inertia, 0.0)


def means_of(holder: WholeCentroids, centroids: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
    """The means of the clusters (unit length if spherical).

    A cluster that is empty, or (spherical) whose rows sum to zero, keeps its centroid.
    """
    updated = torch.empty_like(centroids)
    for some in holder.passes():
        means = sums[some].double() / (holder.rows.unit * counts[some].clamp_min(1)[:, None])
        usable = counts[some] > 0
        if holder.rows.algorithm == "spherical":
            norms = torch.linalg.vector_norm(means, dim=1, keepdim=True)
            usable &= norms.flatten() > 1e-12
            means = means / norms.clamp_min(1e-12)
        updated[some] = torch.where(usable[:, None], means.float(), centroids[some])
    return updated


def _restart(
    holder: WholeCentroids, centroids: Tensor, updated: Tensor, counts: Tensor, keep_empty: bool
) -> int:
    """Moves the first empty cluster to the farthest row of the largest cluster, the second to that
    of the next largest, and so on, leaving out clusters whose rows are all equal. Returns how many
    have moved. Raises ValueError where none can move, unless ``keep_empty``.
    """
    empty = np.flatnonzero(counts.numpy() == 0)
    spread, farthest = unpack(holder.everywhere(holder.farthest(centroids)))
    by_size = np.argsort(-counts.numpy(), kind="stable")
    donors = by_size[spread.numpy()[by_size] > 0.0][: len(empty)]
    if not len(donors):
        if keep_empty:
            return 0
        distinct = int((counts > 0).sum())
        raise ValueError(too_many(len(counts), f"only {distinct:,} distinct usable rows"))
    log.info("k-means: %d of %d empty clusters restart", len(donors), len(empty))
    ids = farthest.numpy()[donors]
    order = np.argsort(ids)
    targets = empty[: len(ids)][order] - holder.held.start
    for first in range(0, len(ids), ROWS_PER_PASS):
        some = slice(first, first + ROWS_PER_PASS)
        farthest_rows = holder.rows.gather(ids[order][some])
        here = (targets[some] >= 0) & (targets[some] < len(updated))
        updated[torch.from_numpy(targets[some][here])] = farthest_rows[torch.from_numpy(here)]
    return len(ids)


def too_many(num_clusters: int, limit: str) -> str:
    """The error message for more clusters than rows."""
    return (
        f"num_clusters is {num_clusters:,}, but there are {limit}: "
        "set cluster.num_clusters to at most that (and at least 1)"
    )


# --- two levels ---


def fit_two_level(
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
) -> Clustering:
    """Clusters the rows of ``blocks`` into K in two levels; centroids are in the order of groups.

    First all rows go into ``num_splits`` groups, among which the K clusters are divided in
    proportion to their rows; then each group is clustered alone. During the iterations a row is
    compared with the centroids of its group alone: with sqrt(K) groups an iteration of both levels
    costs 2 / sqrt(K) of a flat one. UNICOM clusters LAION this way. One rank clusters a whole
    group, and reads the group's rows into its memory.

    ``fit`` makes ``num_splits`` groups (None: about the square root of K) of all rows, and
    the clusters of each group, with ``options``. ``seed``, ``valid``, ``context``, ``sharded`` and
    ``arithmetic`` are those of ``fit``. With ``init`` ``auto`` all groups start in the way
    that suits the group with the most clusters.
    The result is the same for any number of ranks. Clusters may be empty: where a group has fewer
    distinct rows than clusters, or where all rows of a cluster lie nearer to one of another group.
    ``iterations`` is the largest of any group's. Raises ValueError for more clusters than rows, for
    more splits than clusters, and as ``fit`` does.
    """
    words = [seed] if isinstance(seed, int) else list(seed)
    rows = RankRows(blocks, valid, algorithm, context, 0, arithmetic)
    if not 1 <= num_clusters <= rows.num_valid:
        raise ValueError(too_many(num_clusters, f"{rows.num_valid:,} usable rows"))
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
    return Clustering(
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


def _split(
    rows: RankRows, splits: int, words: list[int], options: dict[str, Any]
) -> list[Integers]:
    """Clusters all rows into groups; returns the ascending row numbers of each group."""
    common: dict[str, Any] = {"algorithm": rows.algorithm, "valid": rows.valid}
    common |= {"context": rows.context, "arithmetic": rows.arithmetic}
    level = fit(rows.blocks, splits, seed=[*words, _SPLIT], **common, **options)
    labels = np.empty(rows.num_rows, dtype=np.int32)
    for some, near in assign_blocks(rows.blocks, level.centroids, held=level.held, **common):
        labels[some] = near.labels[:, 0]
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(splits + 1))
    return [order[first:stop] for first, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _cluster_groups(
    rows: RankRows,
    groups: list[Integers],
    shares: Integers,
    words: list[int],
    options: dict[str, Any],
) -> dict[int, KMeans]:
    """Clusters each group on one rank. Returns the groups of this rank, by number."""
    context = rows.context
    costs = [len(ids) * int(share) for ids, share in zip(groups, shares, strict=True)]
    local_groups = balance_by_cost(costs, context.world_size)[context.rank]
    alone = Context(device=context.device)

    def cluster(group: int) -> KMeans:
        return fit(
            cut_blocks([rows.read(groups[group])]),
            int(shares[group]),
            algorithm=rows.algorithm,
            seed=[*words, _GROUP, group],
            keep_empty=True,
            context=alone,
            arithmetic=rows.arithmetic,
            **options,
        )

    def cluster_own() -> dict[int, KMeans]:
        return {group: cluster(group) for group in local_groups if shares[group]}

    return cluster_own() if context.world_size == 1 else raise_on_every_rank(cluster_own)


def _exchange(
    rows: RankRows, of_groups: dict[int, KMeans], shares: Integers, held: range
) -> Tensor:
    """Sends the centroids of one group after the other to all ranks, and returns those with the ids
    ``held``, which this rank keeps.
    """
    local = torch.empty((len(held), rows.dim))
    first = 0
    for group, share in enumerate(shares.tolist()):
        centroids = (
            of_groups[group].centroids if group in of_groups else torch.zeros(share, rows.dim)
        )
        centroids = rows.total(centroids).cpu() + 0.0
        start, stop = max(first, held.start), min(first + share, held.stop)
        if start < stop:
            local[start - held.start : stop - held.start] = centroids[start - first : stop - first]
        first += share
    return local
