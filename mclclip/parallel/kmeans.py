"""Lloyd's k-means over ranks: centroids and nearest centroids, the same for any number of ranks.

How rows are shared out and why sums do not depend on it is said in row_blocks.py, how the nearest
centroid is found in nearest.py, and who holds the centroids in centroids.py.

Source: MCL, section 3. ``spherical`` assigns by cosine; ``euclidean``, by squared distance,
is what the authors' released code does (with scikit-learn's mini-batches; here all rows take part).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mclclip.parallel.centroids import WholeCentroids, hold, passes
from mclclip.parallel.collectives import all_reduce_sum
from mclclip.parallel.kmeans_start import Init, is_plus_plus, plus_plus
from mclclip.parallel.nearest import ROWS_PER_PASS, unpack
from mclclip.parallel.process_group import SINGLE, Context
from mclclip.parallel.row_blocks import Algorithm, Floats, Mask, Rows, Survey, num_not_finite

log = logging.getLogger("mclclip")

_SAMPLE, _START = 1, 2  # what a random generator is for
_ROWS_PER_SUM = 2**20  # of labels and distances, in one message


@dataclass(frozen=True)
class KMeans:
    """Centroids float32 on the CPU (unit rows if spherical) and how they were found.

    ``centroids`` [k, D] are those with the ids ``held``: all K of them, or this rank's where
    centroids are sharded (``each_pass`` gives all, part by part). ``inertia`` is the sum over rows
    of 1 - cosine (spherical) or of the squared distance to the nearest centroid, ``counts`` int64
    [K] the rows nearest to each: what ``assign`` with these centroids gives. ``history`` is the
    inertia before each update and at the end, ``iterations`` the number of updates, ``restart`` the
    start that won.
    """

    centroids: Tensor
    held: range
    counts: Tensor
    inertia: float
    history: tuple[float, ...]
    iterations: int
    restart: int


@dataclass(frozen=True)
class Assignment:
    """The L nearest centroids of each row, nearest first, ties to the lowest id.

    ``labels`` int32 [N, L], -1 where the row is not valid; ``distances`` float32 [N, L]: 1 - cosine
    (spherical) or the squared distance, 0 where the row is not valid.
    """

    labels: Tensor
    distances: Tensor


@dataclass(frozen=True)
class _Rule:
    """When iteration ends, and whether clusters may stay empty for the lack of distinct rows."""

    max_iterations: int
    tolerance: float
    keep_empty: bool


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
    initial: Tensor | None = None,
    keep_empty: bool = False,
    valid: Mask | None = None,
    context: Context = SINGLE,
    sharded: bool | None = None,
    cache_bytes: int | None = None,
) -> KMeans:
    """Clusters the rows of ``blocks`` ([n_i, D] float16 or wider, given whole to each rank) into K.

    Each of ``restarts`` starts is drawn by ``seed``: ``init`` ``random`` takes K distinct usable
    rows; ``plus_plus`` draws K by k-means++ from max(init_samples, 256 K) rows, at a cost that
    grows with the square of K; ``auto`` does the latter up to 1,000 clusters. The lowest inertia
    wins, the first of equals. ``initial`` [K, D] replaces the drawn start (one start then).
    Iteration ends when an update lowers inertia by at most ``tolerance`` of itself, or after
    ``max_iterations`` updates. An empty cluster restarts at the farthest row of the largest
    cluster. Rows where ``valid`` [N] is false take no part. The ranks of ``context`` share the
    work; with ``sharded`` the centroids too (None: where there are several ranks and K D is at
    least 2^25, such as 65,536 clusters of width 512): the result is the same, memory for centroids
    is divided by the ranks (not that of a k-means++ start), and rows travel to all ranks in every
    iteration. Up to ``cache_bytes`` of a rank's rows (None: 1 GiB, half of a GPU's free memory)
    stay on its device as float32.

    Raises ValueError for NaN or infinite rows, and for more clusters than there are rows or (but
    with ``keep_empty``) distinct rows: on all ranks alike.
    """
    rows = Rows(blocks, valid, algorithm, context, cache_bytes)
    if not 1 <= num_clusters <= rows.num_valid:
        raise ValueError(too_many(num_clusters, f"{rows.num_valid:,} usable rows"))
    if initial is not None and tuple(initial.shape) != (num_clusters, rows.dim):
        raise ValueError(f"initial is {list(initial.shape)}: wanted {[num_clusters, rows.dim]}")
    holder = hold(rows, num_clusters, sharded)
    words = [seed] if isinstance(seed, int) else list(seed)
    rule = _Rule(max_iterations, tolerance, keep_empty)
    with rows.one_thread_per_operation():
        survey = rows.survey()
        best: KMeans | None = None
        for number, start in enumerate(
            _starts(holder, words, restarts, init, init_samples, initial)
        ):
            found = _lloyd(holder, survey, start, rule, number)
            if best is None or found.inertia < best.inertia:
                best = found
    assert best is not None
    if (empty := int((best.counts == 0).sum())) and not keep_empty:
        log.warning("k-means: %d of %d clusters are empty", empty, num_clusters)
    return best


def _starts(
    holder: WholeCentroids,
    words: Sequence[int],
    restarts: int,
    init: Init,
    init_samples: int,
    initial: Tensor | None,
) -> Iterator[Tensor]:
    """The centroids held here that each start begins with."""
    rows, num_clusters = holder.rows, holder.num_clusters
    by_distance = is_plus_plus(init, num_clusters)
    if initial is not None:
        yield holder.prepare(initial)
        return
    if by_distance:
        rng = np.random.default_rng([*words, _SAMPLE])
        sample = rows.gather(rows.draw(max(init_samples, 256 * num_clusters), rng))
    for number in range(max(1, restarts)):
        rng = np.random.default_rng([*words, number, _START])
        if by_distance:
            drawn = plus_plus(rows, sample, num_clusters, rng)
            yield drawn[holder.held.start : holder.held.stop]
        else:
            yield holder.take(rows.draw(num_clusters, rng))


def assign(
    blocks: Sequence[Floats],
    centroids: Tensor,
    *,
    algorithm: Algorithm = "spherical",
    labels_per_sample: int = 1,
    held: range | None = None,
    valid: Mask | None = None,
    context: Context = SINGLE,
) -> Assignment:
    """The nearest ``labels_per_sample`` centroids of every row, on every rank (see Assignment).

    ``centroids`` [K, D] are all of them, or those with the ids ``held`` (see KMeans) where they
    are sharded. Raises ValueError for more labels than centroids, for another width than the rows',
    and for NaN or infinite rows: on all ranks alike.
    """
    rows = Rows(blocks, valid, algorithm, context, cache_bytes=0)
    if centroids.ndim != 2 or centroids.shape[1] != rows.dim:
        raise ValueError(f"centroids are {list(centroids.shape)}: wanted [K, {rows.dim}]")
    stop = len(centroids) if held is None else held.stop
    num_clusters = int(rows.largest(torch.tensor(stop)))
    if not 1 <= labels_per_sample <= num_clusters:
        raise ValueError(
            f"labels_per_sample is {labels_per_sample}: wanted 1 to {num_clusters:,}, the number "
            "of centroids"
        )
    labels = torch.zeros((rows.num_rows, labels_per_sample), dtype=torch.int32)
    distances = torch.zeros((rows.num_rows, labels_per_sample), dtype=torch.float32)
    # Ranks that hold unlike ranges see it alike: their number is the same on all.
    shards = int(rows.total(torch.tensor(int(held is not None and len(held) < num_clusters))))
    holder = hold(rows, num_clusters, sharded=shards > 0)
    bad = 0
    with rows.one_thread_per_operation():
        for number, block, packed in holder.nearest(rows.to_device(centroids), labels_per_sample):
            labels[rows.starts[number] : rows.starts[number + 1]] = -1
            ids = torch.from_numpy(rows.ids(number))
            scores, nearest = unpack(packed)
            labels[ids] = nearest.int().cpu()
            distances[ids] = _distances(block, scores, algorithm).cpu()
            bad += num_not_finite(block)
        rows.refuse_not_finite(bad)
    for found in (labels, distances):  # a part at a time: both may fill half the memory
        for part in torch.split(found, _ROWS_PER_SUM):
            part.copy_(rows.total(part))
    return Assignment(labels, distances)


def _distances(block: Tensor, scores: Tensor, algorithm: Algorithm) -> Tensor:
    """1 - x.c, or |x|^2 - 2 (x.c - |c|^2 / 2)."""
    if algorithm == "spherical":
        return 1.0 - scores
    return (block.square().sum(dim=1, keepdim=True) - 2.0 * scores).clamp_min(0.0)


def each_pass(found: KMeans, context: Context) -> Iterator[Tensor]:
    """The centroids [p, D] in order, a part at a time, on every rank; all ranks have to ask."""
    for some in passes(len(found.counts)):
        part = torch.zeros((len(some), found.centroids.shape[1]))
        if some.start in found.held:
            first = some.start - found.held.start
            part = found.centroids[first : first + len(some)]
        whole = len(found.held) == len(found.counts)
        yield part if whole else all_reduce_sum(part.to(context.device)).cpu()


# --- Lloyd's iteration ---


def _lloyd(
    holder: WholeCentroids, survey: Survey, start: Tensor, rule: _Rule, restart: int
) -> KMeans:
    """Assign and update until inertia settles; the centroids are those of the last assignment."""
    centroids = start
    history: list[float] = []
    stuck = False  # no row is left to restart an empty cluster
    while True:
        sums, own_counts = holder.sums(centroids, survey.unit)
        counts = holder.everywhere(own_counts)
        history.append(_inertia(holder, survey, centroids, sums, own_counts))
        log.debug("k-means: start %d, inertia %.8g", restart, history[-1])
        settled = len(history) > 1 and history[-2] - history[-1] <= rule.tolerance * history[-2]
        empty = torch.nonzero(counts == 0).flatten()
        if (settled and (stuck or not len(empty))) or len(history) > rule.max_iterations:
            break
        means = _means(holder, survey, centroids, sums, own_counts)
        if len(empty):
            stuck = not _restart(holder, centroids, means, counts, empty, rule.keep_empty)
        centroids = holder.agreed(means)
    return KMeans(
        centroids.cpu(),
        holder.held,
        counts,
        history[-1],
        tuple(history),
        len(history) - 1,
        restart,
    )


def _inertia(
    holder: WholeCentroids, survey: Survey, centroids: Tensor, sums: Tensor, counts: Tensor
) -> float:
    """sum |x|^2 - 2 c.s + n |c|^2 in float64; half of it if spherical (unit x, c: 1 - cosine)."""
    own = torch.zeros(len(centroids), dtype=torch.float64, device=centroids.device)
    for some in holder.passes():
        wide, total = centroids[some].double(), sums[some].double() / survey.unit
        own[some] = (wide * (wide * counts[some, None] - 2.0 * total)).sum(dim=1)
    inertia = survey.squares + float(holder.everywhere(own).numpy().sum())
    return max(inertia / 2.0 if holder.rows.algorithm == "spherical" else inertia, 0.0)


def _means(
    holder: WholeCentroids, survey: Survey, centroids: Tensor, sums: Tensor, counts: Tensor
) -> Tensor:
    """The means of the clusters (unit length if spherical).

    A cluster that is empty, or whose unit rows add up to nothing, keeps its centroid.
    """
    updated = torch.empty_like(centroids)
    for some in holder.passes():
        means = sums[some].double() / (survey.unit * counts[some].clamp_min(1)[:, None])
        usable = counts[some] > 0
        if holder.rows.algorithm == "spherical":
            norms = torch.linalg.vector_norm(means, dim=1, keepdim=True)
            usable &= norms.flatten() > 1e-12
            means = means / norms.clamp_min(1e-12)
        updated[some] = torch.where(usable[:, None], means.float(), centroids[some])
    return updated


def _restart(
    holder: WholeCentroids,
    centroids: Tensor,
    updated: Tensor,
    counts: Tensor,
    empty: Tensor,
    keep_empty: bool,
) -> int:
    """Moves empty clusters: to the farthest row of the largest cluster, then to that of the next
    largest, and so on; clusters whose rows are all equal give none. Returns how many have moved.
    """
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
    places = empty.numpy()[: len(ids)][order] - holder.held.start
    for first in range(0, len(ids), ROWS_PER_PASS):
        some = slice(first, first + ROWS_PER_PASS)
        found = holder.rows.gather(ids[order][some])
        here = (places[some] >= 0) & (places[some] < len(updated))
        updated[torch.from_numpy(places[some][here])] = found[torch.from_numpy(here)]
    return len(ids)


def too_many(num_clusters: int, limit: str) -> str:
    """The line that says there are too few rows."""
    return (
        f"num_clusters is {num_clusters:,}, but there are {limit}: "
        "set cluster.num_clusters to at most that (and at least 1)"
    )
