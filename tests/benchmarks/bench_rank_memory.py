"""What the data objects of a training keep resident in each of a node's processes.

Several processes, which stand for ranks and loader workers, are handed the sample index and the
grouped index of one training, make its plan, and look up the rows of some batches. Anonymous memory
is a process's own; mapped files are in the page cache once, and every process that touched them is
charged an equal share of them (PSS).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from mclclip.data.groups import GroupedIndex, LabelBlocks, StageGroups
from mclclip.data.index_tables import SAMPLES, SCHEMA, SHARDS, Shard
from mclclip.data.sample_index import SampleIndex
from mclclip.files import write_json
from tests.batches import training_batches
from tests.benchmarks import timing
from tests.benchmarks.bench_plan import RADICES, write_labels

PER_SHARD, DIGITS = 10_000, 10


def write_index(directory: Path, num_samples: int) -> None:
    """A sample index whose shards are not there."""
    directory.mkdir()
    ids = np.arange(num_samples)
    names = np.empty((num_samples, DIGITS), np.uint8)
    for digit in range(DIGITS):
        names[:, DIGITS - 1 - digit] = ids // 10**digit % 10 + ord("0")
    ends = pa.py_buffer(np.arange(num_samples + 1, dtype=np.int64) * DIGITS)
    buffers = [None, ends, pa.py_buffer(names)]
    columns: dict[str, Any] = {field.name: ids * 50_000 % 2**31 for field in SCHEMA}
    columns["key"] = pa.Array.from_buffers(pa.large_string(), num_samples, buffers)
    columns |= {"num_captions": np.ones(num_samples, np.int32)}
    columns |= {"shard": (ids // PER_SHARD).astype(np.int32)}
    table = pa.table(columns, schema=SCHEMA)
    with pa.OSFile(str(directory / SAMPLES), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        writer.write_table(table)
    starts = range(0, num_samples, PER_SHARD)
    stops = [min(start + PER_SHARD, num_samples) for start in starts]
    shards = [
        Shard(f"/data/{start:09d}.tar", "s", "txt", start, stop, 10**9).to_json()
        for start, stop in zip(starts, stops, strict=True)
    ]
    write_json(directory / SHARDS, shards)


def resident_mib() -> dict[str, float]:
    """Rss, Pss and Anonymous of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return {name: found[name] for name in ("Anonymous", "Pss", "Rss")}


def of_a_process(handed: tuple[Any, ...], rank: int, ranks: int, batch: int, steps: int) -> Any:
    """What the data objects added, and the seconds until the first batch was planned."""
    before, start_s = resident_mib(), time.perf_counter()
    index = SampleIndex(*handed[:2])
    grouped = handed[2](*handed[3])
    batches = training_batches(
        index=index,
        grouped=grouped,
        transform=lambda image: image,  # type: ignore[arg-type,return-value]
        global_batch=batch,
        policy="backoff",
        order="proportional",
        seed=0,
        stage=1,
        rank=rank,
        world_size=ranks,
    )
    first_s = 0.0
    for step in range(steps):
        ids = np.sort(batches.plan(0).batch(step).ids[rank::ranks])
        for column in (index.image_offset, index.image_size, index.shard_of, index.num_captions):
            column[ids].sum()
        first_s = first_s or time.perf_counter() - start_s
    time.sleep(1)  # all processes hold theirs while each measures
    after = resident_mib()
    return SimpleNamespace(first_s=first_s, **{name: after[name] - before[name] for name in after})


def main(arguments: Sequence[str] | None = None) -> None:
    """An index of each size, read by several processes."""
    parser = timing.parser(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[2_000_000, 20_000_000])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    options = timing.parse(parser, arguments, samples=[100_000], batch=256, steps=5)
    rows = []
    for samples in options.samples:
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary)
            write_index(root / "index", samples)
            write_labels(root / "labels.npy", samples)
            blocks = LabelBlocks(np.load(root / "labels.npy", mmap_mode="r"), RADICES)
            StageGroups(root / "groups").write(blocks, blocks.sizes(), np.zeros(0, np.int64))
            grouped = GroupedIndex.open(root / "groups")
            handed = (root / "index", "", *grouped.__reduce__())
            number = options.processes
            with ProcessPoolExecutor(number, mp_context=get_context("spawn")) as pool:
                for _ in range(2):  # the first time, modules are imported as well
                    asked = [
                        pool.submit(
                            of_a_process, handed, rank, number, options.batch, options.steps
                        )
                        for rank in range(number)
                    ]
                    found = [one.result() for one in asked]
        names = ("Anonymous", "Pss", "Rss", "first_s")
        worst = [max(getattr(one, name) for one in found) for name in names]
        rows.append([f"{samples:,}", *map(timing.number, worst)])
    timing.print_table(
        f"data objects of a training in each of {options.processes} processes, most of any",
        ["samples", "own MiB", "PSS MiB", "RSS MiB", "first planned batch, s"],
        rows,
    )


if __name__ == "__main__":
    main()
