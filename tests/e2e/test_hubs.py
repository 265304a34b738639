"""Data of the Hugging Face hub and of Azure, against local stand-ins, by the commands of the pages.

Azurite, Azure's own stand-in, is looked for on the path and in the folder of MCLCLIP_AZURITE.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mclclip import config as configuration
from mclclip.verbs.pack import pack
from tests import photos, tiny
from tests.forks import python
from tests.hub_server import COMMIT, hub
from tests.shard_server import ShardServer
from tests.tars import read_tar

PAGES = Path(__file__).resolve().parents[2] / "docs" / "pages" / "how-to"


def jpeg(number: int) -> bytes:
    """A picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (number * 9 % 255, number * 31 % 255, 100)).save(file, "JPEG")
    return file.getvalue()


def write_parquet(path: Path, count: int, **columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": jpeg(number), "path": f"{number}.jpg"} for number in range(count)]
    pq.write_table(pa.table({"image": images} | columns), path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    """A hub with a data set of two splits, one of pictures as files, and one that is hostile."""
    folder = tmp_path / "hub"
    for split, count in (("train", 130), ("test", 3)):
        captions = {f"caption_{n}": [f"{split} {k} {n}" for k in range(count)] for n in range(2)}
        path = folder / f"jxie/flickr8k/data/{split}-00000-of-00001.parquet"
        write_parquet(path, count, **captions)
    files = folder / "me" / "files"
    files.mkdir(parents=True)
    rows = [{"file_name": f"{number}.jpg", "text": f"file {number}"} for number in range(3)]
    (files / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number in range(3):
        (files / f"{number}.jpg").write_bytes(jpeg(number))
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(jpeg(7))
    images = [{"bytes": jpeg(0), "path": "0.jpg"}, {"bytes": None, "path": str(secret)}]
    (folder / "me" / "hostile").mkdir()
    table = pa.table({"image": images, "text": ["a", "b"]})
    pq.write_table(table, folder / "me" / "hostile" / "train.parquet")
    with hub(folder) as started:
        yield started


def environment(folder: Path, server: ShardServer) -> dict[str, str]:
    return tiny.environment() | {
        "HF_ENDPOINT": server.url("").rstrip("/"),
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(folder / "cache"),
        "NO_PROXY": "127.0.0.1,localhost",
    }


PACK_ALL = """
import sys
from pathlib import Path
from mclclip.verbs.pack import pack
for number, name in enumerate(sys.argv[1:]):
    try:
        made = pack(Path(f"hf://datasets/{name}"), Path(f"out/{number}"))
    except ValueError as error:
        print(error)
    else:
        print(made.counts, made.inputs)
"""


def test_data_sets_of_the_hub_are_packed_by_name(server: ShardServer, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    names = ["jxie/flickr8k/test", "me/files", "me/hostile", "jxie/flickr8k", "jxie/flickr8k/no"]
    names += ["me/files@main/default/train/", "no/such"]
    ended = python(PACK_ALL, *names, cwd=tmp_path, env=environment(tmp_path, server))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("{'samples': 3, 'captions': 6, 'shards': 1")
    assert lines[0].endswith(f"{{'hf://datasets/jxie/flickr8k/default/test': '{COMMIT}'}}")
    members = read_tar(tmp_path / "out" / "0" / "00000.tar")
    assert members["000000001.jpg"] == jpeg(1)
    assert json.loads(members["000000001.json"])["captions"] == ["test 1 0", "test 1 1"]
    members = read_tar(tmp_path / "out" / "1" / "00000.tar")
    assert members["000000002.jpg"] == jpeg(2) and members["000000002.txt"] == b"file 2"
    assert members == read_tar(tmp_path / "out" / "5" / "00000.tar")
    assert "'samples': 1," in lines[2] and "outside_folder" in lines[2]
    assert "the splits train, test, choose one: mclclip pack" in lines[3]
    assert "hf://datasets/jxie/flickr8k/train" in lines[3]
    assert "no split 'no'" in lines[4] and "hf://datasets/no/such" in lines[6]
    assert len(lines) == len(names)


@pytest.mark.parametrize("url", ["hf://datasets/ORG", "hf://datasets/a/b/*.tar"])
def test_a_name_of_no_data_set_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(url)):
        pack(Path(url), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_extra_is_named_where_datasets_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'mclclip\[hub\]'"):
        pack(Path("hf://datasets/ORG/NAME"), tmp_path / "out")


# --- the pages ---------------------------------------------------------------------------------


def write_recipe(folder: Path) -> None:
    """A file that stands for the recipe ``cc12m_vitb32``, with a small model and few steps."""
    tree = tiny.tree(folder / "run", folder / "data")
    tree |= {"num_stages": 1, "base": None, "eval": {"suite": {}}}
    tree["model"] |= {"pretrained": None}
    tree["data"]["sources"] = {"cc12m": {"shards": "data/cc12m/*.tar", "captions": "txt"}}
    tree["train"] |= {"steps": 2}
    text = configuration.dump(configuration.from_tree(tree, []))
    (folder / "cc12m_vitb32").write_text(text)


def run_blocks(page: str, folder: Path, variables: dict[str, str], until: str) -> None:
    """Runs the examples of a page up to a heading, as they stand there."""
    text = (PAGES / page).read_text().partition(until)[0]
    programs = folder / "bin"
    programs.mkdir()
    (programs / "mclclip").write_text(f'#!/bin/sh\nexec {sys.executable} -m mclclip "$@"\n')
    (programs / "mclclip").chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for language, block in re.findall(r"```(bash|python)\n(.*?)```", text, re.DOTALL):
        command = ["bash", "-euc", block] if language == "bash" else [sys.executable, "-c", block]
        ended = subprocess.run(
            command, cwd=folder, env=variables | {"PATH": path}, capture_output=True, text=True,
            timeout=900,
        )  # fmt: skip
        assert ended.returncode == 0, f"{block}\n{ended.stderr}"


@pytest.mark.slow
def test_the_page_of_the_hub(server: ShardServer, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    tiny.make_data(tmp_path / "made")
    shards = server.folder / "pixparse" / "cc12m-wds"
    shards.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "made" / "shards").glob("*.tar"))):
        shutil.copyfile(path, shards / f"cc12m-train-{number:04d}.tar")
    write_recipe(tmp_path)
    run_blocks(
        "cc12m-from-the-hub.md", tmp_path, environment(tmp_path, server), "## What was tried"
    )
    assert [*(tmp_path / "runs/look/stage_0/clusters").iterdir()]
    assert (tmp_path / "runs/cc12m/stage_1/export").is_dir()
    assert len([*(tmp_path / "data/cc12m").glob("*.tar")]) == len([*shards.iterdir()])
    assert len(read_tar(tmp_path / "data/flickr8k/00000.tar")) == 3 * 130
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes()


@pytest.fixture
def azurite(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Starts Azurite with a container ``photos``; yields the environment of its users."""
    blob = pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed")
    places = os.pathsep.join([os.environ.get("MCLCLIP_AZURITE", ""), os.environ["PATH"]])
    program = shutil.which("azurite-blob", path=places)
    if program is None:
        pytest.skip("no azurite-blob on the path: npm install azurite, MCLCLIP_AZURITE=its folder")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", str(port)]
    started = subprocess.Popen([program, *flags], cwd=tmp_path)
    host = f"http://127.0.0.1:{port}/devstoreaccount1"
    # The account and the key of every Azurite, which its documentation has.
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    credential = {"account_name": "devstoreaccount1", "account_key": key}
    try:
        client = blob.BlobServiceClient(host, credential=credential, retry_total=0)
        for _ in range(120):
            try:
                client.create_container("photos")
                break
            except Exception:  # it has not started yet
                time.sleep(0.5)
        yield tiny.environment() | {
            "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
            "AZURE_STORAGE_ACCOUNT_KEY": key,
            "AZURE_STORAGE_ENDPOINT": host,
            "NO_PROXY": "127.0.0.1",
        }
    finally:
        started.kill()
        started.wait()


def test_the_page_of_azure(azurite: dict[str, str], tmp_path: Path) -> None:
    table = photos.write(tmp_path)
    table.write_text(table.read_text().replace("photos/", ""))  # names from the folder on
    write_recipe(tmp_path)
    run_blocks("from-azure.md", tmp_path, azurite, "## Try it without")
    run = tmp_path / "runs" / "azure"
    assert (run / "stage_1" / "export").is_dir()
    (shard,) = json.loads((run / "index" / "shards.json").read_text())
    assert shard["path"] == "az://photos/cc12m/00000.tar" and shard["tag"]
    from azure.storage.blob import ContainerClient

    account, key = (azurite[f"AZURE_STORAGE_ACCOUNT_{name}"] for name in ("NAME", "KEY"))
    credential = {"account_name": account, "account_key": key}
    container = ContainerClient(azurite["AZURE_STORAGE_ENDPOINT"], "photos", credential=credential)
    assert [*container.list_blob_names(name_starts_with="checkpoints/")]
