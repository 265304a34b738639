"""k-means beside faiss: the same rows, the same start, the same number of updates.

Ours runs in this process and on two gloo processes, faiss in this process, all on one thread.
Inertia is computed for all by the same few lines. faiss sums in float32; ours keeps exact sums, so
that centroids are equal for any number of ranks, which the last column shows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import torch

from mclclip.parallel import collectives, kmeans
from mclclip.parallel.process_group import Context
from mclclip.parallel.row_blocks import NpyBlocks
from tests.benchmarks import timing
from tests.distributed.conftest import RankPool

Rows = npt.NDArray[np.float32]
UPDATES = 10
NEVER = -1.0  # a tolerance that no update reaches


def write_rows(folder: Path, num_rows: int, dim: int, num_files: int = 8) -> list[Path]:
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
        np.save(paths[-1], rows)
    return paths


def inertia(paths: Sequence[Path], centroids: Rows) -> float:
    """Sum of 1 - cosine to the nearest centroid, in float64."""
    found = 0.0
    for path in paths:
        rows = np.load(path)
        found += float((1.0 - (rows @ centroids.T).max(axis=1)).sum(dtype=np.float64))
    return found


def ours(paths: Sequence[Path], start: Rows, context: Context) -> Rows:
    """Our centroids after ``UPDATES`` updates."""
    found = kmeans.fit(
        NpyBlocks(paths),
        len(start),
        initial=torch.from_numpy(start),
        max_iterations=UPDATES,
        tolerance=NEVER,
        context=context,
    )
    assert found.iterations == UPDATES
    centroids: Rows = found.centroids.numpy()
    return centroids


def ours_on_rank(paths: Sequence[Path], start: Rows) -> tuple[float, float, Rows]:
    """In a process of the pool: seconds of the slowest rank, CPU seconds of all, centroids."""
    context = Context(collectives.rank(), collectives.world_size())
    collectives.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    centroids = ours(paths, start, context)
    spent = torch.tensor([time.perf_counter() - wall_s, time.process_time() - cpu_s]).double()
    every = collectives.gather(spent[None])
    return float(every[:, 0].max()), float(every[:, 1].sum()), centroids


def of_faiss(paths: Sequence[Path], start: Rows) -> Rows:
    """faiss's centroids after as many updates; reading the files is part of it, as in ours."""
    rows = np.concatenate([np.load(path) for path in paths])
    faiss.omp_set_num_threads(1)
    found = faiss.Kmeans(
        rows.shape[1],
        len(start),
        niter=UPDATES,
        spherical=True,
        max_points_per_centroid=len(rows),
        min_points_per_centroid=1,
    )
    found.train(rows, init_centroids=start)
    return np.asarray(found.centroids)


class Contest:
    """The variants of one K, and the centroids that each found last."""

    def __init__(self, paths: Sequence[Path], start: Rows, pool: RankPool) -> None:
        self.paths, self.start, self.pool = paths, start, pool
        self.centroids: dict[str, Rows] = {}

    def variants(self) -> dict[str, Callable[[], object]]:
        """faiss first: the reference."""
        alone = Context()
        return {
            "faiss": lambda: self._keep("faiss", of_faiss),
            "ours, 1 process": lambda: self._keep("ours, 1 process", ours, alone),
            "ours, 2 ranks": self._two_ranks,
        }

    def _keep(self, name: str, find: Callable[..., Rows], *args: Any) -> None:
        self.centroids[name] = find(self.paths, self.start, *args)

    def _two_ranks(self) -> timing.Spent:
        results = self.pool(2, ours_on_rank, self.paths, self.start, timeout_s=600.0)
        wall_s, cpu_s, self.centroids["ours, 2 ranks"] = results[0]
        return timing.Spent(wall_s, cpu_s)

    def report(self, num_rows: int, rounds: int) -> None:
        """Runs the rounds and prints the table."""
        self.pool(2, collectives.rank)  # starts the processes
        timings = timing.interleave(self.variants(), rounds, warm_ups=0)
        rows = timings.rows("faiss", num_rows * UPDATES / 1000)
        costs = {name: inertia(self.paths, found) for name, found in self.centroids.items()}
        same = np.array_equal(self.centroids["ours, 1 process"], self.centroids["ours, 2 ranks"])
        found = [
            [*row, f"{costs[name]:.4f}", str(same) if name.startswith("ours") else ""]
            for name, row in zip(timings.spent, rows, strict=True)
        ]
        timing.print_table(
            f"spherical k-means, {num_rows:,} x {self.start.shape[1]} float32 in "
            f"{len(self.paths)} files, K = {len(self.start)}, {UPDATES} updates from one start",
            [*timing.headers("implementation", "k rows x updates"), "inertia", "1 = 2 ranks"],
            found,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Both numbers of clusters."""
    parser = timing.parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--clusters", type=int, nargs="+", default=[10, 100])
    options: argparse.Namespace = parser.parse_args(arguments)
    torch.set_num_threads(1)
    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            paths = write_rows(Path(temporary), options.rows, options.dim)
            rows = np.concatenate([np.load(path) for path in paths])
            for number in options.clusters:
                start = rows[np.random.default_rng(1).choice(len(rows), number, replace=False)]
                Contest(paths, start, pool).report(len(rows), options.rounds)
    finally:
        pool.kill()


if __name__ == "__main__":
    main()
