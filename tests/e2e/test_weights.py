"""Which samples to train on: shown, filtered and trained on, through the command line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np

from mclclip import config as configuration
from tests import damage, tiny
from tests.e2e.conftest import RecordBatches, Shell


def test_what_is_filtered_is_not_trained_on(
    shell: Shell, prepared_run: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(prepared_run, tmp_path / "run")
    options = damage.options(run_dir, prepared_run.parent / "data", "train.global_batch=8")
    path = tmp_path / "run.yaml"
    path.write_text(configuration.dump(options))
    shown = shell.ok("filter", "--config", path)
    assert "CLIP scores of 96 samples (0 without a caption" in shown.stderr
    assert re.search(r"[\d,]+ pairs above 0.95 within clusters", shown.stderr)
    assert not (run_dir / "filters").exists()
    wanted = ("--keep-share", "0.5", "--near-duplicates", "0.999")
    filtered = shell.ok("filter", "--config", path, *wanted)
    override = re.findall(r"train\.plan\.weights=\S+", filtered.stderr)[0]
    weights = np.load(override.partition("=")[2])
    assert weights.shape == (damage.NUM_SAMPLES,) and 8 <= weights.sum() <= 48
    found = tiny.digests(run_dir / "filters/filter", "*")
    shell.ok("filter", "--config", path, *wanted, "--name", "ranks", ranks=2)
    again = tiny.digests(run_dir / "filters/ranks", "*")
    for name in ("weights.npy", "reasons.npy", "scores.npy", "left_out.jsonl"):
        assert found[name] == again[name]
    batches = RecordBatches(tmp_path / "batches")
    shell.ok("train", "--stage", "1", "--config", path, override, inside=batches)
    drawn = np.unique(batches.sample_ids())
    assert len(drawn) and weights[drawn].all()
    # Weights that have changed are other data: not gone on with, in one line.
    np.save(override.partition("=")[2], np.ones_like(weights))
    line = shell.refused("train", "--stage", "1", "--config", path, override)
    assert "weights" in line and "--force" in line
