"""The files of an index: its shards, the table of its samples, and the values of attributes.

``shards.json`` has every shard with the rows of its samples, ``samples.arrow`` a row per sample,
and ``attributes.json`` the values for which the table has codes. Scans of shards are joined to such
a table here, and known shards are compared with their scans.

Opening an index compares the size of every shard and the time of its last change, which costs one
look per file; of a shard behind a url, its size and its ETag. A shard with another time is scanned
again, and its headers, captions and attributes are compared with the digest of the scan that was
indexed. Where they are equal, only the time is new, and it is noted in ``shard_times.json`` beside
the index; that file is a cache, and without it all shards are scanned again. Captions are compared
once more whenever they are read, and pixels if ``data.verify`` is ``full`` (`samples.TarDataset`).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mclclip.data.findings import MAX_EXAMPLES, Findings
from mclclip.data.options import DataConfig
from mclclip.data.remote import Remote, RemoteOptions, StoredFile
from mclclip.data.shard_filter import ShardFilter, metadata_path
from mclclip.data.shard_reader import ShardReader
from mclclip.data.shard_scan import ATTRIBUTE, ROW, TEXT, TEXT_CRC, ShardScan, scan_shard
from mclclip.ranks.workers import map_in_pool
from mclclip.run.runlog import count_of, progress
from mclclip.util.files import (
    damaged_if_unreadable,
    digest_array,
    digest_json,
    digest_keys,
    printable,
    read_json,
    whole_file,
    write_json,
)
from mclclip.util.options import protocol_of

log = logging.getLogger("mclclip")

SAMPLES, SHARDS, ATTRIBUTES = "samples.arrow", "shards.json", "attributes.json"
TIMES = "shard_times.json"
SCHEMA = ROW.append(pa.field("shard", pa.int32()))
INDEX_AGAIN = "take the folder away and run 'mclclip index' again"
_KEYS_AT_ONCE = 65_536
Integers = npt.NDArray[np.int64]
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")  # what int() reads quickly and text shows


@dataclass(frozen=True)
class Shard:
    """One tar shard: its samples are rows [start, stop) of the index.

    ``path`` may be a url. ``digest`` is that of its scan; it is empty until then.
    ``tag`` is a url's ETag, or what its store tells instead; paths have none. ``subset`` is the
    digest of the uids that its samples were chosen by.
    ``name`` stands in the keys of its samples, ``source/name/key``, where keys start again in every
    shard; it is the end of the path.
    """

    path: str
    source: str
    captions: str
    start: int
    stop: int
    size_bytes: int
    attributes: tuple[str, ...] = ()
    digest: str = ""
    tag: str = ""
    subset: str = ""
    name: str = ""

    @property
    def folder(self) -> str:
        """Where its name begins in its path."""
        return stem_of(self.path).removesuffix(self.name)

    @property
    def stored(self) -> StoredFile:
        """Where it is read."""
        return StoredFile(self.path, self.size_bytes, self.tag)

    def describe(self, directory: Path) -> str:
        """Its path, its source and the index in ``directory``, for messages."""
        return f"shard {printable(self.path)} of source {self.source} in {directory}"

    def to_json(self) -> dict[str, Any]:
        """Its fields; attributes, tag, subset and name only where there are some."""
        fields = dataclasses.asdict(self)
        rare = ("attributes", "tag", "subset", "name")
        return {k: v for k, v in fields.items() if v or k not in rare}


# --- tables ----------------------------------------------------------------------------------


def write_tables(directory: Path, table: pa.Table, shards: Sequence[Shard]) -> str:
    """Writes ``shards.json``, ``attributes.json`` and ``samples.arrow``, each atomically; returns
    the digest.

    ``shards.json`` is written first: if the process is killed in between, the next run keeps its
    order of shards. The digest covers the ordered keys, the samples without a caption if there are
    any (plans depend on them too), and the values of attributes if there are any.
    """
    kept = (replace(shard, path=_to_keep(shard.path, directory)) for shard in shards)
    write_json(directory / SHARDS, [shard.to_json() for shard in kept])
    table, values = to_codes(table)
    if values:
        write_json(directory / ATTRIBUTES, values)
    else:
        (directory / ATTRIBUTES).unlink(missing_ok=True)
    with whole_file(directory / SAMPLES) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    starts = range(0, len(table), _KEYS_AT_ONCE)
    blocks = (table["key"].slice(start, _KEYS_AT_ONCE).to_pylist() for start in starts)
    keys = digest_keys(itertools.chain.from_iterable(blocks))
    bare = np.flatnonzero(table["num_captions"].to_numpy() == 0)
    digest = digest_json([keys, digest_array(bare)]) if len(bare) else keys
    if values:
        codes = {n: digest_array(table[ATTRIBUTE + n].to_numpy()) for n in values}
        digest = digest_json([digest, codes, values])
    return digest


def read_table(directory: Path) -> pa.Table:
    """The rows that ``write_tables`` was given; memory-mapped, but for attributes."""
    return to_text(map_table(directory), read_values(directory))


def map_table(directory: Path) -> pa.Table:
    """``samples.arrow``, memory-mapped, with codes for attributes."""
    with pa.memory_map(str(directory / SAMPLES)) as source:
        return pa.ipc.open_file(source).read_all()


def read_shards(directory: Path) -> list[Shard]:
    """``shards.json`` in order; empty where there is none."""
    path = directory / SHARDS
    with damaged_if_unreadable(path, INDEX_AGAIN):
        entries = read_json(path) if path.exists() else []
        shards = [Shard(**(e | {"attributes": tuple(e.get("attributes", ()))})) for e in entries]
        for before, shard in zip([None, *shards], shards, strict=False):
            texts = (shard.path, shard.source, shard.captions, shard.tag, shard.subset, shard.name)
            if not all(isinstance(t, str) for t in (*texts, *shard.attributes)):
                raise TypeError(f"{shard} has fields of other types")
            if not (before.stop if before else 0) == shard.start <= shard.stop:
                raise ValueError(f"the rows of {printable(shard.path)} do not follow those before")
    return [replace(shard, path=_to_read(shard.path, directory)) for shard in shards]


def _to_keep(path: str, directory: Path) -> str:
    """The path of a shard as the index keeps it: one below the run is relative to the index, so
    that the run can be moved."""
    index = os.path.abspath(directory)
    below = path.startswith(os.path.dirname(index) + os.sep)
    return os.path.relpath(path, index) if below else path


def _to_read(path: str, directory: Path) -> str:
    """The inverse of ``_to_keep``."""
    if not path.startswith(os.pardir + os.sep):
        return path
    return os.path.normpath(os.path.join(os.path.abspath(directory), path))


def read_values(directory: Path) -> dict[str, list[str]]:
    """``attributes.json``, the sorted values by name; empty where there is none."""
    path = directory / ATTRIBUTES
    values: dict[str, list[str]] = read_json(path) if path.exists() else {}
    return values


def to_codes(table: pa.Table) -> tuple[pa.Table, dict[str, list[str]]]:
    """The table with int32 codes (-1: no value) for its columns of text, and the values by name.

    The code is a value's place among the sorted values; whole numbers go first, by their size.
    """

    def sort_key(value: str) -> tuple[int, int, str]:
        return (0, int(value), value) if _WHOLE_NUMBER.fullmatch(value) else (1, 0, value)

    values: dict[str, list[str]] = {}
    for number, name in _attributes(table):
        column = table.column(number)
        text = column.unify_dictionaries().combine_chunks() if len(column) else pa.array([], TEXT)
        text = text.chunk(0) if isinstance(text, pa.ChunkedArray) else text
        indices: npt.NDArray[np.int32] = text.indices.fill_null(-1).to_numpy()
        known = text.dictionary.to_pylist()
        used = np.unique(indices[indices >= 0])  # rows with the other values may have been removed
        order = sorted(used.tolist(), key=lambda place: sort_key(known[place]))
        codes = np.full(len(known) + 1, -1, np.int32)  # the last one is that of index -1
        codes[order] = np.arange(len(order), dtype=np.int32)
        values[name] = [known[place] for place in order]
        field = pa.field(ATTRIBUTE + name, pa.int32())
        table = table.set_column(number, field, pa.array(codes[indices]))
    return table, values


def to_text(table: pa.Table, values: Mapping[str, Sequence[str]]) -> pa.Table:
    """The inverse of ``to_codes``."""
    for number, name in _attributes(table):
        codes: npt.NDArray[np.int32] = table.column(number).to_numpy()
        text = pa.DictionaryArray.from_arrays(
            pa.array(codes, mask=codes < 0), pa.array(values[name], pa.large_string())
        )
        table = table.set_column(number, pa.field(ATTRIBUTE + name, TEXT), text)
    return table


def _attributes(table: pa.Table) -> Iterator[tuple[int, str]]:
    for number, column in enumerate(table.column_names):
        if column.startswith(ATTRIBUTE):
            yield number, column.removeprefix(ATTRIBUTE)


# --- scans and comparisons --------------------------------------------------------------------


def scan_shards(
    shards: Sequence[Shard],
    options: DataConfig,
    *,
    pixels: bool = False,
    filters: Mapping[str, ShardFilter] | None = None,
) -> Generator[ShardScan, None, None]:
    """Yields the scans of the shards, in their order, by up to ``options.index_workers`` processes.

    ``filters``: those of sources, by name. Digests of scans do not depend on them.
    """
    filled = _with_metadata(shards, filters or {}, options.remote)
    calls = [
        (s.stored, s.source, s.captions, s.attributes, pixels, options.remote, chosen)
        for s, chosen in zip(shards, filled, strict=True)
    ]
    return map_in_pool(scan_shard, calls, options.index_workers)


def _with_metadata(
    shards: Sequence[Shard], filters: Mapping[str, ShardFilter], remote: RemoteOptions | None
) -> list[ShardFilter | None]:
    """The filter of each shard, with the place of the parquet beside it."""
    paths = [metadata_path(shard.path) for shard in shards if shard.source in filters]
    parquets = iter(Remote(remote).stat(paths, missing_urls=True))
    return [
        replace(filters[shard.source], metadata=next(parquets)) if shard.source in filters else None
        for shard in shards
    ]


def times_of(shards: Sequence[Shard]) -> dict[str, int]:
    """When each file was last changed, in nanoseconds, by path; urls have tags instead."""
    paths = [shard.path for shard in shards if protocol_of(shard.path) is None]
    return {path: os.stat(path).st_mtime_ns for path in paths}


def note_times(directory: Path, times: dict[str, int]) -> None:
    """Adds to the times of shards that are known to be those of the index in ``directory``."""
    known = _read_times(directory) | times
    kept = {_to_keep(path, directory): time for path, time in known.items()}
    write_json(Path(directory) / TIMES, {"times": kept})


def _read_times(directory: Path) -> dict[str, int]:
    path = Path(directory) / TIMES
    try:
        kept: dict[str, int] = read_json(path)["times"]
        times = {_to_read(name, Path(directory)): time for name, time in kept.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}  # then every shard is scanned
    return times


def check_shards(directory: Path, shards: Sequence[Shard], options: DataConfig) -> None:
    """Compares the shards with what was indexed into ``directory``; call it on one rank.

    Raises FileNotFoundError where one is missing and ValueError where one has another size, tag, or
    other members, captions or attributes; the message names it; OSError where a store does not
    answer.
    """
    now = Remote(options.remote).stat([shard.path for shard in shards])
    for shard, stat in zip(shards, now, strict=True):
        where = shard.describe(directory)
        if stat is None:
            raise FileNotFoundError(f"{where} is not on disk any more: put it back")
        if stat.size != shard.size_bytes:
            raise ValueError(
                f"{where} had {shard.size_bytes} bytes when it was indexed, now {stat.size}: "
                "restore it"
            )
        if stat.tag != shard.tag:
            raise ValueError(
                f"{where} had the ETag {shard.tag} when it was indexed, now {stat.tag}: restore "
                "it, or index it anew with 'mclclip index --force'"
            )
    times, noted = times_of(shards), _read_times(directory)
    changed = [s for s in shards if noted.get(s.path) != times.get(s.path)]
    if not changed:
        return
    log.info("read again, for another time: %s", count_of(len(changed), "shard"))
    with closing(scan_shards(changed, options)) as scans:
        shown = progress(scans, total=len(changed), description="check shards")
        for shard, scan in zip(changed, shown, strict=True):
            if scan.digest != shard.digest:
                raise ValueError(
                    f"{shard.describe(directory)} has changed: its members or captions are not "
                    "those that were indexed; restore it, or index it anew with 'mclclip index "
                    "--force'"
                )
    note_times(directory, {shard.path: times[shard.path] for shard in changed})


def join_rows(
    known: pa.Table | None,
    scanned: list[pa.RecordBatch],
    shards: Sequence[Shard],
    num_old: int,
    findings: Findings,
    options: DataConfig,
) -> tuple[pa.Table, list[Shard]]:
    """The rows of known shards, then those of the scanned ones, which are the last of ``shards``;
    and the shards, some of them with a name.

    Where more than ``options.max_bad_fraction`` of a source's samples have the key of another one,
    its shards get names, but for the first ``num_old``, whose keys are known already. Of other rows
    with the same key the first stays; the others are counted as ``copied_sample`` or
    ``duplicate_key``. A row has no value for attributes that only other shards have. The result has
    one chunk per column, which zero-copy reading needs. ``scanned`` is emptied, so that a column's
    parts go as soon as they are joined: millions of rows are never there twice. Reads the images of
    samples with the key, size and caption of another one; raises OSError where that fails.
    """
    num_known, tables = len(shards) - len(scanned), [] if known is None else [known]
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
    if not len(table):
        return table, [*shards]
    scanned_names = {n: s.name for n, s in enumerate(shards) if s.name and n >= num_known}
    table = _with_names(table, shards, scanned_names)
    first = _first_rows(table["key"].chunk(0))
    if (first < np.arange(len(first))).any():
        reader = ShardReader([shard.stored for shard in shards], options)
        names = _new_names(table, first, shards, num_old, reader, options.max_bad_fraction)
        if names:
            table = _with_names(table, shards, names)
            first = _first_rows(table["key"].chunk(0))
            shards = [replace(s, name=names.get(n, s.name)) for n, s in enumerate(shards)]
        table = _without_repeated(table, first, findings, reader)
    return table, [*shards]


def _are_copies(
    table: pa.Table, rows: Integers, first: Integers, reader: ShardReader
) -> npt.NDArray[np.bool_]:
    """Returns whether samples are those of ``first`` once more: of the same image and caption."""
    size, text = table["image_size"].to_numpy(), table[TEXT_CRC].to_numpy()
    shard, offset = table["shard"].to_numpy(), table["image_offset"].to_numpy()
    others = first[rows]
    same: npt.NDArray[np.bool_] = (size[rows] == size[others]) & (text[rows] == text[others])
    for place in np.flatnonzero(same):
        pair = (rows[place], others[place])
        ranges = [(int(shard[row]), int(offset[row]), int(size[row])) for row in pair]
        reader.prefetch(ranges)
        one, other = (reader.read(*each) for each in ranges)
        same[place] = one == other
    return same


def _new_names(
    table: pa.Table,
    first: Integers,
    shards: Sequence[Shard],
    num_old: int,
    reader: ShardReader,
    bound: float,
) -> dict[int, str]:
    """By their numbers, the names of shards whose source has more repeated keys than the bound."""
    shard = table["shard"].to_numpy()
    repeated = np.flatnonzero(shard[first] != shard)
    lost = shard[repeated[~_are_copies(table, repeated, first, reader)]]
    names: dict[int, str] = {}
    for source in dict.fromkeys(each.source for each in shards):
        members = [n for n, each in enumerate(shards) if each.source == source]
        new = [n for n in members if n >= num_old and not shards[n].name]
        if new and np.isin(lost, members).sum() > bound * np.isin(shard, members).sum():
            stems = [stem_of(shards[n].path) for n in members]
            common = os.path.commonprefix([stem.rpartition("/")[0] + "/" for stem in stems])
            start = common.rfind("/") + 1
            names |= {n: stem_of(shards[n].path)[start:] for n in new}
            log.info("keys of %s start again in its shards: they become shard/key", source)
    return names


def stem_of(path: str) -> str:
    """A path or url without its suffix; a url also without its query, which may be a secret."""
    return (path if protocol_of(path) is None else path.partition("?")[0]).removesuffix(".tar")


def _with_names(table: pa.Table, shards: Sequence[Shard], names: Mapping[int, str]) -> pa.Table:
    """The table with keys ``source/name/key`` for shards that get names, by their numbers."""
    if not names:
        return table
    keys, parts = table["key"].chunk(0), []
    bounds = np.searchsorted(table["shard"].to_numpy(), np.arange(len(shards) + 1)).tolist()
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        part = keys.slice(start, stop - start)
        if number in names:
            prefix = f"{shards[number].source}/"
            rest = (key.removeprefix(prefix) for key in part.to_pylist())
            part = pa.array([f"{prefix}{names[number]}/{key}" for key in rest], keys.type)
        parts.append(part)
    column = table.column_names.index("key")
    joined = pa.chunked_array([pa.concat_arrays(parts)])
    return table.set_column(column, table.schema.field("key"), joined)


def _without_repeated(
    table: pa.Table, first: Integers, findings: Findings, reader: ShardReader
) -> pa.Table:
    repeated = np.flatnonzero(first < np.arange(len(first)))
    copies = _are_copies(table, repeated, first, reader)
    for reason, rows in (("copied_sample", repeated[copies]), ("duplicate_key", repeated[~copies])):
        examples = table["key"].take(pa.array(rows[:MAX_EXAMPLES])).to_pylist()
        findings.add(reason, *examples, count=len(rows))
    return table.filter(pa.array(first == np.arange(len(first)))).combine_chunks()


def _first_rows(keys: pa.Array) -> Integers:
    """int64 [N]: the first row with the same key, which is the row itself where there is none.

    Keys of the same 64-bit hash are compared, so that of all keys hashes alone are held.
    """
    from pandas.util import hash_array

    hashes = np.empty(len(keys), np.uint64)
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys.slice(start, _KEYS_AT_ONCE).to_numpy(zero_copy_only=False)
        hashes[start : start + len(some)] = hash_array(some, categorize=False)
    ordered = np.sort(hashes)
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    found = np.arange(len(keys))
    alike = np.flatnonzero(np.isin(hashes, several)) if len(several) else several.astype(np.int64)
    codes = keys.take(pa.array(alike)).dictionary_encode().indices.to_numpy()
    # Codes are given in order of first appearance.
    found[alike] = alike[np.unique(codes, return_index=True)[1][codes]] if len(codes) else alike
    return found
