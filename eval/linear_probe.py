"""Linear probe: multinomial logistic regression on frozen image features.

Source: Radford et al., CLIP (2021), appendix A.3: L-BFGS with at most 1,000 iterations. The L2
strength is chosen on a validation set, from 1e-6 to 1e6 with 8 steps per decade (96 steps): first 7
values, then ever closer ones around the best. The final classifier is trained on train and
validation together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.eval import logistic
from mclclip.eval.features import Extractor
from mclclip.eval.labelled_features import Feature, LabelledFeatures, accuracy_figures, extract
from mclclip.eval.logistic import MAX_ITERATIONS, Solver
from mclclip.eval.metrics import BoolArray, IntArray
from mclclip.eval.results import Figure
from mclclip.ranks.collectives import on_main
from mclclip.ranks.process_group import Context

READS_TEXT = False  # whether images are compared with texts

log = logging.getLogger("mclclip")

OpenShare = Annotated[float, Field(gt=0.0, lt=1.0)]
STEPS_PER_DECADE = 8
LAST_POSITION = 6 * STEPS_PER_DECADE  # positions -48 to 48 of the grid are 1e-6 to 1e6


def strength_at(position: int) -> float:
    """The L2 strength at a position of the grid."""
    return float(10.0 ** (position / STEPS_PER_DECADE))


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


def answer(
    context: Context,
    data: LabelledFeatures,
    *,
    strength: float | None,
    validation_share: float,
    seed: int,
    max_iterations: int,
    solver: Solver,
) -> tuple[IntArray, dict[str, Any]]:
    """Labels [Q] predicted for ``data.test``, and what a row's protocol says of the classifier.

    Without a ``strength`` it is chosen on ``validation_share`` of every class of train; the
    classifier is then trained on all of it. All ranks must call it, and get the same. Raises
    ValueError for options out of range.
    """
    if strength is not None and not (math.isfinite(strength) and strength > 0):
        raise ValueError(f"strength is {strength}, wanted a number above 0")
    if not 0 < validation_share < 1:
        raise ValueError(f"validation_share is {validation_share}, wanted between 0 and 1")
    if max_iterations < 1:
        raise ValueError(f"max_iterations is {max_iterations}, wanted at least 1")
    train, labels = data.train, data.train_labels
    if len(np.unique(labels)) < 2:
        raise ValueError("all train images are of one class: a classifier needs two at least")
    # Decided once, so that search and final fit are solved alike.
    solver = logistic.choose(solver, len(train), len(np.unique(labels)))
    fitting: dict[str, Any] = {"solver": solver, "max_iterations": max_iterations}
    chosen = strength or _search(context, data, validation_share, seed, fitting)
    [classifier] = logistic.fit_all(context, train, labels, [chosen], **fitting)
    _say(chosen, "trained on train and validation", classifier.converged)
    protocol = {
        "strength": chosen,
        "strength_from": "set" if strength else f"validation on {validation_share:g} of train",
        "seed": seed,
        **fitting,
        "converged": classifier.converged,
        "standardised": "rows to equal length",
    }
    return on_main(lambda: classifier.predict(data.test)), protocol


def _search(
    context: Context, data: LabelledFeatures, share: float, seed: int, fitting: dict[str, Any]
) -> float:
    """The strength with the highest accuracy on the held-out part of ``data.train``."""
    held = held_out(data.train_labels, share, seed)
    train, labels = data.train[~held], data.train_labels[~held]
    queries, truth = data.train[held], data.train_labels[held]

    def score(positions: Sequence[int]) -> dict[int, float]:
        strengths = [strength_at(position) for position in positions]
        found = logistic.fit_all(context, train, labels, strengths, **fitting)
        scores = {}
        # The first rank's, since products of other machines may differ in their last bits.
        right = on_main(lambda: [np.mean(one.predict(queries) == truth) for one in found])
        for position, classifier, score in zip(positions, found, right, strict=True):
            scores[position] = float(score)
            accuracy = f"validation accuracy {100 * scores[position]:.2f} %"
            _say(strength_at(position), accuracy, classifier.converged)
        return scores

    return strength_at(search(score))


def _say(strength: float, what: str, converged: bool) -> None:
    level, end = (logging.INFO, "") if converged else (logging.WARNING, ", did not converge")
    log.log(level, "linear probe: L2 strength %.3g: %s%s", strength, what, end)


def needs(**_: Any) -> str:
    """Names the files that a folder must hold, for messages."""
    return "train/ and test/ with a folder of images per class, such as train/cat/1.jpg"


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    feature: Feature = "projected",
    strength: PositiveFloat | None = None,
    validation_share: OpenShare = 0.2,
    seed: NonNegativeInt = 0,
    max_iterations: PositiveInt = MAX_ITERATIONS,
    solver: Solver = "auto",
) -> list[Figure]:
    """Accuracy and ``mean_per_class`` in percent of the images in ``root/test`` under a classifier
    trained on ``root/train``; both hold a folder per class.

    ``strength``: the L2 strength (see ``logistic``); None chooses it on ``validation_share`` of
    every class of train, then trains on all of it. ``solver``: ``scikit_learn``, ``torch`` (over
    the ranks, on their devices) or ``auto`` by the size of the training set. CLIP's protocol is
    ``feature="pooled"``. Figures do not depend on the number of ranks. Raises ValueError for
    options out of range.
    """
    data = extract(extractor, root, feature)
    predicted, protocol = answer(
        extractor.context,
        data,
        strength=strength,
        validation_share=validation_share,
        seed=seed,
        max_iterations=max_iterations,
        solver=solver,
    )
    protocol = {"name": "linear_probe", **protocol, **data.protocol}
    return accuracy_figures(predicted, data, protocol)
