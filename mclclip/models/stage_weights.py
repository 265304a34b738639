"""Learned weights of a concat's stages, fitted on held-out pairs of images and captions.

With c_s the cosine of an image and a text in stage s, the similarity of the concat `weighted` is
sum_s w_s c_s, where no w_s is negative and all of them sum to 1. Equal weights w_s = 1/S make it
`stage_norm`, the mean of the cosines.

The fit minimises CLIP's loss (Radford et al. 2021, Figure 3) of the logits sum_s v_s c_s over
v >= 0. That is a convex problem of S numbers; w = v / sum(v) are the weights, and sum(v) is the
logit scale that goes with them. It is computed in float64 and draws nothing at random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip.options import brief

LARGEST = 100.0
"""Bound of each v_s, which is CLIP's bound of a logit scale: pairs that are told apart without an
error would push it without end."""
_BATCH = 1024  # held-out pairs that are each other's wrong answers
Rows = NDArray[np.floating[Any]]
Batch = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""Cosines [S, b, b] of images and texts, and [b, b] where a text is an answer that counts."""


@dataclass(frozen=True)
class StageWeights:
    """Weights of the stages, which sum to 1, and the logit scale fitted with them.

    ``loss`` is the loss of the fit in nats, ``equal_loss`` the smallest one of equal weights, with
    a logit scale of its own; chance is near log(1024).
    """

    weights: tuple[float, ...]
    logit_scale: float
    loss: float
    equal_loss: float
    pairs: int


def check_weights(given: Sequence[float], stages: int) -> None:
    """Raises ValueError unless these are weights of so many stages: none negative, their sum 1."""
    if len(given) != stages or not all(map(math.isfinite, given)):
        raise ValueError(f"weights of stages are {brief(given)}: wanted {stages} numbers")
    if min(given) < 0 or abs(sum(given) - 1) > 1e-6:
        raise ValueError(
            f"weights of stages are {brief(given)}: wanted none below 0, and weights that sum to 1"
        )


def fit(images: Sequence[Rows], texts: Sequence[Rows], captions: Sequence[str]) -> StageWeights:
    """The weights of S stages, from the unit features [N, D] of N pairs in each stage.

    Pairs are dealt to batches of at most 1,024 by a fixed permutation. An equal caption of another
    image is no wrong answer, and is left out of the sums. Raises ValueError for fewer than two
    different captions, and where the cosines of no stage tell a caption from others.
    """
    from scipy.optimize import minimize

    if len(set(captions)) < 2:
        raise ValueError(
            f"there are {len(captions)} held-out pairs with {len(set(captions))} different "
            "captions: weights of stages are fitted on two or more"
        )
    batches = _batches(images, texts, captions)
    stages = len(images)
    bounds = [(0.0, LARGEST)]
    # Steps of about 1: the logit scale of a trained CLIP is between 14 and 100.
    start, exact = np.full(stages, 10.0), {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 1000}
    best = minimize(
        _loss, start, (batches,), method="L-BFGS-B", jac=True, bounds=bounds * stages, options=exact
    )

    def equal_loss(scale: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        loss, gradient = _loss(np.repeat(scale, stages), batches)
        return loss, gradient.sum(keepdims=True)

    equal = minimize(
        equal_loss, start[:1], method="L-BFGS-B", jac=True, bounds=bounds, options=exact
    )
    total = float(best.x.sum())
    if not np.isfinite(best.fun) or total < 1e-6:
        raise ValueError(
            "no stage tells held-out captions apart (their best logit scale is 0): are the "
            "captions those of the images?"
        )
    weights = tuple(float(value) / total for value in best.x)
    return StageWeights(weights, total, float(best.fun), float(equal.fun), len(captions))


def _batches(images: Sequence[Rows], texts: Sequence[Rows], captions: Sequence[str]) -> list[Batch]:
    seen: dict[str, int] = {}
    codes = np.array([seen.setdefault(caption, len(seen)) for caption in captions])
    order = np.random.default_rng(0).permutation(len(codes))
    batches = []
    for rows in np.array_split(order, -(-len(codes) // _BATCH)):
        sides = zip(images, texts, strict=True)
        cosines = [z[rows].astype(np.float64) @ t[rows].astype(np.float64).T for z, t in sides]
        counts = (codes[rows, None] != codes[rows]) | np.eye(len(rows), dtype=bool)
        batches.append((np.stack(cosines), counts))
    return batches


def _loss(
    scales: NDArray[np.float64], batches: Sequence[Batch]
) -> tuple[float, NDArray[np.float64]]:
    """CLIP's loss of both directions, mean over pairs, of sum_s scales_s c_s, and its gradient."""
    loss, gradient, pairs = 0.0, np.zeros(len(scales)), sum(len(keep) for _, keep in batches)
    for cosines, counts in batches:
        logits = np.where(counts, np.tensordot(scales, cosines, axes=1), -np.inf)
        of_pairs = np.diagonal(logits)
        pull = -np.eye(len(logits))
        for axis in (0, 1):
            most = logits.max(axis=axis, keepdims=True)
            shares = np.exp(logits - most)
            total = shares.sum(axis=axis, keepdims=True)
            loss += float((np.log(total) + most).sum() - of_pairs.sum()) / (2 * pairs)
            pull += shares / total / 2
        gradient += (cosines * pull).sum(axis=(1, 2)) / pairs
    return loss, gradient
