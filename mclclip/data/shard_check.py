"""Scans shards side by side, joins their rows, and compares the shards with those of an index.

Opening an index compares the size of every shard and the time of its last change, which costs one
look per file; of a shard behind a url, its size and its ETag. A shard with another time is scanned
again, and its headers, captions and attributes are compared with the digest of the scan that was
indexed. Where they are equal, only the time is new, and it is noted in ``shard_times.json`` beside
the index; that file is a cache, and without it all shards are scanned again. Captions are compared
once more whenever they are read, and pixels if ``data.verify`` is ``full`` (`samples.TarDataset`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mclclip import files
from mclclip.data.options import DataConfig
from mclclip.data.remote import ObjectStat, Remote, RemoteOptions, StoredFile, protocol_of
from mclclip.data.sample_index import SCHEMA, Shard
from mclclip.data.shard_filter import ShardFilter, metadata_path
from mclclip.data.shard_scan import MAX_EXAMPLES, ROW, Findings, ShardScan, scan_shard
from mclclip.ranks.parent_death import map_in_pool
from mclclip.run.runlog import progress

log = logging.getLogger("mclclip")

TIMES = "shard_times.json"
_KEYS_AT_ONCE = 65_536


def scan_shards(
    shards: Sequence[Shard],
    options: DataConfig,
    *,
    pixels: bool = False,
    filters: Mapping[str, ShardFilter] | None = None,
) -> Generator[ShardScan, None, None]:
    """Yields the scans of the shards, in their order, by up to ``options.index_workers`` processes.

    ``filters``: those of sources, by name. Raises FileNotFoundError where one has conditions, and
    shards have no parquet beside them. Digests of scans do not depend on filters.
    """
    remote = options.remote
    filled = _with_metadata(shards, filters or {}, remote)
    calls = [
        (s.path, s.source, s.captions, s.attributes, pixels, s.stored.stat, remote, chosen)
        for s, chosen in zip(shards, filled, strict=True)
    ]
    return map_in_pool(scan_shard, calls, options.index_workers)


def _with_metadata(
    shards: Sequence[Shard], filters: Mapping[str, ShardFilter], remote: RemoteOptions | None
) -> list[ShardFilter | None]:
    """The filter of each shard, with the place of the parquet beside it."""
    paths = [metadata_path(shard.path) for shard in shards if shard.source in filters]
    stats = iter(stat_files(paths, remote, missing_urls=True))
    found: list[ShardFilter | None] = []
    missing: dict[str, list[str]] = {}
    for shard in shards:
        chosen = filters.get(shard.source)
        if chosen is not None:
            path, stat = metadata_path(shard.path), next(stats)
            chosen = replace(chosen, metadata=None if stat is None else StoredFile(path, stat))
            if stat is None and chosen.where:
                missing.setdefault(shard.source, []).append(path)
        found.append(chosen)
    for source, lacking in missing.items():
        number = sum(shard.source == source for shard in shards)
        raise FileNotFoundError(
            f"data.sources.{source}.where: {len(lacking)} of {number} shards have no parquet "
            f"beside them, such as {files.shown(lacking[0])}: fetch those that img2dataset wrote "
            "with the shards, or leave where out"
        )
    return found


def times_of(shards: Sequence[Shard]) -> dict[str, int]:
    """When each file was last changed, in nanoseconds, by path; urls have tags instead."""
    paths = [shard.path for shard in shards if protocol_of(shard.path) is None]
    return {path: os.stat(path).st_mtime_ns for path in paths}


def note_times(directory: Path, times: dict[str, int]) -> None:
    """Adds to the times of shards that are known to be those of the index in ``directory``."""
    known = _read_times(directory) | times
    files.write_json(Path(directory) / TIMES, files.sealed({"times": known}))


def _read_times(directory: Path) -> dict[str, int]:
    path = Path(directory) / TIMES
    try:
        times: dict[str, int] = files.unsealed(files.read_json(path), path)["times"]
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}  # then every shard is scanned
    return times


def check_shards(directory: Path, shards: Sequence[Shard], options: DataConfig) -> None:
    """Compares the shards with what was indexed into ``directory``; call it on one rank.

    Raises FileNotFoundError where one is missing and ValueError where one has another size, tag, or
    other members, captions or attributes; the message names it; OSError where a store does not
    answer. Shards of an index that was made before digests were kept are compared by size alone.
    """
    now = stat_files([shard.path for shard in shards], options.remote)
    for shard, stat in zip(shards, now, strict=True):
        _check_stat(shard, stat, directory)
    times, noted = times_of(shards), _read_times(directory)
    changed = [s for s in shards if s.digest and noted.get(s.path) != times.get(s.path)]
    if not changed:
        return
    log.info("%d shard(s) have another time than when they were indexed: read again", len(changed))
    with closing(scan_shards(changed, options)) as scans:
        shown = progress(scans, total=len(changed), description="check shards")
        for shard, scan in zip(changed, shown, strict=True):
            if scan.digest != shard.digest:
                raise ValueError(
                    f"{_where(shard, directory)} has changed: its members or captions are not "
                    "those that were indexed; restore it, or index it anew with 'mclclip index "
                    "--force'"
                )
    note_times(directory, {shard.path: times[shard.path] for shard in changed})


def stat_files(
    paths: Sequence[str], remote: RemoteOptions | None = None, *, missing_urls: bool = False
) -> list[ObjectStat | None]:
    """Size and tag of each path or url; None for a path where there is nothing.

    Raises FileNotFoundError for a url where there is nothing (with ``missing_urls`` it is None
    too), OSError where a store does not answer.
    """
    urls = [path for path in paths if protocol_of(path) is not None]
    store = Remote(remote)
    told: Iterator[ObjectStat | None] = iter((store.find if missing_urls else store.stat)(urls))
    return [next(told) if protocol_of(path) is not None else _stat_file(path) for path in paths]


def _stat_file(path: str) -> ObjectStat | None:
    try:
        return ObjectStat(os.path.getsize(path), "")
    except FileNotFoundError:
        return None


def _check_stat(shard: Shard, now: ObjectStat | None, directory: Path) -> None:
    where = _where(shard, directory)
    if now is None:
        raise FileNotFoundError(f"{where} is not on disk any more: put it back")
    if now.size != shard.size_bytes:
        raise ValueError(
            f"{where} had {shard.size_bytes} bytes when it was indexed, now {now.size}: restore it"
        )
    if now.tag != shard.tag:
        raise ValueError(
            f"{where} had the ETag {shard.tag} when it was indexed, now {now.tag}: restore it, or "
            "index it anew with 'mclclip index --force'"
        )


def _where(shard: Shard, directory: Path) -> str:
    return f"shard {files.shown(shard.path)} of source {shard.source} in {directory}"


def join_rows(
    known: pa.Table | None, num_known: int, scanned: list[pa.RecordBatch], findings: Findings
) -> pa.Table:
    """The rows of known shards, then those of scanned shards, whose numbers follow ``num_known``.

    Of rows with the same key the first stays; the others are counted as ``duplicate_key``. A row
    has no value for attributes that only other shards have. The result has one chunk per column,
    which zero-copy reading needs. ``scanned`` is emptied, so that a column's parts go as soon as
    they are joined: millions of rows are never there twice.
    """
    tables = [] if known is None else [known]
    for number, rows in enumerate(scanned, start=num_known):
        shard = pa.array(np.full(len(rows), number, np.int32))
        table = pa.Table.from_batches([rows])
        tables.append(table.add_column(len(ROW), SCHEMA.field("shard"), shard))
    table = pa.concat_tables(tables, promote_options="default")
    tables.clear()
    scanned.clear()
    for number, field in enumerate(table.schema):
        joined = table.column(number).unify_dictionaries().combine_chunks()
        table = table.set_column(number, field, joined)
    keys = table["key"].chunk(0) if len(table) else pa.array([], pa.large_string())
    repeated = _repeated(keys)
    if repeated.any():
        examples = keys.take(pa.array(np.flatnonzero(repeated)[:MAX_EXAMPLES])).to_pylist()
        findings.add("duplicate_key", *examples, count=int(repeated.sum()))
        table = table.filter(pa.array(~repeated)).combine_chunks()
    return table


def _repeated(keys: pa.Array) -> npt.NDArray[np.bool_]:
    """[N], True where the same key came before.

    Keys of the same 64-bit hash are compared, so that of all keys hashes alone are held.
    """
    from pandas.util import hash_array

    hashes = np.empty(len(keys), np.uint64)
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys.slice(start, _KEYS_AT_ONCE).to_numpy(zero_copy_only=False)
        hashes[start : start + len(some)] = hash_array(some, categorize=False)
    ordered = np.sort(hashes)
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    found = np.zeros(len(keys), bool)
    alike = np.flatnonzero(np.isin(hashes, several)) if len(several) else several.astype(np.int64)
    codes = keys.take(pa.array(alike)).dictionary_encode().indices.to_numpy()
    # Codes are given in order of first appearance: a key is new where its code is a new maximum.
    before = np.concatenate([[-1], np.maximum.accumulate(codes)[:-1]]) if len(codes) else codes
    found[alike] = codes <= before
    return found
