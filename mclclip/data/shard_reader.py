"""Reads ranges of bytes of shards, from files and urls."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mclclip.data.options import DataConfig
from mclclip.data.remote import Remote, StoredFile, UrlRange
from mclclip.util.options import protocol_of

Range = tuple[int, int, int]
"""Number of the shard, offset, size."""


class ShardReader:
    """Reads ranges of bytes of shards; keeps up to ``data.max_open_files`` of them open.

    Reads are positional (``pread``), so that processes that inherit a file handle over a fork do
    not disturb each other. Handles are not pickled. Each thread needs a reader of its own. To read
    many ranges of urls, call `prefetch` first. ``urls`` are the numbers of the shards behind urls.
    """

    # The ranges that are being read ahead, and `take` and `give_up` of `Remote.start`.
    _coming: tuple[list[Range], Callable[[], list[bytes | OSError]], Callable[[], None]] | None

    def __init__(self, files: Sequence[StoredFile], options: DataConfig | None = None) -> None:
        options = options or DataConfig()
        self._files, self._max_open_files = list(files), options.max_open_files
        self.urls = {n for n, file in enumerate(files) if protocol_of(file.path) is not None}
        self._remote = Remote(options.remote)
        self._start_empty()

    def prefetch(self, ranges: Iterable[Range]) -> None:
        """Reads ranges of urls in parallel, and keeps each until it is ``read``.

        Ranges that an earlier call kept are dropped. Raises as ``read`` does, except for a shard
        that is missing or has changed: only ``read`` raises then.
        """
        self._in_this_process()
        self._ahead.clear()
        if of_urls := self._behind_urls(ranges):
            if self._coming is not None and set(of_urls) <= set(self._coming[0]):
                (of_urls, take, _), self._coming = self._coming, None
            else:
                take, _ = self._remote.start(self._url_ranges(of_urls))
            both = zip(of_urls, take(), strict=True)
            self._ahead.update((r, data) for r, data in both if isinstance(data, bytes))

    def start_prefetch(self, ranges: Iterable[Range]) -> None:
        """Begins to read ranges of urls for a later ``prefetch`` of the same ones; does not wait.

        An earlier start whose ranges were not prefetched is cancelled.
        """
        self._in_this_process()
        if self._coming is not None:
            self._coming[2]()
            self._coming = None
        if of_urls := self._behind_urls(ranges):
            self._coming = (of_urls, *self._remote.start(self._url_ranges(of_urls)))

    def _behind_urls(self, ranges: Iterable[Range]) -> list[Range]:
        return [r for r in ranges if r[0] in self.urls]

    def _url_ranges(self, ranges: Iterable[Range]) -> list[UrlRange]:
        files = self._files
        return [(files[n].path, offset, size, files[n].tag) for n, offset, size in ranges]

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Reads ``size`` bytes at ``offset`` of a shard, or fewer if the file ends before.

        Raises FileNotFoundError if the shard is missing, OSError if it cannot be read.
        """
        self._in_this_process()
        if (ahead := self._ahead.pop((shard, offset, size), None)) is not None:
            return ahead
        if shard in self.urls:
            return self._remote.read_ranges(self._url_ranges([(shard, offset, size)]))[0]
        parts: list[bytes] = []
        handle = self._handle(shard, self._files[shard].path)
        while size > 0 and (part := os.pread(handle, size, offset)):
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _in_this_process(self) -> None:
        if self._pid != os.getpid():
            # This process is a fork. Closing the inherited handles does not affect the parent.
            self._start_empty(close=list(self._handles.values()))

    def _start_empty(self, close: Iterable[int] = ()) -> None:
        for handle in close:
            os.close(handle)
        self._pid = os.getpid()
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
        names = ("_files", "_max_open_files", "_remote", "urls")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_empty()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # os may be gone at exit
        for handle in getattr(self, "_handles", {}).values():
            close(handle)
