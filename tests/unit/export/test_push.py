"""A finished export in a repository of a hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects

from mclclip import cli
from mclclip.export import convert, hub
from mclclip.export.hub import open_repository
from tests import tiny
from tests.matrix import in_soak
from tests.unit.export.hub_server import Hub, running
from tests.unit.export.models import exported


class Api:
    """The client of a hub with one repository, which notes what it is asked; calls have the
    arguments of huggingface_hub's own client."""

    def __init__(self, *names: str, private: bool = True, manifest: Path | None = None) -> None:
        self.names, self.private, self.manifest = names, private, manifest
        self.asked: list[str] = []

    def model_info(self, name: str) -> Any:
        self.asked.append("model_info")
        files = [SimpleNamespace(rfilename=file) for file in self.names]
        return SimpleNamespace(siblings=files, private=self.private)

    def hf_hub_download(self, name: str, file: str, local_dir: str) -> str:
        signature(HfApi.hf_hub_download).bind(self, name, file, local_dir=local_dir)
        assert self.manifest is not None
        return shutil.copy(self.manifest, Path(local_dir) / file)

    def create_repo(self, name: str, **options: Any) -> None:
        signature(HfApi.create_repo).bind(self, name, **options)
        self.asked.append(f"create {name} {options}")

    def upload_folder(self, **options: Any) -> Any:
        signature(HfApi.upload_folder).bind(self, **options)
        there = [path.name for path in options["folder_path"].iterdir()]
        sent = filter_repo_objects(there, allow_patterns=options["allow_patterns"])
        self.asked.append(f"upload {sorted(sent)} {options['delete_patterns']}")
        return SimpleNamespace(commit_url="there")


TWICE = """
import sys
from mclclip import cli
from mclclip.ranks import failures
cli.run_verb(cli.parse_words(sys.argv[1:]))
try:
    cli.run_verb(cli.parse_words(sys.argv[1:]))
except RuntimeError as error:
    assert failures.is_for_the_user(error)
    print(failures.line_of(error))
"""


def pushed_twice(hub: Hub, *words: str) -> subprocess.CompletedProcess[str]:
    """`mclclip export` twice in a process of its own, to which the hub is Hugging Face's."""
    environment = tiny.environment() | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
    environment |= {"HF_TOKEN": "hf_of_a_test", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    own = {name: text for name, text in environment.items() if "_proxy" not in name.lower()}
    command = [sys.executable, "-c", TWICE, "export", *words]
    return subprocess.run(command, capture_output=True, text=True, env=own, timeout=300)


@in_soak
def test_an_export_is_uploaded_by_the_hubs_own_client(tmp_path: Path) -> None:
    """Into a private repository, and again into what it holds then, which this hub refuses."""
    source, out = exported(tmp_path / "own"), tmp_path / "out"
    words = ["--to", "open_clip", "--model", str(source), "--out", str(out), "--push", "me/clip"]
    with running() as hub:
        done = pushed_twice(hub, *words)
    assert done.returncode == 0, done.stderr
    held = hub.files["me/clip"]
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {n: c for n, c in held.items() if n != ".gitattributes"} == written
    assert {"manifest.json", "certificate.json", "README.md"} < {*written}
    assert hub.private == {"me/clip": True} and f"{hub.url}/me/clip/commit/1" in done.stderr
    assert "me/clip holds an export to open_clip of 20" in done.stderr
    assert f"{out} is finished, and me/clip has not got it" in done.stdout and "403" in done.stdout


def test_only_files_of_the_export_are_uploaded_and_only_old_ones_removed(tmp_path: Path) -> None:
    source, api = exported(tmp_path / "own"), Api()
    out = convert.run("open_clip", source, tmp_path / "out", push="me/a", public=True, api=api)
    names = {path.name for path in out.iterdir()}
    assert api.asked[1] == "create me/a {'private': False, 'exist_ok': True}"
    assert api.asked[2] == f"upload {sorted(names)} None"
    assert {"manifest.json", "certificate.json", "README.md"} < names
    (out / "notes.txt").write_text("mine")
    before = (out / "manifest.json").read_bytes()
    convert.run("timm", source, tmp_path / "timm")
    again = Api(*names, "user.md", manifest=tmp_path / "timm" / "manifest.json")
    convert.run("open_clip", source, out, push="me/a", api=again)  # a finished one is uploaded
    assert (out / "manifest.json").read_bytes() == before
    gone = ["config.json", "model.safetensors"]
    assert again.asked[-1] == f"upload {sorted(names)} {gone}"
    weights = out / "open_clip_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    (out / "README.md").write_text("a card of my own")
    with pytest.raises(RuntimeError, match="open_clip_model.safetensors.*--force"):
        convert.run("open_clip", source, out, push="me/a", api=again)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"to": "clip_retrieval"}, {}, "--push is of --to hf, .* this is --to clip_retrieval"),
        ({"name": "clip"}, {}, "--push is 'clip', wanted ORG/NAME"),
        ({"name": "me/../clip"}, {}, "wanted ORG/NAME"),
        ({}, {"names": ["weights.bin"]}, "me/a holds files that mclclip did not write.*weights.b"),
        ({}, {"names": ["manifest.json"]}, "me/a holds files that mclclip did not write"),
        ({}, {"names": [".gitattributes"], "private": False}, "everybody reads me/a: give --publ"),
    ],
)  # fmt: skip
def test_what_is_not_written_to(
    tmp_path: Path, changes: dict[str, str], options: dict[str, Any], message: str
) -> None:
    """Nothing is changed there, and nothing is converted."""
    (tmp_path / "manifest.json").write_text('{"kind": "embeddings"}')
    api = Api(*options.pop("names", []), manifest=tmp_path / "manifest.json", **options)
    given = {"to": "hf", "name": "me/a"} | changes
    with pytest.raises(ValueError, match=message):
        open_repository(**given, api=api)
    source = exported(tmp_path / "own")
    if "to" not in changes:
        with pytest.raises(ValueError, match=message):
            convert.run("hf", source, tmp_path / "out", push=given["name"], api=api)
        assert not (tmp_path / "out").exists()
    assert {*api.asked} <= {"model_info"}


def test_what_is_there_already_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("INFO", logger="mclclip"):
        open_repository("hf", "me/a", public=True, api=Api(private=True))
    assert "me/a is private and stays so" in caplog.text

    class Down(Api):
        def model_info(self, name: str) -> Any:
            raise OSError("no route\nto host")

        def upload_folder(self, **options: Any) -> Any:
            raise OSError("403 Forbidden")

    with pytest.raises(RuntimeError, match="me/a cannot be looked at .OSError: no route to host"):
        open_repository("hf", "me/a", api=Down())
    source, out, down = exported(tmp_path / "own"), tmp_path / "out", Down()
    monkeypatch.setattr(down, "model_info", lambda name: None)
    with pytest.raises(RuntimeError, match="out is finished, and me/a has not got it .*403"):
        convert.run("open_clip", source, out, push="me/a", api=down)
    assert down.asked == ["create me/a {'private': True, 'exist_ok': True}"]


def test_offline_or_without_a_token_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = exported(tmp_path / "own"), tmp_path / "out"
    words = ["export", "--to", "hf", "--model", str(source), "--out", str(out), "--push", "me/a"]
    with pytest.raises(ValueError, match="--push needs the hub, and HF_HUB_OFFLINE is set: unset"):
        cli.run_verb(cli.parse_words(words))  # tests are offline
    offered = SimpleNamespace(is_offline_mode=lambda: False, get_token=lambda: None)
    monkeypatch.setattr(hub, "huggingface_hub", offered)
    with pytest.raises(ValueError, match="--push needs a token that may write: set HF_TOKEN, or"):
        convert.run("hf", source, out, push="me/a")
    offered.get_token, offered.HfApi = lambda: "hf_of_a_test", HfApi
    assert isinstance(hub._client(), HfApi)
    with pytest.raises(ValueError, match="--public is of --push ORG/NAME"):
        convert.run("hf", source, out, public=True)
    assert not out.exists() and "HF_TOKEN" not in os.environ
