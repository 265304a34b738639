"""Copies samples into shards in the order of a stage's groups, one shard at a time.

The order is that of a grouped index: by pseudo label, and by sample_id within a group. Which sample
stands in which shard follows from it alone, so that processes write shards side by side, and a
killed one leaves nothing but whole shards behind. A shard is read again before it gets its name:
its members must have the names, sizes and checksums of what was copied.

    00007.tar  SOURCE/KEY.jpg SOURCE/KEY.txt ...   as any WebDataset reader takes them
    00007.npy  int64 [n, 4]: where image and captions of each sample begin, and the CRC-32 of each;
               written last

A sample has its image and the member with its captions there; its other members stay behind. Where
its key is an absolute path or has ``..``, which would lead out of the folder that somebody unpacks
the tar in, its sample_id names its members; a training does not read their names. A sample
whose bytes are not those of the index, or are cut short, is not copied, and read where it was.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from webdataset.writer import TarWriter

from mclclip.data.arrays import open_npy, save_npy
from mclclip.data.groups import GroupedIndex
from mclclip.data.locations import Located, Locations, shard_name
from mclclip.data.remote import Remote, RemoteOptions
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_reader import ShardReader
from mclclip.data.shard_scan import ARRAY_EXTENSION, caption_field
from mclclip.data.tar_members import TarFault, read_members
from mclclip.files import whole_file

Integers = npt.NDArray[np.int64]
TRUNCATED, CHANGED = -1, -2
REASONS = {TRUNCATED: "truncated", CHANGED: "changed"}
"""What stands for the offset of samples that are not copied -> why not."""

_WINDOW_BYTES = 1 << 26  # of samples that are read before they are written
_MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"\x93NUMPY": ARRAY_EXTENSION, b"RIFF": "webp"}


@dataclass(frozen=True)
class Resharding:
    """Arguments of ``write_shard``, the same for all shards.

    identity  digest of all that the shards depend on
    grouped   folder of the grouped index, whose samples are copied in its order
    """

    identity: str
    index: Path
    index_digest: str
    grouped: Path
    directory: Path
    samples_per_shard: int
    max_open_files: int
    remote: RemoteOptions

    def tar(self, number: int) -> Path:
        """A shard."""
        return self.directory / shard_name(number)

    def note(self, number: int) -> Path:
        """Where the samples of a shard are in it; marks it as done."""
        return self.tar(number).with_suffix(".npy")

    def members(self, number: int) -> Integers | None:
        """int64 [n, 4] of a shard that is done; None for another."""
        try:
            return open_npy(self.note(number), "reshard") if self.tar(number).exists() else None
        except (FileNotFoundError, RuntimeError):  # it was not written, or lost in a crash
            return None


@dataclass(frozen=True, eq=False)
class _Sources:
    """The index, the groups and the shards that samples are read from, opened once in a process."""

    index: SampleIndex
    grouped: GroupedIndex
    locations: Locations
    reader: ShardReader


@lru_cache(maxsize=1)
def _sources(of: Resharding) -> _Sources:
    index = SampleIndex(of.index, of.index_digest)
    locations = Locations(index)
    reader = ShardReader(locations.places, of.max_open_files, Remote(of.remote))
    return _Sources(index, GroupedIndex.mapped(of.grouped), locations, reader)


@dataclass(frozen=True)
class _Copy:
    """A sample as it is written: the name of its members, its image and its captions, each with its
    extension (None: there are none). Neither is there where the sample is not copied, for a
    ``reason``."""

    name: str
    image: tuple[str, bytes] | None = None
    text: tuple[str, bytes] | None = None
    reason: int = 0


@dataclass(frozen=True)
class _Member:
    """A member that was written: of the sample in ``row``, its image (column 0) or captions (1)."""

    row: int
    column: int
    crc32: int


def close() -> None:
    """Closes what ``write_shard`` has opened in this process."""
    _sources.cache_clear()


def write_shard(of: Resharding, number: int) -> dict[int, int]:
    """Writes a shard and the note on it, unless they are there; returns the samples that were not
    copied, and why (``REASONS``).

    Raises RuntimeError where a shard does not hold what was written, and the errors of the reader.
    """
    sources = _sources(of)
    start = number * of.samples_per_shard
    ids = np.asarray(sources.grouped.sample_ids[start : start + of.samples_per_shard])
    members = of.members(number)
    if members is None or not _is_whole(of.tar(number), members, sources.index, ids):
        members = _write(of.tar(number), sources, ids)
        save_npy(of.note(number), members)
    left = np.flatnonzero(members[:, 0] < 0)
    return {int(ids[row]): int(members[row, 0]) for row in left}


def _is_whole(path: Path, members: Integers, index: SampleIndex, ids: Integers) -> bool:
    """Whether a note is one on these samples, and the shard is as long as it says."""
    if members.shape != (len(ids), 4):
        return False
    sizes = np.stack([index.image_size[ids], index.text_size[ids]], axis=1)
    end = int((members[:, :2] + sizes)[members[:, 0] >= 0].max(initial=0))
    return path.stat().st_size >= end


def _write(path: Path, sources: _Sources, ids: Integers) -> Integers:
    """Writes the samples to a tar; returns what its note holds, int64 [n, 4]."""
    members = np.zeros((len(ids), 4), dtype=np.int64)
    written: dict[str, _Member] = {}
    options: dict[str, Any] = {"user": "mclclip", "group": "mclclip", "mtime": 0, "encoder": False}
    with whole_file(path) as file:
        # Names of any length, which the default (ustar) does not take.
        with TarWriter(file, format="PAX_FORMAT", **options) as writer:
            for row, copy in enumerate(_copies(sources, ids)):
                members[row, 0] = copy.reason
                own = [member for member in (copy.image, copy.text) if member is not None]
                if own:
                    writer.write({"__key__": copy.name, **dict(own)})
                for column, (extension, data) in enumerate(own):
                    written[f"{copy.name}.{extension}"] = _Member(row, column, zlib.crc32(data))
        file.flush()
        _read_back(Path(file.name), path, written, members)
    return members


def _copies(sources: _Sources, ids: Integers) -> Iterator[_Copy]:
    """The samples in order; some are read at once, in the order in which they lie."""
    sizes = sources.index.image_size[ids] + sources.index.text_size[ids]
    windows = np.cumsum(sizes) // _WINDOW_BYTES
    for window in np.split(ids, np.flatnonzero(np.diff(windows)) + 1):
        located = sources.locations.of(window)
        sources.reader.prefetch(r for own in located for r in (own.image, own.text) if r[2])
        keys = sources.index.keys(window)
        found: dict[int, _Copy] = {}
        for k in sorted(range(len(window)), key=lambda k: located[k]):
            name = _member_name(keys[k], int(window[k]))
            found[k] = _copy(sources, int(window[k]), name, located[k])
        yield from (found[k] for k in range(len(window)))


def _member_name(key: str, sample_id: int) -> str:
    """The key, or ``sample_id`` where the key, a stranger's, is an absolute path or has ``..``.

    A key has its source before a slash, and a number has no slash: no two samples have one name.
    """
    leads_out = not {"", ".."}.isdisjoint(re.split(r"[/\\]", key))
    return f"{sample_id:09d}" if leads_out else key


def _copy(sources: _Sources, sample_id: int, name: str, located: Located) -> _Copy:
    index, ranges = sources.index, (located.image, located.text)
    image, text = (sources.reader.read(*r) if r[2] else b"" for r in ranges)
    if [len(image), len(text)] != [size for _, _, size in ranges]:
        return _Copy(name, reason=TRUNCATED)
    for data, known in ((image, index.image_crc32), (text, index.text_crc32)):
        if data and known is not None and zlib.crc32(data) != known[sample_id]:
            return _Copy(name, reason=CHANGED)
    captions = index.shards[int(index.shard_of[sample_id])].captions
    extension = "txt" if caption_field(captions) is None else "json"
    return _Copy(name, (_extension(image), image), (extension, text) if text else None)


def _extension(image: bytes) -> str:
    """By the first bytes; ``jpg`` for what no reader will decode."""
    return next((name for magic, name in _MAGIC.items() if image.startswith(magic)), "jpg")


def _read_back(
    temporary: Path, path: Path, written: Mapping[str, _Member], members: Integers
) -> None:
    """Compares the members of a tar with what was written, and notes where they begin.

    Raises RuntimeError where they differ.
    """
    missing = dict(written)
    with open(temporary, "rb") as file:
        try:
            for member in read_members(file) if written else ():
                known = missing.pop(member.name, None)
                data = os.pread(file.fileno(), member.size, member.offset)
                if known is None or zlib.crc32(data) != known.crc32:
                    raise TarFault("damaged_shard", f"{member.name} is not what was written")
                members[known.row, [known.column, 2 + known.column]] = member.offset, known.crc32
        except TarFault as fault:
            raise RuntimeError(f"{path} does not hold what was written: {fault}") from fault
    if missing:
        raise RuntimeError(f"{path} lacks {len(missing)} members, such as {next(iter(missing))!r}")
