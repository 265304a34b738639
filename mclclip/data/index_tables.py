"""The files of an index: its shards, the table of its samples, and the values of attributes.

``shards.json`` lists every shard with the rows of its samples, ``samples.arrow`` has a row per
sample, and ``attributes.json`` has the values of the codes in that table. This module joins scans
of shards to such a table, and compares indexed shards with what lies on disk now.

Opening an index compares the size of every shard and the time of its last change, or for a url its
size and its ETag. A shard with another time is scanned again, and the digest of its headers,
captions and attributes is compared with that of the index. If they are equal, only the time is new:
it is written to ``shard_times.json`` beside the index. That file is a cache; without it all shards
are scanned again. Captions are compared once more whenever they are read, and pixels if
``data.verify`` is ``full`` (`bytes.Bytes`).
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

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mclclip.data.findings import MAX_EXAMPLES, Findings
from mclclip.data.options import DataConfig
from mclclip.data.remote import Remote, StoredFile
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
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")  # short, and written as str() would


@dataclass(frozen=True)
class Shard:
    """One tar shard: its samples are rows [start, stop) of the index.

    path      a path or a url
    captions  where its captions are, as ``data.sources.NAME.captions`` says
    digest    the digest of its scan; empty before the scan
    tag       the ETag of a url, or the time of its last change; empty for a path
    subset    the digest of the uids that its samples were filtered by; empty without a filter
    name      the end of the path, if keys start again in every shard of a source: keys of its
              samples are then ``source/name/key``; empty if they are ``source/key``
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
        """The part of its path before its name."""
        return stem_of(self.path).removesuffix(self.name)

    @property
    def stored(self) -> StoredFile:
        """The file or url that it is read from."""
        return StoredFile(self.path, self.size_bytes, self.tag)

    def describe(self, directory: Path) -> str:
        """Names it for messages: 'shard /data/00001.tar of source web in run/index'."""
        return f"shard {printable(self.path)} of source {self.source} in {directory}"


# --- tables ----------------------------------------------------------------------------------


def write_tables(directory: Path, table: pa.Table, shards: Sequence[Shard]) -> str:
    """Writes ``shards.json``, ``attributes.json`` and ``samples.arrow``, each atomically.

    ``shards.json`` is written first: if the process is killed in between, the next run keeps its
    order of shards. Returns the digest of the ordered keys, of the samples without a caption (plans
    depend on them too), and of the values of attributes, where there are any.
    """
    movable = (replace(shard, path=_to_relative(shard.path, directory)) for shard in shards)
    write_json(directory / SHARDS, [*map(dataclasses.asdict, movable)])
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
    """Reads the rows that ``write_tables`` wrote; memory-mapped, except attributes."""
    return to_text(map_table(directory), read_values(directory))


def map_table(directory: Path) -> pa.Table:
    """Maps ``samples.arrow``, which has codes for the values of attributes."""
    with pa.memory_map(str(directory / SAMPLES)) as source:
        return pa.ipc.open_file(source).read_all()


def read_shards(directory: Path) -> list[Shard]:
    """Reads ``shards.json``; returns an empty list if there is none."""
    path = directory / SHARDS
    with damaged_if_unreadable(path, INDEX_AGAIN):
        entries = read_json(path) if path.exists() else []
        shards = [Shard(**(e | {"attributes": tuple(e["attributes"])})) for e in entries]
    return [replace(shard, path=_from_relative(shard.path, directory)) for shard in shards]


def _to_relative(path: str, directory: Path) -> str:
    """Makes a path below the run relative to the index, so that the run can be moved."""
    index = os.path.abspath(directory)
    below = path.startswith(os.path.dirname(index) + os.sep)
    return os.path.relpath(path, index) if below else path


def _from_relative(path: str, directory: Path) -> str:
    """The inverse of ``_to_relative``."""
    if not path.startswith(os.pardir + os.sep):
        return path
    return os.path.normpath(os.path.join(os.path.abspath(directory), path))


def read_values(directory: Path) -> dict[str, list[str]]:
    """Reads ``attributes.json``: the sorted values of each attribute; empty if there is none."""
    path = directory / ATTRIBUTES
    values: dict[str, list[str]] = read_json(path) if path.exists() else {}
    return values


def to_codes(table: pa.Table) -> tuple[pa.Table, dict[str, list[str]]]:
    """Replaces the texts of attributes by int32 codes; returns the table, and the values by name.

    A code is the value's place among the sorted values (-1: no value). Whole numbers come first, by
    their size.
    """

    def sort_key(value: str) -> tuple[int, int, str]:
        return (0, int(value), value) if _WHOLE_NUMBER.fullmatch(value) else (1, 0, value)

    values: dict[str, list[str]] = {}
    for number, name in _attributes(table):
        text = table.column(number).unify_dictionaries().to_pandas().cat
        # Rows with some of the values may have been removed.
        values[name] = sorted(text.remove_unused_categories().cat.categories, key=sort_key)
        codes = text.set_categories(values[name]).cat.codes.to_numpy(np.int32)
        table = table.set_column(number, pa.field(ATTRIBUTE + name, pa.int32()), pa.array(codes))
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
    """Scans shards in up to ``options.index_workers`` processes; yields the scans in order.

    ``filters`` choose samples of some sources, by the source's name. Digests do not depend on them.
    """
    calls, filters, remote = [], filters or {}, options.remote
    beside = [metadata_path(s.path) for s in shards if s.source in filters]
    parquets = iter(Remote(remote).stat(beside, missing_urls=True))
    for s in shards:
        subset = filters.get(s.source)
        if subset is not None:
            subset = replace(subset, metadata=next(parquets))
        calls.append((s.stored, s.source, s.captions, s.attributes, pixels, remote, subset))
    return map_in_pool(scan_shard, calls, options.index_workers)


def times_of(shards: Sequence[Shard]) -> dict[str, int]:
    """Returns the time of each file's last change, in nanoseconds, by path; urls have none."""
    paths = [shard.path for shard in shards if protocol_of(shard.path) is None]
    return {path: os.stat(path).st_mtime_ns for path in paths}


def note_times(directory: Path, times: dict[str, int]) -> None:
    """Adds ``times`` to the noted times of shards whose content is that of the index. Through a
    link nothing is noted: only the run that has the index writes to it."""
    if Path(directory).is_symlink():
        return
    all_times = (_read_times(directory) | times).items()
    noted = {_to_relative(path, directory): time for path, time in all_times}
    write_json(Path(directory) / TIMES, {"times": noted})


def _read_times(directory: Path) -> dict[str, int]:
    path = Path(directory) / TIMES
    try:
        noted: dict[str, int] = read_json(path)["times"]
        return {_from_relative(name, Path(directory)): time for name, time in noted.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}  # then every shard is scanned


def check_shards(directory: Path, shards: Sequence[Shard], options: DataConfig) -> None:
    """Compares the shards with the index in ``directory``; call it on one rank. Shards whose path
    or time of change is not that of the index are read.

    Raises FileNotFoundError for a missing shard, ValueError for one with another size, tag, or
    other members, captions or attributes, and OSError if a store does not answer.
    """
    now = Remote(options.remote).stat([shard.path for shard in shards])
    for shard, stat in zip(shards, now, strict=True):
        where = shard.describe(directory)
        if stat is None:
            raise FileNotFoundError(
                f"{where} is not on disk any more: put it back, or "
                "set data.sources to where it lies now and call 'mclclip index'"
            )
        indexed_as, is_now = (shard.size_bytes, shard.tag), (stat.size, stat.tag)
        if indexed_as != is_now:
            before, after = (f"{size:,} bytes {tag}".strip() for size, tag in (indexed_as, is_now))
            raise ValueError(
                f"{where} had {before} when it was indexed, and has {after} now: restore it, or "
                "index it anew with 'mclclip index --force'"
            )
    times, noted = times_of(shards), _read_times(directory)
    indexed = {shard.path for shard in read_shards(directory)}
    changed = [s for s in shards if s.path not in indexed or noted.get(s.path) != times.get(s.path)]
    if not changed:
        return
    log.info("read again, for another path or time: %s", count_of(len(changed), "shard"))
    with closing(scan_shards(changed, options)) as scans:
        shown = progress(scans, total=len(changed), description="check shards")
        for shard, scan in zip(changed, shown, strict=True):
            if scan.digest != shard.digest:
                raise ValueError(
                    f"{shard.describe(directory)} has changed: its members or captions are not "
                    "those that were indexed; restore it, or index it anew with 'mclclip index "
                    "--force'"
                )
    note_times(directory, {path: times[path] for s in changed if (path := s.path) in times})


def join_rows(
    indexed: pa.Table | None,
    scanned: list[pa.RecordBatch],
    shards: Sequence[Shard],
    num_old: int,
    findings: Findings,
    options: DataConfig,
) -> tuple[pa.Table, list[Shard]]:
    """Joins rows of the index with those of newly scanned shards, the last ones of ``shards``.

    indexed  the rows of all shards before the scanned ones
    scanned  the rows of each new shard; it is emptied, so that millions of rows are not held twice
    num_old  number of shards that an earlier index has: the keys of their samples do not change

    If more than ``options.max_bad_fraction`` of a source's samples have the key of another sample,
    its new shards get names, which make the keys ``source/name/key``. Of other rows with the same
    key the first stays; the rest is counted as ``copied_sample`` or ``duplicate_key``, for which
    images are read (raises OSError if that fails). Attributes that only other shards have are null.
    Returns the rows, with one chunk per column, which zero-copy reading needs, and the shards.
    """
    num_indexed, tables = len(shards) - len(scanned), [] if indexed is None else [indexed]
    for number, rows in enumerate(scanned, start=num_indexed):
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
    scanned_names = {n: s.name for n, s in enumerate(shards) if s.name and n >= num_indexed}
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
    """Returns for each of the ``rows`` if it has the image and caption of the row ``first[row]``.

    bool [len(rows)]. Images are read and compared only if their sizes and captions are equal.
    """
    size, text = table["image_size"].to_numpy(), table[TEXT_CRC].to_numpy()
    shard, offset = table["shard"].to_numpy(), table["image_offset"].to_numpy()
    others = first[rows]
    same: npt.NDArray[np.bool_] = (size[rows] == size[others]) & (text[rows] == text[others])
    for place in np.flatnonzero(same):
        pair = (rows[place], others[place])
        ranges = [(int(shard[row]), int(offset[row]), int(size[row])) for row in pair]
        reader.prefetch(ranges)
        image, other = (reader.read(*each) for each in ranges)
        same[place] = image == other
    return same


def _new_names(
    table: pa.Table,
    first: Integers,
    shards: Sequence[Shard],
    num_old: int,
    reader: ShardReader,
    bound: float,
) -> dict[int, str]:
    """Returns names for the shards of sources with a larger share of repeated keys than ``bound``.

    The names are by the numbers of the shards. ``first`` is the result of `_first_rows`.
    """
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
    """Returns a path or url without '.tar'; of a url without its query, which may be a secret."""
    return (path if protocol_of(path) is None else path.partition("?")[0]).removesuffix(".tar")


def _with_names(table: pa.Table, shards: Sequence[Shard], names: Mapping[int, str]) -> pa.Table:
    """Inserts names into the keys of some shards: ``source/key`` becomes ``source/name/key``, so
    that keys which start again in each shard differ. ``names``: shard number -> name."""
    if not names:
        return table
    keys, parts = table["key"].chunk(0), []
    bounds = np.searchsorted(table["shard"].to_numpy(), np.arange(len(shards) + 1)).tolist()
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        part = keys.slice(start, stop - start)
        if number in names:
            prefix = f"{shards[number].source}/"
            with_name = f"{prefix}{names[number]}/"
            part = pc.replace_substring(part, prefix, with_name, max_replacements=1)
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
    """Returns for each row the first row with the same key, int64 [N]; it may be the row itself.

    To save memory, keys are held as 64-bit hashes; only those of equal hashes are compared.
    """
    from pandas.util import hash_array

    hashes = np.empty(len(keys), np.uint64)
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys.slice(start, _KEYS_AT_ONCE).to_numpy(zero_copy_only=False)
        hashes[start : start + len(some)] = hash_array(some, categorize=False)
    ordered = np.sort(hashes)
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    first = np.arange(len(keys))
    alike = np.flatnonzero(np.isin(hashes, several)) if len(several) else several.astype(np.int64)
    codes = keys.take(pa.array(alike)).dictionary_encode().indices.to_numpy()
    # Codes are given in order of first appearance.
    first[alike] = alike[np.unique(codes, return_index=True)[1][codes]] if len(codes) else alike
    return first
