"""What a user may get wrong: one clear line, exit code 2, and nothing half-written.

After every refusal the disk holds the same files as before, so the corrected command goes on. Rules
between options, and errors that a function raises alone, have unit tests (``test_rules.py``).
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.conftest import Finished, Shell


@pytest.fixture
def config(based: tuple[Path, Path]) -> Path:
    return based[0]


@pytest.fixture
def begun(based: tuple[Path, Path], tmp_path: Path) -> list[object]:
    """The options of a copy of the run that has come to stage 1, ``run`` below ``tmp_path``."""
    shutil.copytree(based[1], tmp_path / "run")
    return ["--config", based[0], f"run_dir={tmp_path / 'run'}"]


def files(folder: Path) -> dict[str, str]:
    """Digests of all files, except the recorded state."""
    digests = tiny.digests(folder, "**/*")
    return {name: digest for name, digest in digests.items() if not name.endswith("run_state.json")}


def assert_refused(finished: Finished, *words: str) -> None:
    line = finished.refusal()
    assert line == finished.stderr.splitlines()[-1]
    assert len(re.sub(r"/[^ :']*", "", line)) < 400, line  # a command offered repeats long paths
    for word in words:
        assert word in line, line


# --- before anything is there -------------------------------------------------------------------

FRESH = {
    "run data.sources.patterns.shards=/nowhere/{00..03}.tar": (
        "data.sources.patterns.shards", "4 of the 4 paths", "/nowhere/00.tar",
    ),
    "train --stage 0 base=null": ("base is null", "nothing to train"),
    "run model.name=ViT-XXL": ("ViT-XXL",),
    "run train.plan.weights=/nowhere/w.npy": ("train.plan.weights=/nowhere/w.npy",),
    "run run_dir=/dev/null/run": ("/dev/null/run", "cannot be written"),
}  # fmt: skip


@pytest.mark.parametrize("command", FRESH)
def test_refused_before_anything_is_written(
    shell: Shell, config: Path, tmp_path: Path, command: str
) -> None:
    verb, *options = command.split()
    finished = shell(verb, "--config", config, f"run_dir={tmp_path / 'run'}", *options)
    assert_refused(finished, *FRESH[command])
    assert set(files(tmp_path / "run")) <= {"config.yaml"}


# --- on a run that has come to stage 1 ----------------------------------------------------------


def truncate(run_dir: Path) -> None:
    (path,) = run_dir.glob("stage_0/export/*.safetensors")
    path.write_bytes(path.read_bytes()[:-200])


BEGUN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "train --stage 1 train.lock.text=false": (str, ("text_embeddings", "mclclip embed")),
    "train --stage 1": (truncate, ("stage_0/export", "safetensors")),
    # Of one image no batch norm can be trained, as in a ResNet.
    "train --stage 0 base.global_batch=1 "
    "'model.name.vision_cfg={image_size: 32, layers: [1, 1, 1, 1], width: 8}'": (
        lambda run_dir: shutil.rmtree(run_dir / "stage_0/train"),
        ("base.global_batch is 1, and batch norms are trained", "raise it"),
    ),
}


@pytest.mark.parametrize("command", BEGUN)
def test_refused_in_the_middle(
    shell: Shell, begun: list[object], tmp_path: Path, command: str
) -> None:
    prepare, words = BEGUN[command]
    prepare(tmp_path / "run")
    before = files(tmp_path)
    assert_refused(shell(*shlex.split(command), *begun), *words)
    assert files(tmp_path) == before


def test_labels_of_another_index(shell: Shell, begun: list[object], tmp_path: Path) -> None:
    """Shards were added after clustering, which is refused at first: every row of what was made
    before is out of date."""
    run_dir = tmp_path / "run"
    more = tiny.make_data(tmp_path / "more", num_samples=48, seed=1)
    added = f"data.sources.more.shards={more}/shards/*.tar"
    before = files(run_dir)
    assert_refused(shell("index", *begun, added), "1 shard", str(more), "--force")
    assert files(run_dir) == before
    shell.ok("index", *begun, added, "--force")
    before = files(run_dir)
    for command, words in {
        "train --stage 1": ("pseudo_labels has 192 rows", "240", "mclclip cluster", "--stage 0"),
        "cluster --stage 0": ("embeddings", "192 rows", "240", "mclclip embed", "--stage 0"),
        "embed --stage 0": ("other data: index, pictures", "--force"),
    }.items():
        assert_refused(shell(*command.split(), *begun, added), *words)
        assert files(run_dir) == before


def test_shard_that_vanished(shell: Shell, begun: list[object], data: Path, tmp_path: Path) -> None:
    shard = data / "shards" / "00001.tar"
    away = shard.rename(tmp_path / "away.tar")
    try:
        for command in ("index", "train --stage 1 data.num_workers=1"):
            assert_refused(shell(*command.split(), *begun), str(shard))
    finally:
        away.rename(shard)
    assert not (tmp_path / "run/stage_1/train/manifest.json").exists()


def test_what_a_line_advises_mends_the_run(
    shell: Shell, begun: list[object], tmp_path: Path
) -> None:
    damaged = tmp_path / "run/stage_0/embeddings/00001.npy"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:200])
    shutil.rmtree(tmp_path / "run/stage_0/clusters")
    line = shell.refused("cluster", "--stage", "0", *begun)
    (offered,) = re.findall(r"'mclclip (embed .*--force)'", line)
    assert str(damaged) in line
    shell.ok(*shlex.split(offered))
    shell.ok("cluster", "--stage", "0", *begun)
    assert damaged.read_bytes() == content
