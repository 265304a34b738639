"""Classifies images by their k nearest neighbours, on frozen image features.

Sources: SimLAP (Wu et al., 2024) takes the majority of the k = 10 nearest by cosine. Wu et al.,
Unsupervised Feature Learning via Non-Parametric Instance Discrimination (CVPR 2018), weight votes
by exp(similarity / 0.07).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic.types import PositiveFloat, PositiveInt

from mclclip.eval.classification import Feature, LabelledFeatures, accuracy_figures, extract
from mclclip.eval.features import Extractor, over_ranks
from mclclip.eval.images import read_parts
from mclclip.eval.metrics import IntArray
from mclclip.eval.protocols import Evaluator
from mclclip.eval.results import Measurement
from mclclip.ranks.collectives import raise_on_every_rank
from mclclip.ranks.process_group import Context
from mclclip.util import search

Weights = Literal["majority", "similarity"]
TEMPERATURE = 0.07


def vote(
    similarity: NDArray[np.float32],
    labels: IntArray,
    num_classes: int,
    weights: Weights = "majority",
    temperature: float = TEMPERATURE,
) -> IntArray:
    """Returns the class [Q] with most votes among the k neighbours of each query, which have these
    ``labels`` [Q, k] and ``similarity`` [Q, k].

    A vote counts 1 ('majority') or exp(similarity / temperature) ('similarity'). If classes have
    equally many votes, the larger sum of similarities wins, then the smaller label.
    """
    cells = (np.arange(len(labels))[:, None] * num_classes + labels).ravel()

    def sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
        # Neighbours are in order, nearest first, so equal ones give sums of equal bits.
        total = np.bincount(cells, values.ravel(), len(labels) * num_classes)
        return total.reshape(len(labels), num_classes).astype(np.float64, copy=False)

    near = similarity.astype(np.float64)
    if weights == "similarity":  # divided by the nearest one's, which any temperature can hold
        votes = sums(np.exp((near - near.max(axis=1, keepdims=True)) / temperature))
    else:
        votes = sums(np.ones_like(near))
    most = votes == votes.max(axis=1, keepdims=True)
    answers: IntArray = np.where(most, sums(near), -np.inf).argmax(axis=1).astype(np.int64)
    return answers


def predict(
    context: Context,
    data: LabelledFeatures,
    k: int,
    weights: Weights = "majority",
    temperature: float = TEMPERATURE,
) -> IntArray:
    """Predicts the labels [Q] of ``data.test`` by the k nearest rows of ``data.train``. The ranks
    share the queries; every rank gets all labels."""
    num_classes = int(data.train_labels.max()) + 1

    def answer(share: slice) -> IntArray:
        near, rows = search.nearest(data.test[share], data.train, k, what="kNN")
        return vote(near, data.train_labels[rows], num_classes, weights, temperature)

    return np.concatenate(over_ranks(context, len(data.test), answer))


def check(root: Path, *, k: PositiveInt = 10, **_: Any) -> None:
    """Raises ValueError if faiss is missing or train has fewer than ``k`` images, and the errors of
    ``read_parts``."""
    search.library("the search for neighbours")
    if k > (count := len(read_parts(Path(root))["train"].images)):
        raise ValueError(f"k is {k}, but {root}/train has {count} images: give a smaller k")


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    k: PositiveInt = 10,
    weights: Weights = "majority",
    temperature: PositiveFloat = TEMPERATURE,
    feature: Feature = "projected",
) -> list[Measurement]:
    """``accuracy`` and ``mean_per_class`` in percent of the images in ``root/test``, which are
    classified by their ``k`` nearest images in ``root/train``; both hold a folder per class.

    ``weights`` and ``temperature`` are those of ``vote``. ``feature`` is 'projected', the feature
    that is compared with texts, or 'pooled', the one before that projection. Figures do not depend
    on the number of ranks, unless more than 16 images are as near as the k-th up to rounding, as
    where features have collapsed.
    """
    parts = raise_on_every_rank(lambda: read_parts(Path(root)))
    parts.pop("valid", None)  # ``extract`` would add it to train
    data = extract(extractor, root, feature, parts)
    predicted = predict(extractor.context, data, k, weights, temperature)
    protocol = {
        "name": "knn",
        "k": k,
        "weights": weights,
        "temperature": temperature if weights == "similarity" else None,
        "ties": "larger sum of similarities, then smaller label",
        **data.protocol,
    }
    return accuracy_figures(predicted, data, protocol)


EVALUATOR = Evaluator(
    evaluate,
    needs="train/ and test/ with a folder of images per class, such as train/cat/1.jpg",
    reads_text=False,
    check=check,
    judged="test",
)
