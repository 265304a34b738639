"""Copies of samples in the order of their groups, through the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mclclip import config as configuration
from tests import damage, tiny
from tests.e2e.conftest import KillAtFile, RecordBatches, Shell
from tests.matrix import kept
from tests.shard_server import serving

PER_SHARD = 8
NUM_SHARDS = damage.NUM_SAMPLES // PER_SHARD
STEPS = 6


def prepared(prepared_run: Path, root: Path, *more: str) -> list[str]:
    """``--config FILE --stage 1`` of a copy of a run that is clustered."""
    shutil.copytree(prepared_run, root)
    options = damage.options(
        root, prepared_run.parent / "data", f"relocate.samples_per_shard={PER_SHARD}",
        "relocate.enabled=true", "train.plan.block=4", "train.global_batch=8",
        f"train.steps={STEPS}", *more,
    )  # fmt: skip
    path = root.with_suffix(".yaml")
    path.write_text(configuration.dump(options))
    return ["--config", str(path), "--stage", "1"]


def written(root: Path) -> dict[str, str]:
    return tiny.digests(root / "stage_1/relocated", "*")


@pytest.mark.parametrize("renamed", kept([True, False], 0))
@pytest.mark.parametrize("count", kept([4, 1, 9, 2 * NUM_SHARDS + 5, 2 * NUM_SHARDS + 7], 0))
def test_killed_anywhere_it_goes_on_and_ends_with_the_same_bytes(
    shell: Shell, prepared_run: Path, tmp_path: Path, count: int, renamed: bool
) -> None:
    whole = prepared(prepared_run, tmp_path / "whole")
    killed = prepared(prepared_run, tmp_path / "killed")
    shell.ok("relocate", *whole)
    assert shell("relocate", *killed, inside=KillAtFile(count, renamed)).code == -9
    line = shell.refused("train", *killed)
    assert "no finished relocated" in line and "mclclip relocate" in line
    shell.ok("relocate", *killed)
    expected, found = written(tmp_path / "whole"), written(tmp_path / "killed")
    assert sum(name.endswith(".tar") for name in expected) == NUM_SHARDS
    del expected["manifest.json"], found["manifest.json"]  # it holds the time
    assert found == expected


@pytest.mark.slow
def test_a_training_reads_either_form_and_ends_with_the_same_bits(
    shell: Shell, prepared_run: Path, tmp_path: Path
) -> None:
    index_form = prepared(prepared_run, tmp_path / "index", "relocate.enabled=false")
    copies = prepared(prepared_run, tmp_path / "copies", "data.index_workers=2")
    two = prepared(prepared_run, tmp_path / "two")
    uploaded = prepared(prepared_run, tmp_path / "uploaded")
    batches = {name: RecordBatches(tmp_path / f"{name}_batches") for name in ("i", "c", "t")}
    shell.ok("train", *index_form, inside=batches["i"])
    shell.ok("relocate", *copies)
    shell.ok("relocate", *two, ranks=2)
    one_rank, two_ranks = written(tmp_path / "copies"), written(tmp_path / "two")
    del one_rank["manifest.json"], two_ranks["manifest.json"]
    assert one_rank == two_ranks
    trained = shell.ok("train", *copies, inside=batches["c"])
    assert "samples are read from copies at" in trained.stderr
    # Copies behind a url: what the server was asked for shows that they are what is read.
    shell.ok("relocate", *uploaded)
    shutil.copytree(tmp_path / "uploaded/stage_1/relocated", tmp_path / "bucket/stage_1")
    with serving(tmp_path / "bucket") as server:
        shell.ok("train", *uploaded, f"relocate.url={server.url('')}")
        assert sum(server.seen.values()) >= STEPS
    shell.ok("train", *two, ranks=2, inside=batches["t"])
    expected = batches["i"].sample_ids()
    assert expected.shape == (STEPS, 8)
    np.testing.assert_array_equal(batches["c"].sample_ids(), expected)
    np.testing.assert_array_equal(batches["t"].sample_ids(ranks=2), expected)
    for command in (index_form, copies, uploaded):
        shell.ok("export", *command)
    ended = [
        tiny.digests(tmp_path / name / "stage_1/export", "*.safetensors")
        for name in ("index", "copies", "uploaded")
    ]
    assert ended[0] == ended[1] == ended[2] and ended[0]
