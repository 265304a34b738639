"""Replies of hostile servers: no more of them is read than was asked for, and no redirect leads
into a nearer network."""

from __future__ import annotations

import gzip
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mclclip.data import http_store
from mclclip.data.http_store import FinalError, HttpStore
from mclclip.data.remote import Remote, RemoteOptions
from tests.shard_server import Handler, ShardServer, serving

pytest.importorskip("aiohttp", reason="shards behind http need aiohttp (the extra 'remote')")
DATA = bytes(range(256)) * 40
Servers = tuple[ShardServer, ShardServer]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Two hosts that have the object."""
    (tmp_path / "a.tar").write_bytes(DATA)
    with serving(tmp_path) as first, serving(tmp_path, "127.0.0.2") as second:
        yield first, second


def read(url: str, start: int = 100, size: int = 50) -> bytes:
    """By a `Remote`, of whose attempts the first must be the last."""
    remote = Remote(RemoteOptions(retries=3, timeout_s=20.0))
    try:
        return remote.read_ranges([(url, start, size, "")])[0]
    finally:
        assert remote.tried_again == 0


def redirecting(target: str) -> Callable[[Handler], object]:
    """Answers every request with a redirect."""
    return lambda handler: handler.send(302, b"", Location=target)


def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server is one of the internet, the second is on this machine."""
    files = {"127.0.0.1": 2, "127.0.0.2": 0}
    monkeypatch.setattr(http_store, "reach", lambda address: files[address])


# --- bytes ---------------------------------------------------------------------------------------


def test_an_endless_reply_is_read_up_to_what_was_asked_for(servers: Servers) -> None:
    sent = [0]

    def answer(handler: Handler) -> None:
        handler.send_response(206)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        block = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        while sent[0] < 1 << 29:
            handler.wfile.write(block)
            sent[0] += len(block)
        handler.close_connection = True

    servers[0].answer = answer
    with pytest.raises(OSError, match=r"a\.tar: other bytes, or more of them, came than the 50 "):
        read(servers[0].url("a.tar"))
    assert sent[0] < 1 << 28  # what buffers of both ends hold


def test_an_encoded_reply_is_refused_and_none_is_asked_for(servers: Servers) -> None:
    assert read(servers[0].url("a.tar")) == DATA[100:150]
    assert HttpStore(20.0).info(servers[0].url("a.tar"))["size"] == len(DATA)
    asked = {(method, head["Accept-Encoding"]) for method, head in servers[0].headers}
    assert asked == {("GET", "identity"), ("HEAD", "identity")}

    squeezed = gzip.compress(bytes(1 << 24))
    servers[0].answer = lambda handler: handler.send(
        206, squeezed, handler.command == "GET", Content_Encoding="gzip"
    )
    for call in (read, lambda url: Remote().stat([url])):
        with pytest.raises(OSError, match=r"a\.tar: the server sends it encoded \(gzip\)"):
            call(servers[0].url("a.tar"))


@pytest.mark.parametrize(
    ("status", "headers"), [(200, {}), (206, {"Content_Range": "bytes 0-49/10240"})]
)
def test_bytes_of_another_place_are_refused(
    servers: Servers, status: int, headers: dict[str, str]
) -> None:
    servers[0].answer = lambda handler: handler.send(status, DATA[:50], **headers)
    with pytest.raises(OSError, match="does not serve ranges of bytes"):
        read(servers[0].url("a.tar"))


# --- redirects -----------------------------------------------------------------------------------


def test_a_redirect_within_a_host_is_followed_with_its_credentials(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets_of_user(tmp_path, monkeypatch)
    first, _ = servers

    first.answer = lambda handler: (
        handler.path != "/a.tar" and handler.send(301, b"", Location="/a.tar")
    )
    assert read(first.url("elsewhere")) == DATA[100:150]
    assert [bool(head["Authorization"]) for _, head in first.headers] == [True, True]


def secrets_of_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A netrc with a password for every host."""
    (tmp_path / "netrc").write_text("default login me password s3cret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_another_host_is_followed_named_and_gets_no_credentials(
    servers: Servers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secrets_of_user(tmp_path, monkeypatch)
    caplog.set_level(logging.INFO, "mclclip")
    first, second = servers
    first.answer = redirecting(second.url("a.tar"))
    assert read(first.url("a.tar")) == DATA[100:150]
    assert first.headers[0][1]["Authorization"] and second.headers[0][1]["Authorization"] is None
    assert "shards at 127.0.0.1 are read from 127.0.0.2, to which" in caplog.text
    second.fail, second.status = 1, 403
    with pytest.raises(PermissionError, match=r"HTTP status 403 \(from 127\.0\.0\.2, to which"):
        read(first.url("a.tar"))


@pytest.mark.parametrize("host", ["127.0.0.2", "inside.test", "0x7f.2"])
def test_a_redirect_into_a_nearer_network_is_refused(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    first, second = servers
    resolve = http_store.addresses_of

    async def addresses_of(name: str, port: int, family: int) -> list[Any]:
        return await resolve("127.0.0.2" if name == "inside.test" else name, port, family)

    monkeypatch.setattr(http_store, "addresses_of", addresses_of)
    target = second.url("a.tar").replace("127.0.0.2", host)
    first.answer = redirecting(target)
    assert read(first.url("a.tar")) == DATA[100:150]  # as long as both are equally near
    second.seen.clear()
    near(monkeypatch)
    for call in (read, lambda url: Remote().stat([url])):
        with pytest.raises(OSError, match=r"a\.tar: it is redirected to .*127\.0\.0\.2.*refused"):
            call(first.url("a.tar"))
    assert not second.seen  # it was not even asked


@pytest.mark.parametrize("host", ["127.2", "2130706434", "0177.0.0.2"])
def test_a_redirect_to_an_address_in_an_odd_form_is_refused(servers: Servers, host: str) -> None:
    first, second = servers
    first.answer = redirecting(second.url("a.tar").replace("127.0.0.2", host))
    with pytest.raises(OSError, match=r"a\.tar: it is redirected to .*refused"):
        read(first.url("a.tar"))


def test_what_a_proxy_finds_is_left_to_it_but_for_addresses(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, near_server = servers
    monkeypatch.setenv("http_proxy", proxy.url(""))
    targets = {"one.test": "http://two.test/a.tar", "bad.test": near_server.url("a.tar")}

    def answer(handler: Handler) -> bool:
        host = handler.path.split("/")[2]
        if target := targets.get(host):
            handler.send(302, b"", Location=target)
        else:
            handler.path = "/a.tar"
        return target is not None

    proxy.answer = answer
    assert read("http://one.test/a.tar") == DATA[100:150]
    with pytest.raises(OSError, match=r"redirected to 127\.0\.0\.2, an address of a private"):
        read("http://bad.test/a.tar")
    assert not near_server.seen


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("93.184.216.34", 2),
        ("2606:2800:220:1::1", 2),
        ("10.1.2.3", 1),
        ("192.168.0.1", 1),
        ("100.64.0.1", 1),
        ("fd00::1", 1),
        ("127.0.0.1", 0),
        ("::1", 0),
        ("169.254.169.254", 0),
        ("fe80::1%eth0", 0),
        ("64:ff9b::a9fe:a9fe", 0),
        ("64:ff9b::808:808", 2),
        ("2002:7f00:1::1", 0),
        ("::ffff:0:7f00:1", 0),
        ("::127.0.0.1", 0),
        ("168.63.129.16", 0),
        ("0.0.0.0", 0),
        ("::ffff:127.0.0.1", 0),
        ("::ffff:10.0.0.1", 1),
    ],
)
def test_how_near_an_address_is(address: str, wanted: int) -> None:
    assert http_store.reach(address) == wanted


def test_redirects_in_a_loop_or_without_end_are_called_that(servers: Servers) -> None:
    first, second = servers
    first.answer, second.answer = redirecting(second.url("a.tar")), redirecting(first.url("a.tar"))
    with pytest.raises(OSError, match=r"a\.tar: 127\.0\.0\.2 redirects in a loop"):
        read(first.url("a.tar"))

    first.answer = lambda handler: handler.send(302, b"", Location=handler.path + "x")
    with pytest.raises(OSError, match=r"a\.tar: more than 10 redirects follow each other"):
        read(first.url("a.tar"))


@pytest.mark.parametrize(
    "target",
    ["ftp://h/a.tar", "file:///etc/passwd", "http://[/", "//h:99999/a?s3cret", "s3:/b/a?s3cret"]
    + ["ftp://h/my file?s3cret", "ftp://h/a#s3cret"],
)
def test_a_redirect_to_what_is_no_http_url_is_refused(servers: Servers, target: str) -> None:
    servers[0].answer = redirecting(target)
    with pytest.raises(OSError, match=r"redirects to .*, which is no http url") as caught:
        read(servers[0].url("a.tar"))
    assert "s3cret" not in str(caught.value)


def test_the_store_tells_its_own_errors_apart(servers: Servers) -> None:
    store = HttpStore(5.0)
    assert store.cat_file(servers[0].url("a.tar"), 0, 10) == DATA[:10]
    servers[0].ranges = False
    with pytest.raises(FinalError):
        store.cat_file(servers[0].url("a.tar"), 0, 10)
