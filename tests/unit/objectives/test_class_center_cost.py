"""What class centers cost, against the figures of MLCD's run on LAION-400M."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mclclip import config, plan
from mclclip.objectives.base import Sizes
from mclclip.plan.machine import Machine
from tests import tiny
from tests.matrix import in_soak

LAION = tiny.ROOT / "launch/recipes/mlcd_laion_vitl14.yaml"


def measured(dim: int = 512, ranks: int = 80, *overrides: str) -> dict[str, Any]:
    train = config.load(LAION, overrides).train
    sizes = Sizes(train.global_batch // ranks, ranks, dim, 1_000_000, torch.float32, lambda _: 0)
    return dict(train.objective.cost(sizes).details)


def test_the_papers_run_on_80_gpus() -> None:
    found = measured()
    assert (found["rows"], found["negatives"], found["positives"]) == (12_500, 1_250, 3_280)
    assert found["distinct_positives"] == pytest.approx(230_800, abs=50)
    parts, sent = found["parts"], found["collectives"]
    assert parts["rows"] + parts["moments"] == pytest.approx(77e6, rel=0.01)
    assert sent["all-gather of features"] == pytest.approx(67e6, rel=0.01)
    assert sent["reduce-scatter of gradients"] == sent["all-gather of features"]
    assert sent["all-gather of labels"] == pytest.approx(1.05e6, rel=0.01)
    assert sent["all-reduce of P and N"] == 524_800
    assert len(sent) == 4
    assert found["checkpoint"] == pytest.approx(6.1e9, rel=0.02)


def test_a_single_label_has_fewer_positives() -> None:
    one = measured(512, 80, "train.objective.kind=single_label")
    assert one["positives"] == 410
    assert one["distinct_positives"] == pytest.approx(32_300, abs=50)
    assert one["collectives"]["all-gather of labels"] == 131_200


def test_rules_of_negatives() -> None:
    """PartialFC's is mostly the batch's positives, 230,798 / 80; the other one leaves them out."""
    partial_fc = measured(512, 80, "train.objective.negatives=partial_fc")
    assert partial_fc["negatives"] == 2_885
    assert partial_fc["parts"]["gradient"] == 2_885 * 512 * 4
    without = measured(512, 80, "train.objective.negatives=exclude_positives")
    assert without["negatives"] == 1_250 - 288
    assert without["parts"]["gradient"] == measured()["parts"]["gradient"]


def test_one_rank_sends_nothing() -> None:
    found = measured(512, 1)
    assert found["rows"] == 1_000_000 and found["seconds"]["network"] == 0.0
    assert found["seconds"]["products"] == pytest.approx(80 * measured()["seconds"]["products"])


def test_all_classes_drawn_are_all_touched() -> None:
    found = measured(512, 80, "train.objective.sample_rate=1.0")
    assert found["negatives"] == 12_500
    assert found["parts"]["gradient"] == found["parts"]["rows"]


@in_soak
def test_the_plan_counts_the_head(capsys: pytest.CaptureFixture[str]) -> None:
    options = config.load(LAION)
    made = plan.make(options, Machine(10, 8), 400_000_000)
    kind = made["memory"]["train"]
    parts = measured(768)["parts"]
    assert kind["parts"]["objective"] == parts["rows"] + parts["moments"] + parts["gradient"]
    assert kind["parts"]["loss"] == parts["step"]
    assert kind["checkpoint"] > measured(768)["checkpoint"]
    assert kind["counts"]["text"]["trainable"] == 0  # what captions would need is not trained
    with pytest.raises(ValueError, match="GiB"):
        plan.run(options, Machine(1, 1, 40.0), samples=400_000_000, as_json=False)
    shown = capsys.readouterr().out
    assert "class centers" in shown and "ms of a step, expected" in shown


def test_more_classes_than_samples() -> None:
    with pytest.raises(ValueError, match="num_clusters=1,000,000 is more than the index's 500,000"):
        plan.make(config.load(LAION), Machine(10, 8), 500_000)


@in_soak
def test_too_many_classes_for_a_gpu() -> None:
    options = config.load(
        LAION, ["cluster.num_clusters=20000000", "train.global_batch=256", "train.steps=10"]
    )
    machine = Machine(1, 1, 80.0)
    made = plan.make(options, machine, 400_000_000)
    with pytest.raises(ValueError, match="the biggest part is the objective.*use more GPUs"):
        plan.memory.check(made["memory"]["train"], "train", options.train, machine)
