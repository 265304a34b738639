"""NaN and infinity are found wherever they stand, and no step waits for the device to find them."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mclclip.ranks.finiteness import NotFinite, StepWatch, not_finite

BAD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_one_number_is_found_at_every_place(bad: float, dtype: torch.dtype) -> None:
    """Vector instructions take the numbers eight by eight, with a rest at the end."""
    for place in range(37):
        values = torch.linspace(-3, 3, 37).to(dtype)
        assert not not_finite({"a": values})
        values[place] = bad
        assert not_finite({"good": torch.ones(3), "a": values, "b": values[place]}) == ["a", "b"]


def test_what_holds_no_such_number_is_passed_over() -> None:
    largest = torch.full((9,), torch.finfo(torch.float32).max)
    state: dict[str, Any] = {
        "ends": torch.cat([largest, -largest]),
        "counts": torch.arange(4),
        "mask": torch.tensor([True]),
        "nobody's": torch.empty(0, 3),
        "text": "nan",
    }
    assert not_finite(state) == []
    assert not_finite({"strided": torch.tensor([[1.0, math.nan], [2.0, 3.0]]).T[0]}) == []
    assert not_finite({"w": torch.tensor(math.nan, requires_grad=True)}) == ["w"]


def watch_of(figures: list[float], norms: dict[int, float] | None = None) -> StepWatch:
    watch, norms = StepWatch(), norms or {}
    for step, loss in enumerate(figures):
        watch.take(torch.tensor(loss, requires_grad=True), torch.tensor(norms.get(step, 1.0)))
    return watch


def counts_of(watch: StepWatch) -> dict[str, int]:
    return {name: int(value) for name, value in watch.counts().items()}


@pytest.mark.parametrize("bad", BAD)
def test_the_first_bad_step_is_told_though_later_ones_are_finite(bad: float) -> None:
    """The row of a class center may be spoiled and not be drawn again for long."""
    watch = watch_of([1.0, 1.0, bad, 1.0, bad, 1.0])
    assert counts_of(watch) == {"max_since": 4, "max_in_a_row": 0}
    with pytest.raises(NotFinite, match="not finite since step 103$") as caught:
        watch.judge(106, **counts_of(watch))
    assert caught.value.step == 103


@pytest.mark.parametrize("bad", BAD)
def test_the_gradient_counts_too(bad: float) -> None:
    assert counts_of(watch_of([1.0] * 4, {3: bad})) == {"max_since": 1, "max_in_a_row": 1}
    assert counts_of(watch_of([bad], {0: bad})) == {"max_since": 1, "max_in_a_row": 1}


def test_finite_steps_are_no_matter() -> None:
    watch = watch_of([1.0, 1e30, -5.0])
    assert counts_of(watch) == {"max_since": 0, "max_in_a_row": 0}
    watch.judge(3, **counts_of(watch))
    StepWatch().judge(0, **counts_of(StepWatch()))


@pytest.mark.parametrize(("many", "warned"), [(15, 0), (16, 1)])
def test_steps_left_out_are_a_warning_where_they_are_many(
    many: int, warned: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("mclclip"), "propagate", True)
    watch = watch_of([math.nan, 1.0] + [math.nan] * many)
    watch.leaves_out = True
    watch.judge(40, **counts_of(watch))
    assert len(caplog.records) == warned
    assert warned == ("the last 16 steps up to step 40 were left out" in caplog.text)
    watch.take(torch.tensor(1.0), torch.tensor(1.0))
    assert counts_of(watch)["max_in_a_row"] == 0


def test_no_step_waits_for_the_device() -> None:
    """Reading a number of a tensor is what makes the host wait for a GPU."""

    class Readings(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    one: Tensor = torch.tensor(1.0)
    with Readings() as readings:
        watch = StepWatch()
        for _ in range(3):
            watch.take(one, one * math.nan)
        assert readings.count == 0
        assert counts_of(watch) == {"max_since": 3, "max_in_a_row": 3}
        assert readings.count == 2  # they would have been seen
