"""The demo's settings and its table over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mclclip.eval.results import Result
from mclclip.verbs import demo


def test_settings_keep_seeds_apart_and_overrides_win() -> None:
    settled = demo.settings(Path("out"), 3, ["train.steps=7"])
    assert (settled.run_dir, settled.seed, settled.train.steps) == ("out/seed_3", 3, 7)
    assert settled.data.sources["patterns"].shards == "out/data_3/shards/*.tar"
    assert settled.controls == ["ungrouped"]
    assert settled.num_stages == 3


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


def test_the_device_is_the_one_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is rendered."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        demo.run(tmp_path, seeds=[0], overrides=["device=cuda"])
    assert not list(tmp_path.iterdir())
