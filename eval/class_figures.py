"""Metrics by which zero-shot classification and the linear probe report a data set of images with
classes, as CLIP and MLCD do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mclclip.eval.metrics import BoolArray, FloatArray, IntArray, hits_at
from mclclip.eval.outcomes import Outcomes
from mclclip.eval.results import Figure, figure

Metric = Literal["accuracy", "mean_per_class", "mean_of_top1_and_top5", "map_11_point", "roc_auc"]
"""The figure by which a data set is reported."""


def check_metric(metric: Metric, num_classes: int, labels: str | None) -> None:
    """Raises ValueError where a benchmark cannot have this metric."""
    if metric == "roc_auc" and num_classes != 2:
        raise ValueError(f"metric roc_auc wants 2 classes, got {num_classes}: use accuracy")
    if metric == "mean_of_top1_and_top5" and num_classes <= 5:
        raise ValueError(f"metric {metric} wants more than 5 classes, got {num_classes}")
    if metric == "map_11_point" and labels is None:
        raise ValueError(
            "metric map_11_point wants labels=FILE, a CSV with a row for each label of an image, "
            "or PASCAL VOC's folder ImageSets/Main: folders give an image one label"
        )


def mean_of_top1_and_top5(ranks: IntArray, items: Sequence[str]) -> Outcomes:
    """The mean of both, from the rank [N] of each image's class."""
    return Outcomes(items, (hits_at(ranks, 1) + hits_at(ranks, 5).astype(np.float64)) / 2)


def area(scores: FloatArray, positive: BoolArray, items: Sequence[str]) -> Outcomes:
    """The area under the ROC curve of ``scores`` [N], those of the second class against the first;
    a tied pair counts as wrong. ValueError where a class has no image."""
    if positive.all() or not positive.any():
        raise ValueError("roc_auc wants images of both classes: one of them has none")
    return Outcomes(items, scores, truth=positive, statistic="roc_auc")


def area_figures(strict: Outcomes, protocol: Mapping[str, Any]) -> list[Figure]:
    """The figure of ``area``, and where pairs tie ``roc_auc_half_ties``: scikit-learn's figure,
    which counts them half."""
    half = replace(strict, statistic="roc_auc_half_ties")
    protocol = {**protocol, "chance": 50.0}
    figures = [figure("roc_auc", strict, protocol, level="headline")]
    if half.value() != strict.value():
        figures.append(figure("roc_auc_half_ties", half, protocol, level="detail"))
    return figures


def precisions(
    scores: FloatArray,
    truth: IntArray | NDArray[np.int8],
    files: Sequence[str],
    classes: Sequence[str],
) -> Outcomes:
    """The mean over classes of the 11-point average precision of ``scores`` [N, K].

    ``truth`` [N, K] as in ``SeveralLabels``: images that the data set does not judge for a class
    are left out there, and classes without a positive or a negative image. ValueError where no
    class is left.
    """
    ranked = (truth == 1).any(axis=0) & (truth == -1).any(axis=0)
    if not ranked.any():
        raise ValueError("map_11_point: no class has images with it and images without it")
    image, column = np.nonzero((truth != 0) & ranked)
    units, strata = [files[i] for i in image.tolist()], [classes[k] for k in column.tolist()]
    return Outcomes(
        items=[f"{file}:{name}" for file, name in zip(units, strata, strict=True)],
        values=scores[image, column],
        strata=strata,
        units=units,
        truth=truth[image, column] == 1,
        statistic="precision_11_point",
    )


def precision_figure(found: Outcomes, num_images: int, protocol: Mapping[str, Any]) -> Figure:
    """The figure of what ``precisions`` returns."""
    ranked = len(set(found.strata or ()))
    settings = {**protocol, "num_images": num_images, "num_ranked_classes": ranked}
    return figure("map_11_point", found, settings, level="headline")
