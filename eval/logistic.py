"""Multinomial logistic regression on unit features, by scikit-learn or by torch's L-BFGS.

Both minimise the sum of cross-entropies + strength / 2 * |weights|^2, without a penalty on the
bias, in float64, on features scaled to length sqrt(E). The numbers in them are then about 1, so a
strength has the same effect at any width E. Subtracting the mean of the features does not change
the minimum, since the bias makes up for it; but L-BFGS then needs far fewer steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mclclip.eval.features import Features
from mclclip.eval.metrics import IntArray

Solver = Literal["scikit_learn", "torch"]
FloatRows = NDArray[np.float64]

LARGE = 200_000
MAX_ITERATIONS = 1000
# Solvers stop when no entry of the mean loss's gradient is larger. The gradient shrinks with the
# number of classes K, since a class has 1/K of the images, so scikit-learn's default of 1e-4 is too
# coarse for hundreds of classes. If a few images can be classified without error and the strength
# is below 0.1, even 1e-6 leaves the two solvers' accuracies an image or more apart.
TOLERANCE = 1e-6
ROWS = 4096  # so many rows have float64 copies and logits at a time


def choose_solver(num_rows: int) -> Solver:
    """Returns 'scikit_learn', which copies all rows to float64, or, from ``LARGE`` rows on,
    'torch', which copies them in blocks and can run on a GPU."""
    return "torch" if num_rows >= LARGE else "scikit_learn"


@dataclass(frozen=True)
class Classifier:
    """A trained classifier of unit rows: it predicts the class with the largest score, where the
    scores are ``rows @ weight.T + bias``.

    classes    [C] the labels that it was trained on, in ascending order
    weight     [C, E]
    bias       [C]
    gradient   the largest entry of the mean loss's gradient when the solver stopped
    converged  True if the solver reached the minimum
    """

    classes: IntArray
    weight: FloatRows
    bias: FloatRows
    gradient: float
    converged: bool

    def predict(self, rows: Features) -> IntArray:
        """Predicts the labels [Q] of unit rows [Q, E]."""
        best = [scores.argmax(axis=1) for _, scores in self._scores(rows)]
        labels: IntArray = self.classes[np.concatenate(best)]
        return labels

    def ranks(self, rows: Features, labels: IntArray) -> IntArray:
        """The rank [Q], from 1 on, of each row's label among the scores, with ties against the
        classifier. A label that it was not trained on comes after all classes."""
        ranks = []
        for part, scores in self._scores(rows):
            right = self.classes == labels[part, None]
            best = np.where(right, scores, -np.inf).max(axis=1, keepdims=True)
            ranks.append(1 + np.count_nonzero((scores >= best) & ~right, axis=1))
        return np.concatenate(ranks)

    def preferences(self, rows: Features) -> FloatRows:
        """The score of the second of two classes minus that of the first, [Q], without biases.

        Biases are the same for all rows, so they do not change the order of the rows; adding them
        could round away small differences.
        """
        assert len(self.classes) == 2
        preferences: FloatRows = rows @ (self.weight[1] - self.weight[0])
        return preferences

    def _scores(self, rows: Features) -> Iterator[tuple[slice, FloatRows]]:
        """Yields slices of the rows, in order, each with its scores [r, C]."""
        for start in range(0, len(rows), ROWS):
            part = slice(start, start + ROWS)
            yield part, rows[part] @ self.weight.T + self.bias


def fit(
    train: Features,
    labels: IntArray,
    strength: float,
    max_iterations: int = MAX_ITERATIONS,
    *,
    solver: Solver = "scikit_learn",
    device: torch.device | None = None,
) -> Classifier:
    """Trains a classifier of unit rows ``train`` [N, E] with ``labels`` [N], in this process.

    ``strength`` is that of the L2 penalty; ``device`` is where torch computes.
    """
    classes, targets = np.unique(labels, return_inverse=True)
    problem = _Problem(train, targets, len(classes), strength, device)
    solve = _solve_by_torch if solver == "torch" else _solve_by_scikit_learn
    converged = solve(problem, max_iterations)
    weight, bias = (part.detach().cpu().numpy() for part in (problem.weight, problem.bias))
    weight = weight * problem.length
    bias = bias - weight @ problem.mean
    return Classifier(classes.astype(np.int64), weight, bias, problem.gradient(), converged)


class _Problem:
    """The mean loss as a function of ``weight`` [C, E] and ``bias`` [C], which solvers change.

    These are for rows minus ``mean``, times ``length``.
    """

    def __init__(
        self,
        train: Features,
        targets: IntArray,
        num_classes: int,
        strength: float,
        device: torch.device | None,
    ) -> None:
        self.train, self.targets, self.strength = train, targets, strength
        self.length, self.mean = math.sqrt(train.shape[1]), train.mean(axis=0, dtype=np.float64)
        # For two classes scikit-learn has one row of weights, the difference of the two rows here.
        # At the minimum half its square is the sum of the squares of these two.
        self.penalty = strength / len(train) / (1 if num_classes == 2 else 2)
        tensors = (torch.from_numpy(array).to(device) for array in (train, targets))
        self.blocks = [*zip(*(torch.split(tensor, ROWS) for tensor in tensors), strict=True)]
        self.shift = torch.from_numpy(self.mean).to(device)
        options: dict[str, Any] = {"dtype": torch.float64, "device": device, "requires_grad": True}
        self.weight = torch.zeros(num_classes, train.shape[1], **options)
        self.bias = torch.zeros(num_classes, **options)

    def loss(self) -> Tensor:
        """Returns the mean loss, and leaves its gradient in ``weight`` and ``bias``."""
        self.weight.grad = self.bias.grad = None
        loss = self.penalty * self.weight.square().sum()
        torch.autograd.backward(loss)
        total = loss.detach()
        for rows, targets in self.blocks:
            scaled = rows.to(torch.float64, copy=True).sub_(self.shift).mul_(self.length)
            logits = functional.linear(scaled, self.weight, self.bias)
            loss = functional.cross_entropy(logits, targets, reduction="sum") / len(self.train)
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def gradient(self) -> float:
        """The largest absolute entry of the gradient of the mean loss."""
        self.loss()
        gradients = (self.weight.grad, self.bias.grad)
        return max(float(part.abs().max()) for part in gradients if part is not None)


def _solve_by_torch(problem: _Problem, max_iterations: int) -> bool:
    """Minimises the problem's loss; returns True if L-BFGS reached the minimum."""
    optimizer = torch.optim.LBFGS(
        [problem.weight, problem.bias],
        max_iter=max_iterations,
        max_eval=15 * max_iterations,
        tolerance_grad=TOLERANCE,
        tolerance_change=0.0,
        history_size=10,  # as in scikit-learn
        line_search_fn="strong_wolfe",
    )
    optimizer.step(problem.loss)  # type: ignore[no-untyped-call]
    return problem.gradient() <= TOLERANCE


def _solve_by_scikit_learn(problem: _Problem, max_iterations: int) -> bool:
    """Minimises the problem's loss; returns True if the solver reached the minimum."""
    # Importing scikit-learn takes half a second, which other commands need not spend.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    rows = problem.train - problem.mean
    rows *= problem.length
    model = LogisticRegression(C=1 / problem.strength, max_iter=max_iterations, tol=TOLERANCE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(rows, problem.targets)
    weight, bias = model.coef_, model.intercept_
    if len(weight) == 1:  # for two classes, scikit-learn has the difference of their rows
        weight, bias = (np.concatenate([-part, part]) / 2 for part in (weight, bias))
    with torch.no_grad():
        problem.weight.copy_(torch.from_numpy(weight))
        problem.bias.copy_(torch.from_numpy(bias))
    return not any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
