"""Reads byte ranges of shards, of files and of urls alike."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mclclip.data.remote import Place, Remote, protocol_of
from mclclip.data.shard_cache import ShardCache, read_copy
from mclclip.ranks.data_wait import note_place

Range = tuple[int, int, int]
"""Number of the shard, offset, size."""


@dataclass(frozen=True)
class _Coming:
    """Ranges that are being read, and how to take or to give up their bytes (`Remote.start`)."""

    ranges: list[Range]
    take: Callable[[], list[bytes]]
    give_up: Callable[[], None]


class ShardReader:
    """Reads byte ranges of shards; keeps the ``max_open_files`` most recently used files open.

    Reads are positional (``pread``), so a file handle carries no state: processes that inherit it
    over a fork do not disturb each other. Handles are not pickled. Threads may share a reader;
    their reads take turns, and only one of them prefetches. Shards behind urls are read by
    ``remote``; many ranges of them are best asked for by `prefetch` first.

    Raises ValueError for ``max_open_files`` below 1.
    """

    _coming: _Coming | None  # what was begun to be read, for a later prefetch

    def __init__(
        self, places: Sequence[Place], max_open_files: int = 64, remote: Remote | None = None
    ) -> None:
        if max_open_files < 1:
            raise ValueError(f"max_open_files is {max_open_files}, wanted at least 1")
        self._paths, self._max_open_files = [place.path for place in places], max_open_files
        self._remote = remote or Remote()
        self._looks = {
            number: place.look
            for number, place in enumerate(places)
            if protocol_of(place.path) is not None
        }
        options, self._cache = self._remote.options, None
        if self._looks and options.cache is not None:
            max_bytes = int(options.cache_gib * 2**30)
            # With few requests under way, which those that somebody waits for do not stand behind.
            patient = Remote(replace(options, in_flight=2))
            self._cache = ShardCache(Path(options.cache).expanduser(), max_bytes, patient)
        self._start_empty()

    @property
    def has_urls(self) -> bool:
        """Whether some shards lie behind urls."""
        return bool(self._looks)

    def prefetch(self, ranges: Iterable[Range]) -> None:
        """Reads ranges of shards behind urls side by side, each for the next ``read`` of it.

        What was prefetched before and not read is forgotten. Raises as ``read`` does.
        """
        self._in_this_process()
        self._ahead.clear()
        if wanted := self._behind_urls(ranges):
            note_place(wanted[0][0])  # for whoever waits for it
            coming = self._coming
            if coming is not None and set(wanted) <= set(coming.ranges):
                self._coming = None
                self._ahead.update(zip(coming.ranges, coming.take(), strict=True))
            else:
                found = self._remote.read_ranges(self._asked(wanted))
                self._ahead.update(zip(wanted, found, strict=True))

    def start_prefetch(self, ranges: Iterable[Range]) -> None:
        """Begins to read ranges of shards behind urls, for a later ``prefetch`` of the same ones,
        and does not wait. What was begun before and not asked for is given up."""
        self._in_this_process()
        if self._coming is not None:
            self._coming.give_up()
            self._coming = None
        if wanted := self._behind_urls(ranges):
            self._coming = _Coming(wanted, *self._remote.start(self._asked(wanted)))

    def _behind_urls(self, ranges: Iterable[Range]) -> list[Range]:
        return [r for r in ranges if r[0] in self._looks and self._copy(r[0]) is None]

    def _asked(self, ranges: Iterable[Range]) -> list[tuple[str, int, int, str]]:
        return [(self._paths[s], at, size, self._looks[s].tag) for s, at, size in ranges]

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset`` of shard number ``shard``; fewer where a file ends.

        Raises FileNotFoundError if the shard is gone, OSError if it cannot be read.
        """
        self._in_this_process()
        if (ahead := self._ahead.pop((shard, offset, size), None)) is not None:
            return ahead
        note_place(shard)  # for whoever waits for it
        if (copy := self._copy(shard)) is not None:
            kept = self._of_copy(shard, copy, offset, size)
            if kept is not None:
                return kept
        if (stored := self.read_in_store(shard, offset, size)) is not None:
            return stored
        parts: list[bytes] = []
        with self._lock:
            handle = self._handle(shard, self._paths[shard])
            while size > 0:
                part = os.pread(handle, size, offset)
                if not part:
                    break
                parts.append(part)
                offset += len(part)
                size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_in_store(self, shard: int, offset: int, size: int) -> bytes | None:
        """What ``read`` gives of a shard behind a url, from its store alone; None for a file."""
        if shard not in self._looks:
            return None
        return self._remote.read_ranges(self._asked([(shard, offset, size)]))[0]

    def _of_copy(self, shard: int, copy: Path, offset: int, size: int) -> bytes | None:
        """Bytes of a copy on a local disk; None where it is gone, or not what was written."""
        with self._lock:
            try:
                handle = self._handle(shard, str(copy))
                data = read_copy(handle, self._looks[shard].size, offset, size)
            except OSError:
                return None
            if data is None and self._cache is not None:
                self._cache.drop(copy, handle)
                os.close(self._handles.pop(shard))
            return data

    def close(self) -> None:
        """Close every handle; a later read opens again."""
        with self._lock:
            while self._handles:
                os.close(self._handles.popitem()[1])

    @property
    def num_open_files(self) -> int:
        return len(self._handles)

    def _copy(self, shard: int) -> Path | None:
        """The copy on a local disk of a shard behind a url, where there is one."""
        if self._cache is None or shard not in self._looks:
            return None
        return self._cache.path_of(self._paths[shard], self._looks[shard])

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
        names = ("_paths", "_max_open_files", "_remote", "_looks", "_cache")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_empty()

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", {}).values():
            os.close(handle)
