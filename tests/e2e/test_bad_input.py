"""What a user may get wrong: one clear line, exit code 2, and nothing half-written.

After every refusal the disk holds the same files as before, so the corrected command goes on. Rules
between options, and errors that a function raises alone, have unit tests (``test_rules.py``).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.conftest import Finished, Shell
from tests.matrix import in_soak

Prepare = Callable[[Path], None]


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

FRESH: dict[str, tuple[str, tuple[str, ...]]] = {
    "missing_shard": (
        "run data.sources.patterns.shards=/nowhere/{00..03}.tar",
        ("data.sources.patterns.shards", "4 of the 4 paths", "/nowhere/00.tar"),
    ),
    "no_num_clusters": ("run cluster.num_clusters=[]", ("cluster.num_clusters",)),
    "base_null": ("train --stage 0 base=null", ("base is null", "nothing to train")),
}


@pytest.mark.parametrize("case", FRESH)
def test_refused_before_anything_is_written(
    shell: Shell, config: Path, tmp_path: Path, case: str
) -> None:
    command, words = FRESH[case]
    given = command.split()
    where = [] if "--config" in given else ["--config", config]
    finished = shell(*given, *where, f"run_dir={tmp_path / 'run'}")
    assert_refused(finished, *words)
    assert set(files(tmp_path / "run")) <= {"config.yaml"}


def test_run_dir_that_cannot_be(shell: Shell, config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finished = shell("run", "--config", config, f"run_dir={tmp_path}/file/run")
    assert_refused(finished, f"{tmp_path}/file/run", "cannot be written")


def test_model_that_nobody_knows(shell: Shell, config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = ["run", "--config", config, f"run_dir={run_dir}", "model.name=ViT-XXL"]
    assert_refused(shell(*command), "ViT-XXL")
    assert not files(run_dir)


def test_a_batch_of_one_has_no_variance(shell: Shell, config: Path, tmp_path: Path) -> None:
    """Of one image no batch norm can be trained, as in a ResNet."""
    tower = "model.name.vision_cfg={image_size: 32, layers: [1, 1, 1, 1], width: 8}"
    command = ["train", "--stage", "0", "--config", config, f"run_dir={tmp_path}/run", tower]
    shell.ok("index", *command[3:])
    finished = shell(*command, "base.global_batch=1")
    assert_refused(finished, "base.global_batch is 1, and batch norms are trained", "raise it")
    assert not [*tmp_path.glob("run/stage_0/train/checkpoints/*")]


# --- on a run that has come to stage 1 ----------------------------------------------------------


def no_clusters(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "stage_0" / "clusters")
    shutil.rmtree(run_dir / "stage_1")


def truncated(name: str) -> Prepare:
    def prepare(run_dir: Path) -> None:
        (path,) = run_dir.glob(name)
        path.write_bytes(path.read_bytes()[:-200])

    return prepare


def nothing(run_dir: Path) -> None:
    pass


BEGUN: dict[str, tuple[Prepare, str, tuple[str, ...]]] = {
    "clusters_for_data": (
        no_clusters,
        "cluster --stage 0 cluster.num_clusters=500",
        ("500", "192"),
    ),
    "locked_text_not_embedded": (
        nothing,
        "train --stage 1 train.lock.text=false",
        ("text_embeddings", "mclclip embed"),
    ),
    "truncated_export": (
        truncated("stage_0/export/*.safetensors"),
        "train --stage 1",
        ("stage_0/export", "safetensors"),
    ),
    "other_device": (nothing, "train --stage 1 device=cuda", ("device=cuda",)),
}


@pytest.mark.parametrize("case", BEGUN)
def test_refused_in_the_middle(
    shell: Shell, begun: list[object], tmp_path: Path, case: str
) -> None:
    import torch

    if case == "other_device" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    prepare, command, words = BEGUN[case]
    prepare(tmp_path / "run")
    before = files(tmp_path)
    assert_refused(shell(*command.split(), *begun), *words)
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
        "embed --stage 0": ("changed (index, pictures)", "--force"),
    }.items():
        assert_refused(shell(*command.split(), *begun, added), *words)
        assert files(run_dir) == before


def test_shard_that_vanished(shell: Shell, begun: list[object], data: Path, tmp_path: Path) -> None:
    shard = data / "shards" / "00001.tar"
    away = shard.rename(tmp_path / "away.tar")
    try:
        for command in ("index", "train --stage 1 data.num_workers=1", "train --stage 1"):
            assert_refused(shell(*command.split(), *begun), str(shard))
    finally:
        away.rename(shard)
    assert not (tmp_path / "run/stage_1/train/manifest.json").exists()


@in_soak
def test_batch_that_two_ranks_cannot_share(config: Path, tmp_path: Path) -> None:
    """Under torchrun: one line from mclclip on two ranks, beside torchrun's own."""
    process = tiny.mclclip(
        "run", "--config", str(config), f"run_dir={tmp_path / 'run'}", "train.global_batch=25",
        ranks=2,
    )  # fmt: skip
    assert process.returncode == 1  # whatever a worker's code is, torchrun's is 1
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("mclclip: ")]
    assert "global_batch=25 cannot be cut over 2 ranks" in line
    assert "exitcode  : 2" in process.stderr
    assert files(tmp_path) == {}


@pytest.mark.parametrize("option", ["base.global_batch=5000", "cluster.num_clusters=5000"])
def test_more_than_the_data_hold_is_refused_before_stage_zero(
    shell: Shell, config: Path, tmp_path: Path, option: str
) -> None:
    refused = shell.refused("run", "--config", config, f"run_dir={tmp_path / 'run'}", option)
    assert "is more than the index's 192 samples" in refused
    assert not (tmp_path / "run" / "stage_0").exists()
