"""Multinomial logistic regression on unit features, by scipy's L-BFGS.

It minimises the sum of cross-entropies + strength / 2 * |weights|^2, without a penalty on the bias,
in float64, on features scaled to length sqrt(E). The numbers in them are then about 1, so a
strength has the same effect at any width E. Subtracting the mean of the features does not change
the minimum, since the bias makes up for it; but L-BFGS then needs far fewer steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch.nn import functional

from mclclip.eval.features import Features
from mclclip.eval.metrics import IntArray

FloatRows = NDArray[np.float64]

MAX_ITERATIONS = 1000
# The solver stops when no entry of the mean loss's gradient is larger. The gradient shrinks with
# the number of classes K, since a class has 1/K of the images, so scikit-learn's default of 1e-4
# is too coarse for hundreds of classes. If a few images can be classified without error and the
# strength is below 0.1, even 1e-6 leaves the accuracy an image or more from that of the minimum.
TOLERANCE = 1e-6
ROWS = 4096  # so many rows have float64 copies and logits at a time
_EPS = float(np.finfo(np.float64).eps)


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
    device: torch.device | None = None,
) -> Classifier:
    """Trains a classifier of unit rows ``train`` [N, E] with ``labels`` [N], in this process.

    ``strength`` is that of the L2 penalty; ``device`` is where torch computes the loss. The rows
    are copied to float64 in blocks.
    """
    classes, targets = np.unique(labels, return_inverse=True)
    length, mean = math.sqrt(train.shape[1]), train.mean(axis=0, dtype=np.float64)
    # scikit-learn has one row of weights for two classes, the difference of the two rows here. At
    # the minimum half its square is the sum of the squares of these two.
    penalty = strength / len(train) / (1 if len(classes) == 2 else 2)
    tensors = (torch.from_numpy(array).to(device) for array in (train, targets))
    blocks = [*zip(*(torch.split(tensor, ROWS) for tensor in tensors), strict=True)]
    shift = torch.from_numpy(mean * length).to(device)
    shape = len(classes), train.shape[1]

    def loss(parameters: FloatRows) -> tuple[float, FloatRows]:
        """Returns the mean loss and its gradient for ``parameters``, C rows of weights and C
        biases, which are for rows minus ``mean``, times ``length``."""
        flat = torch.tensor(parameters, device=device, requires_grad=True)
        total = 0.0
        for number, (rows, block_targets) in enumerate(blocks):
            weight, bias = flat[: -len(classes)].view(shape), flat[-len(classes) :]
            logits = functional.linear(rows.double(), weight * length, bias - weight @ shift)
            part = functional.cross_entropy(logits, block_targets, reduction="sum") / len(train)
            if number == 0:
                part = part + penalty * weight.square().sum()
            torch.autograd.backward(part)
            total += float(part.detach())
        assert flat.grad is not None
        return total, flat.grad.cpu().numpy()

    # Apart from the largest number of steps, the settings are scikit-learn's.
    options = {"maxiter": max_iterations, "maxls": 50, "gtol": TOLERANCE, "ftol": 64 * _EPS}
    start = np.zeros(math.prod(shape) + len(classes))
    result = minimize(loss, start, method="L-BFGS-B", jac=True, options=options)
    weight = result.x[: -len(classes)].reshape(shape) * length
    bias = result.x[-len(classes) :] - weight @ mean
    gradient = float(np.abs(result.jac).max())
    return Classifier(classes.astype(np.int64), weight, bias, gradient, bool(result.success))
