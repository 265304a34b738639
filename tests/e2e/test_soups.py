"""Soups by the command line, and what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mclclip import config
from mclclip.models import weights
from mclclip.models.encoder import load_model
from mclclip.models.loading import load_towers
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import index
from tests import tiny
from tests.e2e.conftest import Shell
from tests.unit.models.stages import save_stages


def test_soups_are_measured_and_not_chosen_on_training_images(shell: Shell, tmp_path: Path) -> None:
    """Not on a copy of the shards under other names either, by which curves are only measured."""
    run, held_out = tmp_path / "run", tmp_path / "held_out"
    save_stages(load_towers({"model_cfg": tiny.MODEL}, seed=1), run, 3, image_blocks=2, text=True)
    tiny.make_data(held_out, num_samples=24)
    models = [["--model", run / f"stage_{n}" / "export"] for n in range(3)]
    two, three = sum(models[:2], []), sum(models, [])
    given = ["--device", "cpu", "--held-out"]
    done = shell.ok(
        "soup", "greedy", *three, *given, held_out / "shards", "--out", tmp_path / "greedy"
    )
    trace = json.loads((tmp_path / "greedy" / "scores" / "trace.json").read_text())["trace"]
    assert done.stdout.count("kept") == sum(row["kept"] for row in trace) >= 1

    sources = {"own": {"shards": f"{held_out}/shards/*.tar"}}
    settings = {"run_dir": str(run), "data": {"sources": sources, "index_workers": 1}}
    (run / "config.yaml").write_text(json.dumps(settings))
    index.run(config.load(run / "config.yaml"), SINGLE)
    (tmp_path / "copied").mkdir()
    for path in (held_out / "shards").glob("*.tar"):
        shutil.copy(path, tmp_path / "copied" / f"other_{path.name}")
    given.append(tmp_path / "copied")
    line = shell.refused("soup", "greedy", *two, *given, "--out", tmp_path / "refused")
    assert "24 of its 24 images" in line and "is chosen by it" in line
    assert not (tmp_path / "refused" / weights.WEIGHTS).exists()
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        "benchmarks:\n  pairs: {kind: mmvp, path: '${data}/pairs', options: {prompt: ''}}\n"
    )
    given += ["--suite", suite, "--set", f"data={held_out}", "--alpha", "0.5"]
    done = shell.ok("soup", "wise", *two, *given, "--out", tmp_path / "wise")
    assert "the run is trained on" in done.stderr and "pairs/" in done.stdout
    assert (tmp_path / "wise" / "scores" / "curve.png").is_file()
    assert load_model(tmp_path / "greedy").embed_dim == load_model(tmp_path / "wise").embed_dim == 8
