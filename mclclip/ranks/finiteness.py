"""What is not finite, neither NaN nor infinite: steps of a training, and the tensors it saves.

A training that diverges meets no error, since NaN only spreads: it would go on to its end and
leave nothing but NaN. Steps are counted where they run, so that no step waits for the device; what
is counted is looked at where figures are brought to the host anyway.
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

# fp16's loss scale is 65,536 at first and halved by every step left out: after 16 of them it is 1,
# and no longer what makes gradients overflow.
_MANY = 16


class NotFinite(RuntimeError):
    """A training has diverged: its loss, gradient or state is not finite at ``step``.

    Raised on all ranks alike.
    """

    def __init__(self, what: str, step: int) -> None:
        super().__init__(what)
        self.step = step


class StepWatch:
    """Counts the steps of this rank whose loss or gradient norm is not finite.

    ``leaves_out``: whether the engine leaves such steps out. Then they do no harm, and only many
    in a row are worth a word; else the first one has spoiled the weights.
    """

    def __init__(self) -> None:
        self.leaves_out = False
        self._since: Tensor | int = 0  # steps since the first such one, with it; 0: none yet
        self._in_a_row: Tensor | int = 0

    def take(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Notes one more step; does not wait for the device."""
        bad = ~torch.isfinite(loss.detach() + grad_norm)
        self._since = self._since + ((self._since > 0) | bad)
        self._in_a_row = (self._in_a_row + 1) * bad

    def counts(self) -> dict[str, Tensor | int]:
        """Numbers that ``judge`` compares over the ranks, by their largest."""
        return {"max_since": self._since, "max_in_a_row": self._in_a_row}

    def judge(self, done: int, max_since: int, max_in_a_row: int) -> None:
        """Raises NotFinite, after ``done`` steps, where one was not finite and not left out.

        Many in a row that were left out are a warning. To be called by all ranks with equal counts.
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
    """The names of those tensors that hold a NaN or an infinity; of a DTensor, in its local part.

    What is no tensor of floating point numbers is passed over. Waits for the device.
    """
    extremes: dict[str, tuple[Tensor, Tensor]] = {}
    for name, value in tensors.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if isinstance(local, Tensor) and local.is_floating_point() and local.numel():
            # NaN is both. One pass without a copy: on a CPU many times as fast as isfinite().all().
            extremes[name] = torch.aminmax(local.detach())
    return [n for n, pair in extremes.items() if not all(math.isfinite(x.item()) for x in pair)]
