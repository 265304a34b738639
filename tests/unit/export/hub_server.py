"""A hub of models in a process of its own: the few requests that `--push` makes, kept in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What the server holds: the files of every repository by name, and which are private.

    From ``most_commits`` commits on, each further one is answered by 403.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    most_commits: int = 1
    url: str = ""

    def info(self, name: str) -> dict[str, Any]:
        siblings = [{"rfilename": file} for file in self.files[name]]
        return {"id": name, "private": self.private[name], "siblings": siblings, "sha": "0" * 40}

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.files[name][value["path"]]


@contextmanager
def running() -> Iterator[Hub]:
    """A hub at a free port of this machine, until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, tree: object, code: int = 200, **headers: str) -> None:
            content = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def none(self) -> None:
            self.answer({"error": "none"}, 404, X_Error_Code="RepoNotFound")

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            parts = path.strip("/").split("/")
            if parts[0] == "api":
                name = "/".join(parts[2:4])
                if name not in hub.files:
                    return self.none()
                if parts[4:5] == ["tree"]:
                    found = [{"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
                             for file, content in hub.files[name].items()]  # fmt: skip
                    return self.answer(found)
                return self.answer(hub.info(name))
            name, file = "/".join(parts[:2]), "/".join(parts[4:])
            self.answer(hub.files[name][file], ETag='"0"', X_Repo_Commit="0" * 40)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[1:] == ["repos", "create"]:
                given = json.loads(body)
                name = f"{given['organization']}/{given['name']}"
                code = 409 if name in hub.files else 200
                hub.files.setdefault(name, {".gitattributes": b""})
                private = given.get("private") or given.get("visibility") == "private"
                hub.private.setdefault(name, private)
                return self.answer({"url": f"{hub.url}/{name}", "name": name}, code)
            if parts[1:] == ["validate-yaml"]:
                return self.answer({"errors": [], "warnings": []})
            name = "/".join(parts[2:4])
            if parts[4] == "preupload":
                names = [file["path"] for file in json.loads(body)["files"]]
                modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
                return self.answer({"files": modes})
            if not hub.most_commits:
                return self.answer({"error": "you may not"}, 403)
            hub.most_commits -= 1
            hub.commit(name, [json.loads(line) for line in body.splitlines()])
            done = {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1" * 40}
            self.answer(done | {"pullRequestUrl": None})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
