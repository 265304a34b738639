"""Temperatures: numbers, the cosine schedule, trained ones, the model's."""

import math
from typing import Any

import pytest
import torch

from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.contrast import (
    CosineSchedule,
    Learnable,
    Temperature,
    parse,
)
from mclclip.objectives.info_nce import InfoNCE
from tests import objective_loops as loops


def test_schedule_is_the_cosine_of_the_paper() -> None:
    schedule = CosineSchedule(min=0.1, max=1.0, half_period=200, per="step")
    for epoch in (0.0, 0.5, 37.25, 100.0, 200.0, 399.0, 400.0):
        expected = 0.1 + 0.5 * (1.0 - 0.1) * (1.0 + math.cos(math.pi * epoch / 200))
        assert schedule.at(epoch) == pytest.approx(expected, rel=1e-14)
    assert schedule.at(0) == pytest.approx(1.0)
    assert schedule.at(200) == pytest.approx(0.1)
    assert schedule.at(400 + 30) == pytest.approx(schedule.at(30))  # a period of two halves


def test_per_epoch_it_rests_within_one() -> None:
    schedule = CosineSchedule(half_period=4)
    assert schedule.at(1.0) == schedule.at(1.99) != schedule.at(2.0)
    assert CosineSchedule(half_period=4, per="step").at(1.99) != schedule.at(1.0)
    fixed = CosineSchedule(min=0.3, max=0.3)
    assert {fixed.at(epoch) for epoch in range(9)} == {0.3}


def test_a_step_moves_the_loss_to_its_temperature() -> None:
    schedule = CosineSchedule(min=0.1, max=1.0, half_period=2)
    scheduled = InfoNCE(temperature=Temperature(schedule), between="views")
    batch = loops.draw(0, 6)
    for step, epoch in enumerate((0.0, 0.5, 1.0, 2.5)):
        scheduled.begin(step, 9, epoch)
        parts = batch.run(scheduled)
        fixed = InfoNCE(temperature=Temperature(schedule.at(epoch)), between="views")
        assert torch.equal(parts["loss"], batch.run(fixed)["loss"])
        assert parts["temperature"].item() == pytest.approx(schedule.at(epoch), rel=1e-14)
    assert not list(scheduled.parameters()) and not scheduled.state_dict()


def test_a_trained_one_moves_is_bounded_and_is_saved() -> None:
    options = Learnable(start=0.5, max_scale=2.5)
    objective = InfoNCE(temperature=Temperature(options, torch.float64), between="views")
    batch = loops.draw(1, 6)
    assert batch.run(objective)["temperature"].item() == pytest.approx(0.5, rel=1e-14)
    (parameter,) = objective.parameters()
    assert parameter.shape == (1,) and parameter.grad is not None and parameter.grad != 0
    twin = batch.rows(slice(None))
    with torch.no_grad():
        twin.scale.fill_(2.0)
    twin.run(InfoNCE(), "text_features")  # the same gradient arrives at a scale of the model's
    between = InfoNCE(temperature=Temperature(options, torch.float64))
    batch.rows(slice(None)).run(between, "text_features")
    (other,) = between.parameters()
    assert other.grad is not None and twin.scale.grad is not None
    loops.close(other.grad[0], 2.0 * twin.scale.grad)  # of the logarithm

    optimizer = build_optimizer(objective, weight_decay=0.5, lr=10.0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    parameter.grad.fill_(-1.0)
    optimizer.step()
    assert parameter.item() == math.log(2.5)
    again = InfoNCE(temperature=Temperature(options, torch.float64), between="views")
    again.load_state_dict(objective.state_dict())
    assert batch.run(again)["temperature"].item() == pytest.approx(1 / 2.5, rel=1e-14)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "greater than 0"),
        (-1.0, "greater than 0"),
        (math.inf, "finite"),
        (True, "wanted a number such as 0.5"),
        ({"max": 1.0}, "wanted a number such as 0.5"),
        ("warm", "valid number"),
        ({"schedule": "linear"}, "'cosine'"),
        ({"schedule": "cosine", "min": 2.0}, "min=2.0 is above max=1.0"),
        ({"learnable": False}, "True"),
        ({"learnable": True, "start": 0.001}, "start=0.001 is below 1 / max_scale=0.01"),
    ],
)
def test_what_is_no_temperature_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(given)
