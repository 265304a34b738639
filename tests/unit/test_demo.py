"""The demo's settings and its table over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mclclip import demo
from mclclip.config import Config
from mclclip.eval.results import Result
from mclclip.models.loading import load_towers
from tests.matrix import in_soak


def test_settings_keep_seeds_apart_and_overrides_win() -> None:
    settled = demo.settings(Path("out"), 3, ["train.steps=7"])
    assert (settled.run_dir, settled.seed, settled.train.steps) == ("out/seed_3", 3, 7)
    assert settled.data.sources["patterns"].shards == "out/data_3/shards/*.tar"
    assert settled.controls == ["ungrouped"]
    assert settled.num_stages == 3


def test_the_short_form_is_one_small_stage_and_overrides_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def note(settled: Config, context: object) -> Path:
        seen["settled"] = settled
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.pipeline, "run", note)
    monkeypatch.setattr(demo.make_dataset, "run", lambda *_, **sizes: seen.update(sizes))
    with pytest.raises(KeyboardInterrupt):
        demo.run(tmp_path, seeds=[2], overrides=["train.steps=3"], short=True)
    settled = seen["settled"]
    assert (settled.num_stages, settled.base.steps, settled.train.steps) == (1, 20, 3)
    assert (seen["seed"], seen["num_samples"], seen["num_pairs"]) == (2, 1_200, 20)


def test_seed_table_gives_mean_and_standard_deviation() -> None:
    def rows(shape: float) -> list[Result]:
        figures = {"colour": 100.0, "shape": shape, "count": 0.0, "average": 60.0}
        return [Result("stage_0", "pairs", m, v, 10, 0.0, 100.0) for m, v in figures.items()]

    one = demo.seed_table([rows(40.0)]).splitlines()
    assert one[0].endswith("| size | count | shape | rare | average |")
    assert one[2] == "| stage_0 | - | 100.0 | - | - | - | 0.0 | 40.0 | 20.0 | 60.0 |"
    text = demo.seed_table([rows(40.0), rows(50.0), rows(60.0)])
    assert text.startswith("| 3 seeds |")
    assert "| 50.0 ± 10.0 | 25.0 ± 5.0 | 60.0 ± 0.0 |" in text


@in_soak
def test_a_knowing_text_tower_stays_what_its_teacher_learned(tmp_path: Path) -> None:
    steps = ("base.steps=2", "train.steps=2", "data.num_workers=0", "controls=[]")
    less = (*steps, "export.concat=[]", "export.soup=false")
    text = demo.run(tmp_path, seeds=[5], regimes=["knowing"], overrides=less, short=True)
    page = tmp_path / "knowing" / "seed_5" / "report.html"
    assert text.endswith(f"Report of the run, to open in a browser: {page}\n") and page.is_file()
    rows = [line.split("|")[1].strip() for line in text.splitlines()[2:] if "|" in line]
    assert rows == ["teacher", "stage_0", "stage_1"]
    folder = tmp_path / "knowing"
    towers = {
        name: load_towers(f"local-dir:{folder / path}").clip.state_dict()
        for name, path in {
            "teacher": "teacher_5/stage_0/export",
            "given": "given_5",
            "stage_0": "seed_5/stage_0/export",
            "stage_1": "seed_5/stage_1/export",
        }.items()
    }
    drawn = load_towers(demo.settings(tmp_path, 5, []).model.name, seed=5).clip.state_dict()
    for name, tensor in towers["teacher"].items():
        given = towers["given"][name]
        if name.startswith(("visual.", "logit_")):
            assert torch.equal(given, drawn[name].reshape(given.shape))
        else:
            assert torch.equal(given, tensor)
            assert torch.equal(towers["stage_0"][name], tensor)
            assert torch.equal(towers["stage_1"][name], tensor)
    weight = "visual.conv1.weight"
    assert not torch.equal(towers["stage_0"][weight], towers["given"][weight])


def test_regimes_are_compared_in_one_table() -> None:
    def rows(grouped: float, ungrouped: float) -> list[Result]:
        models = {"stage_0": 40.0, "stage_1": 50.0, "concat_stage_norm": grouped}
        models |= {"control_ungrouped_concat_stage_norm": ungrouped}
        return [Result(m, "pairs", "average", v, 10, 0.0, 100.0) for m, v in models.items()]

    table = demo.regime_table({"trained": [rows(80.0, 50.0)], "knowing": [rows(90.0, 91.0)]})
    lines = table.splitlines()
    assert lines[0].startswith("| text tower, 1 seed | stage_0 | stage_1 |")
    assert lines[2] == "| trained | 40.0 | 50.0 | - | 80.0 | - | - | 50.0 | 30.0 |"
    assert lines[3] == "| knowing | 40.0 | 50.0 | - | 90.0 | - | - | 91.0 | -1.0 |"
