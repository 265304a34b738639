"""The trunk's output on disk, through the command line: kills, ranks, and the whole method."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mclclip import config as configuration
from tests import damage, tiny
from tests.e2e.conftest import KillAtFile, RecordBatches, Send, Shell, at_call
from tests.matrix import kept

STEPS = 6
LABELS = ("embed --stage 0", "cluster --stage 0")
STAGE = (*LABELS, "train --stage 1", "export --stage 1", "embed --stage 1")
ON = "image_rows={enabled: true, dtype: float32}"


@dataclass(frozen=True)
class KillAtWrite:
    """The process kills itself with -9 in its n-th batch of rows."""

    count: int

    def __call__(self) -> None:
        from mclclip.models.model import Model

        # The first call gives the rows' shape.
        at_call(Model, "encode_trunk", self.count + 1, Send(signal.SIGKILL))


def prepared(prepared_run: Path, root: Path, *more: str) -> list[str]:
    """``--config FILE`` of a copy of a run whose encoder is exported, and nothing embedded."""
    shutil.copytree(prepared_run, root)
    for name in ("embeddings", "clusters"):
        shutil.rmtree(root / "stage_0" / name)
    shutil.rmtree(root / "stage_1")
    options = damage.options(
        root, prepared_run.parent / "data", ON, "cluster.feature=image", "train.global_batch=24",
        f"train.steps={STEPS}", *more,
    )  # fmt: skip
    path = root.with_suffix(".yaml")
    path.write_text(configuration.dump(options))
    return ["--config", str(path)]


def written(root: Path) -> dict[str, str]:
    """Digests of every file of the cache but its manifest, which holds the time, and the note of a
    work that has begun: a kill before its rename, or right after the manifest's, leaves it."""
    found = tiny.digests(root / "stage_0/image_rows", "**/*")
    del found["manifest.json"]
    return {name: d for name, d in found.items() if "in_progress.json" not in name}


@pytest.mark.parametrize(
    "kill",
    kept(
        [
            *(KillAtWrite(count) for count in (1, 3, 4, 6)),
            *(KillAtFile(count, renamed) for count in range(2, 12) for renamed in (False, True)),
        ],
        1,
    ),
    ids=str,
)
def test_killed_anywhere_it_goes_on_and_ends_with_the_same_bytes(
    shell: Shell, prepared_run: Path, tmp_path: Path, kill: KillAtWrite | KillAtFile
) -> None:
    whole = prepared(prepared_run, tmp_path / "whole")
    killed = prepared(prepared_run, tmp_path / "killed")
    shell.ok("embed", "--stage", "0", *whole)
    assert shell("embed", "--stage", "0", *killed, inside=kill).code == -9
    line = shell.refused("train", "--stage", "1", *killed)
    assert "run 'mclclip" in line
    shell.ok("embed", "--stage", "0", *killed)
    expected = written(tmp_path / "whole")
    assert sum(name.endswith(".npy") for name in expected) == 2
    assert written(tmp_path / "killed") == expected
    embedded = [
        tiny.digests(tmp_path / n / "stage_0/embeddings", "*.npy") for n in ("whole", "killed")
    ]
    assert embedded[0] == embedded[1]


def test_two_ranks_write_the_same_cache_and_train_on_the_same_batches(
    shell: Shell, prepared_run: Path, tmp_path: Path
) -> None:
    batches = {name: RecordBatches(tmp_path / f"{name}_batches") for name in ("one", "two")}
    losses = {}
    for name, ranks in (("one", 1), ("two", 2)):
        options = prepared(prepared_run, tmp_path / name)
        shell.through(*options, verbs=LABELS, ranks=ranks)
        shell.ok("train", "--stage", "1", *options, ranks=ranks, inside=batches[name])
        rows = tiny.rows(tmp_path / name / "stage_1/train/metrics.jsonl")
        losses[name] = [row["loss"] for row in rows]
    assert written(tmp_path / "one") == written(tmp_path / "two")
    expected = batches["one"].sample_ids()
    np.testing.assert_array_equal(batches["two"].sample_ids(ranks=2), expected)
    np.testing.assert_allclose(losses["two"], losses["one"], rtol=1e-5)


@pytest.mark.parametrize("engine", kept(["fsdp", "deepspeed"]))
def test_sharded_engines_train_from_it(
    shell: Shell, prepared_run: Path, tmp_path: Path, engine: str
) -> None:
    """Blocks that never run forward have parameters of their own to gather, and to save."""
    found = {}
    for name, ranks in (("ddp", 1), (engine, 2)):
        more = (f"train.engine.name={name}",) if ranks == 2 else ()
        options = prepared(prepared_run, tmp_path / name, *more)
        shell.through(*options, verbs=STAGE, ranks=ranks)
        paths = sorted((tmp_path / name / "stage_1/embeddings").glob("*.npy"))
        found[name] = np.concatenate([np.load(path) for path in paths])
    np.testing.assert_allclose(found[engine], found["ddp"], atol=2e-4)


def test_run_makes_it_and_the_stage_and_its_control_start_from_it(
    shell: Shell, tmp_path: Path
) -> None:
    data = tiny.make_data(tmp_path / "data", num_samples=48)
    more = (
        "base=null", "num_stages=1", "train.steps=2", "export.concat=[]", "export.soup=false",
        "controls=[ungrouped]",
    )  # fmt: skip
    path = tiny.write_config(tmp_path / "c.yaml", tmp_path / "run", data, *more)
    run = ("run", "--config", str(path), "image_rows.enabled=true")
    done = shell.ok(*run)
    assert done.stderr.count("starts from what the frozen part of the image tower made of") == 2
    # A finished run does not need the rows any more.
    rows = [*(tmp_path / "run/stage_0/image_rows").glob("*.npy")]
    assert len(rows) == 1
    for path in rows:
        path.unlink()
    shell.ok(*run)
    line = shell.refused("embed", "--stage", "1", "--force", *run[1:])
    assert "--stage 0 --force'" in line and not any(path.exists() for path in rows)


def test_embeddings_from_rows_are_others_than_those_from_images(
    shell: Shell, prepared_run: Path, tmp_path: Path
) -> None:
    options = prepared(prepared_run, tmp_path / "run", "image_rows.enabled=false")
    shell.ok("embed", "--stage", "0", *options, "image_rows.enabled=true")
    assert (tmp_path / "run/stage_0/image_rows/manifest.json").exists()
    line = shell.refused("embed", "--stage", "0", *options)
    assert "other data: image_rows" in line and "--force" in line
