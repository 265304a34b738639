"""Linear probe: multinomial logistic regression on frozen image features.

Source: Radford et al., CLIP (2021), appendix A.3: L-BFGS with at most 1,000 iterations. The L2
strength is chosen on a validation set, from 1e-6 to 1e6 with 8 steps per decade (96 steps): first 7
values, then ever closer ones around the best. The final classifier is trained on train and
validation together.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.eval.features import Extractor, Features, over_ranks
from mclclip.eval.labelled_features import Feature, LabelledFeatures, accuracy_figures, extract
from mclclip.eval.metrics import BoolArray, IntArray
from mclclip.eval.results import Figure
from mclclip.ranks.collectives import on_main

READS_TEXT = False  # whether images are compared with texts

log = logging.getLogger("mclclip")

MAX_ITERATIONS = 1000
OpenShare = Annotated[float, Field(gt=0.0, lt=1.0)]
STEPS_PER_DECADE = 8
LAST_POSITION = 6 * STEPS_PER_DECADE  # positions -48 to 48 of the grid are 1e-6 to 1e6
# Bound of the gradient of the mean loss, which shrinks with the number of classes K, since a class
# has 1/K of the images. scikit-learn's default of 1e-4 is too coarse for hundreds of classes.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Answers:
    """Predicted labels [Q], and whether the classifier had converged."""

    predicted: IntArray
    converged: bool


def strength_at(position: int) -> float:
    """The L2 strength at a position of the grid."""
    return float(10.0 ** (position / STEPS_PER_DECADE))


@dataclass(frozen=True)
class Classifier:
    """A trained classifier of unit rows [Q, E].

    model      scikit-learn's, of rows after the shift and the scaling
    mean       [E], subtracted from rows
    length     multiplies what is left
    converged  False where scikit-learn warned of it
    """

    model: Any
    mean: NDArray[np.float64]
    length: float
    converged: bool

    def predict(self, rows: Features) -> IntArray:
        """Labels [Q] of unit rows [Q, E]."""
        labels: IntArray = self.model.predict((rows - self.mean) * self.length).astype(np.int64)
        return labels

    def linear(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Weight [C, E] and bias [C]: the largest entry of ``rows @ weight.T + bias`` is predicted.

        C are the classes that it was trained on, in order.
        """
        weight, bias = self.model.coef_ * self.length, self.model.intercept_
        if len(weight) == 1:  # of two classes scikit-learn keeps the second one's row alone
            weight = np.concatenate([-weight, weight]) / 2
            bias = np.concatenate([-bias, bias]) / 2
        return weight, bias - weight @ self.mean


def fit(
    train: Features, labels: IntArray, strength: float, max_iterations: int = MAX_ITERATIONS
) -> Classifier:
    """Trains on unit rows ``train`` [N, E] with ``labels`` [N].

    Minimises sum of cross-entropies + strength / 2 * |weights|^2, without a penalty on the bias, on
    features scaled to length sqrt(E). Their entries are about 1, like those of an image tower's
    last norm, so that a strength has the same effect at any width.
    """
    # Imported here, since it takes half a second that other commands need not spend.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # The bias absorbs any shift of the features, so subtracting their mean does not change the
    # minimum; L-BFGS then needs far fewer steps.
    length, mean = math.sqrt(train.shape[1]), train.mean(axis=0, dtype=np.float64)
    model = LogisticRegression(C=1 / strength, max_iter=max_iterations, tol=TOLERANCE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit((train - mean) * length, labels)
    stopped = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
    return Classifier(model, mean, length, not stopped)


def fit_predict(
    train: Features,
    labels: IntArray,
    test: Features,
    strength: float,
    max_iterations: int = MAX_ITERATIONS,
) -> Answers:
    """Trains on unit rows ``train`` [N, E] with ``labels`` [N] (``fit``); answers ``test`` [Q, E].

    ``converged`` is False where scikit-learn warns of it.
    """
    classifier = fit(train, labels, strength, max_iterations)
    return Answers(classifier.predict(test), classifier.converged)


def held_out(labels: IntArray, share: float, seed: int) -> BoolArray:
    """[N]: True for a seeded ``share`` of every class, rounded, at least one image and never all.

    Raises ValueError where every class has only one image.
    """
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        held[rows[: min(max(1, round(share * len(rows))), len(rows) - 1)]] = True
    if not held.any():
        raise ValueError(
            "every class has one train image, so none can be held out to choose the strength: "
            "set strength, such as strength=1"
        )
    return held


def search(score: Callable[[Sequence[int]], Mapping[int, float]]) -> int:
    """The grid position with the best score, searched from coarse to fine; ties by the higher one.

    ``score`` returns the scores of some positions: first of 7, two decades apart, then of the best
    one's neighbours at half the distance, and so on down to the distance of the grid.
    """
    step = 2 * STEPS_PER_DECADE
    scores = dict(score(range(-LAST_POSITION, LAST_POSITION + 1, step)))
    while True:
        best = max(scores, key=lambda position: (scores[position], position))
        if step == 1:
            return best
        step //= 2
        around = [p for p in (best - step, best + step) if abs(p) <= LAST_POSITION]
        scores.update(score([p for p in around if p not in scores]))


def choose_strength(
    extractor: Extractor, data: LabelledFeatures, share: float, seed: int, max_iterations: int
) -> float:
    """The strength with the highest accuracy on the held-out part of ``data.train``.

    Ranks divide the fits of a round.
    """
    held = held_out(data.train_labels, share, seed)
    train, labels = data.train[~held], data.train_labels[~held]
    queries, truth = data.train[held], data.train_labels[held]

    def score(positions: Sequence[int]) -> dict[int, float]:
        def fit(own: slice) -> list[Answers]:
            strengths = map(strength_at, positions[own])
            return [fit_predict(train, labels, queries, s, max_iterations) for s in strengths]

        scores = {}
        found = chain(*over_ranks(extractor.context, len(positions), fit))
        for p, answers in zip(positions, found, strict=True):
            scores[p] = float(np.mean(answers.predicted == truth))
            accuracy = f"validation accuracy {100 * scores[p]:.2f} %"
            _say(strength_at(p), accuracy, answers.converged)
        return scores

    return strength_at(search(score))


def _say(strength: float, what: str, converged: bool) -> None:
    level, end = (logging.INFO, "") if converged else (logging.WARNING, ", did not converge")
    log.log(level, "linear probe: L2 strength %.3g: %s%s", strength, what, end)


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    feature: Feature = "projected",
    strength: PositiveFloat | None = None,
    validation_share: OpenShare = 0.2,
    seed: NonNegativeInt = 0,
    max_iterations: PositiveInt = MAX_ITERATIONS,
) -> list[Figure]:
    """Accuracy and ``mean_per_class`` in percent of the images in ``root/test`` under a classifier
    trained on ``root/train``; both hold a folder per class.

    ``strength``: the L2 strength (see ``fit_predict``); None chooses it on ``validation_share`` of
    every class of train, then trains on all of it. CLIP's protocol is ``feature="pooled"``. Figures
    do not depend on the number of ranks. Raises ValueError for options out of range.
    """
    if strength is not None and not (math.isfinite(strength) and strength > 0):
        raise ValueError(f"strength is {strength}, wanted a number above 0")
    if not 0 < validation_share < 1:
        raise ValueError(f"validation_share is {validation_share}, wanted between 0 and 1")
    if max_iterations < 1:
        raise ValueError(f"max_iterations is {max_iterations}, wanted at least 1")
    data = extract(extractor, root, feature)
    chosen = strength or choose_strength(extractor, data, validation_share, seed, max_iterations)
    answers = on_main(
        lambda: fit_predict(data.train, data.train_labels, data.test, chosen, max_iterations)
    )
    _say(chosen, "trained on train and validation", answers.converged)
    protocol = {
        "name": "linear_probe",
        "strength": chosen,
        "strength_from": "set" if strength else f"validation on {validation_share:g} of train",
        "seed": seed,
        "max_iterations": max_iterations,
        "converged": answers.converged,
        "standardised": "rows to equal length",
        **data.protocol,
    }
    return accuracy_figures(answers.predicted, data, protocol)
