"""k nearest neighbours on frozen image features.

Source: SimLAP uses cosines, k = 10, and the majority. Votes weighted by exp(similarity / 0.07) are
those of Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination (CVPR
2018).
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic.types import PositiveFloat, PositiveInt

from mclclip.eval.features import Extractor, Features, over_ranks
from mclclip.eval.labelled_features import Feature, accuracy_figures, extract
from mclclip.eval.metrics import IntArray
from mclclip.eval.results import Figure
from mclclip.ranks.collectives import together

READS_TEXT = False  # whether images are compared with texts

Weights = Literal["majority", "similarity"]
TEMPERATURE = 0.07
SPARE = 16  # candidates beyond k that are scored again in float64, since faiss uses float32


def nearest(queries: Features, train: Features, k: int) -> tuple[NDArray[np.float32], IntArray]:
    """The k nearest of unit rows ``train`` [N, E] to each of ``queries`` [Q, E], by cosine.

    Returns similarities and rows [Q, k], nearest first, ties by the lower row. faiss finds k +
    ``SPARE`` candidates among the distinct rows; their similarities are computed again in float64
    and rounded to float32, and copies of a row get the same one. So equal features tie exactly,
    however many there are. A wrong row can be returned only where more than ``SPARE`` distinct rows
    lie within faiss's rounding (1e-6) of the k-th nearest. Raises ValueError unless 1 <= k <= N,
    and where faiss is not installed.
    """
    if not 1 <= k <= len(train):
        raise ValueError(f"k is {k}, wanted 1 to {len(train)}, the number of train images")
    groups: dict[bytes, list[int]] = {}
    for row, values in enumerate(train):
        groups.setdefault(blake2b(values.tobytes(), digest_size=16).digest(), []).append(row)
    members = [np.array(rows[:k]) for rows in groups.values()]
    different = train[[rows[0] for rows in members]]
    similarity = np.empty((len(queries), k), np.float32)
    rows = np.empty((len(queries), k), np.int64)
    faiss, wide = _faiss(), min(k + SPARE, len(different))
    found = faiss.knn(queries, different, wide, metric=faiss.METRIC_INNER_PRODUCT)[1]
    for number, (query, near) in enumerate(zip(queries, found, strict=True)):
        exact = (different[near] @ query.astype(np.float64)).astype(np.float32)
        exact = np.repeat(exact, [len(members[group]) for group in near])
        candidates = np.concatenate([members[group] for group in near])
        order = np.lexsort((candidates, -exact))[:k]
        similarity[number], rows[number] = exact[order], candidates[order]
    return similarity, rows


def _faiss() -> Any:
    """The faiss package, imported only when it is used. Raises ValueError where it is missing."""
    try:
        import faiss
    except ModuleNotFoundError:
        raise ValueError(
            "kNN needs the package faiss, which is not installed: pip install faiss-cpu"
        ) from None
    return faiss


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
    queries = len(labels)
    cells = (np.arange(queries)[:, None] * num_classes + labels).ravel()

    def sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
        # Neighbours come nearest first, so equal neighbours give sums that are equal bit for bit.
        total = np.zeros(queries * num_classes)
        np.add.at(total, cells, values.ravel())
        return total.reshape(queries, num_classes)

    near = similarity.astype(np.float64)
    votes = sums(np.exp(near / temperature) if weights == "similarity" else np.ones_like(near))
    most = votes == votes.max(axis=1, keepdims=True)
    answers: IntArray = np.where(most, sums(near), -np.inf).argmax(axis=1).astype(np.int64)
    return answers


def evaluate(
    extractor: Extractor,
    root: Path,
    *,
    k: PositiveInt = 10,
    weights: Weights = "majority",
    temperature: PositiveFloat = TEMPERATURE,
    feature: Feature = "projected",
) -> list[Figure]:
    """Accuracy and ``mean_per_class`` in percent of the images in ``root/test``, each classified by
    its k nearest images of ``root/train``; both hold a folder per class.

    ``weights``: majority, or similarity with ``temperature``. Ranks divide the test images; figures
    do not depend on their number. Raises ValueError for options out of range.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, wanted a number above 0")
    together(_faiss)  # before hours are spent on features
    data = extract(extractor, root, feature)
    num_classes = data.protocol["num_classes"]

    def answer(own: slice) -> IntArray:
        near, rows = nearest(data.test[own], data.train, k)
        return vote(near, data.train_labels[rows], num_classes, weights, temperature)

    predicted = np.concatenate(over_ranks(extractor.context, len(data.test), answer))
    protocol = {
        "name": "knn",
        "k": k,
        "weights": weights,
        "temperature": temperature if weights == "similarity" else None,
        "ties": "larger sum of similarities, then smaller label",
        **data.protocol,
    }
    return accuracy_figures(predicted, data, protocol)
