"""k nearest neighbours on frozen image features.

Source: SimLAP uses cosines, k = 10, and the majority. Votes weighted by exp(similarity / 0.07) are
those of Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination (CVPR
2018).
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
    """Class [Q] with most votes among neighbours of ``similarity`` and ``labels`` [Q, k].

    A neighbour's vote counts 1, or exp(similarity / temperature). Of classes with equally many
    votes the one with the larger sum of similarities wins, then the smaller label.
    """
    cells = (np.arange(len(labels))[:, None] * num_classes + labels).ravel()

    def sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
        # Neighbours come nearest first, so equal neighbours give sums that are equal bit for bit.
        total = np.bincount(cells, values.ravel(), len(labels) * num_classes)
        return total.reshape(len(labels), num_classes).astype(np.float64, copy=False)

    near = similarity.astype(np.float64)
    votes = sums(np.exp(near / temperature) if weights == "similarity" else np.ones_like(near))
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
    """Labels [Q] of ``data.test`` by the vote of the k nearest of ``data.train``; ranks divide the
    queries, and all get all answers."""
    num_classes = int(data.train_labels.max()) + 1

    def answer(share: slice) -> IntArray:
        near, rows = search.nearest(data.test[share], data.train, k, what="kNN")
        return vote(near, data.train_labels[rows], num_classes, weights, temperature)

    return np.concatenate(over_ranks(context, len(data.test), answer))


def check(_: Path, **__: Any) -> None:
    """Raises ValueError where faiss is not installed."""
    search.library("the search for neighbours")


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    k: PositiveInt = 10,
    weights: Weights = "majority",
    temperature: PositiveFloat = TEMPERATURE,
    feature: Feature = "projected",
) -> list[Measurement]:
    """Accuracy and ``mean_per_class`` in percent of the images in ``root/test``, each classified by
    its ``k`` nearest images of ``root/train``; both hold a folder per class.

    ``weights``: majority, or similarity with ``temperature``. ``feature``: ``projected``,
    which is compared with texts, or ``pooled``, before that projection. Ranks divide the test
    images; figures do not depend on their number.
    """
    parts = raise_on_every_rank(lambda: read_parts(Path(root)))
    parts.pop("valid", None)  # the neighbours are those of train alone
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
