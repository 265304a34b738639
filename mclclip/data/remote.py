"""Shards behind a url: object stores through fsspec, and plain HTTP.

A url is looked at when a verb begins (its size and its ETag, which the index remembers) and then
read by ranges of bytes, many in flight. A read that fails is tried again with growing pauses; one
that fails for good is an OSError that names the shard. A server that sends more than was asked for
is an error, and so is an object whose ETag is not the remembered one: when it is looked at, and
over HTTP with every read, as far as the server gives strong ETags.

Addresses and credentials of a store come from where its library looks for them: environment
variables (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``), ``~/.aws`` and ``~/.netrc``.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass as checked_dataclass

from mclclip.data.http_store import FinalError, HttpStore, StatusError
from mclclip.files import clean
from mclclip.options import PROTOCOLS, STRICT, protocol_of

T = TypeVar("T")
log = logging.getLogger("mclclip")

BLOCK_BYTES = 1 << 23
"""Of one request where a whole shard is fetched."""

GAP_BYTES = 1 << 16
"""Members that lie nearer to each other than this are read by one request."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_TAGS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified")


@checked_dataclass(frozen=True, config=STRICT)
class RemoteOptions:
    """How shards behind urls are read.

    ``index/shards.json`` holds urls as they stand, with the query of signed ones: keep the run
    directory private, or sign urls for no longer than the run takes. Nothing shows that query.
    """

    retries: int = Field(default=6, ge=0, le=1000)
    """Further attempts of a read that failed, with pauses of 0.2, 0.4, ... up to 10 seconds."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of one request (S3 and HTTP; other stores have their library's)."""
    in_flight: int = Field(default=16, ge=1, le=1024)
    """Requests that one process has under way."""
    cache: str | None = None
    """A folder on a local disk that keeps whole shards, shared by the processes of a node."""
    cache_gib: PositiveFloat = 100.0
    """Size of that folder at most. Shards that find no room are read by ranges, as without one."""


@dataclass(frozen=True)
class StoredFile:
    """Where a shard lies, and what its store said of it when it was indexed.

    path  a path or a url
    size  in bytes
    tag   of a url: its ETag; where a store has none, its digest or the time of its last change;
          else empty
    """

    path: str
    size: int = 0
    tag: str = ""


UrlRange = tuple[str, int, int, str]
"""Url, offset, size, and the tag that the object must still have (empty: any)."""


class ChangedShard(OSError):
    """The object behind a url is not the one that was indexed."""


def check_protocol(path: str, where: str) -> None:
    """Raises ValueError for a url of another protocol than `PROTOCOLS`, a chain of urls, one with a
    blank, at which it would end in messages, and one that holds a password, which would be stored
    in the index."""
    if "::" in path or not path.startswith(tuple(f"{known}://" for known in PROTOCOLS)):
        raise ValueError(
            f"{where}: {clean(path)!r} is neither a local path nor a url that is read: wanted "
            f"one of {', '.join(f'{known}://' for known in PROTOCOLS)}"
        )
    if len(parts := path.split()) > 1:
        raise ValueError(f"{where}: {clean(parts[0])!r} is followed by a blank: write it as %20")
    if "@" in path.split("/")[2]:
        raise ValueError(
            f"{where}: {clean(path)!r} holds a user or a password: leave them out, and put "
            "them where the store's library looks for them (HTTP: ~/.netrc, S3: ~/.aws/credentials)"
        )


class Remote:
    """Reads objects by url; usable after a fork and in many threads. Pickles as its options."""

    def __init__(self, options: RemoteOptions | None = None) -> None:
        self.options = options or RemoteOptions()
        self._pid = 0
        self._ranged: set[str] = set()  # hosts that are known to serve ranges
        self.tried_again = 0  # requests of this process that were repeated

    def stat(self, paths: Sequence[str], missing_urls: bool = False) -> list[StoredFile | None]:
        """Size and tag of each path or url now, of urls side by side; None for a missing path.

        Raises FileNotFoundError for a missing url (with ``missing_urls`` it is None too), OSError
        where the store does not answer or says no size.
        """

        def stat(path: str) -> StoredFile | None:
            is_url = protocol_of(path) is not None
            try:
                if is_url:
                    return self._attempts(path, lambda: self._stat_once(path))
                return StoredFile(path, os.path.getsize(path))
            except FileNotFoundError:
                if is_url and not missing_urls:
                    raise
                return None

        urls = [path for path in paths if protocol_of(path) is not None]
        of_urls = dict(zip(urls, self._side_by_side(stat, urls), strict=True))
        return [of_urls[path] if path in of_urls else stat(path) for path in paths]

    def _stat_once(self, url: str) -> StoredFile:
        info = self._store(url).info(url)
        if info.get("type") == "directory":
            raise FileNotFoundError(url)
        if not isinstance(info.get("size"), int):
            raise OSError("its size is not told, so it cannot be read by ranges")
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
        return StoredFile(url, info["size"], tag)

    def glob(self, pattern: str) -> list[str]:
        """Urls of the objects that match; ValueError for HTTP, which has no listings."""
        protocol = protocol_of(pattern)
        if protocol in ("http", "https"):
            raise ValueError(
                f"{clean(pattern)!r}: HTTP has no listings: use braces, such as "
                "https://host/{00000..00099}.tar, or @FILE with one url per line"
            )
        found = self._attempts(pattern, lambda: self._store(pattern).glob(pattern, detail=True))
        return [f"{protocol}://{name}" for name, info in found.items() if info["type"] == "file"]

    def read_ranges(self, ranges: Sequence[UrlRange]) -> list[bytes]:
        """The bytes of each range, in their order, neighbours by one request.

        With a tag the object must still have it, as far as the store can be asked (HTTP).
        Raises FileNotFoundError for an object that is gone, ChangedShard for one that has changed,
        and OSError where the store does not give those bytes after all attempts.
        """
        return self.start(ranges)[0]()

    def start(
        self, ranges: Sequence[UrlRange]
    ) -> tuple[Callable[[], list[bytes]], Callable[[], None]]:
        """Asks for what ``read_ranges`` gives, and does not wait for it.

        Returns a function that waits and gives the bytes, or raises as ``read_ranges`` does; and
        one that gives them up: what no thread has begun yet is not asked for.
        """
        self._in_this_process()
        requests, places = _joined(ranges)
        coming = [self._threads.submit(self._read, request) for request in requests]

        def give_up() -> None:
            for future in coming:
                future.cancel()

        def take() -> list[bytes]:
            try:
                read = [future.result() for future in coming]
            except BaseException:
                give_up()
                raise
            both = zip(places, ranges, strict=True)
            return [read[number][at : at + size] for (number, at), (_, _, size, _) in both]

        return take, give_up

    def fetch(self, stored: StoredFile, file: BinaryIO) -> None:
        """Writes the whole object to ``file``; ChangedShard where it changes meanwhile.

        A server that serves no ranges, by which samples are read later, is refused here."""
        host = stored.path.split("/")[2]
        if host not in self._ranged and stored.size > 1:
            self._read((stored.path, stored.size - 1, 1, stored.tag))
            self._ranged.add(host)
        step = BLOCK_BYTES * self.options.in_flight
        for start in range(0, stored.size, step):
            stop = min(start + step, stored.size)
            blocks = [
                (stored.path, at, min(BLOCK_BYTES, stop - at), stored.tag)
                for at in range(start, stop, BLOCK_BYTES)
            ]
            file.writelines(self._side_by_side(self._read, blocks))
        if self.stat([stored.path]) != [stored]:
            url = clean(stored.path)
            raise ChangedShard(f"shard {url} changed while it was read: start again")

    def _read(self, request: UrlRange) -> bytes:
        """The bytes of a range, by one request and as many attempts as it needs."""
        url, start, size, tag = request
        if not threading.main_thread().is_alive():
            # The interpreter waits for its threads, which would go on to read the rest.
            raise FinalError("the program has ended")

        def once() -> bytes:
            store = self._store(url)
            told = {"tag": tag} if isinstance(store, HttpStore) else {}
            data: bytes = store.cat_file(url, start=start, end=start + size, **told)
            if len(data) != size:
                raise OSError(f"{len(data):,} bytes came where {size:,} were asked for")
            return data

        return self._attempts(url, once) if size else b""

    def _attempts(self, url: str, read: Callable[[], T]) -> T:
        """``read()``, tried again after errors that may pass."""
        for attempt in range(self.options.retries + 1):
            try:
                return read()
            except Exception as error:  # each store's library raises errors of its own
                _raise_final(url, error)
                last = error
            if not threading.main_thread().is_alive():
                break  # the program ends, and waits for its threads
            if attempt < self.options.retries:
                self.tried_again += 1
                level = logging.WARNING if self.tried_again == 1 else logging.DEBUG
                log.log(level, "%s is read again: %s", clean(url), _error_line(last))
                time.sleep(min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S))
        raise OSError(
            f"shard {clean(url)} could not be read after {attempt + 1} attempts "
            f"({_error_line(last)}): look after its store, and start again"
        ) from last

    def _side_by_side(self, call: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        if len(items) < 2:
            return [call(item) for item in items]
        self._in_this_process()
        return list(self._threads.map(call, items))

    def _store(self, url: str) -> Any:
        """An `HttpStore`, or fsspec's file system of a url; made anew in every process."""
        self._in_this_process()
        protocol, timeout_s = protocol_of(url) or "", self.options.timeout_s
        if protocol in self._stores:
            return self._stores[protocol]
        check_protocol(url, "shard")
        # Nothing is remembered of listings, which may change.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if protocol == "s3":
            options["config_kwargs"] = {"connect_timeout": timeout_s, "read_timeout": timeout_s}
        try:
            is_http = protocol in ("http", "https")
            store = HttpStore(timeout_s) if is_http else fsspec.filesystem(protocol, **options)
        except ImportError as error:
            raise FinalError(
                f"{error}: install the library of {protocol}://, for S3, GS and HTTP by "
                "pip install 'mclclip[remote]'"
            ) from error
        return self._stores.setdefault(protocol, store)

    def _in_this_process(self) -> None:
        if self._pid != os.getpid():
            self._stores: dict[str, Any] = {}
            self._threads = ThreadPoolExecutor(self.options.in_flight, "remote shards")
            self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[Remote], tuple[RemoteOptions]]:
        return type(self), (self.options,)


def _joined(ranges: Sequence[UrlRange]) -> tuple[list[UrlRange], list[tuple[int, int]]]:
    """Requests for the ranges, where near ones of one object become one; and for every range the
    number of its request and its offset in that."""
    requests: list[UrlRange] = []
    places = [(0, 0)] * len(ranges)
    for number in sorted(range(len(ranges)), key=lambda n: ranges[n][:2]):
        url, start, size, _ = ranges[number]
        last_url, first, last_size, tag = requests[-1] if requests else ("", 0, 0, "")
        if url == last_url and start <= first + last_size + GAP_BYTES:
            requests[-1] = (url, first, max(last_size, start + size - first), tag)
        else:
            requests.append(ranges[number])
        places[number] = len(requests) - 1, start - requests[-1][1]
    return requests, places


def _raise_final(url: str, error: Exception) -> None:
    """Raises what another attempt would not mend."""
    if isinstance(error, FinalError | ChangedShard):
        raise type(error)(f"shard {clean(url)}: {clean(str(error))}") from error
    status = error.status if isinstance(error, StatusError) else None
    if status == 412:
        raise ChangedShard(
            f"shard {clean(url)} has changed since it was indexed (another ETag): restore it, "
            "or index it anew with 'mclclip index --force'"
        ) from error
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        raise FileNotFoundError(f"shard {clean(url)} is not there: put it back") from error
    if isinstance(error, PermissionError) or status in (401, 403):
        raise PermissionError(
            f"shard {clean(url)} may not be read ({_error_line(error)}): check the credentials of "
            "its store"
        ) from error


def _error_line(error: BaseException) -> str:
    """One line on an error, which may have no words of its own."""
    return clean(" ".join(str(error).split()))[:200] or type(error).__name__


@contextmanager
def open_whole(stored: StoredFile, remote: Remote) -> Iterator[BinaryIO]:
    """A shard as an open file: a path's own, of a url a copy that is removed at the end."""
    if protocol_of(stored.path) is None:
        with open(stored.path, "rb") as file:
            yield file
        return
    with tempfile.TemporaryFile(prefix="mclclip-shard-") as copy:
        remote.fetch(stored, cast(BinaryIO, copy))
        copy.seek(0)
        yield cast(BinaryIO, copy)
