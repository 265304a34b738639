"""The search of blind spots beside the bare product, over rows in float16 on disk.

Every row is compared with every other, in pieces: a block of queries beside a block of rows. All
pieces cost about the same, so that some of them are measured, the first ones, and the time of all
is that times their number. The bare product is of the same blocks in float32; nothing is kept of
it. Rows are random, with one planted pair in 500 rows; what a trained encoder confuses beside costs
two rows of the other encoder per pair. Memory is the peak above what was there before, without
digests, which are compared once per file and not measured here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from mclclip.data.row_store import RowStore, rows_path
from mclclip.run.artifacts import Manifest
from mclclip.util import search
from mclclip.verbs.blindspots import ABOVE, BELOW, BlindSpots, find
from tests.benchmarks import memory, timing

ROWS_PER_FILE = 10_000  # as in a shard of ``mclclip pack``
PLANTED = 500  # of so many rows two are a pair


def write(folder: Path, num_rows: int, dim: int, planted: bool) -> None:
    """Random unit rows in float16, a file per shard; with ``planted`` some follow near copies."""
    folder.mkdir()
    rng = np.random.default_rng(int(planted))
    for number, start in enumerate(range(0, num_rows, ROWS_PER_FILE)):
        shape = min(ROWS_PER_FILE, num_rows - start), dim
        rows = search.normalize_rows(rng.standard_normal(shape, dtype=np.float32))
        if planted:
            rows[1::PLANTED] = search.normalize_rows(
                rows[::PLANTED][: len(rows[1::PLANTED])] + 0.2 * rows[1::PLANTED]
            )
        np.save(rows_path(folder, number), rows.astype(np.float16))


def stored(folder: Path, num_rows: int) -> RowStore:
    """The rows of a folder that ``write`` has written."""
    counts = {"shards": -(-num_rows // ROWS_PER_FILE)}
    return RowStore.open(folder, Manifest("embeddings", {}, {}, counts, ""))


def bare(rows: RowStore, num_pieces: int) -> None:
    """Products of the same blocks."""
    for bank, queries in islice(search.blocks(len(rows)), num_pieces):
        if queries.start == 0:
            right = search.normalize_rows(rows[bank]).T
            found = np.empty((search.QUERY_ROWS, right.shape[1]), np.float32)
        left = search.normalize_rows(rows[queries])
        np.matmul(left, right, out=found[: len(left)])


def spots(root: Path, num_rows: int, num_pieces: int) -> BlindSpots:
    """The blind spots in the first pieces."""
    blocks = islice(search.blocks(num_rows), num_pieces)
    pairs = search.near_pairs(stored(root / "first", num_rows), ABOVE, blocks)
    return find(
        pairs, stored(root / "second", num_rows),
        above=ABOVE, below=BELOW, per_image=5, max_pairs=1000,
    )  # fmt: skip


def peak(root: Path, num_rows: int, num_pieces: int) -> float:
    """MiB of the search of the first pieces."""
    return memory.peak_mib(lambda: spots(root, num_rows, num_pieces))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = timing.parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--pieces", type=int, default=48, help="measured, of all that there are")
    parser.add_argument("--folder", type=Path, help="where rows are written (default: temporary)")
    args = timing.parse(parser, arguments, rows=20_000, dim=64, pieces=8)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        root = Path(folder)
        write(root / "first", args.rows, args.dim, planted=True)
        write(root / "second", args.rows, args.dim, planted=False)
        total = search.num_blocks(args.rows)
        pieces = min(args.pieces, total)
        rows = stored(root / "first", args.rows)
        variants: dict[str, Callable[[], object]] = {
            "bare product": lambda: bare(rows, pieces),
            "blind spots": lambda: spots(root, args.rows, pieces),
        }
        found = timing.interleave(variants, args.rounds)
        mib = memory.in_fresh_process(peak, root, args.rows, pieces)
        kept = spots(root, args.rows, pieces).spots.num_pairs
    seen = sum(
        (bank.stop - bank.start) * (queries.stop - queries.start)
        for bank, queries in islice(search.blocks(args.rows), pieces)
    )
    hours = found.wall_s("blind spots") / pieces * total / 3600
    cpu = found.cpu_s("blind spots") / pieces * total / 3600
    timing.print_table(
        f"{args.rows:,} rows of {args.dim} in float16: {pieces} of {total:,} pieces, {kept} blind "
        f"spots; all pieces would take {hours:.2f} h ({cpu:.2f} h of CPU); peak {mib:,.0f} MiB",
        timing.headers("variant", "million pairs"),
        found.rows("bare product", seen / 1e6),
    )


if __name__ == "__main__":
    main()
