"""What comparing with digests costs: opening a run of 12 million samples, reading its files.

The run is synthetic: an index over 1,200 shards, labels, clusters and a grouped index of full size,
written as the verbs write them; its shards are empty files, since opening looks at nothing of them
but size and time. Each is read with the records of its manifest and without. Embeddings are read
block by block as k-means does; batches come from rendered pictures, with their captions compared,
and with their pixels too. Files are in the page cache, where the share of digests is largest.

Last, what it takes to choose samples by a file of uids and by the parquets beside their shards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mclclip import files, index, make_dataset
from mclclip.config import from_tree
from mclclip.data.arrays import open_npy, save_npy
from mclclip.data.groups import GroupedIndex, LabelBlocks, StageGroups
from mclclip.data.index_tables import (
    SAMPLES,
    SHARDS,
    Shard,
    check_shards,
    note_times,
    times_of,
    write_tables,
)
from mclclip.data.options import DataConfig
from mclclip.data.remote import StoredFile
from mclclip.data.row_store import RowBlocks, RowStore
from mclclip.data.sample_index import KIND, SampleIndex
from mclclip.data.samples import TarDataset
from mclclip.data.shard_filter import UID, ShardFilter, digest_uids, parse_condition
from mclclip.data.shard_scan import ROW, TEXT_CRC
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import Artifact, read_manifest
from tests.benchmarks import timing

CLUSTERS, WIDTH, ROWS_PER_FILE = 1000, 512, 10_000


# --- a synthetic run ---------------------------------------------------------------------------


def write_index(root: Path, num_samples: int, num_shards: int) -> Path:
    """An index of so many samples and shards, which are empty files; returns its directory."""
    directory, per_shard = root / "index", num_samples // num_shards
    ids = np.arange(num_samples)
    keys = pa.array(np.char.add("source/", ids.astype("U9")).tolist(), pa.large_string())
    place = pa.array(ids % per_shard * 60_000)
    numbers = [
        place,
        pa.array(np.full(num_samples, 50_000)),
        place,
        pa.array(np.full(num_samples, 80)),
    ]
    captions = pa.array(np.ones(num_samples, np.int32))
    shard_of = pa.array((ids // per_shard).astype(np.int32))
    crc = pa.array((ids % 2**32).astype(np.uint32))
    table = pa.table(
        [keys, *numbers, captions, shard_of, crc], names=[*ROW.names, "shard", TEXT_CRC]
    )
    shards = []
    (root / "shards").mkdir(parents=True)
    for number in range(num_shards):
        path = root / "shards" / f"{number:05d}.tar"
        path.touch()
        rows = (number * per_shard, (number + 1) * per_shard)
        shards.append(Shard(str(path), "source", "txt", *rows, 0, digest=f"{number:064x}"))
    artifact = Artifact.open(directory, kind=KIND, config={}, inputs={})
    digest = write_tables(directory, table, shards)
    records = files.records_of(directory, SAMPLES, SHARDS)
    artifact.finish({"samples": num_samples}, content_digest=digest, records=records)
    note_times(directory, times_of(shards))
    return directory


def write_arrays(directory: Path, kind: str, **arrays: np.ndarray) -> Path:
    """Arrays as an artifact with records."""
    artifact = Artifact.open(directory, kind=kind, config={}, inputs={})
    for name, array in arrays.items():
        save_npy(directory / f"{name}.npy", array)
    names = [f"{name}.npy" for name in arrays]
    artifact.finish({}, records=files.records_of(directory, *names))
    return directory


# --- what is measured --------------------------------------------------------------------------


def opening(
    root: Path, num_samples: int
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By what is opened: as verbs do, and without the digests."""
    rng = np.random.default_rng(0)
    directory = write_index(root, num_samples, max(num_samples // 10_000, 1))
    shards = SampleIndex.open(directory).shards
    labels = rng.integers(CLUSTERS, size=num_samples)
    clusters = write_arrays(
        root / "clusters", "clusters",
        cluster_labels=labels[:, None].astype(np.int32),
        similarities=rng.random((num_samples, 1)).astype(np.float16),
        centroids=rng.random((CLUSTERS, WIDTH)).astype(np.float32),
    )  # fmt: skip
    pseudo = write_arrays(root / "pseudo", "pseudo_labels", pseudo_labels=labels[:, None])
    blocks = LabelBlocks(labels, (CLUSTERS,))
    StageGroups(root / "grouped").write(blocks, blocks.sizes(), np.zeros(0, np.int64))

    def arrays(directory: Path, kind: str, checked: bool) -> None:
        manifest = read_manifest(directory, kind)
        for name in manifest.records:
            open_npy(directory / name, "cluster", manifest.record(name) if checked else None)

    return {
        "index": (lambda: SampleIndex.open(directory), lambda: SampleIndex(directory, "")),
        "times of shards": (lambda: check_shards(directory, shards, DataConfig()), lambda: None),
        "clusters": (
            lambda: arrays(clusters, "clusters", True), lambda: arrays(clusters, "clusters", False)
        ),
        "pseudo labels": (
            lambda: arrays(pseudo, "pseudo_labels", True),
            lambda: arrays(pseudo, "pseudo_labels", False),
        ),
        "grouped index": (
            lambda: GroupedIndex.open(root / "grouped"),
            lambda: GroupedIndex.open(root / "grouped", compare=False),
        ),
    }  # fmt: skip


def embeddings(root: Path, num_files: int) -> dict[str, Callable[[], object]]:
    """Reading all blocks of embeddings once, with a sum over their values."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(ROWS_PER_FILE, WIDTH)).astype(np.float16)
    paths = [root / f"{number:05d}.npy" for number in range(num_files)]
    for path in paths:
        save_npy(path, rows)
    records = [files.record_of(path) for path in paths]

    def read(blocks: RowBlocks) -> float:
        return sum(float(np.square(np.asarray(block, np.float32)).sum()) for block in blocks)

    return {
        "without digests": lambda: read(RowBlocks(RowStore(paths))),
        "the first pass": lambda: read(RowBlocks(RowStore(paths, records))),
    }


def batches(root: Path, num_samples: int) -> dict[str, Callable[[], object]]:
    """Reading and decoding samples in batches, as loaders do."""
    data = make_dataset.run("patterns", root / "data", num_samples=num_samples, num_pairs=1)
    tree: dict[str, Any] = {
        "run_dir": str(root / "run"),
        "data": {
            "sources": {"s": {"shards": f"{data}/shards/*.tar"}}, "verify": "full",
            "index_workers": 1,
        },
    }  # fmt: skip
    samples = index.run(from_tree(tree), SINGLE)
    ids = np.random.default_rng(0).permutation(len(samples)).reshape(-1, 32)

    def read(check_captions: bool, check_pixels: bool) -> None:
        opened = SampleIndex(samples.directory, samples.digest)
        opened.text_crc32 = opened.text_crc32 if check_captions else None
        dataset = TarDataset(
            opened, DataConfig(verify="full" if check_pixels else "captions"), np.asarray,  # type: ignore[arg-type]
            tokenizer=lambda texts: [len(texts[0])],  # type: ignore[arg-type,return-value]
        )  # fmt: skip
        for some in ids:
            dataset.__getitems__(some.tolist())

    return {
        "nothing compared": lambda: read(False, False),
        "captions": lambda: read(True, False),
        "captions and pixels": lambda: read(True, True),
    }


def filters(root: Path, num_uids: int, num_shards: int) -> dict[str, Callable[[], object]]:
    """Choosing the samples of shards of 10,000, half of which are among the uids of a subset."""
    rng = np.random.default_rng(0)
    uids = np.lib.format.open_memmap(root / "u.npy", "w+", UID, (num_uids,))
    step = 2**64 // num_uids  # sorted: one upper half of each stretch
    for start in range(0, num_uids, 1 << 20):
        numbers = np.arange(start, min(start + (1 << 20), num_uids), dtype=np.uint64)
        jitter = rng.integers(step, size=len(numbers), dtype=np.uint64)
        uids["f0"][start : start + len(numbers)] = numbers * np.uint64(step) + jitter
        uids["f1"][start : start + len(numbers)] = rng.integers(2**63, size=len(numbers))
    shards = []
    for number in range(num_shards):
        own = uids[np.sort(rng.integers(num_uids, size=ROWS_PER_FILE))].copy()
        own["f1"][::2] ^= np.uint64(1)
        keys = [f"{number:05d}{k:04d}" for k in range(ROWS_PER_FILE)]
        rows = {
            "key": keys, "uid": [f"{upper:016x}{lower:016x}" for upper, lower in own.tolist()],
            "caption": [f"a caption of no interest here, {k}" for k in keys],
            "similarity": rng.random(ROWS_PER_FILE), "width": rng.integers(900, size=ROWS_PER_FILE),
        }  # fmt: skip
        shards.append((root / f"{number}.parquet", keys))
        pq.write_table(pa.table(rows).take(rng.permutation(ROWS_PER_FILE)), shards[-1][0])

    def choose(subset: str | None, where: Sequence[str]) -> None:
        conditions = tuple(map(parse_condition, where))
        for path, keys in shards:
            chosen = ShardFilter(subset, "", conditions, StoredFile(str(path)))
            taken = chosen.why_not("", keys, lambda _: b"").count(None)
            assert subset is None or where or taken == ROWS_PER_FILE // 2

    path, where = str(root / "u.npy"), ["similarity>=0.28", "width>=200"]
    return {
        "two conditions": lambda: choose(None, where),
        "a subset": lambda: choose(path, []),
        "both": lambda: choose(path, where),
        "reading the subset once": lambda: digest_uids(path),
    }


def report(title: str, variants: dict[str, Callable[[], object]], rounds: int, per: str) -> None:
    timings = timing.interleave(variants, rounds)
    first = next(iter(variants))
    rows = [
        [
            name, timing.number(1000 * timings.wall_s(name)),
            timing.number(1000 * timings.cpu_s(name)), timing.number(timings.ratio(name, first)),
        ]
        for name in variants
    ]  # fmt: skip
    timing.print_table(title, ["variant", f"wall ms {per}", f"CPU ms {per}", "ratio"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """12 million samples, half a million embeddings, some thousand pictures."""
    parser = timing.parser(__doc__)
    parser.add_argument("--samples", type=int, default=12_000_000)
    parser.add_argument("--files", type=int, default=48, help="of 10,000 embeddings each")
    parser.add_argument("--pictures", type=int, default=3_200)
    parser.add_argument("--uids", type=int, default=100_000_000, help="of a subset")
    short = {"samples": 120_000, "files": 2, "pictures": 320, "uids": 100_000}
    options = timing.parse(parser, arguments, **short)
    rounds: int = options.rounds
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, (checked, plain) in opening(root / "run", options.samples).items():
            variants = {"without digests": plain, "as verbs do": checked}
            report(f"open: {name}, {options.samples:,} samples", variants, rounds, "once")
        (root / "rows").mkdir()
        rows = options.files * ROWS_PER_FILE
        title = f"embeddings, {rows:,} rows of {WIDTH} float16"
        report(title, embeddings(root / "rows", options.files), rounds, "per pass")
        title = f"{options.pictures:,} samples in batches of 32"
        report(title, batches(root / "pictures", options.pictures), rounds, "for all")
        (root / "filters").mkdir()
        title = f"choosing among {options.files * ROWS_PER_FILE:,} samples, {options.uids:,} uids"
        report(title, filters(root / "filters", options.uids, options.files), rounds, "for all")


if __name__ == "__main__":
    main()
