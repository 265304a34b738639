"""An HTTP server of a folder for tests of remote shards: ranges, ETags, and faults on request."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest


class ShardServer(ThreadingHTTPServer):
    """Serves the files of ``folder``; faults are attributes that a test sets.

    latency_s   added to every request
    fail        this many requests of data get ``status`` (-1: all)
    cut         this many responses of data end after half of their bytes
    ranges      False: the whole file is sent, whatever is asked for
    silent      True: a request of data is accepted and never answered
    tags        False: neither ETags nor times of change
    times_only  True: times of change and no ETags
    after_look  called once, before the first request of data is answered
    answer      called first of all with the request's handler; False where it has not answered
    headers     of all requests so far, by method
    """

    daemon_threads = True

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), Handler)
        self.folder = folder
        self.latency_s, self.fail, self.cut, self.status = 0.0, 0, 0, 503
        self.ranges, self.silent, self.tags, self.times_only = True, False, True, False
        self.after_look: Callable[[], object] | None = None
        self.answer: Callable[[Handler], object] | None = None
        self.seen: Counter[str] = Counter()
        self.headers: list[tuple[str, Message]] = []
        self.lock = threading.Lock()

    def url(self, name: str) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/{name}"

    def takes(self, fault: str) -> bool:
        """Whether this request has the fault; counts down."""
        with self.lock:
            left = getattr(self, fault)
            setattr(self, fault, left - (left > 0))
            return bool(left)

    def handle_error(self, *_: Any) -> None:
        """Clients that go away in the middle are what these tests are about."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ShardServer

    def do_HEAD(self) -> None:
        self._answer(with_data=False)

    def do_GET(self) -> None:
        self._answer(with_data=True)

    def do_POST(self) -> None:
        self._answer(with_data=True)

    def _answer(self, *, with_data: bool) -> None:
        server = self.server
        time.sleep(server.latency_s)
        with server.lock:
            server.seen[self.command] += 1
            server.headers.append((self.command, self.headers))
            if with_data and server.after_look is not None:
                called, server.after_look = server.after_look, None
                called()
        if server.answer is not None and server.answer(self) is not False:
            return None
        path = server.folder / unquote(self.path.lstrip("/").partition("?")[0])
        if not path.is_file():
            return self.send(404, b"")
        if with_data and server.silent:
            time.sleep(3600)
        if with_data and server.takes("fail"):
            return self.send(server.status, b"")
        data = path.read_bytes()
        tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        if not server.tags or server.times_only:
            tag = ""
        since = self.headers.get("If-Unmodified-Since")
        if since and int(path.stat().st_mtime) > parsedate_to_datetime(since).timestamp():
            return self.send(412, b"")
        if self.headers.get("If-Match", tag) != tag:
            return self.send(412, b"")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        status, extra = 200, {"ETag": tag} if tag else {}
        if server.tags:
            extra["Last-Modified"] = formatdate(path.stat().st_mtime, usegmt=True)
        if found and server.ranges:
            extra["Content-Range"] = f"bytes {found[1]}-{found[2]}/{len(data)}"
            status, data = 206, data[int(found[1]) : int(found[2]) + 1]
        self.send(status, data, with_data, with_data and server.takes("cut"), **extra)

    def send(
        self, status: int, data: bytes, body: bool = True, cut: bool = False, **headers: str
    ) -> None:
        """Sends a reply; header names have - for _, and Content-Length is that of ``data``."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def serving(folder: Path, host: str = "127.0.0.1") -> Iterator[ShardServer]:
    server = ShardServer(folder, host)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of moto's S3 as boto3 gives it; stores find it through the environment."""
    server_of = pytest.importorskip("moto.server", reason="moto's S3 is not installed")
    import boto3

    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    for name, value in (names | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
        monkeypatch.setenv(name, value)
    try:
        # A process keeps the stores of a bucket, and with them the address.
        bucket = boto3.resource("s3", region_name="us-east-1").Bucket(f"bucket-{port}")
        bucket.create()
        yield bucket
    finally:
        server.stop()
