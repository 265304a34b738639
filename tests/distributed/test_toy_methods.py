"""Methods of another package, one file each, train without a change to any other file.

``tests/toys`` holds two views without captions, a momentum copy with a queue, an adversary that
changes views, parameters outside of the engine, and a term of a sum. Each is trained by the verb
itself on one, two and three ranks in float64, and goes on from a checkpoint bit for bit.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mclclip import checkpoint, cluster, config, embed, export, index
from mclclip.objectives import base
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.train import verb as train
from tests import tiny, toys
from tests.matrix import kept

Ranks = Callable[..., list[Any]]
STEPS = 8
SUM = {
    "kind": "weighted_sum",
    "terms": [
        {"objective": {"kind": "info_nce"}, "weight": 0.7},
        {"objective": {"kind": "toy_alignment"}, "weight": 0.3},
    ],
}
METHODS: dict[str, dict[str, Any]] = {
    "toy_two_views": {"kind": "toy_two_views"},
    "toy_momentum": {"kind": "toy_momentum", "momentum": 0.8},
    "toy_adversary": {"kind": "toy_adversary"},
    "weighted_sum": SUM,
    "toy_prototypes": {"kind": "toy_prototypes"},
}
OUTSIDE = {"toy_adversary": ("pattern",), "toy_prototypes": ("prototypes",)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_data(tmp_path_factory.mktemp("data"), num_samples=96)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.install(tmp_path_factory.mktemp("site"))


def train_on_this_rank(site: str, tree: dict[str, Any], stage: int) -> dict[str, Any]:
    """Trains one stage; returns the weights, what is saved beside them, and the losses."""
    torch.set_num_threads(1)
    if site not in sys.path:
        sys.path.insert(0, site)
        importlib.invalidate_caches()
    context = Context(collectives.rank(), collectives.world_size())
    options = config.from_tree(tree)
    index.run(options, context)
    if stage:
        export.stage(options, context, stage=0)
        embed.run(options, context, stage=0)
        cluster.run(options, context, stage=0)
    directory = train.run(options, context, stage=stage)
    found: dict[str, Any] = {}
    for part in (
        "model",
        *OUTSIDE.get(tree["train" if stage else "base"]["objective"]["kind"], ()),
    ):
        state = checkpoint.load_model_state(directory / "checkpoints", STEPS, part)
        found |= {f"{part}.{name}": tensor.numpy() for name, tensor in state.items()}
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {"state": found, "losses": [row["loss"] for row in rows], "row": rows[-1]}


def tree_of(run_dir: Path, data: Path, method: str, precision: str) -> tuple[dict[str, Any], int]:
    """The options of a run of ``method``, and the stage that it trains."""
    tree = tiny.tree(run_dir, data)
    stage = 1 if method == "toy_prototypes" else 0
    option = "train" if stage else "base"
    tree[option] |= {
        "precision": precision,
        "steps": STEPS,
        "log_every": 1,
        "checkpoint": {"every": STEPS // 2, "keep": 9},
        "lock": {},
        "objective": METHODS[method],
    }
    tree["num_stages"] = stage
    if stage:
        tree["base"] = None
    return tree, stage


def run(
    ranks: Ranks, world_size: int, site: Path, tree: dict[str, Any], stage: int
) -> dict[str, Any]:
    found: dict[str, Any] = ranks(world_size, train_on_this_rank, str(site), tree, stage)[0]
    return found


@pytest.mark.parametrize("method", kept([*METHODS], 2))
def test_any_number_of_ranks_trains_the_same(
    ranks: Ranks, data: Path, installed: Path, tmp_path: Path, method: str
) -> None:
    one = run(ranks, 1, installed, *tree_of(tmp_path / "1", data, method, "float64"))
    assert len(one["losses"]) == STEPS and len(set(one["losses"])) == STEPS
    for world_size in (2, 3):
        run_dir = tmp_path / str(world_size)
        many = run(ranks, world_size, installed, *tree_of(run_dir, data, method, "float64"))
        np.testing.assert_allclose(many["losses"], one["losses"], rtol=1e-9)
        assert many["state"].keys() == one["state"].keys()
        for name, wanted in one["state"].items():
            np.testing.assert_allclose(many["state"][name], wanted, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("method", kept([*METHODS], 2))
def test_a_checkpoint_goes_on_bit_for_bit(
    ranks: Ranks, data: Path, installed: Path, tmp_path: Path, method: str
) -> None:
    """The second half of a training, repeated from the checkpoint before it."""
    tree, stage = tree_of(tmp_path / "run", data, method, "fp32")
    whole = run(ranks, 1, installed, tree, stage)
    directory = tmp_path / "run" / f"stage_{stage}" / "train"
    shutil.rmtree(directory / f"checkpoints/step_{STEPS:08d}")
    (directory / "manifest.json").rename(directory / "in_progress.json")
    again = run(ranks, 1, installed, tree, stage)
    assert again["losses"] == whole["losses"]
    for name, wanted in whole["state"].items():
        np.testing.assert_array_equal(again["state"][name], wanted, err_msg=name)


def test_what_each_method_owns_is_saved_and_moves(
    ranks: Ranks, data: Path, installed: Path, tmp_path: Path
) -> None:
    def trained(method: str) -> dict[str, Any]:
        return run(ranks, 1, installed, *tree_of(tmp_path / method, data, method, "fp32"))

    momentum = trained("toy_momentum")["state"]
    assert momentum["model.objective.filled"] == STEPS * 24
    weights = [n.removeprefix("model.objective.copy.") for n in momentum if ".copy." in n]
    assert any((momentum[f"model.objective.copy.{n}"] != momentum[f"model.model.{n}"]).any()
               for n in weights)  # fmt: skip
    adversary = trained("toy_adversary")
    assert np.abs(adversary["state"]["pattern.pixels"]).max() > 0
    assert adversary["row"]["max_pattern"] > 0
    rows = trained("weighted_sum")["row"]
    parts = 0.7 * rows["0_info_nce/loss"] + 0.3 * rows["1_toy_alignment/loss"]
    assert rows["loss"] == pytest.approx(parts, rel=1e-6)


def test_an_engine_that_cannot_carry_a_method_is_refused(
    data: Path, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    tree, _ = tree_of(tmp_path, data, "toy_momentum", "fp32")
    tree["base"]["engine"] = {"name": "fsdp"}
    with pytest.raises(ValueError, match="engine.name=fsdp does not run objective.kind=toy_mom"):
        config.from_tree(tree)


def test_kinds_are_found_by_name_alone(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no objective 'toy_two_views' .nearest: "):
        base.options_class("toy_two_views")
    monkeypatch.syspath_prepend(installed)
    assert {*toys.KINDS, "info_nce", "mlcd", "mlc", "single_label"} <= {*base.kinds()}
    monkeypatch.delitem(sys.modules, "tests.toys.adversary", raising=False)
    assert base.options_class("toy_two_views").num_views == 2
    assert "tests.toys.adversary" not in sys.modules
