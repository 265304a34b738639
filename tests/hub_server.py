"""A local stand-in of the Hugging Face hub: data sets as folders, by the hub's own addresses.

``served/ORG/NAME`` is a data set. It answers what mclclip, huggingface_hub and datasets ask: the
description of a data set, its tree, some of its paths, and files, which it redirects to a second
address as the hub does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.shard_server import Handler, ShardServer, serving

COMMIT = "c0ffee" * 6 + "c0ff"
_API = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/[^/]+(?:/(.*))?)?")
_FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@contextmanager
def hub(folder: Path) -> Iterator[ShardServer]:
    """Serves the data sets below ``folder``; its url is what HF_ENDPOINT has to be."""
    with serving(folder) as server:
        server.answer = answer
        yield server


def answer(handler: Handler) -> object:
    """Answers the hub's own addresses; False for those of files."""
    path, _, query = handler.path.partition("?")
    path = unquote(path)
    if match := _API.fullmatch(path):
        folder = handler.server.folder / match[1]
        return _described(handler, folder, match, parse_qs(query))
    if match := _FILE.fullmatch(path):
        return _redirect(handler, f"{match[1]}/{match[3]}")
    return False


def _described(handler: Handler, folder: Path, match: Any, query: dict[str, list[str]]) -> object:
    name, what, below = match.groups()
    if not folder.is_dir():
        return handler.send(404, b"{}", X_Error_Code="RepoNotFound")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in files]
    if what == "paths-info":
        length = int(handler.headers["Content-Length"])
        asked = json.loads(handler.rfile.read(length))["paths"]
        return _json(handler, [e for e in _entries(folder, True) if e["path"] in asked])
    if what == "tree":
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        return _json(handler, _entries(folder, recursive, below or ""))
    siblings = [{"rfilename": each} for each in names]
    return _json(
        handler,
        {
            "id": name, "sha": COMMIT, "private": False, "gated": False, "disabled": False,
            "downloads": 0, "likes": 0, "tags": [], "siblings": siblings,
            "lastModified": "2026-01-01T00:00:00.000Z",
        },
    )  # fmt: skip


def _entries(folder: Path, recursive: bool, below: str = "") -> list[dict[str, Any]]:
    found = (folder / below).rglob("*") if recursive else (folder / below).glob("*")
    entries: list[dict[str, Any]] = []
    for path in sorted(found):
        entry: dict[str, Any] = {"path": str(path.relative_to(folder)), "size": 0}
        entry |= {"type": "directory", "oid": "0" * 40}
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            entry |= {"type": "file", "oid": digest[:40], "size": path.stat().st_size}
        entries.append(entry)
    return entries


def _redirect(handler: Handler, name: str) -> object:
    path = handler.server.folder / name
    if not path.is_file():
        return handler.send(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
    tag = f'"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"'
    facts = {"X_Repo_Commit": COMMIT, "X_Linked_Etag": tag}
    facts |= {"X_Linked_Size": str(path.stat().st_size), "ETag": tag}
    # Another host, since a redirect within the hub is taken for another name of the same file.
    target = handler.server.url(f"{name}?signature=s3cret").replace("127.0.0.1", "localhost")
    return handler.send(302, b"", Location=target, **facts)


def _json(handler: Handler, value: object) -> object:
    return handler.send(
        200, json.dumps(value).encode(), handler.command != "HEAD", Content_Type="application/json"
    )
