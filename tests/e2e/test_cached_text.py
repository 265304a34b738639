"""A frozen text tower need not run again: its stored embeddings give the same training."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mclclip.data import patterns
from mclclip.data.datasets.sources import jpeg
from mclclip.data.shard_writer import PackedSample, write_shards
from tests import tiny
from tests.e2e.conftest import LABELLED, Shell

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


def test_stored_embeddings_give_the_same_losses(shell: Shell, tmp_path: Path) -> None:
    write_shards(samples(), tmp_path / "shards", 40)
    stored, fly = tmp_path / "stored", tmp_path / "fly"
    config = tiny.write_config(
        tmp_path / "config.yaml", stored, tmp_path,
        "data.sources.patterns.captions=json:captions", "eval.suite={}", "base=null",
        "train.lock.text=false", f"train.steps={STEPS}", "train.log_every=1",
    )  # fmt: skip
    where = ("--config", config)
    shell.through(*where, verbs=[verb for verb in LABELLED if "train" not in verb])
    shards = (stored / "stage_0" / "text_embeddings").glob("*.npy")
    assert sum(len(np.load(path)) for path in shards) == 2 * NUM_SAMPLES
    shutil.copytree(stored, fly)
    shutil.rmtree(fly / "stage_0" / "text_embeddings")  # not looked at

    def losses(run_dir: Path, *overrides: str) -> list[float]:
        """Of every step of stage 1."""
        shell.ok("train", "--stage", "1", *where, f"run_dir={run_dir}", *overrides)
        return [row["loss"] for row in tiny.rows(run_dir / "stage_1/train/metrics.jsonl")]

    expected = losses(fly, "train.cached_text=false")
    assert len(expected) == STEPS
    np.testing.assert_allclose(losses(stored), expected, rtol=1e-5)
