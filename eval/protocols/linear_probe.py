"""Linear probe: multinomial logistic regression on frozen image features.

Source: Radford et al., CLIP (2021), appendix A.3: L-BFGS with at most 1,000 iterations, on features
before the projection (``feature="pooled"``). The L2 strength is chosen on a validation set, the
data set's own or else a part of train, from 1e-6 to 1e6 with 8 steps per decade (96 steps): first 7
values, then ever closer ones around the best. The final classifier is trained on train and
validation together. That rows are brought to equal length first is ours: CLIP names no such step.
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
from mclclip.eval.images import read_parts
from mclclip.eval.logistic import MAX_ITERATIONS, TOLERANCE, Classifier, choose_solver
from mclclip.eval.metrics import BoolArray, IntArray
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.protocols import Evaluator
from mclclip.eval.results import Measurement
from mclclip.ranks.collectives import on_main, raise_on_every_rank
from mclclip.ranks.process_group import Context

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
    """Trains the classifier of ``data.train``; returns it and its settings for a row's protocol.

    Images with several labels get one classifier per class, which tells images with the class from
    those without. If ``strength`` is None, the strength with the best ``metric`` is taken, on
    ``data.valid`` or else on ``validation_share`` of every class of train; classifiers are then
    trained on all of it. All ranks must call it, and get the same. Raises ValueError for classes
    that cannot be learnt.
    """
    labels = data.train_labels
    if labels.ndim == 1 and len(np.unique(labels)) < 2:
        raise ValueError("all train images are of one class: a classifier needs two at least")
    if labels.ndim == 2:
        learnable = (labels == 1).any(axis=0) & (labels == -1).any(axis=0)
        if (lacking := np.flatnonzero(~learnable)).size:
            raise ValueError(
                f"{len(lacking)} classes have no train image with them, or none without, such as "
                f"{data.class_names[lacking[0]]!r}: a classifier needs both"
            )
    # The solver is chosen once, so that search and final fit are solved alike.
    fitting: dict[str, Any] = {
        "solver": choose_solver(len(labels)), "max_iterations": max_iterations
    }  # fmt: skip
    if strength:
        best_strength, strength_from = strength, "set"
    elif data.valid is not None:
        strength_from = "validation on the data set's own split"
        best_strength = _search(context, data.held_out(data.valid), metric, fitting)
    else:
        strength_from = f"validation on {validation_share:g} of train"
        # Of images with several labels the part is drawn without regard to the classes.
        classes = labels if labels.ndim == 1 else np.zeros(len(labels), np.int64)
        held = held_out(classes, validation_share, seed)
        best_strength = _search(context, data.held_out(held), metric, fitting)
    [fitted] = _fit_all(context, data.train, labels, [best_strength], fitting)
    protocol = {
        "strength": best_strength,
        "strength_from": strength_from,
        "seed": seed,
        **fitting,
        "converged": _log(best_strength, fitted, "trained on train and validation"),
        "standardised": "rows to equal length",
    }
    return fitted, protocol


def predict(
    context: Context, data: LabelledFeatures, **options: Any
) -> tuple[IntArray, dict[str, Any]]:
    """Trains the classifier of images with one label each; returns its labels [Q] of ``data.test``,
    equal on all ranks, and the protocol of the row of results."""
    [classifier], protocol = train(context, data, **options)
    assert classifier is not None
    return on_main(lambda: classifier.predict(data.test)), protocol


def _fit_all(
    context: Context,
    rows: Features,
    labels: IntArray,
    strengths: Sequence[float],
    fitting: dict[str, Any],
) -> list[list[Classifier | None]]:
    """Trains a classifier for every strength, or for labels [N, K] one per strength and class.

    A class with nothing to learn gets None. Rows that are not judged for a class are left out of
    its fit. The ranks divide the fits, and all ranks get all classifiers.
    """
    columns = [labels] if labels.ndim == 1 else [*labels.T]
    fits = [(strength, truth) for strength in strengths for truth in columns]

    def fit(strength: float, truth: IntArray) -> Classifier | None:
        if labels.ndim == 1:
            return logistic.fit(rows, truth, strength, device=context.device, **fitting)
        judged = truth != 0
        if len(np.unique(truth[judged])) < 2:
            return None
        judged_rows = rows[judged]
        return logistic.fit(judged_rows, truth[judged], strength, device=context.device, **fitting)

    shares = over_ranks(context, len(fits), lambda part: [fit(*each) for each in fits[part]])
    fitted = [classifier for share in shares for classifier in share]
    return [fitted[start : start + len(columns)] for start in range(0, len(fitted), len(columns))]


def outcomes_of(
    metric: Metric, fitted: Sequence[Classifier | None], data: LabelledFeatures
) -> Outcomes:
    """The outcomes of ``data.test`` under the classifiers of ``train``, by the metric. Raises
    ValueError if the metric is not defined for these images."""
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


def _search(
    context: Context, data: LabelledFeatures, metric: Metric, fitting: dict[str, Any]
) -> float:
    """The strength that has the highest ``metric`` on ``data.test`` after learning from train."""

    def score(positions: Sequence[int]) -> dict[int, float]:
        strengths = [strength_at(position) for position in positions]
        tried = _fit_all(context, data.train, data.train_labels, strengths, fitting)
        # The first rank's, since products of other machines may differ in their last bits.
        values = on_main(lambda: [outcomes_of(metric, fitted, data).value() for fitted in tried])
        for strength, fitted, value in zip(strengths, tried, values, strict=True):
            _log(strength, fitted, f"validation {metric} {100 * value:.2f} %")
        return dict(zip(positions, values, strict=True))

    return strength_at(search(score))


def _log(strength: float, fitted: Sequence[Classifier | None], what: str) -> bool:
    """Logs a strength and how its classifiers do; returns whether all of them converged."""
    log.info("linear probe: L2 strength %.3g: %s", strength, what)
    gradients = [fit.gradient for fit in fitted if fit is not None and not fit.converged]
    if gradients:
        log.warning(
            "linear probe: L2 strength %.3g did not converge (gradient's norm %.2g, wanted %.0e): "
            "raise max_iterations",
            strength, max(gradients), TOLERANCE,
        )  # fmt: skip
    return not gradients


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
    """Figures in percent of the test images under a classifier that was trained on the others;
    ``read_parts`` says where they lie, without ``labels`` and with it.

    They are ``accuracy`` and ``mean_per_class``, and by ``metric``, which names the headline:
      - ``mean_of_top1_and_top5``: the mean of both (Kinetics700).
      - ``roc_auc``: the area under the ROC curve too, of two classes (Hateful Memes).
      - ``map_11_point``: instead of them the mean over classes of the 11-point average precision,
        for images with several labels (PASCAL VOC 2007), with a classifier per class.

    ``strength``: the L2 strength (see ``logistic``), one for all classes; None chooses it by
    ``metric`` on the data set's part ``valid``, or if there is none on ``validation_share`` of
    every class of train; the classifier is then trained on all of it. ``seed`` draws the part to
    validate on; ``max_iterations`` limits the solver. ``feature``: ``projected`` is compared with
    texts, ``pooled`` comes before that projection and is what CLIP takes; features of equal length
    are our choice. Figures do not depend on the number of ranks.
    """
    several = metric == "map_11_point"
    if several:
        raise_on_every_rank(lambda: check_metric(metric, 0, labels))
    parts = raise_on_every_rank(lambda: read_parts(Path(root), labels, several=several))
    raise_on_every_rank(lambda: check_metric(metric, len(parts["test"].class_names), labels))
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
        # Of the most frequent classes of train as every answer.
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
    judged="test",
)
