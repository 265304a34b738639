"""Evaluations of a training: when, which is best, when it ends, and what a checkpoint holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mclclip import config
from mclclip.eval.protocols import BenchmarkConfig, EvalConfig
from mclclip.train.loop import PeriodicEvaluation
from mclclip.train.options import EvaluateConfig


class Engine:
    """Something whose state a checkpoint holds."""

    def __init__(self, **state: torch.Tensor) -> None:
        self.state = state

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state


def judging(values: dict[int, float], **options: Any) -> PeriodicEvaluation:
    """Of a training of 10 steps, evaluated after 3, 6, 9 and 10."""
    settled: dict[str, Any] = {"every": 3, "metric": "pairs/average"} | options
    is_loss = settled.pop("is_loss", False)
    when = EvaluateConfig(**settled)
    figures = lambda step: {"pairs/average": values[step]}  # noqa: E731
    return PeriodicEvaluation(Engine(), figures, when, settled["every"], 10, is_loss)


def until_it_ends(judged: PeriodicEvaluation, start: int = 0) -> int:
    """The steps after ``start`` as the loop takes them; returns the last one."""
    for done in range(start, judged.total + 1):
        if judged.is_due(done):
            judged.measure(done)
            if judged.patience_is_over:
                return done
    return judged.total


def test_it_is_due_every_so_many_steps_and_at_the_end() -> None:
    judged = judging({})
    assert [done for done in range(11) if judged.is_due(done)] == [3, 6, 9, 10]
    assert [done for done in range(11) if judging({}, every=5).is_due(done)] == [5, 10]


@pytest.mark.parametrize(
    ("values", "options", "ends", "best"),
    [
        ([50, 60, 55, 58], {}, 10, 6),
        ([50, 60, 55, 58], {"is_loss": True}, 10, 3),
        ([50, 60, 60, 60], {"patience": 2}, 10, 6),  # an equal figure is not better
        ([50, 60, 60, 60], {"patience": 1}, 9, 6),
        ([60, 50, 55, 70], {"patience": 2}, 9, 3),
        ([50, 40, 45, 30], {"patience": 1, "is_loss": True}, 9, 6),
        ([10, 20, 30, 40], {"patience": 1}, 10, 10),
    ],
)
def test_the_best_and_the_end(
    values: list[float], options: dict[str, Any], ends: int, best: int
) -> None:
    given = dict(zip((3, 6, 9, 10), values, strict=True))
    judged = judging(given, best=True, **options)
    assert until_it_ends(judged) == ends
    assert judged.best_step == judged.exported_step == best
    assert judging(given, **options).exported_step is None
    for start in (3, 6, 9):  # resumed from a checkpoint, which is older than its own evaluation
        before = judging(given, best=True, **options)
        for done in range(start):
            if before.is_due(done):
                before.measure(done)
        if not before.patience_is_over:
            resumed = judging(given, best=True, **options)
            resumed.load_state_dict(before.state_dict())
            assert resumed.values == before.values
            assert until_it_ends(resumed, start) == ends and resumed.best_step == best


def test_only_figures_of_a_loss_are_better_where_they_are_smaller() -> None:
    suite = {kind: BenchmarkConfig(kind, "folder") for kind in ("contrastive_loss", "retrieval")}
    config = EvalConfig(suite)
    assert config.is_loss("contrastive_loss/loss") and not config.is_loss("retrieval/average")


def test_an_evaluation_that_is_made_again_counts_once() -> None:
    judged = judging({3: 1.0, 6: 2.0}, patience=1)
    for done in (3, 6, 6, 6):
        judged.measure(done)
    assert judged.values == [1.0, 2.0] and not judged.patience_is_over


def test_a_checkpoint_holds_both_states() -> None:
    judged, resumed = judging({3: 7.0}), judging({})
    judged.engine = Engine(weight=torch.ones(2))
    judged.measure(3)
    resumed.load_state_dict(judged.state_dict())
    assert resumed.values == [7.0] and resumed.engine.state_dict().keys() == {"weight"}


def test_a_metric_that_is_not_measured_is_named() -> None:
    with pytest.raises(ValueError, match="'pairs/top1' is not measured: name one of pairs/average"):
        judging({3: 1.0}, metric="pairs/top1").measure(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "pairs/average"}, "no effect without evaluate.every"),
        ({"every": 5, "best": True}, "set evaluate.metric"),
        ({"every": 5, "metric": "average"}, "wanted BENCHMARK/METRIC"),
    ],
)
def test_options_that_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.from_tree({"run_dir": "x", "train": {"evaluate": options}})
