"""The moving average of weights."""

from __future__ import annotations

import pytest
import torch

from mclclip.engines.engine import MovingAverage


def test_it_is_the_formula_written_out() -> None:
    weight = torch.tensor([1.0, 2.0])
    average = MovingAverage({"weight": weight}, decay=0.75)
    expected = weight.clone()
    for value in (3.0, -1.0, 0.5):
        weight.fill_(value)
        average.update()
        expected = 0.75 * expected + 0.25 * value
        torch.testing.assert_close(average.tensors["weight"], expected)


def test_it_takes_the_values_of_a_checkpoint() -> None:
    average = MovingAverage({"weight": torch.zeros(2)}, decay=0.5)
    average.load({"weight": torch.tensor([4.0, 8.0])})
    average.update()
    assert average.tensors["weight"].tolist() == [2.0, 4.0]


@pytest.mark.parametrize("decay", [0.0, 1.0, 1.5, -0.1])
def test_a_decay_outside_of_0_and_1_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="ema_decay is"):
        MovingAverage({}, decay)
