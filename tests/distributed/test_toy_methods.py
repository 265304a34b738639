"""Methods of another package, one file each, train without a change to any other file.

``tests/toys`` holds a momentum copy with a queue, an adversary that changes views, and parameters
outside of the engine. That they keep what every objective keeps is in
``contracts/test_objectives.py``; here the verb itself finds and trains them.
"""

from __future__ import annotations

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

STEPS = 2


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.install(tmp_path_factory.mktemp("site"))


def test_the_verb_trains_and_saves_what_each_method_owns(
    data: Path, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)

    def trained(objective: Any, part: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The last row of metrics, and a part of the last checkpoint."""
        tree = tiny.tree(tmp_path / part, data) | {"num_stages": 0}
        tree["base"] |= {"steps": STEPS, "log_every": 1, "checkpoint": {"every": STEPS}}
        tree["base"] |= {"lock": {}, "objective": objective}
        options = config.from_tree(tree)
        index.run(options, SINGLE)
        directory = train.run(options, SINGLE, stage=0)
        state = step_files.load_model_state(directory / "checkpoints", STEPS, part)
        return tiny.rows(directory / "metrics.jsonl")[-1], state

    _, momentum = trained({"kind": "toy_momentum", "momentum": 0.8}, "model")
    assert momentum["objective.filled"] == STEPS * 24
    copied = {n.removeprefix("objective.copy."): v for n, v in momentum.items() if ".copy." in n}
    assert any((value != momentum[f"model.{name}"]).any() for name, value in copied.items())
    row, adversary = trained({"kind": "toy_adversary"}, "pattern")
    assert adversary["pixels"].abs().max() > 0 and row["max_pattern"] > 0


def test_kinds_are_found_by_name_alone(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no objective 'toy_prototypes' .nearest: "):
        base.options_class("toy_prototypes")
    monkeypatch.syspath_prepend(installed)
    assert {*toys.KINDS, "info_nce"} <= {*base.kinds()}
    monkeypatch.delitem(sys.modules, "tests.toys.adversary", raising=False)
    assert (
        base.options_class("toy_prototypes")(kind="toy_prototypes").reads.num_classes_per_sample
        == 1
    )
    assert "tests.toys.adversary" not in sys.modules
