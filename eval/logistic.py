"""Multinomial logistic regression on unit features, by scikit-learn or by torch over ranks.

Both minimise the sum of cross-entropies + strength / 2 * |weights|^2, without a penalty on the
bias, in float64 by L-BFGS, on features scaled to length sqrt(E). Their entries are then about 1,
like those of an image tower's last norm, so that a strength has the same effect at any width. The
bias absorbs any shift of the features, so subtracting their mean does not change the minimum;
L-BFGS then needs far fewer steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mclclip.eval.features import Features, over_ranks
from mclclip.eval.metrics import IntArray
from mclclip.ranks.collectives import broadcast, broadcast_object, gather, together
from mclclip.ranks.process_group import Context

Solver = Literal["auto", "scikit_learn", "torch"]
"""Who solves; ``auto`` takes torch from ``LARGE`` on, where scikit-learn would take hours."""

LARGE = 20_000_000  # rows x classes: CIFAR-100 has 5 million, ImageNet 1,281 million
MAX_ITERATIONS = 1000
# Bound of the gradient of the mean loss, which shrinks with the number of classes K, since a class
# has 1/K of the images. scikit-learn's default of 1e-4 is too coarse for hundreds of classes.
TOLERANCE = 1e-6
HISTORY = 10  # scikit-learn's
# Sums are made of so many parts of the rows, in order, whatever the number of ranks that compute
# them, so that the result does not depend on it. More ranks than these do nothing.
PARTS = 16
ROWS = 16_384  # rows of a part whose logits are held at a time


@dataclass(frozen=True)
class Classifier:
    """The largest entry of ``rows @ weight.T + bias`` is predicted.

    classes    [C] the labels that it was trained on, in order
    weight     [C, E], of unit rows
    bias       [C]
    converged  whether the solver reached the minimum
    """

    classes: IntArray
    weight: NDArray[np.float64]
    bias: NDArray[np.float64]
    converged: bool

    def predict(self, rows: Features) -> IntArray:
        """Labels [Q] of unit rows [Q, E]."""
        best = [scores.argmax(axis=1) for _, scores in self._scores(rows)]
        labels: IntArray = self.classes[np.concatenate(best)]
        return labels

    def ranks(self, rows: Features, labels: IntArray) -> IntArray:
        """The rank [Q] of each row's label, from 1 on, with ties against the classifier; a class
        that it was not trained on is behind all others."""
        ranks = []
        for part, scores in self._scores(rows):
            own = self.classes == labels[part, None]
            best = np.where(own, scores, -np.inf).max(axis=1, keepdims=True)
            ranks.append(1 + np.count_nonzero((scores >= best) & ~own, axis=1))
        return np.concatenate(ranks)

    def preferences(self, rows: Features) -> NDArray[np.float64]:
        """How much each row [Q] is of the second of two classes; without the biases, which are
        equal for all rows and would hide small differences in their last digits."""
        assert len(self.classes) == 2
        preferences: NDArray[np.float64] = rows @ (self.weight[1] - self.weight[0])
        return preferences

    def _scores(self, rows: Features) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """Yields parts of the rows, in order, each with its scores [r, C]."""
        for start in range(0, len(rows), ROWS):
            part = slice(start, start + ROWS)
            yield part, rows[part] @ self.weight.T + self.bias


def choose(solver: Solver, num_rows: int, num_classes: int) -> Solver:
    """``auto`` resolved by the size of the problem, so that it is the same on every machine."""
    if solver != "auto":
        return solver
    return "torch" if num_rows * num_classes >= LARGE else "scikit_learn"


def fit_all(
    context: Context,
    train: Features,
    labels: IntArray,
    strengths: Sequence[float],
    *,
    solver: Solver = "scikit_learn",
    max_iterations: int = MAX_ITERATIONS,
) -> list[Classifier]:
    """One classifier per strength, the same on every rank.

    With scikit-learn the ranks divide the strengths, with torch the rows of each fit, on their
    devices. All ranks must pass the same arguments.
    """
    if choose(solver, len(train), len(np.unique(labels))) == "torch":
        problem = _Problem(context, train, labels)
        return [problem.fit(strength, max_iterations) for strength in strengths]

    def own(part: slice) -> list[Classifier]:
        return [fit(train, labels, strength, max_iterations) for strength in strengths[part]]

    return [*chain(*over_ranks(context, len(strengths), own))]


def fit(
    train: Features, labels: IntArray, strength: float, max_iterations: int = MAX_ITERATIONS
) -> Classifier:
    """Trains scikit-learn's classifier on unit rows ``train`` [N, E] with ``labels`` [N]."""
    # Imported here, since it takes half a second that other commands need not spend.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    length, mean = _length_and_mean(train)
    model = LogisticRegression(C=1 / strength, max_iter=max_iterations, tol=TOLERANCE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit((train - mean) * length, labels)
    stopped = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
    weight, bias = model.coef_, model.intercept_
    if len(weight) == 1:  # of two classes scikit-learn keeps the second one's row alone
        weight, bias = (np.concatenate([-part, part]) / 2 for part in (weight, bias))
    return _classifier(model.classes_, weight, bias, train, not stopped)


def _length_and_mean(train: Features) -> tuple[float, NDArray[np.float64]]:
    """The length that unit rows are scaled to, and the mean that is subtracted before."""
    return math.sqrt(train.shape[1]), train.mean(axis=0, dtype=np.float64)


def _classifier(
    classes: IntArray,
    weight: NDArray[np.float64],
    bias: NDArray[np.float64],
    train: Features,
    converged: bool,
) -> Classifier:
    """A classifier of unit rows, from one of rows after the shift and the scaling."""
    length, mean = _length_and_mean(train)
    weight = weight * length
    return Classifier(classes.astype(np.int64), weight, bias - weight @ mean, converged)


class _Problem:
    """The training set as parts on the devices of the ranks; each rank holds its own."""

    def __init__(self, context: Context, train: Features, labels: IntArray) -> None:
        self.train, self.device, self.is_main = train, context.device, context.is_main
        self.classes, targets = np.unique(labels, return_inverse=True)
        # Each rank has the same number of slots; those beyond its own parts stay 0.
        world = context.world_size
        bounds = [PARTS * rank // world for rank in range(world + 1)]
        self.slots = -(-PARTS // world)
        self.filled = [
            rank * self.slots + slot
            for rank in range(world)
            for slot in range(bounds[rank + 1] - bounds[rank])
        ]
        self.length, mean = _length_and_mean(train)
        self.mean = torch.from_numpy(mean).to(self.device)
        self.parts = []
        for part in range(bounds[context.rank], bounds[context.rank + 1]):
            rows = slice(len(train) * part // PARTS, len(train) * (part + 1) // PARTS)
            own = (torch.from_numpy(train[rows]), torch.from_numpy(targets[rows]))
            self.parts.append(tuple(tensor.to(self.device) for tensor in own))

    def fit(self, strength: float, max_iterations: int) -> Classifier:
        """Trains with all ranks; every rank gets the first one's classifier.

        The first rank takes the steps and decides when to stop; the others add their parts to each
        sum that it asks for. So ranks of unequal machines cannot come to unequal decisions.
        """
        shape = (len(self.classes), self.train.shape[1] + 1)  # the last column is the bias
        solution = torch.zeros(shape, dtype=torch.float64, device=self.device)

        def work() -> Classifier | None:
            if not self.is_main:
                sent = solution.new_empty(solution.numel() + 1)
                while (sent := broadcast(sent))[0]:  # as ``_ask`` sends it
                    self._sums(solution.copy_(sent[1:].view_as(solution)))
                return None
            try:
                return self._solve(solution, strength, max_iterations)
            finally:
                self._ask(solution, more=False)

        fitted: Classifier = broadcast_object(together(work))  # type: ignore[assignment]
        return fitted

    def _solve(self, solution: Tensor, strength: float, max_iterations: int) -> Classifier:
        if len(self.classes) == 2:
            # scikit-learn penalises the one row of weights that two classes need, which is the
            # difference of the two here: half their squares' sum at the minimum.
            strength *= 2
        optimizer = torch.optim.LBFGS(
            [solution],
            max_iter=max_iterations,
            max_eval=15 * max_iterations,
            tolerance_grad=TOLERANCE,
            tolerance_change=0.0,
            history_size=HISTORY,
            line_search_fn="strong_wolfe",
        )

        def closure() -> float:
            loss, solution.grad = self._loss_and_gradient(solution, strength)
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        _, gradient = self._loss_and_gradient(solution, strength)
        converged = bool(gradient.abs().max() <= TOLERANCE)
        rows = solution.cpu().numpy()
        return _classifier(self.classes, rows[:, :-1], rows[:, -1], self.train, converged)

    def _loss_and_gradient(self, solution: Tensor, strength: float) -> tuple[float, Tensor]:
        """The mean loss of all rows and its gradient, of ``solution``'s shape; first rank only."""
        self._ask(solution, more=True)
        total = self._sums(solution) / len(self.train)
        penalised, share = solution[:, :-1], strength / len(self.train)
        gradient = total[1:].reshape(solution.shape)
        gradient[:, :-1] += share * penalised
        return float(total[0] + share / 2 * penalised.square().sum()), gradient

    def _ask(self, solution: Tensor, *, more: bool) -> None:
        """Sends the first rank's solution, and whether sums of it are wanted, to the others."""
        broadcast(torch.cat([solution.new_tensor([more]), solution.detach().flatten()]))

    def _sums(self, solution: Tensor) -> Tensor:
        """The sums of losses and gradients over the rows of all ranks, on every rank."""
        sums = solution.new_zeros(self.slots, solution.numel() + 1)
        for slot, (rows, targets) in enumerate(self.parts):
            for start in range(0, len(rows), ROWS):
                self._add(sums[slot], solution, rows[start:][:ROWS], targets[start:][:ROWS])
        return gather(sums)[self.filled].sum(dim=0)

    def _add(self, sums: Tensor, solution: Tensor, rows: Tensor, targets: Tensor) -> None:
        scaled = (rows.double() - self.mean) * self.length
        log_shares = (scaled @ solution[:, :-1].T + solution[:, -1]).log_softmax(dim=1)
        own = targets[:, None]
        sums[0] -= log_shares.gather(1, own).sum()
        errors = log_shares.exp_()
        errors.scatter_add_(1, own, errors.new_full(own.shape, -1.0))
        gradient = sums[1:].view_as(solution)
        gradient[:, :-1] += errors.T @ scaled
        gradient[:, -1] += errors.sum(dim=0)
