"""Filters of embeddings: CLIP scores, near-duplicates within clusters, copies of evaluation images.

Rows lie in float16 on disk, a file per shard. They are random around the centers of as many
clusters; of some rows a near copy is planted (cosine about 0.98) further on, so that two of a pair
lie in different files; its cluster is that of the nearest center, like any row's. Precision and
recall are of these pairs. Each part is timed beside one reading of all rows, and its memory is the
peak above what was there before, without digests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mclclip.curate import inputs, near
from mclclip.data.row_store import RowStore, rows_path
from mclclip.run.artifacts import Manifest
from mclclip.util import search
from tests.benchmarks import memory, timing

ROWS_PER_FILE = 10_000  # as in a shard of ``mclclip pack``
PLANTED = 0.02  # share of the rows that are in planted pairs
ABOVE = 0.95


def write(root: Path, num_rows: int, dim: int, num_clusters: int) -> None:
    """Images, captions and evaluation images below ``root``, clusters and the planted pairs."""
    rng = np.random.default_rng(0)
    centers = search.normalize_rows(rng.standard_normal((num_clusters, dim)))
    labels = rng.integers(num_clusters, size=num_rows).astype(np.int32)
    copies = rng.choice(num_rows, round(PLANTED * num_rows), replace=False)
    source = np.full(num_rows, -1)
    lower, higher = np.sort(copies.reshape(-1, 2), axis=1).T
    source[higher] = lower
    kept: dict[int, np.ndarray] = {}
    for name in ("images", "texts"):
        (root / name).mkdir()
    for number, start in enumerate(range(0, num_rows, ROWS_PER_FILE)):
        ids = np.arange(start, min(start + ROWS_PER_FILE, num_rows))
        noise = search.normalize_rows(rng.standard_normal((len(ids), dim), dtype=np.float32))
        rows = search.normalize_rows(centers[labels[ids]] + 1.5 * noise)
        for row in np.flatnonzero(np.isin(ids, lower)).tolist():
            kept[start + row] = rows[row]
        for row in np.flatnonzero(source[ids] >= 0).tolist():
            rows[row] = search.normalize_rows((kept[source[start + row]] + 0.2 * noise[row])[None])[
                0
            ]
        labels[ids] = np.argmax(rows @ centers.T, axis=1)
        texts = search.normalize_rows(rng.standard_normal((len(ids), dim), dtype=np.float32) + rows)
        np.save(rows_path(root / "images", number), rows.astype(np.float16))
        np.save(rows_path(root / "texts", number), texts.astype(np.float16))
    np.save(root / "labels.npy", labels)
    np.save(root / "pairs.npy", np.column_stack([lower, higher]))


def stored(folder: Path, num_rows: int) -> RowStore:
    """The rows of a folder that ``write`` has written."""
    counts = {"shards": -(-num_rows // ROWS_PER_FILE)}
    return RowStore.open(folder, Manifest("embeddings", {}, {}, counts, ""))


def reading(root: Path, num_rows: int) -> None:
    """Every row once, looked at for numbers that are not finite."""
    rows = stored(root / "images", num_rows)
    for cut in near.cuts(num_rows):
        inputs.finite(rows, cut, "rows")


def scores(root: Path, num_rows: int) -> np.ndarray:
    """The scores of samples with one caption each."""
    texts = stored(root / "texts", num_rows)
    captions = np.ones(num_rows, np.int32)
    return inputs.clip_scores(stored(root / "images", num_rows), texts, captions)


def copies(root: Path, num_rows: int) -> tuple[float, float, int]:
    """Precision and recall of the samples that are left out, and near pairs within clusters."""
    rows, labels = stored(root / "images", num_rows), np.load(root / "labels.npy")
    usable = np.ones(num_rows, bool)
    of, counts = near.copies_among(rows, usable, None, ABOVE, labels, what="the benchmark")
    left_out = np.flatnonzero(of != np.arange(num_rows))
    planted = np.load(root / "pairs.npy")[:, 1]
    right = len(np.intersect1d(left_out, planted))
    return right / max(len(left_out), 1), right / len(planted), counts["pairs"]


def evaluation(root: Path, num_rows: int, num_images: int) -> int:
    """Samples that are copies of evaluation images, which are near copies of the first rows."""
    rows = stored(root / "images", num_rows)
    noise = np.random.default_rng(1).standard_normal((num_images, rows[:1].shape[1]))
    others = search.normalize_rows(rows[:num_images] + 0.2 * search.normalize_rows(noise))
    nearest, _, _ = near.nearest_other(rows, others, ABOVE, what="the benchmark")
    return int((nearest >= 0).sum())


def peak(work: Callable[..., object], root: Path, *sizes: int) -> float:
    """MiB of a part."""
    return memory.peak_mib(lambda: work(root, *sizes))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of times, and one of memory, precision and recall."""
    parser = timing.parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--clusters", type=int, default=1_000)
    parser.add_argument("--evaluation", type=int, default=1_000, help="evaluation images")
    parser.add_argument("--folder", type=Path, help="where rows are written (default: temporary)")
    args = timing.parse(parser, arguments, rows=20_000, dim=64, clusters=20, evaluation=100)
    parts: dict[str, tuple[Callable[..., object], tuple[int, ...]]] = {
        "reading": (reading, (args.rows,)),
        "CLIP scores": (scores, (args.rows,)),
        "near-duplicates within clusters": (copies, (args.rows,)),
        f"copies of {args.evaluation:,} images": (evaluation, (args.rows, args.evaluation)),
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        root = Path(folder)
        write(root, args.rows, args.dim, args.clusters)
        spent = timing.interleave(
            {name: lambda w=work, s=sizes: w(root, *s) for name, (work, sizes) in parts.items()},
            args.rounds,
            warm_ups=0,
        )
        mib = {
            name: memory.in_fresh_process(peak, work, root, *sizes)
            for name, (work, sizes) in parts.items()
        }
        precision, recall, pairs = copies(root, args.rows)
        matched = evaluation(root, args.rows, args.evaluation)
    timing.print_table(
        f"{args.rows:,} rows of {args.dim} in float16, {args.clusters:,} clusters",
        timing.headers("part", "million samples"),
        spent.rows("reading", args.rows / 1e6),
    )
    timing.print_table(
        f"Peak memory of each part; near-duplicates above {ABOVE} within clusters: {pairs:,} pairs",
        ["what", "figure"],
        [
            *([name, f"{value:,.0f} MiB"] for name, value in mib.items()),
            ["precision", f"{precision:.4f}"],
            ["recall of planted copies", f"{recall:.4f}"],
            [f"samples near the {args.evaluation:,} images", f"{matched:,}"],
        ],
    )


if __name__ == "__main__":
    main()
