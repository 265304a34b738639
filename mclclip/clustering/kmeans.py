"""Lloyd's k-means over ranks, flat or in two levels (for a million clusters and more).

The centroids are the same for any number of ranks. rows.py divides the rows among ranks, nearest.py
finds the nearest centroid of a row, and centroids.py divides the centroids among ranks and assigns
all rows in the end.

Source: MCL, section 4.1. ``spherical`` assigns by cosine, ``euclidean`` by squared distance. The
authors' released code is euclidean, with scikit-learn's mini-batches; here every update uses all
rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mclclip.clustering.centroids import WholeCentroids, assign_blocks, hold, passes
from mclclip.clustering.nearest import ROWS_PER_PASS, squared_distance, unpack
from mclclip.clustering.options import ClusterConfig, Init
from mclclip.clustering.rows import Integers, RankRows
from mclclip.data.arrays import ROWS_PER_BLOCK, cut_blocks
from mclclip.ranks.collectives import all_reduce_sum, raise_on_every_rank
from mclclip.ranks.process_group import Context
from mclclip.ranks.sharded_rows import balance_by_cost

log = logging.getLogger("mclclip")

PLUS_PLUS_UP_TO = 1000  # init='auto' is k-means++ up to so many clusters: its cost grows with K^2
# These numbers are appended to the seed, so that every use of it draws other random numbers.
_SAMPLE, _START, _SPLIT, _GROUP = 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """The centroids that k-means has found.

    centroids     float32 [k, D] on the CPU, of unit length if spherical: those with the ids
                  ``held``. These are all, or this rank's if centroids are sharded (``each_pass``
                  then yields all of them)
    num_clusters  K
    iterations    the number of updates
    restart       the number, from 0 on, of the start that gave the lowest inertia
    """

    centroids: Tensor
    held: range
    num_clusters: int
    iterations: int
    restart: int = 0


@dataclass(frozen=True, kw_only=True)
class KMeans(Clustering):
    """The result of flat k-means. ``counts`` and ``inertia`` belong to the returned centroids.

    counts   int64 [K], the number of rows that are nearest to each centroid
    inertia  the sum over rows of 1 - cosine (spherical), or of the squared distance (euclidean), to
             the nearest centroid
    history  the inertia before each update and at the end
    """

    counts: Tensor
    inertia: float
    history: tuple[float, ...]


def fit(
    rows: RankRows,
    num_clusters: int,
    options: ClusterConfig,
    *,
    seed: Sequence[int] = (0,),
    sharded: bool | None = None,
    keep_empty: bool = False,
) -> KMeans:
    """Clusters ``rows`` into K = ``num_clusters``; returns the same on every rank.

    Each of ``options.restarts`` starts is drawn by ``seed``; the one with the lowest inertia wins,
    the first of equals. Iteration ends when an update lowers inertia by at most
    ``options.tolerance`` of itself, or after ``options.max_iterations`` updates. An empty cluster
    restarts at the farthest row of the largest cluster.

    With ``sharded`` each rank holds a part of the centroids. Results are the same; the memory for
    centroids is divided by the ranks (but for a k-means++ start), and rows are sent to all ranks in
    every iteration. None: sharded if there are several ranks and K D is at least 2^25, such as
    65,536 clusters of width 512.

    Raises ValueError on all ranks for NaN or infinite rows, and for more clusters than valid rows.
    If there are fewer distinct rows than clusters, clusters stay empty with ``keep_empty``;
    otherwise that is a ValueError too.
    """
    _check_num_clusters(num_clusters, rows)
    holder = hold(rows, num_clusters, sharded)
    with rows.torch_settings():
        rows.survey()
        results = (
            _lloyd(holder, start, number, options, keep_empty)
            for number, start in enumerate(draw_starts(holder, seed, options))
        )
        return min(results, key=lambda result: result.inertia)


def draw_starts(
    holder: WholeCentroids, seed: Sequence[int], options: ClusterConfig
) -> Iterator[Tensor]:
    """Yields the first centroids [k, D] of each start, those that this rank holds.

    They are drawn by k-means++ from max(``options.init_samples``, 256 K) rows, or at random.
    """
    rows, num_clusters = holder.rows, holder.num_clusters
    by_plus_plus = is_plus_plus(options.init, num_clusters)
    if by_plus_plus:
        rng = np.random.default_rng([*seed, _SAMPLE])
        sample = rows.gather(rows.draw(max(options.init_samples, 256 * num_clusters), rng))
    for number in range(options.restarts):
        rng = np.random.default_rng([*seed, number, _START])
        if by_plus_plus:
            drawn = plus_plus(rows, sample, num_clusters, rng)
            yield drawn[holder.held.start : holder.held.stop]
        else:
            yield holder.take(rows.draw(num_clusters, rng))


def is_plus_plus(init: Init, num_clusters: int) -> bool:
    """Returns True if the option ``init`` stands for k-means++ with so many clusters."""
    return init == "plus_plus" or (init == "auto" and num_clusters <= PLUS_PLUS_UP_TO)


def plus_plus(
    rows: RankRows, sample: Tensor, num_clusters: int, rng: np.random.Generator
) -> Tensor:
    """Draws K rows of ``sample`` [S, D] by greedy k-means++; returns them as centroids [K, D].

    A row is drawn with a probability proportional to its squared distance to the nearest centroid
    so far. Of 2 + ln K draws, the one that lowers the sum of these distances most is taken, as in
    scikit-learn. If the sample has fewer distinct rows than clusters, rows repeat; ``fit`` then
    finds empty clusters, and restarts them or raises ValueError.
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
    """Returns squared distances, float64 [n, C] on the CPU, of rows to all centroids [C, D].

    ``part`` is the rows [n, D] and their squared lengths [n, 1]. Equal vectors have distance 0.
    """
    rows, lengths = part
    squares = lengths + centroids.square().sum(dim=1)
    from_products = squares - 2.0 * (rows @ centroids.T)
    distances = from_products.double().cpu()
    # Where the subtraction has cancelled most digits, differences give the distance.
    near = torch.nonzero(from_products <= 1e-4 * squares)
    row, centroid = near[:, 0], near[:, 1]
    distances[row.cpu(), centroid.cpu()] = squared_distance(centroids[centroid], rows[row])
    return distances


def each_pass(clustering: Clustering, context: Context) -> Iterator[Tensor]:
    """Yields all centroids in order, in parts [p, D], on every rank. All ranks must call it."""
    for some in passes(clustering.num_clusters):
        part = torch.zeros((len(some), clustering.centroids.shape[1]))
        if some.start in clustering.held:
            first = some.start - clustering.held.start
            part = clustering.centroids[first : first + len(some)]
        whole = len(clustering.held) == clustering.num_clusters
        yield part if whole else all_reduce_sum(part.to(context.device)).cpu()


# --- Lloyd's iteration ---


def _lloyd(
    holder: WholeCentroids, start: Tensor, restart: int, options: ClusterConfig, keep_empty: bool
) -> KMeans:
    """Assigns rows and updates centroids in turn until inertia hardly falls any more.

    ``start`` are the first centroids, ``restart`` is the number of this start. The result has the
    centroids of the last assignment.
    """
    centroids = start
    history: list[float] = []
    stuck = False  # whether no row is left at which an empty cluster could restart
    while True:
        sums, own_counts = holder.sums(centroids)
        counts = holder.everywhere(own_counts)
        history.append(_inertia(holder, centroids, sums, own_counts))
        log.debug("k-means: start %d, inertia %.8g", restart, history[-1])
        falls = len(history) < 2 or history[-2] - history[-1] > options.tolerance * history[-2]
        any_empty = bool((counts == 0).any())
        if (not falls and (stuck or not any_empty)) or len(history) > options.max_iterations:
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
    """The inertia (``KMeans``) of the assignment that gave these sums and counts, in float64.

    With c a centroid, s the sum of its rows and n their number, it is the sum of all |x|^2 plus the
    sum over clusters of n |c|^2 - 2 c.s. Spherical takes half of it, since half the squared
    distance of unit vectors is 1 - cosine.
    """
    parts = torch.zeros(len(centroids), dtype=torch.float64, device=centroids.device)
    for some in holder.passes():
        wide, total = centroids[some].double(), sums[some].double() / holder.rows.unit
        parts[some] = (wide * (wide * counts[some, None] - 2.0 * total)).sum(dim=1)
    inertia = holder.rows.squares + float(holder.everywhere(parts).numpy().sum())
    return max(inertia / 2.0 if holder.rows.algorithm == "spherical" else inertia, 0.0)


def means_of(holder: WholeCentroids, centroids: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
    """The means [k, D] of the clusters that this rank holds, of unit length if spherical.

    A cluster that is empty keeps its centroid, and so does a spherical one whose rows sum to zero.
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
    """Moves empty clusters: the first to the farthest row of the largest cluster, the second to
    that of the next largest, and so on. Clusters whose rows are all equal give no row.

    Writes into ``updated`` [k, D] and returns how many clusters have moved. Raises ValueError if
    none can move, unless ``keep_empty``.
    """
    empty = np.flatnonzero(counts.numpy() == 0)
    spread, farthest = unpack(holder.everywhere(holder.farthest(centroids)))
    by_size = np.argsort(-counts.numpy(), kind="stable")
    donors = by_size[spread.numpy()[by_size] > 0.0][: len(empty)]
    if not len(donors):
        if keep_empty:
            return 0
        _check_num_clusters(len(counts), holder.rows, distinct=int((counts > 0).sum()))
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


def _check_num_clusters(num_clusters: int, rows: RankRows, distinct: int | None = None) -> None:
    """Raises ValueError for more clusters than valid rows, or than ``distinct`` ones if known."""
    limit = rows.num_valid if distinct is None else distinct
    if not 1 <= num_clusters <= limit:
        kind = "usable" if distinct is None else "distinct usable"
        raise ValueError(
            f"num_clusters is {num_clusters:,}, but there are {limit:,} {kind} rows: "
            "set cluster.num_clusters to at most that (and at least 1)"
        )


# --- two levels ---


def fit_two_level(
    rows: RankRows,
    num_clusters: int,
    options: ClusterConfig,
    *,
    seed: Sequence[int] = (0,),
    sharded: bool | None = None,
) -> Clustering:
    """Clusters ``rows`` into K = ``num_clusters`` in two levels; returns the same on every rank.

    First, ``fit`` clusters all rows into ``options.num_splits`` groups (None: about sqrt(K)), among
    which the K clusters are divided in proportion to their rows. Then ``fit`` clusters each group
    by itself, on one rank, which reads the group's rows into its memory. So a row is compared with
    the centroids of its group only: with sqrt(K) groups, an iteration of both levels costs
    2 / sqrt(K) of a flat one. UNICOM clusters LAION this way.

    Centroids are in the order of the groups; ``iterations`` is the largest of any group. With
    ``init`` ``auto``, all groups start in the way that suits the group with the most clusters.
    Clusters may be empty: if a group has fewer distinct rows than clusters, or if all rows of a
    cluster are nearer to a centroid of another group. Raises ValueError as ``fit`` does.
    """
    _check_num_clusters(num_clusters, rows)
    splits = options.num_splits or max(1, round(num_clusters**0.5))
    assert splits <= num_clusters
    groups = _split(rows, splits, options, seed)
    rows.clear_cache()  # a group's rows need the room
    shares = share_out(num_clusters, np.array([len(ids) for ids in groups]))
    by_plus_plus = is_plus_plus(options.init, int(shares.max()))
    options = replace(options, init="plus_plus" if by_plus_plus else "random")
    log.info(
        "k-means: %d groups of up to %d rows, of up to %d clusters each",
        splits, max(len(ids) for ids in groups), shares.max(),
    )  # fmt: skip
    of_groups = _cluster_groups(rows, groups, shares, options, seed)
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
    """Divides K clusters among groups of ``sizes`` [G] rows; returns int64 [G], whose sum is K.

    Shares are proportional to the sizes, rounded by largest remainder (the first of equals). Every
    group that has rows gets at least one cluster, and no group gets more clusters than rows. K must
    lie between the number of groups that have rows and the number of all rows.
    """
    exact = num_clusters * sizes / sizes.sum()
    shares: Integers = np.maximum(np.floor(exact).astype(np.int64), np.minimum(sizes, 1))
    while (missing := num_clusters - int(shares.sum())) != 0:
        step = 1 if missing > 0 else -1
        # The groups that are farthest from their exact shares change by one cluster. An exact share
        # never exceeds the rows of its group.
        room = shares > (0 if step > 0 else 1)
        order = np.argsort(-step * (exact - shares), kind="stable")
        shares[order[room[order]][: abs(missing)]] += step
    return shares


def _split(
    rows: RankRows, splits: int, options: ClusterConfig, seed: Sequence[int]
) -> list[Integers]:
    """Clusters all rows into groups; returns the ascending row numbers of each group."""
    level = fit(rows, splits, options, seed=[*seed, _SPLIT])
    labels = np.empty(rows.num_rows, dtype=np.int32)
    for some, near in assign_blocks(rows, level.centroids, held=level.held):
        labels[some] = near.labels[:, 0]
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(splits + 1))
    return [order[first:stop] for first, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _cluster_groups(
    rows: RankRows,
    groups: list[Integers],
    shares: Integers,
    options: ClusterConfig,
    seed: Sequence[int],
) -> dict[int, KMeans]:
    """Clusters each group on one rank. Returns the results of this rank's groups by group number.

    ``groups`` are the row numbers of each group, ``shares`` [G] its number of clusters.
    """
    context = rows.context
    costs = [len(ids) * int(share) for ids, share in zip(groups, shares, strict=True)]
    local_groups = balance_by_cost(costs, context.world_size)[context.rank]

    def cluster_local_groups() -> dict[int, KMeans]:
        results = {}
        for group in local_groups:
            if shares[group]:
                of_group = RankRows(
                    cut_blocks([rows.read(groups[group])]),
                    rows.algorithm,
                    context=Context(device=context.device),  # without the other ranks
                    arithmetic=rows.arithmetic,
                )
                words = [*seed, _GROUP, group]
                results[group] = fit(
                    of_group, int(shares[group]), options, seed=words, keep_empty=True
                )
        return results

    if context.world_size == 1:
        return cluster_local_groups()
    return raise_on_every_rank(cluster_local_groups)


def _exchange(
    rows: RankRows, of_groups: dict[int, KMeans], shares: Integers, held: range
) -> Tensor:
    """Sends the centroids of one group after the other to all ranks; returns those with the ids
    ``held``.
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
