"""Protocol of parameters that an engine trains but does not wrap."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class OutsideParameters(Protocol):
    """Parameters that are trained together with a module that an engine wraps, but not wrapped.

    Their gradients are not averaged over the ranks, and they have their own optimizer. Sharded
    class centers are an example.
    """

    def begin(self, step: int, loss_scale: Tensor | float = 1.0) -> None:
        """Prepares a step whose loss is multiplied by ``loss_scale`` before the backward pass."""

    def zero_grad(self) -> None:
        """Drops the gradient."""

    def grad_square(self) -> Tensor:
        """The sum of squares of the gradient over all ranks, float64, 0-dimensional."""

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        """One optimizer step along ``factor`` times the gradient at the learning rate ``lr``."""

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that a resumed training needs; no other part uses their names."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads the entries that ``state_dict`` names; ignores all others in ``state``."""
