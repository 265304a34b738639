"""Copies from main memory to a device that the host does not wait for.

A copy to a GPU runs beside the host only where it is asked for (``non_blocking``) and begins in
page-locked memory; otherwise the host waits until the GPU has done all that was queued before it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Memory = Literal["pinned", "pageable"]


def choose_memory(device: torch.device) -> Memory:
    """Which main memory copies to this device begin in; ``pinned`` is page-locked."""
    return "pinned" if device.type == "cuda" else "pageable"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def to_device(tensor: Tensor, device: torch.device, memory: Memory | None = None) -> Tensor:
    """``tensor``, of main memory, on ``device`` (memory None: the device's own choice).

    torch keeps the page-locked copy until the transfer is over.
    """
    if (memory or choose_memory(device)) == "pinned":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
