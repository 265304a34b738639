"""Shards behind urls of S3, Google Cloud Storage, Azure and HTTP, which obstore reads.

A url is looked at when a verb begins (its size and its ETag, which the index remembers) and then
read by ranges of bytes, many in flight. obstore repeats a request that fails, with growing pauses;
what fails for good is an OSError that names the shard. Reads ask for the remembered ETag
(``If-Match``), so that an object that was replaced is an error and never data.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, TypeVar, cast

import obstore
from obstore import exceptions
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass as checked_dataclass

from mclclip.util.files import printable
from mclclip.util.options import PROTOCOLS, STRICT, protocol_of
from mclclip.util.stores import HUB_URL, open_store, reason_of

T = TypeVar("T")

BLOCK_BYTES = 1 << 23
"""Of one request; a member that is larger comes by one request too."""

GAP_BYTES = 1 << 16
"""Members of one object are read by one request where no more lies between them. So captions alone
are read together with the pictures between them: a request takes longer than these bytes."""


@checked_dataclass(frozen=True, config=STRICT)
class RemoteOptions:
    """How shards behind urls are read.

    ``index/shards.json`` and ``config.yaml`` of a run hold urls as they stand, with the query of
    signed ones: keep the run directory private, or sign urls for no longer than the run takes.
    Messages, and what 'mclclip config' prints, leave the query out.
    """

    retries: int = Field(default=6, ge=0, le=1000)
    """Further attempts of a request that failed, with pauses that grow from 0.2 to 10 seconds."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of one request."""
    in_flight: int = Field(default=16, ge=1, le=1024)
    """Requests that one process has under way."""


@dataclass(frozen=True)
class StoredFile:
    """Where a shard lies, and what its store said of it when it was indexed.

    path  a path or a url
    size  in bytes
    tag   of a url: its ETag; where a store has none, the time of its last change, or nothing
    """

    path: str
    size: int = 0
    tag: str = ""


UrlRange = tuple[str, int, int, str]
"""Url, offset, size, and the tag that the object must still have (empty: any)."""


class ChangedShard(OSError):
    """The object behind a url is not the one that was indexed."""


def check_protocol(path: str, where: str) -> None:
    """Raises ValueError for a url of another protocol than `PROTOCOLS`, one with a blank, at which
    it would end in messages, one that holds a password, which would be stored in the index, one of
    the hub that names no file of a data set, and one with // or a wildcard that is none."""
    if not path.startswith(tuple(f"{known}://" for known in PROTOCOLS)):
        raise ValueError(
            f"{where}: {printable(path)!r} is neither a local path nor a url that is read: wanted "
            f"one of {', '.join(f'{known}://' for known in PROTOCOLS)}"
        )
    if len(parts := path.split()) > 1:
        raise ValueError(
            f"{where}: {printable(parts[0])!r} is followed by a blank: write it as %20"
        )
    if "//" in path.partition("://")[2].partition("?")[0]:
        raise ValueError(f"{where}: {printable(path)!r} has // in its path: write one slash")
    if path.startswith(("s3://", "gs://", "az://")) and re.search(r"[?[]", path):
        raise ValueError(
            f"{where}: {printable(path)!r} holds ? or [, which are no wildcards of an object "
            "store: wanted * or ** or braces"
        )
    is_hub = path.startswith("hf://")
    if is_hub and not HUB_URL.fullmatch(path):
        raise ValueError(
            f"{where}: {printable(path)!r} names no file of a data set: wanted "
            "hf://datasets/ORG/NAME/FILE, or hf://datasets/ORG/NAME@REVISION/FILE"
        )
    if "@" in path.split("/")[2] and not is_hub:
        raise ValueError(
            f"{where}: {printable(path)!r} holds a user or a password: leave them out, and put "
            "them where they are looked for (HTTP: ~/.netrc; others: environment variables)"
        )


# --- errors --------------------------------------------------------------------------------------


def _call(url: str, options: RemoteOptions, call: Callable[[Any, str], T]) -> T:
    """``call(store, path)``; errors become an OSError without the query of the url. They have no
    cause: obstore's messages show queries, and replies of servers that may repeat them."""
    failure: OSError
    try:
        return call(*open_store(url, options.retries, options.timeout_s))
    except (exceptions.BaseError, OSError, ValueError) as error:
        failure = _failure(printable(url), error, options.retries)
    raise failure


def _failure(url: str, error: Exception, retries: int) -> OSError:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"shard {url} is not there: put it back")
    if isinstance(error, exceptions.PreconditionError):
        return ChangedShard(
            f"shard {url} has changed since it was indexed (another ETag or time): restore it, or "
            "index it anew with 'mclclip index --force'"
        )
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return PermissionError(
            f"shard {url} may not be read ({reason_of(error)}): check the credentials of its store"
        )
    if isinstance(error, exceptions.NotSupportedError):
        return OSError(
            f"shard {url} cannot be read: its server does not serve ranges of bytes, by which "
            "samples are read. Fetch it, or put it on a server that does"
        )
    return OSError(
        f"shard {url} could not be read ({reason_of(error)}; a request is tried again {retries} "
        "times where that may help): look after its store, and start again"
    )


# --- reading -------------------------------------------------------------------------------------


class Remote:
    """Reads objects by url, in many threads. Pickles as its options."""

    def __init__(self, options: RemoteOptions | None = None) -> None:
        self.options = options or RemoteOptions()
        self._pool: ThreadPoolExecutor | None = None

    def stat(self, paths: Sequence[str], missing_urls: bool = False) -> list[StoredFile | None]:
        """Size and tag of each path or url now, of urls side by side; None for a missing path.

        Raises FileNotFoundError for a missing url (with ``missing_urls`` it is None too), OSError
        where the store does not answer.
        """

        def stat(path: str) -> StoredFile | None:
            is_url = protocol_of(path) is not None
            try:
                if is_url:
                    return self._stat_url(path)
                return StoredFile(path, os.path.getsize(path))
            except FileNotFoundError:
                if is_url and not missing_urls:
                    raise
                return None

        urls = [path for path in paths if protocol_of(path) is not None]
        of_urls = dict(zip(urls, self._side_by_side(stat, urls), strict=True))
        return [of_urls[path] if path in of_urls else stat(path) for path in paths]

    def _stat_url(self, url: str) -> StoredFile:
        def head(store: Any, path: str) -> Any:
            if protocol_of(url) in ("http", "https", "hf"):
                # Not by HEAD, which servers refuse where a url is signed for GET; and a server
                # without ranges is told here, not a verb later.
                return obstore.get(store, path, options={"range": (0, 1)}).meta
            return obstore.head(store, path)

        meta = _call(url, self.options, head)
        changed = meta["last_modified"]
        tag = meta["e_tag"] or (changed.isoformat() if changed.timestamp() > 0 else "")
        return StoredFile(url, meta["size"], tag)

    def glob(self, pattern: str) -> list[str]:
        """Urls of the objects that match: ``*`` stands for no slash, ``**`` for any text.

        Raises ValueError for HTTP and the hub, which have no listings."""
        protocol = protocol_of(pattern)
        if protocol in ("http", "https", "hf"):
            raise ValueError(
                f"{printable(pattern)!r}: HTTP has no listings: use braces, such as "
                "https://host/{00000..00099}.tar, or @FILE with one url per line"
            )
        path = "".join(pattern.split("/", 3)[3:])
        parts = re.split(r"(\*\*|\*)", path)
        stars = {"**": ".*", "*": "[^/]*"}
        matches = re.compile("".join(stars.get(part) or re.escape(part) for part in parts))
        folder = path.partition("*")[0].rpartition("/")[0]
        is_of_folder = path.rpartition("/")[0] == folder and "**" not in path

        def names(store: Any, _: str) -> list[str]:
            prefix = folder or None
            if is_of_folder:  # folders below it may hold many more
                return [e["path"] for e in obstore.list_with_delimiter(store, prefix)["objects"]]
            return [entry["path"] for entry in obstore.list(store, prefix).collect()]

        bucket = "/".join(pattern.split("/")[:3])
        listed = _call(f"{bucket}/{folder}", self.options, names)
        return [f"{bucket}/{name}" for name in listed if matches.fullmatch(name)]

    def read_ranges(self, ranges: Sequence[UrlRange]) -> list[bytes]:
        """The bytes of each range, in their order, neighbours by one request.

        With a tag that is a strong ETag the object must still have it, and with one that is a time
        be unchanged since. Raises FileNotFoundError for an object that is gone, ChangedShard for
        one that has changed, and OSError where the store does not give those bytes after all
        attempts.
        """
        found: list[bytes] = []
        for data in self.start(ranges)[0]():
            if isinstance(data, OSError):
                raise data
            found.append(data)
        return found

    def start(
        self, ranges: Sequence[UrlRange]
    ) -> tuple[Callable[[], list[bytes | OSError]], Callable[[], None]]:
        """Asks for what ``read_ranges`` gives, and does not wait for it.

        Returns a function that waits and gives the bytes, with an error in the place of those of an
        object that is gone or has changed, and raises other errors of ``read_ranges``; and one that
        gives them up: what no thread has begun yet is not asked for.
        """
        requests, places = _joined(ranges)
        coming = [self._threads().submit(self._read, request) for request in requests]

        def give_up() -> None:
            for future in coming:
                future.cancel()

        def take() -> list[bytes | OSError]:
            read: list[bytes | OSError] = []
            for future in coming:
                try:
                    read.append(future.result())
                except (FileNotFoundError, ChangedShard) as error:
                    read.append(error)
                except BaseException:
                    give_up()
                    raise
            return [
                data[at : at + size] if isinstance(data := read[number], bytes) else data
                for (number, at), (_, _, size, _) in zip(places, ranges, strict=True)
            ]

        return take, give_up

    def fetch(self, stored: StoredFile, file: BinaryIO) -> None:
        """Writes the whole object to ``file``; ChangedShard where it changes meanwhile."""
        step = BLOCK_BYTES * self.options.in_flight
        for start in range(0, stored.size, step):
            stop = min(start + step, stored.size)
            blocks = [
                (stored.path, at, min(BLOCK_BYTES, stop - at), stored.tag)
                for at in range(start, stop, BLOCK_BYTES)
            ]
            file.writelines(self._side_by_side(self._read, blocks))
        if self.stat([stored.path]) != [stored]:
            url = printable(stored.path)
            raise ChangedShard(f"shard {url} changed while it was read: start again")

    def _read(self, request: UrlRange) -> bytes:
        """The bytes of a range, by one request. obstore's ``get_ranges`` joins neighbours as
        `_joined` does, but does not send an ETag."""
        url, start, size, tag = request
        if not threading.main_thread().is_alive():
            # The interpreter waits for its threads, which would go on to read the rest.
            raise OSError("the program has ended")
        if not size:
            return b""
        options: Any = {"range": (start, start + size)}
        if tag.startswith('"'):  # a weak ETag never matches
            options["if_match"] = tag
        elif re.match(r"\d{4}-\d\d-\d\dT", tag):
            options["if_unmodified_since"] = datetime.fromisoformat(tag)
        data = _call(
            url, self.options,
            lambda store, path: obstore.get(store, path, options=options).bytes().to_bytes(),
        )  # fmt: skip
        if len(data) != size:
            raise ChangedShard(
                f"shard {printable(url)} has become shorter than when it was indexed: restore it"
            )
        return data

    def _side_by_side(self, call: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        if len(items) < 2:
            return [call(item) for item in items]
        return list(self._threads().map(call, items))

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.options.in_flight, "remote shards")
        return self._pool

    def __reduce__(self) -> tuple[type[Remote], tuple[RemoteOptions]]:
        return type(self), (self.options,)


def _joined(ranges: Sequence[UrlRange]) -> tuple[list[UrlRange], list[tuple[int, int]]]:
    """Requests for the ranges, where near ones of one object become one of up to `BLOCK_BYTES`; and
    for every range the number of its request and its offset in that."""
    requests: list[UrlRange] = []
    places = [(0, 0)] * len(ranges)
    for number in sorted(range(len(ranges)), key=lambda n: ranges[n][:2]):
        url, start, size, _ = ranges[number]
        last_url, first, last_size, tag = requests[-1] if requests else ("", 0, 0, "")
        joined_size = max(last_size, start + size - first)
        is_near = url == last_url and start <= first + last_size + GAP_BYTES
        if is_near and joined_size <= max(last_size, BLOCK_BYTES):
            requests[-1] = url, first, joined_size, tag
        else:
            requests.append(ranges[number])
        places[number] = len(requests) - 1, start - requests[-1][1]
    return requests, places


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
