"""A frozen text tower need not run again: its stored embeddings give the same training."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mclclip.data import patterns
from mclclip.data.datasets.sources import jpeg
from mclclip.data.shard_writer import PackedSample, write_shards
from tests import tiny
from tests.e2e.conftest import Shell
from tests.matrix import in_soak

STEPS = 8
NUM_SAMPLES = 48  # two steps an epoch: four epochs draw both captions of most samples


def samples() -> Iterator[PackedSample]:
    """Pictures with two captions each, which an epoch chooses from."""
    for number, pattern in enumerate(patterns.patterns(NUM_SAMPLES, 0)):
        other = ", ".join(f"{name}: {value}" for name, value in pattern.values.items())
        yield PackedSample(
            key=f"{number:04d}",
            image=jpeg(pattern.image),
            extension="jpg",
            captions=[pattern.caption, other],
            metadata={},
        )


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A frozen text tower, float32 embeddings (as in tests/tiny.py), a row for every step."""
    data = tmp_path_factory.mktemp("captions")
    write_shards(samples(), data / "shards", 40)
    config = tiny.write_config(
        data / "config.yaml", data / "unused", data,
        "data.sources.patterns.captions=json:captions", "eval.suite={}",
        "train.lock.text=false", f"train.steps={STEPS}", "train.log_every=1",
    )  # fmt: skip
    return ["--config", str(config)]


@pytest.fixture(scope="module")
def labelled(shell: Shell, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run up to the labels and the text embeddings that stage 1 needs; tests copy it."""
    run_dir = tmp_path_factory.mktemp("labelled") / "run"
    shell.through(*options, f"run_dir={run_dir}")
    shards = sorted((run_dir / "stage_0" / "text_embeddings").glob("*.npy"))
    assert sum(len(np.load(path)) for path in shards) == 2 * NUM_SAMPLES
    return run_dir


def losses(shell: Shell, options: list[str], run_dir: Path, *overrides: str) -> np.ndarray:
    """float64 [STEPS]: the loss of every step of stage 1."""
    shell.ok("train", "--stage", "1", *options, f"run_dir={run_dir}", *overrides)
    rows = tiny.rows(run_dir / "stage_1/train/metrics.jsonl")
    return np.array([row["loss"] for row in rows])


@pytest.fixture(scope="module")
def on_the_fly(
    shell: Shell, options: list[str], labelled: Path, tmp_path_factory: pytest.TempPathFactory
) -> np.ndarray:
    run_dir = tmp_path_factory.mktemp("fly") / "run"
    shutil.copytree(labelled, run_dir)
    shutil.rmtree(run_dir / "stage_0" / "text_embeddings")  # not looked at
    found = losses(shell, options, run_dir, "train.cached_text=false")
    assert len(found) == STEPS
    return found


def test_float32_embeddings_give_the_same_losses(
    shell: Shell, options: list[str], labelled: Path, on_the_fly: np.ndarray, tmp_path: Path
) -> None:
    shutil.copytree(labelled, tmp_path / "run")
    found = losses(shell, options, tmp_path / "run")
    np.testing.assert_allclose(found, on_the_fly, rtol=1e-5)


@in_soak
def test_float16_embeddings_deviate_little(
    shell: Shell, options: list[str], labelled: Path, on_the_fly: np.ndarray, tmp_path: Path
) -> None:
    """The same labels, the texts rounded to float16."""
    run_dir = tmp_path / "run"
    shutil.copytree(labelled, run_dir)
    for name in ("embeddings", "text_embeddings"):
        shutil.rmtree(run_dir / "stage_0" / name)
    half = "embed.dtype=float16"
    shell.ok("embed", "--stage", "0", *options, f"run_dir={run_dir}", half)
    found = losses(shell, options, run_dir, half)
    deviation = np.abs(found / on_the_fly - 1).max()
    assert 0.0 < deviation < 1e-3
