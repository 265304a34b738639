"""Reads byte ranges of shards: of files, of urls, and of copies of urls on a local disk.

The cache is a folder of whole shards, which the processes of a node share, filled while their urls
are read by ranges. A shard that is asked for is fetched in the background by the first that wants
it, and nobody waits for that: until it is there, ranges are read from its store. What the folder
holds stays below its bound. For a new shard only such make room as nobody has opened for hours: a
data set larger than the bound is read at random, and would otherwise push out what is needed next.

A copy ends with the checksums of its blocks, and every read compares those that it touches: what
a disk or somebody has changed is read from its store, and the copy is fetched again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from mclclip.data.options import DataConfig
from mclclip.data.remote import Remote, StoredFile, UrlRange
from mclclip.files import digest_json
from mclclip.options import protocol_of

log = logging.getLogger("mclclip")

Range = tuple[int, int, int]
"""Number of the shard, offset, size."""


class ShardReader:
    """Reads byte ranges of shards; keeps the ``data.max_open_files`` most recently used ones open.

    Reads are positional (``pread``), so a file handle carries no state: processes that inherit it
    over a fork do not disturb each other. Handles are not pickled. Threads may share a reader;
    their reads take turns, and only one of them prefetches. Many ranges of shards behind urls are
    best asked for by `prefetch` first. ``urls`` are the numbers of those behind urls.
    """

    # Ranges that were begun to be read, and how to take and to give up their bytes.
    _coming: tuple[list[Range], Callable[[], list[bytes]], Callable[[], None]] | None

    def __init__(self, files: Sequence[StoredFile], options: DataConfig | None = None) -> None:
        options = options or DataConfig()
        self._files, self._max_open_files = list(files), options.max_open_files
        self.urls = {n for n, file in enumerate(files) if protocol_of(file.path) is not None}
        remote, self._cache = options.remote, None
        self._remote = Remote(remote)
        if self.urls and remote.cache is not None:
            max_bytes = int(remote.cache_gib * 2**30)
            # With few requests under way, which those that somebody waits for do not stand behind.
            patient = Remote(replace(remote, in_flight=2))
            self._cache = ShardCache(Path(remote.cache).expanduser(), max_bytes, patient)
        self._start_empty()

    def prefetch(self, ranges: Iterable[Range]) -> None:
        """Reads ranges of shards behind urls side by side, each for the next ``read`` of it.

        What was prefetched before and not read is forgotten. Raises as ``read`` does.
        """
        self._in_this_process()
        self._ahead.clear()
        if wanted := self._behind_urls(ranges):
            if self._coming is not None and set(wanted) <= set(self._coming[0]):
                (wanted, take, _), self._coming = self._coming, None
                found = take()
            else:
                found = self._remote.read_ranges(self._of_urls(wanted))
            self._ahead.update(zip(wanted, found, strict=True))

    def start_prefetch(self, ranges: Iterable[Range]) -> None:
        """Begins to read ranges of shards behind urls, for a later ``prefetch`` of the same ones,
        and does not wait. What was begun before and not asked for is given up."""
        self._in_this_process()
        if self._coming is not None:
            self._coming[2]()
            self._coming = None
        if wanted := self._behind_urls(ranges):
            self._coming = (wanted, *self._remote.start(self._of_urls(wanted)))

    def _behind_urls(self, ranges: Iterable[Range]) -> list[Range]:
        return [r for r in ranges if r[0] in self.urls and self._copy(r[0]) is None]

    def _of_urls(self, ranges: Iterable[Range]) -> list[UrlRange]:
        files = self._files
        return [(files[n].path, offset, size, files[n].tag) for n, offset, size in ranges]

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset`` of shard number ``shard``; fewer where a file ends.

        Raises FileNotFoundError if the shard is gone, OSError if it cannot be read.
        """
        self._in_this_process()
        if (ahead := self._ahead.pop((shard, offset, size), None)) is not None:
            return ahead
        if (copy := self._copy(shard)) is not None:
            kept = self._read_copy(shard, copy, offset, size)
            if kept is not None:
                return kept
        if (stored := self.read_in_store(shard, offset, size)) is not None:
            return stored
        parts: list[bytes] = []
        with self._lock:
            handle = self._handle(shard, self._files[shard].path)
            while size > 0 and (part := os.pread(handle, size, offset)):
                parts.append(part)
                offset += len(part)
                size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_in_store(self, shard: int, offset: int, size: int) -> bytes | None:
        """The bytes of a shard behind a url, read from its store alone; None for a file."""
        if shard not in self.urls:
            return None
        return self._remote.read_ranges(self._of_urls([(shard, offset, size)]))[0]

    def _copy(self, shard: int) -> Path | None:
        """The copy on a local disk of a shard behind a url, where there is one."""
        if self._cache is None or shard not in self.urls:
            return None
        return self._cache.path_of(self._files[shard])

    def _read_copy(self, shard: int, copy: Path, offset: int, size: int) -> bytes | None:
        """Bytes of a copy on a local disk; None where it is gone, or not what was written."""
        with self._lock:
            try:
                handle = self._handle(shard, str(copy))
                data = read_copy(handle, self._files[shard].size, offset, size)
            except OSError:
                return None
            if data is None and self._cache is not None:
                self._cache.drop(copy, handle)
                os.close(self._handles.pop(shard))
            return data

    def _in_this_process(self) -> None:
        if self._pid != os.getpid():
            # After a fork: the inherited lock may be held for ever, so it is made anew. Closing the
            # inherited handles does not affect the parent.
            self._start_empty(close=list(self._handles.values()))

    def _start_empty(self, close: Iterable[int] = ()) -> None:
        for handle in close:
            os.close(handle)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._handles: OrderedDict[int, int] = OrderedDict()
        self._ahead: dict[Range, bytes] = {}
        self._coming = None

    def _handle(self, shard: int, path: str) -> int:
        if shard in self._handles:
            self._handles.move_to_end(shard)
            return self._handles[shard]
        while len(self._handles) >= self._max_open_files:
            os.close(self._handles.popitem(last=False)[1])
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"shard {path} is not on disk any more: put it back, or run 'mclclip index' on the "
                "shards there are"
            ) from error
        self._handles[shard] = handle
        return handle

    def __getstate__(self) -> dict[str, Any]:
        names = ("_files", "_max_open_files", "_remote", "urls", "_cache")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_empty()

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            os.close(handle)


# --- the cache of whole shards -----------------------------------------------------------------

IDLE_S = 6 * 3600.0
BLOCK_BYTES = 1 << 14
"""Of a copy, with a CRC-32: half of an image's usual size, so that few bytes more are read."""

_SUM_BYTES = 4
_LOCK = "cache.lock"


def read_copy(handle: int, size: int, offset: int, wanted: int) -> bytes | None:
    """``wanted`` bytes at ``offset`` of the copy of a shard of ``size`` bytes, fewer where the
    shard ends; None where they are not those that were written."""
    stop = min(offset + wanted, size)
    if stop <= offset:
        return b""
    first, last = offset // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
    start = first * BLOCK_BYTES
    data = os.pread(handle, min(last * BLOCK_BYTES, size) - start, start)
    blocks = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    written = os.pread(handle, _SUM_BYTES * (last - first), size + _SUM_BYTES * first)
    if _checksums(blocks) != written:
        return None
    return data[offset - start : stop - start]


def _checksums(blocks: Iterable[bytes]) -> bytes:
    return b"".join(zlib.crc32(block).to_bytes(_SUM_BYTES, "little") for block in blocks)


def _size_of_copy(size: int) -> int:
    return size + _SUM_BYTES * -(-size // BLOCK_BYTES)


class ShardCache:
    """Finished copies of shards below ``folder``, ``max_bytes`` of them at most.

    A copy that nobody has opened for `IDLE_S` may be removed for another shard. Usable after a
    fork, where it begins anew with what lies in the folder. Raises ValueError where the folder
    cannot be made.
    """

    def __init__(self, folder: Path, max_bytes: int, remote: Remote) -> None:
        self.folder, self.max_bytes, self.remote = folder, max_bytes, remote
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"data.remote.cache={self.folder} cannot be made ({error.strerror}): give a folder "
                "that can be written, or leave the option out"
            ) from None
        self._pid, self._off = 0, False
        self._dropped: set[Path] = set()

    def path_of(self, stored: StoredFile) -> Path | None:
        """The copy of a shard; None where there is none yet, and then it is fetched."""
        if self._off:
            return None
        name = digest_json([stored.path, stored.size, stored.tag])[:40]
        path = self.folder / f"{name}.tar"
        try:
            if os.path.getsize(path) == _size_of_copy(stored.size):
                os.utime(path)
                return path
            path.unlink()  # cut short, or of an older version, which kept no checksums
            self._want(path, stored)
        except FileNotFoundError:
            self._want(path, stored)
        except OSError as error:
            self._give_up(error)
        return None

    def drop(self, path: Path, handle: int) -> None:
        """Removes a damaged copy, which is open as ``handle``: it is fetched again, once."""
        log.warning("%s is damaged: the shard is read from its store and fetched again", path)
        try:
            with self._locked():
                if path.exists() and os.path.samestat(os.fstat(handle), os.stat(path)):
                    path.unlink()
        except OSError as error:
            self._give_up(error)
        if path not in self._dropped and self._pid == os.getpid():
            self._asked.discard(path)
        self._dropped.add(path)

    def _want(self, path: Path, stored: StoredFile) -> None:
        if self._pid != os.getpid():
            self._pid, self._asked = os.getpid(), set[Path]()
            self._queue: queue.Queue[tuple[Path, StoredFile]] = queue.Queue()
            threading.Thread(target=self._work, name="shard cache", daemon=True).start()
        if path not in self._asked:
            self._asked.add(path)
            self._queue.put((path, stored))

    def _work(self) -> None:
        while True:
            path, stored = self._queue.get()
            try:
                if not self._off:
                    self._fetch(path, stored)
            except OSError as error:
                if error.errno is None:  # the store failed; the foreground read raises it
                    log.warning("a shard is not kept in %s: %s", self.folder, error)
                else:
                    self._give_up(error)
            finally:
                self._queue.task_done()

    def _give_up(self, error: OSError) -> None:
        """A cache only saves time: where its folder fails, shards are read from their store."""
        self._off = True
        log.warning("the shard cache %s is not used any more: %s", self.folder, error)

    def _fetch(self, path: Path, stored: StoredFile) -> None:
        file = self._reserve(path, _size_of_copy(stored.size))
        if file is None:
            return
        part = Path(file.name)
        with file:
            try:
                self.remote.fetch(stored, file)
                file.seek(0)
                starts = range(0, stored.size, BLOCK_BYTES)
                blocks = (file.read(min(BLOCK_BYTES, stored.size - start)) for start in starts)
                sums = _checksums(blocks)
                file.seek(stored.size)
                file.write(sums)
                file.flush()
                os.fsync(file.fileno())
                os.replace(part, path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def _reserve(self, path: Path, size: int) -> BinaryIO | None:
        """An empty file of that size, which counts from now on; its lock says that it is being
        filled; None where there is no room, or where the shard is there or on its way."""
        part = path.with_suffix(".part")
        with self._locked():
            for other in self.folder.glob("*.part"):
                with open(other, "r+b") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    other.unlink()  # the process that was filling it has ended
            if path.exists() or part.exists() or size > self.max_bytes:
                return None
            held = {p: p.stat() for p in self.folder.iterdir() if p.suffix in (".tar", ".part")}
            over = sum(stat.st_size for stat in held.values()) + size - self.max_bytes
            long_ago, leaving = time.time() - IDLE_S, []
            for old, stat in sorted(held.items(), key=lambda entry: entry[1].st_mtime):
                if over > 0 and old.suffix == ".tar" and stat.st_mtime < long_ago:
                    leaving.append(old)
                    over -= stat.st_size
            if over > 0:
                return None
            for old in leaving:
                old.unlink()
            file = open(part, "x+b")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
                os.ftruncate(file.fileno(), size)
            except BaseException:
                file.close()
                part.unlink()
                raise
            return file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """No other process looks for room meanwhile."""
        with open(self.folder / _LOCK, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:  # not by closing: a process that was forked meanwhile has the file open too
                fcntl.flock(file, fcntl.LOCK_UN)

    def __reduce__(self) -> tuple[type[ShardCache], tuple[Path, int, Remote]]:
        return type(self), (self.folder, self.max_bytes, self.remote)
