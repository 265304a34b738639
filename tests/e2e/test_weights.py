"""Trainings whose samples are drawn by weights, through the command line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np

from mclclip import config as configuration
from tests import damage, tiny
from tests.e2e.conftest import KillAfter, RecordBatches, Shell
from tests.matrix import in_soak

STEPS = 8


@in_soak
def test_killed_or_on_two_ranks_it_draws_by_the_same_weights(
    shell: Shell, prepared_run: Path, tmp_path: Path
) -> None:
    weights = np.ones(damage.NUM_SAMPLES, np.float32)
    weights[:32], weights[32:40] = 0, 5
    np.save(tmp_path / "w.npy", weights)

    def prepared(name: str) -> list[str]:
        run_dir = shutil.copytree(prepared_run, tmp_path / name)
        more = ("train.global_batch=8", f"train.plan.weights={tmp_path}/w.npy")
        options = damage.options(
            run_dir, prepared_run.parent / "data", *more, f"train.steps={STEPS}"
        )
        path = tmp_path / f"{name}.yaml"
        path.write_text(configuration.dump(options))
        return ["train", "--stage", "1", "--config", str(path)]

    batches = RecordBatches(tmp_path / "one_batches"), RecordBatches(tmp_path / "two_batches")
    one, two, killed = prepared("one"), prepared("two"), prepared("killed")
    shown = shell.ok("config", "--plan", *one[3:]).stdout
    finished = shell.ok(*one, "--verbose", inside=batches[0])
    # 56 samples once and 8 five times are 96 draws: 12 batches, of which no epoch leaves one out.
    assert "64 samples, drawn 96 times (1.50 each on average)" in finished.stderr
    assert "drawn by weight, of all draws: patterns 100.0 %" in finished.stderr
    assert f"{STEPS} steps from 0, 12 per epoch" in finished.stderr
    assert re.search(r"^stage 1 +3 +8 +12 ", shown, re.MULTILINE), shown
    drawn = batches[0].sample_ids()
    assert drawn.min() >= 32 and drawn.shape == (STEPS, 8)
    assert np.isin(drawn, np.arange(32, 40)).sum() > 8 * STEPS / 5
    shell.ok(*two, ranks=2, inside=batches[1])
    np.testing.assert_array_equal(batches[1].sample_ids(ranks=2), drawn)
    assert shell(*killed, inside=KillAfter("update", 5)).code == -9
    shell.ok(*killed)
    for command in (one, killed):
        shell.ok("export", *command[1:])
    ended, resumed = (
        tiny.digests(tmp_path / name / "stage_1/export", "*") for name in ("one", "killed")
    )
    weights_of = "open_clip_model.safetensors"
    assert ended[weights_of] == resumed[weights_of]
    # Weights that have changed are other data: not gone on with, in one line.
    np.save(tmp_path / "w.npy", np.ones(damage.NUM_SAMPLES, np.float32))
    line = shell.refused(*one)
    assert "(weights)" in line and "--force" in line
