"""Evaluations within one training: when they are due, and what follows from their figures.

At a step that is evaluated the state is saved first, and the evaluation reads that checkpoint; it
changes nothing of the training. A checkpoint of step t holds the figures of the evaluations before
t. So a training that resumes at a step that is evaluated evaluates it again, with the same figures,
and goes on or ends as an undisturbed one does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mclclip.checkpoint import Stateful
from mclclip.train.options import EvaluateConfig

Evaluate = Callable[[int], Mapping[str, float]]
"""Figures by name of the checkpoint of a step, the same on all ranks; all ranks call it."""


@dataclass
class Judging:
    """The evaluations of one training of ``total`` steps, every ``every`` steps and after the last.

    ``options`` name the figure that decides, ``metric``; without one, figures are only recorded.
    An equal figure is not a better one.
    """

    evaluate: Evaluate
    options: EvaluateConfig
    every: int
    total: int
    values: list[float] = field(default_factory=list)

    def due(self, done: int) -> bool:
        """Whether the checkpoint of ``done`` steps is evaluated."""
        return done > 0 and (done % self.every == 0 or done == self.total)

    def judge(self, done: int) -> Mapping[str, float]:
        """Evaluates the checkpoint of ``done`` steps.

        Raises ValueError where ``metric`` is not measured.
        """
        figures, metric = self.evaluate(done), self.options.metric
        if metric is None:
            return figures
        if metric not in figures:
            raise ValueError(
                f"evaluate.metric={metric!r} is not measured: name one of {', '.join(figures)}"
            )
        # A resumed training evaluates its first step again.
        before = (done - 1) // self.every
        self.values = [*self.values[:before], float(figures[metric])]
        return figures

    @property
    def kept_step(self) -> int | None:
        """The step whose checkpoint is kept and exported; None for the last one."""
        return self.best_step if self.options.best else None

    @property
    def best_step(self) -> int | None:
        """The first step with the best figure so far; None without a metric or a figure."""
        return min((self._best + 1) * self.every, self.total) if self.values else None

    @property
    def _best(self) -> int:
        """Number of the first evaluation with the best figure."""
        best = max(self.values) if self.options.mode == "max" else min(self.values)
        return self.values.index(best)

    @property
    def patience_is_over(self) -> bool:
        """Whether ``patience`` evaluations in a row have brought nothing better."""
        if self.options.patience is None or not self.values:
            return False
        return len(self.values) - 1 - self._best >= self.options.patience

    def state_dict(self) -> dict[str, Tensor]:
        """The figures so far, in tensors whose shapes do not depend on their number."""
        if self.options.metric is None:
            return {}
        values = torch.zeros(-(-self.total // self.every), dtype=torch.float64)
        values[: len(self.values)] = torch.tensor(self.values, dtype=torch.float64)
        return {"evaluation.values": values, "evaluation.count": torch.tensor(len(self.values))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads what ``state_dict`` returned."""
        if self.options.metric is not None:
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
