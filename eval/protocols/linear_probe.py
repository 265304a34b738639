"""Linear probe: multinomial logistic regression on frozen image features.

Source: Radford et al., CLIP (2021), appendix A.3: L-BFGS with at most 1,000 iterations, on features
before the projection (``feature="pooled"``). The L2 strength is chosen on a validation set: that of
the data set, or else a part of train. It is searched from 1e-6 to 1e6 with 8 steps per decade (96
steps): first 7 values, then ever closer ones around the best. The final classifier is trained on
train and validation together. Scaling features to equal length is our addition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from mclclip.eval import logistic
from mclclip.eval.classification import (
    Feature,
    LabelledFeatures,
    Metric,
    accuracy_figures,
    area,
    area_figures,
    check_metric,
    extract,
    mean_of_top1_and_top5,
    precision_figure,
    precisions,
    ranked_figures,
)
from mclclip.eval.features import Extractor, Features, over_ranks
from mclclip.eval.images import LabelledImages, Part, read_parts
from mclclip.eval.logistic import MAX_ITERATIONS, TOLERANCE, Classifier
from mclclip.eval.metrics import BoolArray, IntArray
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.protocols import Evaluator
from mclclip.eval.results import Measurement
from mclclip.ranks.collectives import on_main, raise_on_every_rank
from mclclip.ranks.process_group import Context

log = logging.getLogger("mclclip")

OpenShare = Annotated[float, Field(gt=0.0, lt=1.0)]
STEPS_PER_DECADE = 8
LAST_POSITION = 6 * STEPS_PER_DECADE  # the grid's positions -48 to 48 stand for 1e-6 to 1e6


def strength_at(position: int) -> float:
    """The L2 strength at a position of the grid."""
    return float(10.0 ** (position / STEPS_PER_DECADE))


def held_out(labels: IntArray, share: float, seed: int) -> BoolArray:
    """Draws a ``share`` of the images of every class to validate on; returns bool [N].

    The share is rounded to at least one image, but never all images of a class. Raises ValueError
    if every class has a single image.
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
    """Searches the grid position with the best score, from coarse to fine; of equals, the higher.

    ``score`` returns the scores of some positions. It is called first for 7 positions, two decades
    apart, then for the best one's neighbours at half this distance, and so on down to 1.
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


def train(
    context: Context,
    data: LabelledFeatures,
    *,
    strength: float | None,
    validation_share: float,
    seed: int,
    max_iterations: int,
    metric: Metric = "accuracy",
) -> tuple[list[Classifier | None], dict[str, Any]]:
    """Trains a classifier on ``data.train``; returns it, in a list, and settings for the protocol.

    If images have several labels, the list has one classifier per class, which separates images
    with the class from those without. If ``strength`` is None, the one with the best ``metric`` is
    taken, on ``data.valid`` or else on ``validation_share`` of every class of train; the final
    classifiers are trained on all of train. All ranks must call it, and get the same. Raises
    ValueError for a class that all train images have, or none.
    """
    labels = data.train_labels
    assert labels.ndim == 2 or len(np.unique(labels)) > 1
    if labels.ndim == 2:
        learnable = (labels == 1).any(axis=0) & (labels == -1).any(axis=0)
        if (lacking := np.flatnonzero(~learnable)).size:
            raise ValueError(
                f"{len(lacking)} classes have no train image with them, or none without, such as "
                f"{data.class_names[lacking[0]]!r}: a classifier needs both"
            )
    if strength:
        best_strength, strength_from = strength, "set"
    elif data.valid is not None:
        strength_from = "validation on the data set's own split"
        best_strength = _search(context, data.held_out(data.valid), metric, max_iterations)
    else:
        strength_from = f"validation on {validation_share:g} of train"
        # If images have several labels, the part is drawn from all images at once.
        classes = labels if labels.ndim == 1 else np.zeros(len(labels), np.int64)
        held = held_out(classes, validation_share, seed)
        best_strength = _search(context, data.held_out(held), metric, max_iterations)
    [fitted] = _fit_all(context, data.train, labels, [best_strength], max_iterations)
    protocol = {
        "strength": best_strength,
        "strength_from": strength_from,
        "seed": seed,
        "max_iterations": max_iterations,
        "converged": _log(best_strength, fitted, "trained on train and validation"),
        "standardised": "rows to equal length",
    }
    return fitted, protocol


def predict(
    context: Context, data: LabelledFeatures, **options: Any
) -> tuple[IntArray, dict[str, Any]]:
    """Trains a classifier of images with one label each (``train``), and predicts the labels [Q] of
    ``data.test``; returns these, equal on all ranks, and settings for the protocol."""
    [classifier], protocol = train(context, data, **options)
    assert classifier is not None
    return on_main(lambda: classifier.predict(data.test)), protocol


def _fit_all(
    context: Context,
    rows: Features,
    labels: IntArray,
    strengths: Sequence[float],
    max_iterations: int,
) -> list[list[Classifier | None]]:
    """Trains classifiers: for labels [N] one for every strength, for labels [N, K] one for every
    strength and class. Returns a list for every strength.

    Images that are not judged for a class are left out for it. A class that all other images have,
    or none, gets None. The ranks share the work; all ranks get all classifiers.
    """
    columns = [labels] if labels.ndim == 1 else [*labels.T]
    fits = [(strength, truth) for strength in strengths for truth in columns]

    def fit(strength: float, truth: IntArray) -> Classifier | None:
        judged_rows = rows
        if labels.ndim == 2:
            judged_rows, truth = rows[truth != 0], truth[truth != 0]
            if len(np.unique(truth)) < 2:
                return None
        return logistic.fit(judged_rows, truth, strength, max_iterations, device=context.device)

    shares = over_ranks(context, len(fits), lambda part: [fit(*each) for each in fits[part]])
    fitted = [classifier for share in shares for classifier in share]
    return [fitted[start : start + len(columns)] for start in range(0, len(fitted), len(columns))]


def outcomes_of(
    metric: Metric, fitted: Sequence[Classifier | None], data: LabelledFeatures
) -> Outcomes:
    """The outcomes of a metric for ``data.test``, answered by the classifiers that ``train``
    returned. Raises ValueError if the metric is not defined for these images."""
    rows, truth, items = data.test, data.test_labels, data.test_items
    if metric == "map_11_point":
        scores = np.zeros(truth.shape)
        for column, classifier in enumerate(fitted):
            if classifier is not None:
                scores[:, column] = classifier.preferences(rows)
        learnt = np.array([fit is not None for fit in fitted])
        return precisions(scores, truth * learnt, items, data.class_names)
    [classifier] = fitted
    assert classifier is not None
    if metric == "mean_of_top1_and_top5":
        return mean_of_top1_and_top5(classifier.ranks(rows, truth), items)
    if metric == "roc_auc":
        return area(classifier.preferences(rows), truth == classifier.classes[1], items)
    strata = [*map(str, truth)] if metric == "mean_per_class" else None
    return Outcomes(items, classifier.predict(rows) == truth, strata=strata)


def _search(context: Context, data: LabelledFeatures, metric: Metric, max_iterations: int) -> float:
    """The strength whose classifiers, trained on ``data.train``, have the best ``metric`` on
    ``data.test``."""

    def score(positions: Sequence[int]) -> dict[int, float]:
        strengths = [strength_at(position) for position in positions]
        tried = _fit_all(context, data.train, data.train_labels, strengths, max_iterations)
        # All ranks take the values of rank 0, since unlike machines may compute other last bits.
        values = on_main(lambda: [outcomes_of(metric, fitted, data).value() for fitted in tried])
        for strength, fitted, value in zip(strengths, tried, values, strict=True):
            _log(strength, fitted, f"validation {metric} {100 * value:.2f} %")
        return dict(zip(positions, values, strict=True))

    return strength_at(search(score))


def _log(strength: float, fitted: Sequence[Classifier | None], what: str) -> bool:
    """Logs a strength with ``what``, and warns if its classifiers did not converge; returns True if
    all did."""
    log.info("linear probe: L2 strength %.3g: %s", strength, what)
    gradients = [fit.gradient for fit in fitted if fit is not None and not fit.converged]
    if gradients:
        log.warning(
            "linear probe: L2 strength %.3g did not converge (gradient's norm %.2g, wanted %.0e): "
            "raise max_iterations",
            strength, max(gradients), TOLERANCE,
        )  # fmt: skip
    return not gradients


def read(
    root: Path, *, labels: str | None = None, metric: Metric = "accuracy", **_: Any
) -> dict[Part, LabelledImages]:
    """Reads the parts (``read_parts``); raises ValueError for a metric that they cannot have."""
    parts = read_parts(Path(root), labels, several=metric == "map_11_point")
    check_metric(metric, len(parts["test"].class_names), labels)
    return parts


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    feature: Feature = "projected",
    labels: str | None = None,
    metric: Metric = "accuracy",
    strength: PositiveFloat | None = None,
    validation_share: OpenShare = 0.2,
    seed: NonNegativeInt = 0,
    max_iterations: PositiveInt = MAX_ITERATIONS,
) -> list[Measurement]:
    """Figures, in percent, of test images under a classifier that is trained on the train images.

    There are ``accuracy`` and ``mean_per_class``. ``metric`` is the headline, and may add a figure:
      - ``mean_of_top1_and_top5``: the mean of top-1 and top-5 accuracy (Kinetics700).
      - ``roc_auc``: the area under the ROC curve, for two classes (Hateful Memes).
      - ``map_11_point``: the mean over classes of the 11-point average precision, for images with
        several labels (PASCAL VOC 2007). It has a classifier per class, and is the only figure.

    feature           'projected', the feature that is compared with texts; or 'pooled', the one
                      before that projection, which CLIP takes
    labels            a table of labels below ``root`` (``read_parts``); None: a folder per class
    strength          the L2 strength for all classes (see ``logistic``); None: chosen by ``metric``
                      on the part ``valid`` or, without one, on ``validation_share`` of every class
    seed              draws the images to validate on
    max_iterations    limits the solver

    Figures do not depend on the number of ranks.
    """
    several = metric == "map_11_point"
    parts = raise_on_every_rank(lambda: read(root, labels=labels, metric=metric))
    data = extract(extractor, root, feature, parts)
    options: dict[str, Any] = {
        "strength": strength, "validation_share": validation_share, "seed": seed,
        "max_iterations": max_iterations, "metric": metric,
    }  # fmt: skip
    fitted, settings = train(extractor.context, data, **options)
    protocol = {"name": "linear_probe", **settings, **data.protocol}
    outcomes = on_main(lambda: outcomes_of(metric, fitted, data))
    if several:
        return [precision_figure(outcomes, len(data.test), protocol)]
    [classifier] = fitted
    assert classifier is not None
    predicted = on_main(lambda: classifier.predict(data.test))
    figures = accuracy_figures(predicted, data, protocol, metric)
    if metric == "roc_auc":
        return [*area_figures(outcomes, protocol), *figures]
    if metric == "mean_of_top1_and_top5":
        # Chance is the figure if the answers are always the most frequent classes of train.
        order = np.argsort(-np.bincount(data.train_labels), kind="stable")
        shares = [np.isin(data.test_labels, order[:k]).mean() for k in (1, 5)]
        chance = 100 * float(np.mean(shares))
        return ranked_figures({metric: (outcomes, chance)}, metric, protocol) + figures
    return figures


EVALUATOR = Evaluator(
    evaluate,
    needs="train/ and test/ with a folder of images per class, such as train/cat/1.jpg, or images "
    "and a table (option labels)",
    reads_text=False,
    check=read,
    judged="test",
)
