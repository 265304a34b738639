"""Protocol of parameters that an engine trains but does not wrap."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class OutsideParameters(Protocol):
    """Parameters that are trained with a module but lie outside of what engines wrap.

    Their gradients are not averaged over the ranks, and they have an optimizer of their own.
    Sharded class centers are an example.
    """

    def begin(self, step: int, loss_scale: float = 1.0) -> None:
        """Prepares a step, whose loss will be multiplied by ``loss_scale`` before the backward."""

    def zero_grad(self) -> None:
        """Forgets the gradient."""

    def grad_square(self) -> Tensor:
        """The sum of squares of the gradient over all ranks, float64, 0-dimensional."""

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        """One optimizer step along ``factor`` times the gradient at the learning rate ``lr``."""

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what a resumed training needs, by names that no other part uses."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes what ``state_dict`` gave, filled with other values, among other entries."""
