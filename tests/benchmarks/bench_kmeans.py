"""k-means beside faiss: the same rows, the same start, the same number of updates.

Ours runs in this process and on two gloo processes, faiss in this process, all on one thread.
Inertia is computed for all by the same few lines. faiss sums in float32; ours keeps exact sums, so
that centroids are equal for any number of ranks, which the last column shows. faiss makes as many
assignments as updates; ours makes one more, so that counts and inertia are those of the centroids
it returns: "per iteration" divides each by the assignments it made.

Then the memory of one iteration at a million clusters: whole in one process, sharded over two; and
with ``--two-level`` the time in which two ranks find a million clusters in two levels.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import torch

from mclclip.clustering import kmeans
from mclclip.clustering.centroids import hold
from mclclip.clustering.rows import RankRows
from mclclip.data.arrays import cut_blocks
from mclclip.data.row_store import RowBlocks, RowStore
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from tests.benchmarks import memory, timing
from tests.distributed.conftest import RankPool, here
from tests.nearest_checks import fit, fit_two_level

Floats = npt.NDArray[np.float32]
SIZES = {10: (200_000, 10), 100: (200_000, 10), 1000: (50_000, 5), 20_000: (40_000, 2)}
"""K: rows and updates that take seconds."""
MILLION, MILLION_DIM, MILLION_ROWS = 1_000_000, 64, 8192
MILLION_UPDATES = 10
NEVER = -1.0  # a tolerance that no update reaches


def write_rows(
    folder: Path, num_rows: int, dim: int, num_files: int = 8, dtype: Any = np.float32
) -> list[Path]:
    """Unit rows around 300 centres, the way embeddings lie on disk: one file per shard."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((300, dim), dtype=np.float32)
    paths = []
    for number in range(num_files):
        size = num_rows // num_files
        rows = centres[rng.integers(300, size=size)]
        rows += 1.5 * rng.standard_normal((size, dim), dtype=np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        paths.append(folder / f"{number:05d}.npy")
        np.save(paths[-1], rows.astype(dtype))
    return paths


def inertia(paths: Sequence[Path], centroids: Floats) -> float:
    """Sum of 1 - cosine to the nearest centroid, in float64."""
    found = 0.0
    for path in paths:
        rows = np.load(path)
        found += float((1.0 - (rows @ centroids.T).max(axis=1)).sum(dtype=np.float64))
    return found


def ours(paths: Sequence[Path], start: Floats, updates: int, context: Context) -> Floats:
    """Our centroids after so many updates."""
    found = fit(
        RowBlocks(RowStore(paths)),
        len(start),
        initial=torch.from_numpy(start),
        max_iterations=updates,
        tolerance=NEVER,
        context=context,
    )
    assert found.iterations == updates
    centroids: Floats = found.centroids.numpy()
    return centroids


def ours_on_rank(paths: Sequence[Path], start: Floats, updates: int) -> tuple[float, float, Floats]:
    """In a process of the pool: seconds of the slowest rank, CPU seconds of all, centroids."""
    context = here()
    collectives.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    centroids = ours(paths, start, updates, context)
    spent = torch.tensor([time.perf_counter() - wall_s, time.process_time() - cpu_s]).double()
    every = collectives.gather(spent[None])
    return float(every[:, 0].max()), float(every[:, 1].sum()), centroids


def of_faiss(paths: Sequence[Path], start: Floats, updates: int) -> Floats:
    """faiss's centroids after as many updates; reading the files is part of it, as in ours."""
    rows = np.concatenate([np.load(path) for path in paths])
    faiss.omp_set_num_threads(1)
    found = faiss.Kmeans(
        rows.shape[1],
        len(start),
        niter=updates,
        spherical=True,
        max_points_per_centroid=len(rows),
        min_points_per_centroid=1,
    )
    found.train(rows, init_centroids=start)
    return np.asarray(found.centroids)


class Contest:
    """The variants of one K, and the centroids that each found last."""

    def __init__(self, paths: Sequence[Path], start: Floats, updates: int, pool: RankPool) -> None:
        self.paths, self.start, self.updates, self.pool = paths, start, updates, pool
        self.centroids: dict[str, Floats] = {}

    def variants(self) -> dict[str, Callable[[], object]]:
        """faiss first: the reference."""
        alone = Context()
        return {
            "faiss": lambda: self._keep("faiss", of_faiss),
            "ours, 1 process": lambda: self._keep("ours, 1 process", ours, alone),
            "ours, 2 ranks": self._two_ranks,
        }

    def _keep(self, name: str, find: Callable[..., Floats], *args: Any) -> None:
        self.centroids[name] = find(self.paths, self.start, self.updates, *args)

    def _two_ranks(self) -> timing.Spent:
        results = self.pool(2, ours_on_rank, self.paths, self.start, self.updates, timeout_s=600.0)
        wall_s, cpu_s, self.centroids["ours, 2 ranks"] = results[0]
        return timing.Spent(wall_s, cpu_s)

    def report(self, num_rows: int, rounds: int) -> None:
        """Runs the rounds and prints the table."""
        self.pool(2, collectives.rank)  # starts the processes
        timings = timing.interleave(self.variants(), rounds, warm_ups=0)
        rows = timings.rows("faiss", num_rows * self.updates / 1000)
        costs = {name: inertia(self.paths, found) for name, found in self.centroids.items()}
        same = np.array_equal(self.centroids["ours, 1 process"], self.centroids["ours, 2 ranks"])
        found = []
        for name, row in zip(timings.spent, rows, strict=True):
            is_ours = name.startswith("ours")
            share = self.updates / (self.updates + is_ours)
            found.append(
                [
                    *row,
                    timing.number(1000 * timings.wall_s(name) * share / self.updates),
                    f"{timings.ratio(name, 'faiss') * share:.3f}",
                    f"{costs[name]:.4f}",
                    str(same) if is_ours else "",
                ]
            )
        timing.print_table(
            f"spherical k-means, {num_rows:,} x {self.start.shape[1]} float32 in {len(self.paths)} "
            f"files, K = {len(self.start)}, {self.updates} updates from one start",
            [
                *timing.headers("implementation", "k rows x updates"),
                "wall ms per iteration",
                "ratio",
                "inertia",
                "1 = 2 ranks",
            ],
            found,
        )


def one_iteration(sharded: bool) -> tuple[float, float]:
    """Peak MiB and seconds of assigning some rows to a million centroids and updating these."""
    context = here()
    data = np.random.default_rng(0).standard_normal((MILLION_ROWS, MILLION_DIM), dtype=np.float32)
    rows = RankRows(cut_blocks([data]), context=context)

    def iterate() -> None:
        with rows.torch_settings():
            rows.survey()
            holder = hold(rows, MILLION, sharded)
            torch.manual_seed(context.rank)
            centroids = torch.randn(len(holder.held), MILLION_DIM).mul_(MILLION_DIM**-0.5)
            sums, counts = holder.sums(centroids)
            kmeans.means_of(holder, centroids, sums, counts)

    begun_s = time.perf_counter()
    peak = memory.peak_mib(iterate)
    return peak, time.perf_counter() - begun_s


def report_memory(pool: RankPool) -> None:
    """Prints the table of a million clusters."""
    whole = memory.in_fresh_process(one_iteration, False)
    shards = pool(2, one_iteration, True, timeout_s=600.0)
    rows = [["whole, 1 process", whole], ["sharded, 2 ranks", max(shards)]]
    timing.print_table(
        f"one iteration on {MILLION_ROWS:,} x {MILLION_DIM} rows, K = {MILLION:,}; centroids alone "
        f"{MILLION * MILLION_DIM * 4 / 2**20:.0f} MiB",
        ["centroids", "peak MiB of a rank", "s"],
        [[name, timing.number(peak), timing.number(seconds)] for name, (peak, seconds) in rows],
    )


def two_levels_on_rank(paths: Sequence[Path]) -> tuple[float, float, float, int]:
    """In a process of the pool: peak MiB, seconds, CPU seconds, and centroids that it holds."""
    context = here()
    blocks = RowBlocks(RowStore(paths))
    options = {"init": "random", "max_iterations": MILLION_UPDATES, "tolerance": NEVER}
    found = []
    collectives.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    peak = memory.peak_mib(
        lambda: found.append(fit_two_level(blocks, MILLION, context=context, **options))
    )
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert found[0].iterations == MILLION_UPDATES and len(found[0].held) < MILLION
    return peak, wall_s, cpu_s, len(found[0].held)


def report_two_levels(pool: RankPool, num_rows: int) -> None:
    """Prints how long two ranks take for a million clusters of so many rows."""
    with tempfile.TemporaryDirectory() as temporary:
        paths = write_rows(Path(temporary), num_rows, MILLION_DIM, dtype=np.float16)
        ranks = pool(2, two_levels_on_rank, paths, timeout_s=3600.0)
    timing.print_table(
        f"two levels on two ranks, {num_rows:,} x {MILLION_DIM} float16 rows, K = {MILLION:,}, "
        f"random starts, {MILLION_UPDATES} updates in each level",
        ["rank", "centroids held", "peak MiB", "s", "CPU s"],
        [
            [str(rank), f"{held:,}", *(timing.number(x) for x in (peak, wall_s, cpu_s))]
            for rank, (peak, wall_s, cpu_s, held) in enumerate(ranks)
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """All numbers of clusters, then the memory at a million."""
    parser = timing.parser(__doc__)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--clusters", type=int, nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--no-memory", action="store_true", help="skip the million clusters")
    parser.add_argument(
        "--two-level", type=int, default=0, metavar="ROWS", help="a million clusters of so many"
    )
    options = timing.parse(parser, arguments, dim=32, clusters=[10], no_memory=True)
    torch.set_num_threads(1)
    pool = RankPool()
    try:
        if not options.no_memory:
            report_memory(pool)
        if options.two_level:
            report_two_levels(pool, options.two_level)
        for num_clusters in options.clusters:
            num_rows, updates = SIZES[num_clusters]
            with tempfile.TemporaryDirectory() as temporary:
                paths = write_rows(Path(temporary), num_rows, options.dim)
                rows = np.concatenate([np.load(path) for path in paths])
                drawn = np.random.default_rng(1).choice(len(rows), num_clusters, replace=False)
                Contest(paths, rows[drawn], updates, pool).report(len(rows), options.rounds)
    finally:
        pool.kill()


if __name__ == "__main__":
    main()
