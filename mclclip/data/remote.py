"""Reads shards behind urls of S3, Google Cloud Storage, Azure, HTTP and the Hugging Face hub.

When a verb begins, it asks for the size and the ETag of each url and compares them with the index.
Then it reads ranges of bytes, many at the same time. obstore repeats a request that fails, with
growing pauses; if it fails in the end, the OSError names the shard. Reads ask for the ETag of the
index (``If-Match``), so that an object that was replaced gives an error and no data.
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

from mclclip.util.files import parse_json, printable
from mclclip.util.options import PROTOCOLS, STRICT, protocol_of
from mclclip.util.stores import HUB_URL, open_store, reason_of

T = TypeVar("T")

BLOCK_BYTES = 1 << 23
"""Most bytes of one request; a single larger member is also read by one request."""

MOST_LISTED = 50_000
"""Files of a data set of the hub from which on its description may not have all of them."""

GAP_BYTES = 1 << 16
"""Members are read by one request if no more bytes lie between them, since another request would
take longer. So captions are read together with the pictures between them."""


@checked_dataclass(frozen=True, config=STRICT)
class RemoteOptions:
    """How shards behind urls are read.

    ``index/shards.json`` and ``config.yaml`` of a run hold whole urls, including the query of
    signed ones: keep the run directory private, or sign urls only for the time of the run. Messages
    and 'mclclip config' leave the query out.
    """

    retries: int = Field(default=6, ge=0, le=1000)
    """How often a failed request is repeated, with pauses that grow from 0.2 to 10 seconds."""
    timeout_s: PositiveFloat = 60.0
    """Longest time of one request, in seconds."""
    in_flight: int = Field(default=16, ge=1, le=1024)
    """Most requests of one process at the same time."""


@dataclass(frozen=True)
class StoredFile:
    """The place of a shard, and its size and tag when it was indexed.

    path  a path or a url
    size  in bytes
    tag   the ETag of a url, or the time of its last change if the store has no ETags; else empty
    """

    path: str
    size: int = 0
    tag: str = ""


UrlRange = tuple[str, int, int, str]
"""Url, offset, size, and the tag that the object must still have (empty: any)."""


class ChangedShard(OSError):
    """The object behind a url is not the one that was indexed."""


def check_protocol(path: str, where: str) -> None:
    """Raises ValueError for a url that cannot be read, or that holds a password.

    ``where`` begins the message, such as 'data.sources.web'. A password would be stored in the
    index, and a blank would end the url in messages, which hide what is secret up to there.
    """
    protocols = [f"{name}://" for name in PROTOCOLS]
    url, is_hub, problem = path, path.startswith("hf://"), ""
    if not path.startswith(tuple(protocols)):
        problem = "is neither a local path nor a url that is read: wanted one of "
        problem += ", ".join(protocols)
    elif len(parts := path.split()) > 1:
        url, problem = parts[0], "is followed by a blank: write it as %20"
    elif path.startswith(("s3://", "gs://", "az://")) and re.search(r"[?[]", path):
        problem = (
            "holds ? or [, which are no wildcards of an object store: wanted * or ** or braces"
        )
    elif is_hub and not HUB_URL.fullmatch(path):
        problem = "names no file of a data set: wanted hf://datasets/ORG/NAME/FILE, or "
        problem += "hf://datasets/ORG/NAME@REVISION/FILE"
    elif "@" in path.split("/")[2] and not is_hub:
        problem = "holds a user or a password: leave them out, and put them where they are looked "
        problem += "for (HTTP: ~/.netrc; others: environment variables)"
    if problem:
        raise ValueError(f"{where}: {printable(url)!r} {problem}")


# --- errors --------------------------------------------------------------------------------------


def _call(url: str, options: RemoteOptions, call: Callable[[Any, str], T]) -> T:
    """Returns ``call(store, path)`` for the store and the path of a url.

    Errors become an OSError without the query of the url, which may be a secret. It has no cause,
    since obstore's messages show the query.
    """
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
        """Returns the present size and tag of each path or url; None for a missing path.

        A missing url raises FileNotFoundError, or is None with ``missing_urls``. Raises OSError if
        a store does not answer.
        """

        def stat(path: str) -> StoredFile | None:
            is_url = protocol_of(path) is not None
            try:
                return self._stat_url(path) if is_url else StoredFile(path, os.path.getsize(path))
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
                # A HEAD request would be refused if the url is signed for GET. And a server that
                # serves no ranges is found now, not a verb later.
                return obstore.get(store, path, options={"range": (0, 1)}).meta
            return obstore.head(store, path)

        meta = _call(url, self.options, head)
        changed = meta["last_modified"]
        tag = meta["e_tag"] or (changed.isoformat() if changed.timestamp() > 0 else "")
        return StoredFile(url, meta["size"], tag)

    def glob(self, pattern: str) -> list[str]:
        """Returns the urls of the objects that match: ``*`` is text without a slash, ``**`` any.

        Raises ValueError for HTTP, which has no listings, and for a data set of the hub whose
        listing is not complete.
        """
        protocol = protocol_of(pattern)
        if protocol in ("http", "https"):
            raise ValueError(
                f"{printable(pattern)!r}: HTTP has no listings: use braces, such as "
                "https://host/{00000..00099}.tar, or @FILE with one url per line"
            )
        depth = 5 if protocol == "hf" else 3  # hf://datasets/ORG/NAME, s3://BUCKET
        base, path = "/".join(pattern.split("/")[:depth]), "/".join(pattern.split("/")[depth:])
        parts = re.split(r"(\*\*|\*)", path)
        stars = {"**": ".*", "*": "[^/]*"}
        matches = re.compile("".join(stars.get(part) or re.escape(part) for part in parts))
        folder = path.partition("*")[0].rpartition("/")[0]
        is_of_folder = path.rpartition("/")[0] == folder and "**" not in path

        def names(store: Any, _: str) -> list[str]:
            prefix = folder or None
            if is_of_folder:  # does not list the folders below it, which may hold many more
                return [e["path"] for e in obstore.list_with_delimiter(store, prefix)["objects"]]
            return [entry["path"] for entry in obstore.list(store, prefix).collect()]

        if protocol == "hf":
            listed = self._files_of_hub(base)
        else:
            listed = _call(f"{base}/{folder}", self.options, names)
        return [f"{base}/{name}" for name in listed if matches.fullmatch(name)]

    def _files_of_hub(self, url: str) -> list[str]:
        """Returns the names of all files of a data set of the hub, in order."""
        try:
            described = _call(
                url, self.options, lambda store, path: obstore.get(store, path).bytes().to_bytes()
            )
        except (FileNotFoundError, PermissionError):
            raise FileNotFoundError(
                f"{url}: the hub has no such data set or revision, or shows it only with HF_TOKEN"
            ) from None
        names = sorted(each["rfilename"] for each in parse_json(described, url)["siblings"])
        if len(names) >= MOST_LISTED:
            raise ValueError(
                f"{url}: the hub lists at most {MOST_LISTED:,} files of a data set: use braces, or "
                "@FILE with one url per line"
            )
        return names

    def read_ranges(self, ranges: Sequence[UrlRange]) -> list[bytes]:
        """Reads the bytes of each range, neighbours by one request.

        A range carries the tag that its object had when it was indexed: a strong ETag, which the
        object must still have, or a time, since which it must be unchanged. Raises
        FileNotFoundError for a missing object, ChangedShard for one that has changed, and OSError
        if all attempts fail.
        """
        parts: list[bytes] = []
        for data in self.start(ranges)[0]():
            if isinstance(data, OSError):
                raise data
            parts.append(data)
        return parts

    def start(
        self, ranges: Sequence[UrlRange]
    ) -> tuple[Callable[[], list[bytes | OSError]], Callable[[], None]]:
        """Begins to read ranges, without waiting. Returns the functions ``take`` and ``give_up``.

        ``take`` waits, and returns for each range its bytes, or the error of an object that is
        missing or has changed; it raises the other errors of ``read_ranges``. ``give_up`` cancels
        the requests that have not begun.
        """
        requests, places = _join(ranges)
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
        """Writes the whole object to ``file``; raises ChangedShard if it changes meanwhile."""
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
        """Reads a range by one request. (obstore's ``get_ranges`` does not send an ETag.)"""
        url, start, size, tag = request
        if not threading.main_thread().is_alive():
            # At its end the interpreter waits for its threads, which would read all that is left.
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


def _join(ranges: Sequence[UrlRange]) -> tuple[list[UrlRange], list[tuple[int, int]]]:
    """Joins near ranges of one object to requests of up to `BLOCK_BYTES`.

    Also returns for every range the number of its request, and its offset in that.
    """
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
    """Opens a shard as a file; that of a url is a temporary copy."""
    if protocol_of(stored.path) is None:
        with open(stored.path, "rb") as file:
            yield file
        return
    with tempfile.TemporaryFile(prefix="mclclip-shard-") as copy:
        remote.fetch(stored, cast(BinaryIO, copy))
        copy.seek(0)
        yield cast(BinaryIO, copy)
