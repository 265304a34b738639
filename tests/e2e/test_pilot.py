"""``mclclip run --pilot`` as a user types it: it ends or goes on, resumes, and leaves the full run
as it would have been."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.data.groups import GroupedIndex
from mclclip.data.labels import outside_of_share
from tests import tiny
from tests.e2e.conftest import KillAfter, RecordBatches, Shell, state_of
from tests.matrix import in_soak

SAMPLES, SHARE = 192, 0.5


@pytest.fixture(scope="module")
def stopped(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run of one stage that has ended after its pilot; its run directory is
    ``run`` beside it. Tests leave both as they are."""
    folder = tmp_path_factory.mktemp("stopped")
    options = ("num_stages=1", "export.soup=false", "pilot.stop_without_gain=true")
    config = tiny.write_config(folder / "config.yaml", folder / "run", data, *options)
    batches = RecordBatches(folder / "batches")
    finished = shell.ok("run", "--config", config, "--pilot", SHARE, inside=batches)
    assert "the run ends after its pilot, which shows no gain" in finished.stdout
    return config


def verdict_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "pilot" / "verdict.json").read_text())
    return found


def grouped(directory: Path) -> set[int]:
    return set(GroupedIndex.open(directory / "train" / "grouped_index").sample_ids.tolist())


def test_a_pilot_without_gain_ends_the_run_without_an_error(stopped: Path) -> None:
    run_dir = stopped.parent / "run"
    state = state_of(run_dir)
    assert (state["state"], state["exit_code"], state["requeue"]) == ("finished", 0, False)
    assert "pilot.stop_without_gain" in state["reason"]
    assert not (run_dir / "stage_1" / "train").exists() and not (run_dir / "controls").exists()
    verdict = verdict_of(run_dir)
    assert verdict["gain"] is False and verdict["encoder"] == "concat_stage_norm"
    assert verdict["price"]["steps"] == {"stage_1": [6, 6]}
    assert verdict["price"]["samples_seen"] == [144, 144]
    speed = verdict["price"]["samples_per_s_per_rank"]
    assert verdict["price"]["gpu_hours"] == pytest.approx([144 / speed / 3600] * 2)


def test_a_pilot_trains_on_its_share_of_samples_and_steps(stopped: Path) -> None:
    run_dir = stopped.parent / "run"
    share = set(range(SAMPLES)) - set(outside_of_share(SAMPLES, SHARE, seed=0).tolist())
    for root in (run_dir / "pilot", run_dir / "pilot" / "controls" / "ungrouped"):
        assert grouped(root / "stage_1") == share
    assert verdict_of(run_dir)["samples"] == len(share) < SAMPLES
    seen = RecordBatches(stopped.parent / "batches").sample_ids()[6:]  # after stage 0
    assert len(seen) == 3 + 3 and set(seen.ravel().tolist()) <= share


@in_soak
def test_the_full_run_goes_on_from_what_the_pilot_used(
    shell: Shell, stopped: Path, tmp_path: Path
) -> None:
    """The run goes on with all samples; what the pilot used and made is not made again."""
    shutil.copytree(stopped.parent / "run", tmp_path / "run")
    before = tiny.digests(tmp_path / "run", "**/*")
    goes_on = ["run", "--config", stopped, f"run_dir={tmp_path / 'run'}", f"pilot.share={SHARE}"]
    shell.ok(*goes_on, "pilot.stop_without_gain=false")
    after = tiny.digests(tmp_path / "run", "**/*")
    for name in before:
        if name.startswith(("index/", "stage_0/", "stage_1/pseudo_labels/", "pilot/")):
            assert after[name] == before[name], name
    assert grouped(tmp_path / "run" / "stage_1") == set(range(SAMPLES))
    assert state_of(tmp_path / "run")["reason"] == ""


@pytest.mark.parametrize(
    ("share", "line"),
    [
        ("0.4", r"pilot/stage_1/train was made with other settings.*share was 0\.5"),
        ("0.05", r"fewer than train\.global_batch=24: raise it to 0\.25 or more"),
    ],
)
def test_another_share_and_one_that_fills_no_batch_are_refused(
    shell: Shell, stopped: Path, tmp_path: Path, share: str, line: str
) -> None:
    shutil.copytree(stopped.parent / "run", tmp_path / "run")
    if share == "0.05":
        shutil.rmtree(tmp_path / "run" / "pilot")
    command = ["run", "--config", stopped, f"run_dir={tmp_path / 'run'}", "--pilot", share]
    complaint = shell.refused(*command)
    assert re.search(line, complaint)
    assert (tmp_path / "run" / "pilot").exists() == (share == "0.4")


@pytest.mark.parametrize("ranks", [1, 2])
@in_soak
def test_a_killed_pilot_resumes_bit_for_bit(
    shell: Shell, stopped: Path, tmp_path: Path, ranks: int
) -> None:
    done = stopped.parent / "run"
    for name in ("whole", "cut"):
        for part in ("index", "stage_0", "outcomes"):
            shutil.copytree(done / part, tmp_path / name / part)
        shutil.copy(done / "results.jsonl", tmp_path / name)
    options = ["--config", stopped, "--pilot", SHARE, "train.checkpoint.every=1"]
    shell.ok("run", *options, f"run_dir={tmp_path / 'whole'}", ranks=ranks)
    cut = ["run", *options, f"run_dir={tmp_path / 'cut'}"]
    for count in (1, 1, 2, 1):  # in the pilot, at its end, in its control, and at the end of that
        assert shell(*cut, ranks=ranks, inside=KillAfter("save", count)).code == -9
    shell.ok(*cut, ranks=ranks)
    exports = "pilot/**/*.safetensors"
    whole = tiny.digests(tmp_path / "whole", exports)
    assert len(whole) > 3 and tiny.digests(tmp_path / "cut", exports) == whole
    figures = [verdict_of(tmp_path / name)["comparisons"] for name in ("whole", "cut")]
    assert figures[0] == figures[1]
    seen = np.array([verdict_of(tmp_path / name)["samples"] for name in ("whole", "cut")])
    assert seen[0] == seen[1] == verdict_of(done)["samples"]
