"""Random damage through the command line, in the soak: exit code 0 with the same result, or 2 and
one line. The same damage is tried in process, with many more trials, in the unit tests.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
from pathlib import Path

import pytest

from mclclip import config as configuration
from mclclip.checkpoint import step_files
from mclclip.models.weights import digest_tensors
from tests import damage, fuzzing, tiny
from tests.e2e.conftest import Finished, Shell
from tests.matrix import in_soak

SEED, TRIALS = 5, 100
TIMEOUT_S = 600.0  # of a command on a busy machine; most take a second


def ended_well(finished: Finished, what: str) -> bool:
    """Whether a command succeeded; fails where it ended otherwise than with one line."""
    assert finished.code in (0, 2), (what, finished.stderr)
    assert "Traceback" not in finished.stderr, (what, finished.stderr)
    assert finished.code == 0 or len(finished.complaints()) == 1, (what, finished.stderr)
    return finished.code == 0


@in_soak
def test_a_training_on_damaged_artifacts(shell: Shell, tmp_path: Path) -> None:
    """From the embeddings to the weights: the weights are those of the intact run, or there are
    none. A file of the same size is not compared, unless doctor is asked to."""
    prepared = damage.prepare(tmp_path / "prepared")
    data, run_dir = tmp_path / "prepared/data", tmp_path / "run"
    path = tmp_path / "config.yaml"
    path.write_text(configuration.dump(damage.options(run_dir, data)))
    made = ("stage_0/clusters", "stage_1/pseudo_labels")

    def trained(what: str) -> str | None:
        for verb in ("cluster --stage 0", "train --stage 1"):
            command = [*verb.split(), "--config", path]
            if not ended_well(shell(*command, timeout_s=TIMEOUT_S), f"{what}, {verb}"):
                return None
        state = step_files.load_model_state(run_dir / "stage_1/train/checkpoints", 2)
        return digest_tensors(state)

    shutil.copytree(prepared, run_dir)
    wanted = trained("no damage")
    assert wanted is not None
    rng = random.Random(SEED)
    for number in range(TRIALS):
        shutil.rmtree(run_dir)
        shutil.copytree(prepared, run_dir)
        if number % 2:  # else what is damaged is read from the labels on
            for name in made:
                shutil.rmtree(run_dir / name)
        files = sorted(p for p in run_dir.rglob("*") if p.is_file() and "train" not in p.parts)
        victim = rng.choice(files)
        what = f"trial {number}, {victim.relative_to(run_dir)}"
        size = victim.stat().st_size
        victim.write_bytes(fuzzing.damaged_bytes(victim.read_bytes(), rng))
        if trained(what) not in (None, wanted):
            assert victim.stat().st_size == size, what
            finished = shell("doctor", run_dir)
            assert finished.code and victim.name in finished.stdout + finished.stderr, what


@in_soak
def test_strange_configurations(shell: Shell, tmp_path: Path) -> None:
    """As a model's JSON file, and as the directory of a model."""
    data = tiny.make_data(tmp_path / "data", num_samples=48)
    config = tiny.write_config(tmp_path / "c.yaml", tmp_path / "run", data, "base=null")
    rng, start = random.Random(SEED), tmp_path / "start"
    model = tmp_path / "model.json"
    model.write_text(json.dumps(tiny.MODEL))
    export = ["export", "--stage", "0", "--config", config]
    shell.ok(*export, f"run_dir={start}", f"model.name={model}")
    for number in range(TRIALS):
        run_dir = tmp_path / "runs" / f"{number}"
        strange = json.dumps(fuzzing.damaged_json(tiny.MODEL, rng))
        model.write_text(re.sub(r"20000|\d{6,}", "200", strange))  # of 20 GB is no strange one
        directory = shutil.copytree(start / "stage_0/export", tmp_path / "models" / f"{number}")
        if number % 2:
            (directory / "manifest.json").unlink()
        victim = rng.choice(sorted(p for p in directory.iterdir() if p.name != "manifest.json"))
        victim.write_bytes(fuzzing.damaged_bytes(victim.read_bytes(), rng))
        for name in (model, directory):
            command = [*export, f"run_dir={run_dir}/{name.name}", f"model.name={name}"]
            finished = shell(*command, timeout_s=TIMEOUT_S)
            ended_well(finished, f"trial {number}, {name.name}, {victim.name}")
        shutil.rmtree(directory)


@pytest.mark.parametrize("damaged", ["stage_0/embeddings/00001.npy"])
def test_advice_and_option_agree(
    shell: Shell, prepared_run: Path, tmp_path: Path, damaged: str
) -> None:
    """What the line says, as it says it, mends the run."""
    run_dir, path = shutil.copytree(prepared_run, tmp_path / "run"), tmp_path / "config.yaml"
    options = damage.options(run_dir, prepared_run.parent / "data", "eval.suite={}")
    path.write_text(configuration.dump(options))
    for name in ("stage_0/clusters", "stage_1/pseudo_labels"):
        shutil.rmtree(run_dir / name)
    content = (run_dir / damaged).read_bytes()
    (run_dir / damaged).write_bytes(content[:200])
    cluster = ["cluster", "--stage", "0", "--config", path]
    (line,) = shell(*cluster).complaints()
    (offered,) = re.findall(r"'mclclip (embed .*--force)'", line)
    assert damaged in line
    shell.ok(*shlex.split(offered))
    shell.ok(*cluster)
    assert (run_dir / damaged).read_bytes() == content
