"""Finds NaN and infinity in training steps and in tensors that are saved.

A diverging training raises no error by itself: NaN spreads, and the run would go on to its end
with useless weights. Bad steps are counted on the device, so that no step waits for it; the counts
are read when metrics are copied to the host anyway.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mclclip.ranks import collectives

log = logging.getLogger("mclclip")

# The fp16 loss scale starts at 65,536 and is halved by every skipped step. After 16 of them it is
# 1, and no longer explains why gradients overflow.
_MANY = 16


class NotFinite(RuntimeError):
    """The training has diverged: its loss, gradient or state is not finite at ``step``.

    All ranks raise it together.
    """

    def __init__(self, what: str, step: int) -> None:
        super().__init__(what)
        self.step = step


class StepWatch:
    """Counts the steps of this rank whose loss or gradient norm is not finite.

    ``leaves_out``: whether the engine skips the weight update of such steps. Then only many of them
    in a row are warned of; otherwise the first one has spoiled the weights.
    """

    def __init__(self) -> None:
        self.leaves_out = False
        self._since: Tensor | int = 0  # number of steps from the first bad one on; 0: none yet
        self._in_a_row: Tensor | int = 0

    def take(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Counts one more step, from its 0-dimensional tensors; does not wait for the device."""
        bad = ~torch.isfinite(loss.detach() + grad_norm)
        self._since = self._since + ((self._since > 0) | bad)
        self._in_a_row = (self._in_a_row + 1) * bad

    def counts(self) -> dict[str, Tensor | int]:
        """This rank's counts; ``judge`` takes the maximum of each over the ranks."""
        return {"max_since": self._since, "max_in_a_row": self._in_a_row}

    def judge(self, done: int, max_since: int, max_in_a_row: int) -> None:
        """Raises NotFinite if one of the ``done`` steps was not finite and was not skipped.

        Warns of many skipped steps in a row. All ranks must call this with equal counts.
        """
        if max_since and not self.leaves_out:
            first = done - max_since + 1
            raise NotFinite(f"the loss or its gradient is not finite since step {first}", first)
        if max_in_a_row >= _MANY and collectives.rank() == 0:
            log.warning(
                "the last %d steps up to step %d were left out, since their loss or gradient is "
                "not finite: nothing is learned; lower lr, or start from other weights",
                max_in_a_row, done,
            )  # fmt: skip


def not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """The names of the tensors that hold a NaN or an infinity. Waits for the device.

    Of a DTensor only the local part is read. Values that are no floating-point tensors are ignored.
    """
    extremes: dict[str, tuple[Tensor, Tensor]] = {}
    for name, value in tensors.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(local, Tensor) and local.is_floating_point() and local.numel():
            # With a NaN inside, both extremes are NaN. One pass without a copy: on a CPU this is
            # many times as fast as isfinite().all().
            extremes[name] = torch.aminmax(local.detach())
    return [n for n, pair in extremes.items() if not all(math.isfinite(x.item()) for x in pair)]
