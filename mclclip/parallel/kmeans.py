"""Lloyd's k-means over ranks: centroids and nearest centroids, the same for any number of ranks.

How rows are shared out and why sums do not depend on it is said in row_blocks.py. What is not such
a sum (the start of k-means++, the means themselves) is rank 0's result on all ranks.

Source: MCL, section 3. ``spherical`` assigns by cosine; ``euclidean``, by squared distance,
is what the authors' released code does (with scikit-learn's mini-batches; here all rows take part).
Centroids are held whole on every rank ([K, D] int64 sums, float64 means, float32 centroids).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mclclip.parallel.collectives import all_reduce_sum
from mclclip.parallel.process_group import SINGLE, Context
from mclclip.parallel.row_blocks import (
    ROWS_PER_BLOCK,
    Algorithm,
    Floats,
    Integers,
    Mask,
    Reduce,
    Rows,
    Survey,
    add_rows,
    num_not_finite,
    squared_distance,
    squared_distances,
)

log = logging.getLogger("mclclip")

CENTROIDS_PER_PASS = 8192  # columns of one similarity matrix; fixed, as it is part of the result
_SAMPLE, _START = 1, 2  # what a random generator is for


@dataclass(frozen=True)
class KMeans:
    """Centroids float32 [K, D] on the CPU (unit rows if spherical) and how they were found.

    ``inertia`` is the sum over rows of 1 - cosine (spherical) or of the squared distance to the
    nearest centroid, ``counts`` int64 [K] the rows nearest to each: what ``assign`` with these
    centroids gives. ``history`` is the inertia before each update and at the end, ``iterations``
    the number of updates, ``restart`` the start that won.
    """

    centroids: Tensor
    counts: Tensor
    inertia: float
    history: tuple[float, ...]
    iterations: int
    restart: int


@dataclass(frozen=True)
class Assignment:
    """The L nearest centroids of each row, nearest first, ties to the lowest id.

    ``labels`` int64 [N, L], -1 where the row is not valid; ``distances`` float32 [N, L]: 1 - cosine
    (spherical) or the squared distance, 0 where the row is not valid.
    """

    labels: Tensor
    distances: Tensor


def fit(
    blocks: Sequence[Floats],
    num_clusters: int,
    *,
    algorithm: Algorithm = "spherical",
    seed: int | Sequence[int] = 0,
    restarts: int = 1,
    max_iterations: int = 100,
    tolerance: float = 1e-5,
    init_samples: int = 100_000,
    initial: Tensor | None = None,
    valid: Mask | None = None,
    context: Context = SINGLE,
    reduce: Reduce = all_reduce_sum,
    cache_bytes: int | None = None,
) -> KMeans:
    """Clusters the rows of ``blocks`` ([n_i, D] float16 or wider, given whole to each rank) into K.

    Each of ``restarts`` starts draws K rows by k-means++ from max(init_samples, 256 K) rows chosen
    by ``seed``; the lowest inertia wins, the first of equals. ``initial`` [K, D] replaces the drawn
    start (one start then). Iteration ends when an update lowers inertia by at most ``tolerance`` of
    itself, or after ``max_iterations`` updates. An empty cluster restarts at the farthest row of
    the largest cluster. Rows where ``valid`` [N] is false take no part. ``context`` and ``reduce``
    (sum over ranks) say who shares the work; up to ``cache_bytes`` of a rank's rows (None: 1 GiB,
    half of a GPU's free memory) stay on its device as float32.

    Raises ValueError for NaN or infinite rows, and for more clusters than there are rows or
    distinct rows: on all ranks alike.
    """
    rows = Rows(blocks, valid, algorithm, context, reduce, cache_bytes)
    if not 1 <= num_clusters <= rows.num_valid:
        raise ValueError(_too_many(num_clusters, f"{rows.num_valid:,} usable rows"))
    if initial is not None and tuple(initial.shape) != (num_clusters, rows.dim):
        raise ValueError(f"initial is {list(initial.shape)}: wanted {[num_clusters, rows.dim]}")
    words = [seed] if isinstance(seed, int) else list(seed)
    with rows.one_thread_per_operation():
        survey = rows.survey()
        if initial is not None:
            starts, sample = 1, rows.prepare(initial)
        else:
            starts, rng = max(1, restarts), np.random.default_rng([*words, _SAMPLE])
            sample = rows.gather(rows.draw(max(init_samples, 256 * num_clusters), rng))
        best: KMeans | None = None
        for number in range(starts):
            rng = np.random.default_rng([*words, number, _START])
            start = sample if initial is not None else _plus_plus(rows, sample, num_clusters, rng)
            found = _lloyd(rows, survey, start, max_iterations, tolerance, number)
            if best is None or found.inertia < best.inertia:
                best = found
    assert best is not None
    if empty := int((best.counts == 0).sum()):
        log.warning("k-means: %d of %d clusters are empty", empty, num_clusters)
    return best


def assign(
    blocks: Sequence[Floats],
    centroids: Tensor,
    *,
    algorithm: Algorithm = "spherical",
    labels_per_sample: int = 1,
    valid: Mask | None = None,
    context: Context = SINGLE,
    reduce: Reduce = all_reduce_sum,
) -> Assignment:
    """The nearest ``labels_per_sample`` centroids of every row, on every rank (see Assignment).

    Raises ValueError for more labels than centroids, for another width than the rows', and for NaN
    or infinite rows: on all ranks alike.
    """
    rows = Rows(blocks, valid, algorithm, context, reduce, cache_bytes=0)
    if centroids.ndim != 2 or centroids.shape[1] != rows.dim:
        raise ValueError(f"centroids are {list(centroids.shape)}: wanted [K, {rows.dim}]")
    if not 1 <= labels_per_sample <= len(centroids):
        raise ValueError(
            f"labels_per_sample is {labels_per_sample}: wanted 1 to {len(centroids):,}, the number "
            "of centroids"
        )
    labels = torch.zeros((rows.num_rows, labels_per_sample), dtype=torch.int64)
    distances = torch.zeros((rows.num_rows, labels_per_sample), dtype=torch.float32)
    centroids = rows.to_device(centroids)

    def assign_block(number: int) -> int:
        labels[rows.starts[number] : rows.starts[number + 1]] = -1
        block, ids = rows.block(number), torch.from_numpy(rows.ids(number))
        nearest = _nearest(block, centroids, algorithm, labels_per_sample)
        labels[ids], distances[ids] = nearest.labels.cpu(), nearest.distances.cpu()
        return num_not_finite(block)

    with rows.one_thread_per_operation():
        rows.refuse_not_finite(sum(rows.each(assign_block, rows.own)))
    return Assignment(rows.total(labels).cpu(), rows.total(distances).cpu())


def merge_nearest(parts: Sequence[Assignment], labels_per_sample: int) -> Assignment:
    """The L nearest of assignments of the same rows to different centroids (with global ids)."""
    labels = torch.cat([part.labels for part in parts], dim=1)
    distances = torch.cat([part.distances for part in parts], dim=1)
    by_id = labels.sort(dim=1, stable=True)
    by_distance = distances.gather(1, by_id.indices).sort(dim=1, stable=True)
    kept = by_distance.indices[:, :labels_per_sample]
    return Assignment(by_id.values.gather(1, kept), by_distance.values[:, :labels_per_sample])


def _nearest(block: Tensor, centroids: Tensor, algorithm: Algorithm, count: int) -> Assignment:
    """The ``count`` nearest centroids of rows [n, D], for a bounded number of centroids at a time.

    Compared by x.c (spherical) or x.c - |c|^2 / 2 (euclidean) in float32.
    """
    parts = []
    for first in range(0, len(centroids), CENTROIDS_PER_PASS):
        some = centroids[first : first + CENTROIDS_PER_PASS]
        scores = block @ some.T
        if algorithm == "euclidean":
            scores -= some.square().sum(dim=1) / 2.0
        ids, values = _largest(scores, min(count, len(some)))
        parts.append(Assignment(ids + first, -values))
    best = parts[0] if len(parts) == 1 else merge_nearest(parts, count)
    if algorithm == "spherical":
        return Assignment(best.labels, 1.0 + best.distances)
    squares = block.square().sum(dim=1, keepdim=True)
    return Assignment(best.labels, (squares + 2.0 * best.distances).clamp_min(0.0))


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids, values), each [n, count], descending. Overwrites ``scores``."""
    ids, values = [], []
    for _ in range(count):
        value, index = scores.max(dim=1, keepdim=True)  # the first of equals; topk leaves it open
        ids.append(index)
        values.append(value)
        scores.scatter_(1, index, -torch.inf)
    return torch.cat(ids, dim=1), torch.cat(values, dim=1)


def _plus_plus(rows: Rows, sample: Tensor, num_clusters: int, rng: np.random.Generator) -> Tensor:
    """Greedy k-means++: draws rows by their squared distance to the centroids so far, and takes of
    2 + ln K draws the one that lowers the sum of these distances most (as scikit-learn does).

    Where the sample has fewer distinct rows than clusters, rows repeat: Lloyd then finds clusters
    empty, and restarts them or says that there are no more distinct rows.
    """
    cut = (sample[i : i + ROWS_PER_BLOCK] for i in range(0, len(sample), ROWS_PER_BLOCK))
    parts = [(part, part.square().sum(dim=1, keepdim=True)) for part in cut]
    chosen: list[int] = []
    nearest = np.full(len(sample), np.inf)
    drawn = rng.integers(len(sample), size=1)
    while True:
        distances = torch.cat(rows.each(partial(squared_distances, sample[drawn]), parts)).numpy()
        lowered = np.minimum(nearest[:, None], distances)
        best = int(lowered.sum(axis=0).argmin())
        chosen.append(int(drawn[best]))
        if len(chosen) == num_clusters:
            return rows.of_first_rank(sample[chosen])
        nearest = lowered[:, best]
        cumulative = np.cumsum(nearest)
        at = rng.random(2 + int(np.log(num_clusters))) * cumulative[-1]
        # A total of zero draws the last row again.
        drawn = np.searchsorted(cumulative, at, "right").clip(max=len(sample) - 1)


def _lloyd(
    rows: Rows, survey: Survey, start: Tensor, max_iterations: int, tolerance: float, restart: int
) -> KMeans:
    """Assign and update until inertia settles; the centroids are those of the last assignment."""
    centroids = start
    history: list[float] = []
    while True:
        sums, counts = _cluster_sums(rows, survey, centroids)
        history.append(_inertia(rows, survey, centroids, sums, counts))
        log.debug("k-means: start %d, inertia %.8g", restart, history[-1])
        settled = len(history) > 1 and history[-2] - history[-1] <= tolerance * history[-2]
        empty = torch.nonzero(counts == 0).flatten().tolist()
        if (settled and not empty) or len(history) > max_iterations:
            break
        centroids = _update(rows, centroids, sums, counts, empty)
    updates = len(history) - 1
    return KMeans(centroids.cpu(), counts.cpu(), history[-1], tuple(history), updates, restart)


def _cluster_sums(rows: Rows, survey: Survey, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """(sums float64 [K, D], counts int64 [K]) of the rows nearest to each centroid, all ranks."""

    def add_run(numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        sums = torch.zeros_like(centroids, dtype=torch.int64)
        counts = torch.zeros(len(centroids), dtype=torch.int64, device=centroids.device)
        for number in numbers:
            block = rows.block(number)
            labels = _nearest(block, centroids, rows.algorithm, 1).labels.flatten()
            present, place, count = torch.unique(labels, return_inverse=True, return_counts=True)
            sums[present] += (add_rows(block, place, len(present)) * survey.unit).round().long()
            counts[present] += count
        return sums, counts

    sums, counts = add_run([])
    for more_sums, more_counts in rows.each(add_run, rows.runs()):
        sums += more_sums
        counts += more_counts
    return rows.total(sums).double() / survey.unit, rows.total(counts)


def _inertia(rows: Rows, survey: Survey, centroids: Tensor, sums: Tensor, counts: Tensor) -> float:
    """sum |x|^2 - 2 c.s + n |c|^2 in float64; half of it if spherical (unit x, c: 1 - cosine)."""
    wide = centroids.double()
    inertia = survey.squares + (wide * (wide * counts[:, None] - 2.0 * sums)).sum()
    if rows.algorithm == "spherical":
        inertia = inertia / 2.0
    return float(rows.of_first_rank(inertia.clamp_min(0.0)))


def _update(
    rows: Rows, centroids: Tensor, sums: Tensor, counts: Tensor, empty: Sequence[int]
) -> Tensor:
    """The means of the clusters (unit length if spherical); empty ones restart elsewhere.

    A cluster whose unit rows add up to nothing keeps its centroid.
    """
    means = sums / counts.clamp_min(1)[:, None]
    usable = counts > 0
    if rows.algorithm == "spherical":
        norms = torch.linalg.vector_norm(means, dim=1, keepdim=True)
        usable &= norms.flatten() > 1e-12
        means = means / norms.clamp_min(1e-12)
    updated = torch.where(usable[:, None], means.float(), centroids)
    if empty:
        ids = _restart_rows(rows, centroids, counts)[: len(empty)]
        log.info("k-means: %d of %d empty clusters restart", len(ids), len(empty))
        order = np.argsort(ids)
        updated[np.array(empty)[order]] = rows.gather(ids[order])
    return rows.of_first_rank(updated)


def _restart_rows(rows: Rows, centroids: Tensor, counts: Tensor) -> Integers:
    """Where empty clusters restart: the farthest row of the largest cluster, then that of the next
    largest, and so on; clusters whose rows are all equal give none.
    """
    spread, farthest = _farthest(rows, centroids)
    by_size = np.argsort(-counts.cpu().numpy(), kind="stable")
    donors = by_size[spread.numpy()[by_size] > 0.0]
    if not len(donors):
        distinct = int((counts > 0).sum())
        raise ValueError(_too_many(len(counts), f"only {distinct:,} distinct usable rows"))
    ids: Integers = farthest.numpy()[donors]
    return ids


def _farthest(rows: Rows, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Per cluster: the largest squared distance (-1: no rows), and the lowest row that has it."""

    def look(number: int) -> tuple[Tensor, Tensor]:
        block = rows.block(number)
        labels = _nearest(block, centroids, rows.algorithm, 1).labels.flatten()
        return labels.cpu(), squared_distance(centroids[labels], block)

    spread = torch.full((len(centroids),), -1.0, dtype=torch.float64)
    farthest = torch.zeros(len(centroids), dtype=torch.int64)
    for number, (labels, distance) in zip(rows.own, rows.each(look, rows.own), strict=True):
        ids = torch.from_numpy(rows.ids(number))
        largest = spread.scatter_reduce(0, labels, distance, "amax")
        for cluster in torch.nonzero(largest > spread).flatten().tolist():
            at_largest = (labels == cluster) & (distance == largest[cluster])
            farthest[cluster] = ids[at_largest][0]
        spread = largest
    spreads, rows_of = rows.by_rank(spread), rows.by_rank(farthest)
    largest = spreads.max(dim=0).values
    rows_of = rows_of.where(spreads == largest, torch.iinfo(torch.int64).max)
    return largest, rows_of.min(dim=0).values


def _too_many(num_clusters: int, limit: str) -> str:
    return (
        f"num_clusters is {num_clusters:,}, but there are {limit}: "
        "set cluster.num_clusters to at most that (and at least 1)"
    )
