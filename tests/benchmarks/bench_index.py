"""Joining the scans of all shards into an index, as ``mclclip index`` does it after scanning.

Rows are made up, of shards of 10,000 samples: what is measured is the table that rank 0 holds, not
the scan of a shard, whose time ``bench_verification`` has. Memory is the largest resident set of a
process that did nothing else, its libraries and the scans that it joins included.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from mclclip.data.index_tables import Shard, join_rows, write_tables
from mclclip.data.shard_scan import ROW, TEXT_CRC, Findings
from tests.benchmarks import memory, timing

PER_SHARD = 10_000


def scanned(shard: int) -> pa.RecordBatch:
    """Rows as a scan returns them."""
    keys = pa.array([f"cc12m/{shard:05d}{n:04d}" for n in range(PER_SHARD)], pa.large_string())
    starts = np.arange(PER_SHARD, dtype=np.int64) * 60_000
    sizes = np.full(PER_SHARD, 50_000), np.full(PER_SHARD, 80)
    ones, sums = np.ones(PER_SHARD, np.int32), np.arange(PER_SHARD, dtype=np.uint32)
    columns = [starts, sizes[0], starts + 52_000, sizes[1], ones, sums]
    schema = pa.schema([*ROW, pa.field(TEXT_CRC, pa.uint32())])
    return pa.RecordBatch.from_arrays([keys, *map(pa.array, columns)], schema=schema)


def join(num_shards: int, directory: Path) -> tuple[float, float, float]:
    """Wall and CPU seconds of joining and writing, and the largest resident set in MiB."""
    rows = [scanned(number) for number in range(num_shards)]
    shards = [
        Shard(f"/data/{n:05d}.tar", "cc12m", "txt", n * PER_SHARD, (n + 1) * PER_SHARD, 10**9)
        for n in range(num_shards)
    ]
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    write_tables(directory, join_rows(None, 0, rows, Findings()), shards)
    spent = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return *spent, memory.resident_mib("VmHWM")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row per number of samples."""
    parser = timing.parser(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[3_000_000, 12_000_000])
    args = timing.parse(parser, arguments, samples=[20_000])
    rows = []
    for samples in args.samples:
        with tempfile.TemporaryDirectory() as name:
            found = memory.in_fresh_process(join, samples // PER_SHARD, Path(name))
        rows.append([f"{samples:,}", *map(timing.number, found)])
    headers = ["samples", "wall s", "CPU s", "largest resident set, MiB"]
    timing.print_table("Joining and writing the rows of an index", headers, rows)


if __name__ == "__main__":
    main()
