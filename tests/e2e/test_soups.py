"""Soups by the command line, and what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mclclip import config
from mclclip.eval import results
from mclclip.models import weights
from mclclip.models.encoder import load_model
from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import SINGLE
from mclclip.run.artifacts import INTENT
from mclclip.verbs import index
from tests import tiny
from tests.e2e.conftest import Shell
from tests.unit.models.stages import save_stages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of three stages in ``stage_S/export``, and held-out shards with minimal pairs."""
    root = tmp_path_factory.mktemp("soups")
    model = load_towers({"model_cfg": tiny.MODEL}, seed=1)
    save_stages(model, root, 3, image_blocks=2, text=True)
    tiny.make_data(root / "held_out", num_samples=48, seed=9)
    (root / "suite.yaml").write_text(
        "benchmarks:\n  pairs: {kind: mmvp, path: '${data}/pairs', options: {prompt: ''}}\n"
    )
    return root


def models(folder: Path, *numbers: int) -> list[str | Path]:
    return [word for n in numbers for word in ("--model", folder / f"stage_{n}" / "export")]


def test_soups_are_made_measured_and_evaluated(shell: Shell, folder: Path, tmp_path: Path) -> None:
    held_out = ["--held-out", folder / "held_out" / "shards", "--device", "cpu"]
    greedy, wise = tmp_path / "greedy", tmp_path / "wise"
    done = shell.ok("soup", "greedy", *models(folder, 0, 1, 2), *held_out, "--out", greedy)
    trace = json.loads((greedy / "scores" / "trace.json").read_text())["trace"]
    assert done.stdout.count("kept") == sum(row["kept"] for row in trace) >= 1
    suite = ["--suite", folder / "suite.yaml", "--set", f"data={folder / 'held_out'}"]
    line = ["--alphas", "0", "0.5", "1", "--out", wise]
    done = shell.ok("soup", "wise", *models(folder, 0, 2), *held_out, *suite, *line)
    assert "pairs/" in done.stdout and "is written; against alpha 0: held_out/" in done.stdout
    assert (wise / "scores" / "curve.png").is_file()
    best = max(row["soup"] for row in trace if row["kept"])
    again = results.read(greedy / "scores" / "results.jsonl")
    own = {(r.model, r.metric): r.value for r in again if r.metric.endswith("/R@1")}
    alone = {model: [v for (m, _), v in own.items() if m == model] for model, _ in own}
    assert best >= max(sum(alone[f"stage_{n}"]) / 2 for n in range(3))
    assert load_model(greedy).embed_dim == load_model(wise).embed_dim == 8


def test_a_finished_run_takes_another_stage(shell: Shell, folder: Path, tmp_path: Path) -> None:
    """What joins its stages is made again, and the old joins are kept; trainings stay."""
    run, steps = tmp_path / "run", ("base.steps=1", "train.steps=1")
    where = tiny.write_config(tmp_path / "c.yaml", run, folder / "held_out", *steps)
    shell.ok("run", "--config", where, "num_stages=1")
    before = [(run / f"stage_{n}/train/manifest.json").read_bytes() for n in (0, 1)]
    rows = {(r.model, r.metric): r for r in results.read(run / "results.jsonl")}
    left = {"concat_raw": "manifest.json", "soup_uniform": INTENT}
    for name, file in left.items():
        made = run / "exports" / name / "manifest.json"
        if file == INTENT:  # as if it had been killed before its last file
            fields = json.loads(made.read_text())
            made.with_name(INTENT).write_text(
                json.dumps({key: fields[key] for key in ("kind", "config", "inputs")})
            )
            made.unlink()
    shell.ok("run", "--config", where, "num_stages=2")
    assert before == [(run / f"stage_{n}/train/manifest.json").read_bytes() for n in (0, 1)]
    for name in ("concat_raw", "soup_uniform"):
        made = json.loads((run / f"exports/{name}/manifest.json").read_text())
        assert [*made["inputs"]] == ["stage_0", "stage_1", "stage_2"]
        assert (run / f"exports/{name}.old-1/{left[name]}").is_file()
    again = {(r.model, r.metric): r for r in results.read(run / "results.jsonl")}
    evaluations = [of["concat_raw", "average"].protocol["evaluation"] for of in (rows, again)]
    assert evaluations[0] != evaluations[1]
    assert "stage_2" in shell.refused("run", "--config", where, "num_stages=1")


def test_a_soup_is_not_chosen_on_training_images(
    shell: Shell, folder: Path, tmp_path: Path
) -> None:
    """Not on a copy of the shards under other names either, by which curves are only measured."""
    run = tmp_path / "run"
    for stage in ("stage_0", "stage_1"):
        shutil.copytree(folder / stage, run / stage)
    shards = folder / "held_out" / "shards"
    sources = {"own": {"shards": f"{shards}/*.tar"}}
    settings = {"run_dir": str(run), "data": {"sources": sources, "index_workers": 1}}
    (run / "config.yaml").write_text(json.dumps(settings))
    index.run(config.load(run / "config.yaml"), SINGLE)
    (tmp_path / "copied").mkdir()
    for path in shards.glob("*.tar"):
        shutil.copy(path, tmp_path / "copied" / f"other_{path.name}")
    given = [*models(run, 0, 1), "--held-out", tmp_path / "copied", "--device", "cpu"]
    line = shell.refused("soup", "greedy", *given, "--out", tmp_path / "greedy")
    assert "48 of its 48 images" in line and "is chosen by it" in line
    assert not (tmp_path / "greedy" / weights.WEIGHTS).exists()
    done = shell.ok("soup", "wise", *given, "--alpha", "0.5", "--out", tmp_path / "measured")
    assert "the run is trained on" in done.stderr
