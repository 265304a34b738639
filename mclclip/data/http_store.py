"""Objects behind http urls: no more bytes than were asked for, and redirects that are looked at.

A reply is read up to what was asked for, and never decompressed. A redirect to another host is
followed, as stores with a delivery network need it, but without credentials (`~/.netrc`), and not
into a network nearer to this machine than that of the host which redirects: a server of the
internet does not make this machine ask the addresses that only this machine can reach.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import socket
import urllib.request
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import fsspec.asyn

from mclclip.files import clean

if TYPE_CHECKING:  # an extra, and slow to import
    import aiohttp
    from yarl import URL

log = logging.getLogger("mclclip")

MAX_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)
_TAGS = ("ETag", "Content-MD5", "Last-Modified")
# Networks of IPv6 whose last 32 bits are an address of IPv4: compatible, SIIT, NAT64.
_EMBEDDING = [*map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96"))]
_OF_AZURE = "168.63.129.16"  # which a machine there asks for its settings
_of_parents: list[Any] = []  # sessions that a fork has inherited


class FinalError(OSError):
    """An error that another attempt would not mend."""


class StatusError(OSError):
    """A server answered with another status than that of the bytes that were asked for."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status


class HttpStore:
    """Reads objects by url. Raises ImportError where aiohttp is not installed.

    timeout_s  longest time of one request
    """

    def __init__(self, timeout_s: float) -> None:
        import aiohttp

        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._sessions: dict[int | None, aiohttp.ClientSession] = {}
        self._loop = fsspec.asyn.get_loop()
        self._logged: set[tuple[str | None, str | None]] = set()

    def info(self, url: str) -> dict[str, Any]:
        """``size`` of the object (None: the server does not say it), and its ``ETag`` or, where it
        has none, another sign of its content; empty where there is none of them.

        Raises StatusError, FinalError, and OSError where no reply comes.
        """
        size, tag = self._wait(self._stat, url)
        return {"size": size, "ETag": tag}

    def cat_file(self, url: str, start: int, end: int, tag: str = "") -> bytes:
        """Bytes [start, end) of the object, fewer where the reply ends before.

        With a ``tag``, an ETag that is not weak, the object must still have it: StatusError with
        412 where it has another. Raises as ``info`` does, FinalError too where more bytes come.
        """
        data: bytes = self._wait(self._read, url, start, end, tag)
        return data

    def _wait(self, call: Callable[..., Any], *args: Any) -> Any:
        """Runs a coroutine and returns its result.

        aiohttp's errors may quote what a server sent, such as the path and query that it was asked
        for: they lose the query.
        """
        import aiohttp

        try:
            return fsspec.asyn.sync(self._loop, call, *args)
        except aiohttp.ClientError as error:
            text = re.sub(r"[?#]\S+", "?...", clean(str(error)))
            raise OSError(f"{type(error).__name__}: {text}") from None

    async def _stat(self, url: str) -> tuple[int | None, str]:
        async with self._reply("HEAD", url, {}) as reply:
            size = reply.content_length
            if reply.status == 200 and size is not None:
                return size, _tag_of(reply)
        async with self._reply("GET", url, {}) as reply:  # whose body is not read
            if reply.status != 200:
                raise StatusError(reply.status)
            return reply.content_length, _tag_of(reply)

    async def _read(self, url: str, start: int, stop: int, tag: str) -> bytes:
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        if tag.startswith('"'):
            headers["If-Match"] = tag
        async with self._reply("GET", url, headers) as reply:
            if reply.status not in (200, 206):
                raise StatusError(reply.status)
            told, data = reply.headers.get("Content-Range", f"bytes {start}-"), bytearray()
            wanted = stop - start if reply.status == 206 or start == 0 else 0
            while len(data) <= wanted and (part := await reply.content.read(wanted + 1)):
                data += part
            if len(data) > wanted or not told.startswith(f"bytes {start}-"):
                raise FinalError(
                    f"other bytes, or more of them, came than the {stop - start:,} that were asked "
                    "for: the server does not serve ranges of bytes"
                )
            return bytes(data)

    @asynccontextmanager
    async def _reply(
        self, method: str, url: str, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply behind all redirects. Errors inside name the host where they have led."""
        from yarl import URL

        first = here = URL(url)
        seen: set[URL] = set()
        least: int | None = None
        while True:
            seen.add(here)
            async with await self._ask(method, here, headers, least) as reply:
                location = reply.headers.get("Location")
                if reply.status not in _REDIRECTS or location is None:
                    try:
                        encoding = reply.headers.get("Content-Encoding", "").strip()
                        if encoding.lower() not in ("", "identity"):
                            raise FinalError(
                                f"the server sends it encoded ({clean(encoding)[:40]}), which was "
                                "not asked for: store it without Content-Encoding"
                            )
                        yield reply
                    except (StatusError, FinalError) as error:
                        if not _is_same_host(first, here):
                            error.args = (f"{error} (from {here.host}, to which it is redirected)",)
                        raise
                    return
            there = _target(here, location)
            if there in seen:
                raise FinalError(f"{here.host} redirects in a loop")
            if len(seen) > MAX_REDIRECTS:
                raise FinalError(f"more than {MAX_REDIRECTS} redirects follow each other")
            if not _is_same_host(here, there):
                least = max(least or 0, await _reach_of(here))
                if (hosts := (first.host, there.host)) not in self._logged:
                    self._logged.add(hosts)
                    log.info("shards at %s are read from %s, to which they are redirected", *hosts)
            here = there

    async def _ask(
        self, method: str, url: URL, headers: Mapping[str, str], least: int | None
    ) -> aiohttp.ClientResponse:
        """The reply of one server. ``least``: the least ``reach`` that its address may have; None
        for the host that the user named."""
        import aiohttp

        proxy = None
        if least is not None:
            _check(str(url.host), str(url.host), least)
            proxy = _proxy_of(url)  # which finds the addresses itself, and decides on them
        session = self._session(0 if proxy is not None else least)
        try:
            return await session.request(
                method, url, headers=headers, allow_redirects=False, proxy=proxy
            )
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, FinalError):
                raise error.os_error from None
            raise

    def _session(self, least: int | None) -> aiohttp.ClientSession:
        if least not in self._sessions:
            import aiohttp

            resolver: Any = _Resolver(least or 0)
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=resolver),
                timeout=self._timeout,
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
                # Passwords of ~/.netrc, and proxies of the environment, for hosts of the user.
                trust_env=least is None,
            )
            weakref.finalize(self, _close, self._loop, session, os.getpid())
            self._sessions[least] = session
        return self._sessions[least]


def _close(loop: asyncio.AbstractEventLoop, session: aiohttp.ClientSession, pid: int) -> None:
    """Closes a session of the process ``pid``. A forked child leaves it open: its event loop has
    the file descriptors of its parent's, and closing them would stall the parent."""
    if os.getpid() == pid:
        from fsspec.implementations.http import HTTPFileSystem

        HTTPFileSystem.close_session(loop, session)
    else:
        _of_parents.append(session)


class _Resolver:
    """Addresses of names as aiohttp asks for them; none with a ``reach`` below ``least``."""

    def __init__(self, least: int) -> None:
        self.least = least

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[Any]:
        """The addresses of a host; FinalError where one of them is too near."""
        found = await addresses_of(host, port, family)
        for entry in found:
            _check(entry["host"], host, self.least)
        return found

    async def close(self) -> None:
        """Does nothing: there is nothing to close."""


async def addresses_of(host: str, port: int, family: int) -> list[Any]:
    """The addresses of a host as the system resolves it; see aiohttp's ``AbstractResolver``."""
    import aiohttp

    return list(await aiohttp.ThreadedResolver().resolve(host, port, socket.AddressFamily(family)))


def reach(address: str) -> int:
    """Who can ask an address: 2 for the internet's, 1 for a private one, 0 for those of this
    machine and its link (where clouds have the credentials of a machine), and for odd ones. Of one
    of IPv6 that stands for one of IPv4 the nearer one counts."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified:
        return 0
    if address == _OF_AZURE:
        return 0
    own = 2 if found.is_global else 1
    if isinstance(found, ipaddress.IPv4Address):
        return own
    inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
    if inner is None and any(found in network for network in _EMBEDDING):
        inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
    if inner is None:
        return own
    return reach(str(inner)) if found.ipv4_mapped else min(own, reach(str(inner)))


async def _reach_of(url: URL) -> int:
    """The ``reach`` of a url's host, by its widest address; 2 where a proxy finds it."""
    host = str(url.host)
    if _proxy_of(url) is not None:
        return 2
    if _is_address(host):
        return reach(host)
    found = await addresses_of(host, url.port or 0, socket.AF_UNSPEC)
    return max((reach(entry["host"]) for entry in found), default=2)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _check(address: str, host: str, least: int) -> None:
    """Raises FinalError for an address whose ``reach`` is below ``least``, and for one that is not
    written as usual, such as 127.1; names pass."""
    if reach(address) < least if _is_address(address) else re.fullmatch(r"[\d.]+", address):
        shown_host = host if host == address else f"{host} ({address})"
        raise FinalError(
            f"it is redirected to {clean(shown_host)}, an address of a private network or of this "
            "machine, from one that is not, which is refused: name the url where the shard lies"
        )


def _proxy_of(url: URL) -> str | None:
    """The environment's proxy for a url."""
    if urllib.request.proxy_bypass(str(url.host)):
        return None
    return urllib.request.getproxies().get(url.scheme)


def _target(here: URL, location: str) -> URL:
    """The url that a redirect names, without a user."""
    from yarl import URL

    try:
        there = here.join(URL(location)).with_user(None)
        if there.scheme not in ("http", "https") or not there.host:
            raise ValueError("another protocol, or no host")
    except ValueError:
        public = clean(re.split(r"[?#]", location)[0])[:200]
        raise FinalError(f"{here.host} redirects to {public!r}, which is no http url") from None
    return there


def _is_same_host(here: URL, there: URL) -> bool:
    if here.scheme == "http" and there.scheme == "https":
        return here.host == there.host
    return here.origin() == there.origin()


def _tag_of(reply: aiohttp.ClientResponse) -> str:
    return next((reply.headers[name] for name in _TAGS if reply.headers.get(name)), "")
