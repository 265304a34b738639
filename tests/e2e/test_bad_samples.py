"""Pictures that cannot be decoded, zero-byte members and keys that come twice: the run goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mclclip.data.datasets.patterns import draw_samples
from mclclip.data.groups import GroupedIndex
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_writer import PackedSample, write_shards
from mclclip.run import artifacts
from mclclip.util import files
from tests import tiny
from tests.e2e.conftest import Finished, KillAfter, RecordBatches, Shell, training_in
from tests.matrix import in_soak

STEPS = 6
NUM_SAMPLES = 120
EMPTY = 7  # a member without bytes: not in the index at all
BROKEN = {11: "unidentified", 50: "truncated", 51: "unidentified", 110: "truncated"}
BAD_KEYS = {f"patterns/{number:09d}" for number in BROKEN}


def damaged(sample: PackedSample) -> PackedSample:
    number = int(sample.key)
    image = sample.image
    if number == EMPTY:
        image = b""
    if reason := BROKEN.get(number):
        image = b"this is no picture" if reason == "unidentified" else image[: len(image) // 2]
    return dataclasses.replace(sample, image=image)


def samples() -> Iterator[PackedSample]:
    return map(damaged, draw_samples(NUM_SAMPLES, 0))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four damaged pictures in 119, and a last shard that repeats three keys of the first."""
    folder = tmp_path_factory.mktemp("damaged")
    write_shards(samples(), folder / "shards", 40)
    (repeated,) = write_shards((s for s in samples() if int(s.key) in (0, 1, 2)), folder, 10)
    repeated.rename(folder / "shards" / "repeated.tar")
    return tiny.write_config(
        folder / "config.yaml", folder / "unused", folder, "data.max_bad_fraction=0.04",
        "num_stages=1", "eval.suite={}", "export.concat=[]", "export.soup=false",
    )  # fmt: skip


@dataclass(frozen=True)
class Run:
    run_dir: Path
    batches: RecordBatches
    finished: Finished


@pytest.fixture(scope="module")
def done(shell: Shell, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("done")
    batches = RecordBatches(folder / "batches")
    command = ["run", "--config", config, f"run_dir={folder}/run"]
    return Run(folder / "run", batches, shell.ok(*command, inside=batches))


def test_bad_samples_are_listed_and_what_is_left_out_is_counted_by_reason(done: Run) -> None:
    listed = files.read_json(done.run_dir / "index" / "bad_samples.json")
    assert {key: entry["reason"].split(":")[0] for key, entry in listed.items()} == {
        f"patterns/{number:09d}": reason for number, reason in BROKEN.items()
    }
    warnings = [line for line in done.finished.stderr.splitlines() if "cannot be used" in line]
    assert all(any(key in line for line in warnings) for key in BAD_KEYS), warnings
    counts = artifacts.read_manifest(done.run_dir / "index", "index").counts
    assert counts["samples"] == len(SampleIndex.open(done.run_dir / "index")) == NUM_SAMPLES - 1
    assert counts["findings"] == {
        "copied_sample": {"count": 3, "examples": [f"patterns/{n:09d}" for n in (0, 1, 2)]},
        "zero_byte_image": {"count": 1, "examples": [f"patterns/{EMPTY:09d}"]},
    }
    assert all(reason in done.finished.stderr for reason in counts["findings"])


def test_no_batch_holds_a_sample_twice_or_a_bad_one(done: Run) -> None:
    bad = SampleIndex.open(done.run_dir / "index").bad_ids()
    batches = done.batches.sample_ids()
    assert len(bad) == len(BROKEN) and batches.shape == (2 * STEPS, 24)
    assert all(len(set(batch)) == 24 for batch in batches.tolist())
    assert not np.isin(batches, bad).any()
    planned = GroupedIndex.open(done.run_dir / "stage_0/train/grouped_index").sample_ids
    assert np.isin(bad, planned).all()  # stage 0 met and replaced them; the next plan is without
    labels = np.load(done.run_dir / "stage_1/pseudo_labels/pseudo_labels.npy")
    np.testing.assert_array_equal(np.flatnonzero(labels < 0), bad)
    grouped = GroupedIndex.open(done.run_dir / "stage_1/train/grouped_index")
    assert not np.isin(bad, grouped.sample_ids).any()


def stage_zero(shell: Shell, config: Path, run_dir: Path) -> list[object]:
    where: list[object] = ["--config", config, f"run_dir={run_dir}"]
    shell.ok("index", *where)
    return ["train", "--stage", "0", *where]


def test_two_ranks_replace_them_alike(
    shell: Shell, config: Path, done: Run, tmp_path: Path
) -> None:
    batches = RecordBatches(tmp_path / "batches")
    command = stage_zero(shell, config, tmp_path / "run")
    shell.ok(*command, ranks=2, inside=batches)
    np.testing.assert_array_equal(batches.sample_ids(2), done.batches.sample_ids()[:STEPS])
    np.testing.assert_array_equal(batches.group_ids(2), done.batches.group_ids()[:STEPS])


@in_soak
def test_a_resumed_run_replaces_them_alike(
    shell: Shell, config: Path, done: Run, tmp_path: Path
) -> None:
    """Though it knows more of them than the run that began."""
    command = [*stage_zero(shell, config, tmp_path), "base.checkpoint.every=1"]
    for kill in (KillAfter("update", 3), KillAfter("save", 2)):
        assert shell(*command, inside=kill).code == -9
    assert (tmp_path / "index" / "bad_samples.json").exists()
    shell.ok(*command)
    again, whole = (training_in(path / "stage_0/train") for path in (tmp_path, done.run_dir))
    assert again["model"] == whole["model"]


@in_soak
def test_too_many_stop_all_ranks_together(shell: Shell, config: Path, tmp_path: Path) -> None:
    command = stage_zero(shell, config, tmp_path)
    line = shell.refused(*command, "data.max_bad_fraction=0.005", ranks=2)
    assert "data.max_bad_fraction=0.005" in line and "of 119 samples cannot be used" in line
    assert not (tmp_path / "stage_0/train/manifest.json").exists()
    shell.ok(*command, ranks=2)  # with the limit raised, it goes on


def test_nothing_left_to_replace_with(shell: Shell, config: Path, tmp_path: Path) -> None:
    """The global batch is the whole data set; the error comes out of a loader process."""
    command = stage_zero(shell, config, tmp_path)
    line = shell.refused(*command, "base.global_batch=119", "data.num_workers=1")
    assert "is unusable" in line and "lower the global batch" in line
