"""Copies to a device: the host neither waits for them nor reads them back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mclclip.ranks.transfer import choose_memory, to_device
from tests.device_waits import DEVICE, following


def test_copies_to_a_gpu_begin_in_pinned_memory() -> None:
    assert choose_memory(torch.device("cuda", 1)) == "pinned"
    assert choose_memory(torch.device("cpu")) == "pageable"


@pytest.mark.parametrize(("memory", "pinned"), [("pinned", 1), ("pageable", 0), (None, 0)])
def test_values_arrive_without_a_wait(
    monkeypatch: pytest.MonkeyPatch, memory: Any, pinned: int
) -> None:
    calls: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:  # a machine without a GPU has no such memory
        calls.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    values = torch.tensor([3, 1, 2])
    with following() as waits:
        waits.recording = True
        moved = to_device(values, DEVICE, memory)
        assert waits.on_device(moved) and not waits.on_device(values)
        assert not waits.found
    assert torch.equal(moved, values) and len(calls) == pinned
