"""An exponential moving average of the trained parameters, kept beside them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class MovingAverage:
    """``tensors[name] <- decay * tensors[name] + (1 - decay) * parameters[name]``, in fp32.

    ``parameters``: this rank's part of each trained parameter (all or a shard), read at updates.
    Raises ValueError for a decay outside (0, 1).
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(
                f"ema_decay is {decay}: wanted a number between 0 and 1, such as 0.999"
            )
        self._parameters = dict(parameters)
        self.tensors = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average one step towards the parameters."""
        averages = list(self.tensors.values())
        self._average(averages, list(self._parameters.values()), torch.tensor(0))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the average from a checkpoint's tensors."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])
