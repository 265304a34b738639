"""Evaluations within one training: when they are due, and what follows from their figures.

At a step that is evaluated the state is saved first, and the evaluation reads that checkpoint; it
changes nothing of the training. A checkpoint of step t holds the figures of the evaluations before
t. So a training that resumes at a step that is evaluated evaluates it again, with the same figures,
and goes on or ends as an undisturbed one does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mclclip.checkpoint import Stateful

Evaluate = Callable[[int], Mapping[str, float]]
"""Figures by name of the checkpoint of a step, the same on all ranks; all ranks call it."""


@dataclass(kw_only=True)
class Judging:
    """The evaluations of one training.

    every     steps between two; one more follows the last step
    total     steps of the training
    metric    the figure that decides, by its name; None: figures are only recorded
    mode      whether a larger or a smaller figure is better; an equal one is not
    best      whether the checkpoint with the best figure is kept, to be exported
    patience  evaluations in a row without a better figure after which the training ends; None: all
              steps are taken
    """

    evaluate: Evaluate
    every: int
    total: int
    metric: str | None = None
    mode: Literal["max", "min"] = "max"
    best: bool = False
    patience: int | None = None
    values: list[float] = field(default_factory=list)

    def due(self, done: int) -> bool:
        """Whether the checkpoint of ``done`` steps is evaluated."""
        return done > 0 and (done % self.every == 0 or done == self.total)

    def judge(self, done: int) -> Mapping[str, float]:
        """Evaluates the checkpoint of ``done`` steps.

        Raises ValueError where ``metric`` is not measured.
        """
        figures = self.evaluate(done)
        if self.metric is None:
            return figures
        if self.metric not in figures:
            raise ValueError(
                f"evaluate.metric={self.metric!r} is not measured: name one of {', '.join(figures)}"
            )
        # A resumed training evaluates its first step again.
        self.values = [*self.values[: self._number(done)], float(figures[self.metric])]
        return figures

    def _number(self, done: int) -> int:
        """How many evaluations there are before that of ``done``."""
        return (done - 1) // self.every

    @property
    def kept_step(self) -> int | None:
        """The step whose checkpoint is kept and exported; None for the last one."""
        return self.best_step if self.best else None

    @property
    def best_step(self) -> int | None:
        """The first step with the best figure so far; None without a metric or a figure."""
        number = self._best()
        return None if number is None else min((number + 1) * self.every, self.total)

    def _best(self) -> int | None:
        if not self.values:
            return None
        return self.values.index(max(self.values) if self.mode == "max" else min(self.values))

    @property
    def patience_is_over(self) -> bool:
        """Whether so many evaluations in a row have brought nothing better."""
        best = self._best()
        if self.patience is None or best is None:
            return False
        return len(self.values) - 1 - best >= self.patience

    def state_dict(self) -> dict[str, Tensor]:
        """The figures so far, in tensors whose shapes do not depend on their number."""
        if self.metric is None:
            return {}
        values = torch.zeros(-(-self.total // self.every), dtype=torch.float64)
        values[: len(self.values)] = torch.tensor(self.values, dtype=torch.float64)
        return {"evaluation.values": values, "evaluation.count": torch.tensor(len(self.values))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads what ``state_dict`` returned."""
        if self.metric is not None:
            count = int(state["evaluation.count"])
            self.values = state["evaluation.values"][:count].tolist()


@dataclass(frozen=True)
class Together:
    """The state of an engine and of the evaluations, as a checkpoint holds them."""

    engine: Stateful
    judging: Judging

    def state_dict(self) -> dict[str, Tensor]:
        """Both states; a collective."""
        return {**self.engine.state_dict(), **self.judging.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads both states; a collective."""
        self.judging.load_state_dict(state)
        names = self.judging.state_dict()
        self.engine.load_state_dict({name: v for name, v in state.items() if name not in names})
