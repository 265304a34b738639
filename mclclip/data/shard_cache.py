"""A folder of whole shards on a local disk, filled while their urls are read by ranges.

The processes of a node share it. A shard that is asked for is fetched in the background by the
first that wants it, and nobody waits for that: until it is there, ranges are read from its store.
What the folder holds stays below its bound. For a new shard only such make room as nobody has
opened for hours: a data set larger than the bound is read at random, and would otherwise push out
what is needed next.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mclclip.data.remote import Look, Remote
from mclclip.files import digest_json

log = logging.getLogger("mclclip")

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
    first, last = offset // BLOCK_BYTES, _num_blocks(stop)
    start = first * BLOCK_BYTES
    data = os.pread(handle, min(last * BLOCK_BYTES, size) - start, start)
    blocks = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    sums = b"".join(map(_checksum, blocks))
    if sums != os.pread(handle, _SUM_BYTES * (last - first), size + _SUM_BYTES * first):
        return None
    return data[offset - start : stop - start]


def _checksum(block: bytes) -> bytes:
    return zlib.crc32(block).to_bytes(_SUM_BYTES, "little")


def _num_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _size_of_copy(size: int) -> int:
    return size + _SUM_BYTES * _num_blocks(size)


class ShardCache:
    """Finished copies of shards below ``folder``, ``max_bytes`` of them at most.

    ``idle_s``: a copy that nobody has opened for so long may be removed for another shard.
    Usable after a fork, where it begins anew with what lies in the folder. Raises OSError where the
    folder cannot be made.
    """

    def __init__(
        self, folder: Path, max_bytes: int, remote: Remote, idle_s: float = IDLE_S
    ) -> None:
        self.folder, self.max_bytes, self.idle_s = Path(folder), max_bytes, idle_s
        self.remote = remote
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"data.remote.cache={self.folder} cannot be made ({error.strerror}): give a folder "
                "that can be written, or leave the option out"
            ) from None
        self._pid, self._off = 0, False
        self._dropped: set[Path] = set()

    def path_of(self, url: str, look: Look) -> Path | None:
        """The copy of a shard; None where there is none yet, and then it is fetched."""
        if self._off:
            return None
        path = self.folder / f"{digest_json([url, look.size, look.tag])[:40]}.tar"
        try:
            if os.path.getsize(path) == _size_of_copy(look.size):
                os.utime(path)
                return path
            path.unlink()  # cut short, or of an older version, which kept no checksums
            self._want(path, url, look)
        except FileNotFoundError:
            self._want(path, url, look)
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

    def wait(self) -> None:
        """Returns when everything that this process has asked for was fetched or left out."""
        if self._pid == os.getpid():
            self._queue.join()

    def _want(self, path: Path, url: str, look: Look) -> None:
        if self._pid != os.getpid():
            self._pid, self._asked = os.getpid(), set[Path]()
            self._queue: queue.Queue[tuple[Path, str, Look]] = queue.Queue()
            threading.Thread(target=self._work, name="shard cache", daemon=True).start()
        if path not in self._asked:
            self._asked.add(path)
            self._queue.put((path, url, look))

    def _work(self) -> None:
        while True:
            path, url, look = self._queue.get()
            try:
                if not self._off:
                    self._fetch(path, url, look)
            except OSError as error:
                if error.errno is None:  # of its store, which whoever reads it will hear of
                    log.warning("a shard is not kept in %s: %s", self.folder, error)
                else:
                    self._give_up(error)
            finally:
                self._queue.task_done()

    def _give_up(self, error: OSError) -> None:
        """A cache only saves time: where its folder fails, shards are read from their store."""
        self._off = True
        log.warning("the shard cache %s is not used any more: %s", self.folder, error)

    def _fetch(self, path: Path, url: str, look: Look) -> None:
        file = self._reserve(path, _size_of_copy(look.size))
        if file is None:
            return
        part = Path(file.name)
        with file:
            try:
                self.remote.fetch(url, look, file)
                file.seek(0)
                starts = range(0, look.size, BLOCK_BYTES)
                blocks = (file.read(min(BLOCK_BYTES, look.size - start)) for start in starts)
                sums = b"".join(map(_checksum, blocks))
                file.seek(look.size)
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
            self._remove_abandoned()
            if path.exists() or part.exists() or size > self.max_bytes:
                return None
            held = {p: p.stat() for p in self.folder.iterdir() if p.suffix in (".tar", ".part")}
            over = sum(stat.st_size for stat in held.values()) + size - self.max_bytes
            long_ago, leaving = time.time() - self.idle_s, []
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

    def _remove_abandoned(self) -> None:
        """Removes files that were being filled by a process that has ended."""
        for part in self.folder.glob("*.part"):
            with open(part, "r+b") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                part.unlink()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """No other process looks for room meanwhile."""
        with open(self.folder / _LOCK, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:  # not by closing: a process that was forked meanwhile has the file open too
                fcntl.flock(file, fcntl.LOCK_UN)

    def __reduce__(self) -> tuple[type[ShardCache], tuple[Path, int, Remote, float]]:
        return type(self), (self.folder, self.max_bytes, self.remote, self.idle_s)
