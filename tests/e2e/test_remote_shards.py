"""A whole run over shards behind urls: the run on a disk, and the end of one whose store dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mclclip import config as configuration
from mclclip.data import remote
from mclclip.data.batches import Batch
from mclclip.data.groups import StageGroups, group_samples
from mclclip.data.loader import Loader
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import index
from tests import tiny
from tests.batches import training_batches
from tests.e2e.conftest import Shell
from tests.shard_server import Handler, ShardServer, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    tiny.make_data(tmp_path / "data")
    with serving(tmp_path / "data" / "shards") as started:
        yield started


def config(path: Path, server: ShardServer, *overrides: str) -> Path:
    urls = [server.url(shard.name) for shard in sorted(server.folder.glob("*.tar"))]
    over = [f"data.sources.patterns.shards={urls}", "data.remote.retries=3", *overrides]
    return tiny.write_config(path / "config.yaml", path / "run", server.folder.parent, *over)


def made(run_dir: Path) -> dict[str, bytes]:
    """Exports, embeddings and labels of a run."""
    found = [*run_dir.rglob("*.safetensors"), *run_dir.rglob("*.npy")]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in found}


def _tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


@pytest.mark.slow
def test_reading_ahead_asks_for_one_batch_more_per_worker(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another guess of the next batch than the right one would ask for every batch twice."""
    samples = index.run(configuration.load(config(tmp_path, server)), SINGLE)
    groups = StageGroups(tmp_path / "g")
    groups.write(group_samples(np.zeros(len(samples), np.int64), ()), np.zeros(0, np.int64))
    batches = training_batches(
        index=samples, grouped=groups.read()[0],
        transform=_tensor, global_batch=16, policy="backoff",
        order="proportional", seed=0, stage=1,
    )  # fmt: skip
    steps = range(2, 2 * batches.steps_per_epoch)

    def requests(num_workers: int) -> int:
        before = server.seen["GET"]
        loader: Loader[Batch] = Loader(
            batches, steps, num_workers=num_workers, timeout_s=300.0,
            describe=lambda *_: "a batch", fresh=True,
        )  # fmt: skip
        assert sum(len(batch.sample_id) for batch in loader) == 16 * len(steps)
        return server.seen["GET"] - before

    with monkeypatch.context() as patched:
        patched.setattr(remote, "GAP_BYTES", -1)  # a request per sample: their number is known
        assert 0 <= requests(0) - 16 * len(steps) <= 16
    per_batch = requests(0) / len(steps)
    assert requests(2) <= per_batch * (len(steps) + 4)


def test_the_secret_of_a_signed_url_is_in_no_message_and_no_state(
    shell: Shell, server: ShardServer, tmp_path: Path
) -> None:
    def html(handler: Handler) -> bool:
        handler.send(200, b"<html>".ljust(20_480), handler.command == "GET")
        return True

    urls = [server.url(f"{name.name}?signature=s3cret") for name in server.folder.glob("*.tar")]
    options = config(tmp_path, server, f"data.sources.patterns.shards={urls}")
    state = tmp_path / "run" / "run_state.json"
    for fault in ({"answer": html}, {"fail": -1}, {}):
        vars(server).update({"answer": None, "fail": 0, "status": 403} | fault)
        ended, recorded = shell("index", "--config", options), state.read_text()
        assert ended.code == (2 if fault else 0)
        assert json.loads(recorded)["state"] == ("failed" if fault else "finished")
        assert ".tar?..." in ended.stderr or not fault
        assert "s3cret" not in ended.stdout + ended.stderr + recorded
    run = tmp_path / "run"
    held = [path for path in run.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert {str(path.relative_to(run)) for path in held} <= {"index/shards.json", "config.yaml"}


@pytest.mark.slow
def test_a_run_over_http_is_the_run_on_a_disk(
    shell: Shell, server: ShardServer, tmp_path: Path
) -> None:
    for name in ("local", "http"):
        (tmp_path / name).mkdir()
    local = tiny.write_config(
        tmp_path / "local" / "config.yaml", tmp_path / "local" / "run", tmp_path / "data"
    )
    http = config(tmp_path / "http", server, "data.num_workers=1")
    shell.ok("run", "--config", local)
    server.fail, server.cut = 2, 1
    shell.ok("run", "--config", http)
    wanted = made(tmp_path / "local" / "run")
    assert made(tmp_path / "http" / "run") == wanted and len(wanted) > 10
    assert not server.takes("fail") and not server.takes("cut")


@pytest.mark.slow
def test_a_store_that_fails_for_good_is_one_line_on_all_ranks(
    shell: Shell, server: ShardServer, tmp_path: Path
) -> None:
    options = config(tmp_path, server, "data.num_workers=1", "base.steps=400")
    shell.ok("index", "--config", options)
    server.fail = -1
    line = shell.refused("train", "--stage", "0", "--config", options, ranks=2)
    assert "http://127.0.0.1" in line and "could not be read (HTTP status 503" in line
