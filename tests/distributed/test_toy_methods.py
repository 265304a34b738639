"""Methods of another package, one file each, train without a change to any other file.

``tests/toys`` holds a momentum copy with a queue, an adversary that changes views, parameters
outside of the engine, and a term of a sum. That they keep what every
objective keeps is in ``contracts/test_objectives.py``; here the verb itself finds and trains them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mclclip import config
from mclclip.checkpoint import step_files
from mclclip.objectives import base
from mclclip.ranks.process_group import SINGLE
from mclclip.verbs import index, train
from tests import tiny, toys

STEPS = 4
SUM = [{"kind": "info_nce", "weight": 0.7}, {"kind": "toy_alignment", "weight": 0.3}]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.install(tmp_path_factory.mktemp("site"))


def tree_of(run_dir: Path, data: Path, objective: Any) -> dict[str, Any]:
    """The options of a run that trains stage 0 alone."""
    tree = tiny.tree(run_dir, data) | {"num_stages": 0}
    tree["base"] |= {
        "steps": STEPS,
        "log_every": 1,
        "checkpoint": {"every": STEPS},
        "lock": {},
        "objective": objective,
    }
    return tree


def test_the_verb_trains_and_saves_what_each_method_owns(
    data: Path, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)

    def trained(objective: Any, part: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The last row of metrics, and a part of the last checkpoint."""
        tree = tree_of(tmp_path / str(len(list(tmp_path.iterdir()))), data, objective)
        options = config.from_tree(tree)
        index.run(options, SINGLE)
        directory = train.run(options, SINGLE, stage=0)
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        state = step_files.load_model_state(directory / "checkpoints", STEPS, part)
        return json.loads(lines[-1]), state

    _, momentum = trained({"kind": "toy_momentum", "momentum": 0.8}, "model")
    assert momentum["objective.filled"] == STEPS * 24
    copied = {n.removeprefix("objective.copy."): v for n, v in momentum.items() if ".copy." in n}
    assert any((value != momentum[f"model.{name}"]).any() for name, value in copied.items())
    row, adversary = trained({"kind": "toy_adversary"}, "pattern")
    assert adversary["pixels"].abs().max() > 0 and row["max_pattern"] > 0
    row, _ = trained(SUM, "model")
    parts = 0.7 * row["0_info_nce/loss"] + 0.3 * row["1_toy_alignment/loss"]
    assert row["loss"] == pytest.approx(parts, rel=1e-6)


def test_an_engine_that_cannot_carry_a_method_is_refused(
    data: Path, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    tree = tree_of(tmp_path, data, {"kind": "toy_momentum"})
    tree["base"]["engine"] = {"name": "deepspeed", "zero_stage": 3}
    with pytest.raises(ValueError, match="zero_stage"):
        config.from_tree(tree)


def test_kinds_are_found_by_name_alone(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no objective 'toy_momentum' .nearest: "):
        base.options_class("toy_momentum")
    monkeypatch.syspath_prepend(installed)
    assert {*toys.KINDS, "info_nce", "mlcd", "mlc", "single_label"} <= {*base.kinds()}
    monkeypatch.delitem(sys.modules, "tests.toys.adversary", raising=False)
    assert base.options_class("toy_momentum")(kind="toy_momentum").reads.num_views == 2
    assert "tests.toys.adversary" not in sys.modules
