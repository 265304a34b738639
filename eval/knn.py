"""k nearest neighbours on frozen image features.

Source: SimLAP: cosine, k = 10, majority. Weighted by similarity, w = exp(s / 0.07), as Wu et al.,
Unsupervised Feature Learning via Non-Parametric Instance Discrimination (CVPR 2018).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mclclip.eval.features import Extractor, Features
from mclclip.eval.labelled_features import Feature, accuracy_figures, extract
from mclclip.eval.metrics import IntArray
from mclclip.eval.results import Figure
from mclclip.ranks.collectives import gather_objects, together

Weights = Literal["majority", "similarity"]
TEMPERATURE = 0.07
QUERIES, CANDIDATES = 1024, 8192  # one block of similarities: 64 MiB in float64


def nearest(
    queries: Features, train: Features, k: int, device: torch.device | None = None
) -> tuple[NDArray[np.float32], IntArray]:
    """The k nearest of unit rows ``train`` [N, E] to each of ``queries`` [Q, E], by cosine.

    Returns similarities and rows [Q, k], nearest first; of equally near rows the first. Memory does
    not grow with N x Q: blocks of ``train`` are merged into the best so far. Similarities are
    summed in float64 and rounded to float32, so that equal features tie wherever they stand.
    ValueError unless 1 <= k <= N.
    """
    if not 1 <= k <= len(train):
        raise ValueError(f"k is {k}, wanted 1 to {len(train)}, the number of train images")
    parts = [
        _nearest(queries[start : start + QUERIES], train, k, device)
        for start in range(0, len(queries), QUERIES)
    ]
    similarity = np.concatenate([part[0] for part in parts]) if parts else np.empty((0, k), "f4")
    rows = np.concatenate([part[1] for part in parts]) if parts else np.empty((0, k), np.int64)
    return similarity, rows


def _nearest(
    queries: Features, train: Features, k: int, device: torch.device | None
) -> tuple[NDArray[np.float32], IntArray]:
    left = torch.from_numpy(queries).to(device, torch.float64)
    best = torch.empty(len(queries), 0, device=device)
    rows = torch.empty(len(queries), 0, dtype=torch.int64, device=device)
    for start in range(0, len(train), CANDIDATES):
        right = torch.from_numpy(train[start : start + CANDIDATES]).to(device, torch.float64)
        new = torch.arange(start, start + len(right), device=device).expand(len(queries), -1)
        best = torch.cat([best, (left @ right.T).float()], dim=1)
        rows = torch.cat([rows, new], dim=1)
        kept = _first_of_largest(best, min(k, best.shape[1]))
        best, rows = best.gather(1, kept), rows.gather(1, kept)
    order = best.argsort(dim=1, descending=True, stable=True)
    return best.gather(1, order).cpu().numpy(), rows.gather(1, order).cpu().numpy()


def _first_of_largest(values: Tensor, k: int) -> Tensor:
    """Columns [Q, k] of the k largest of each row, ascending; of equal values the first columns.

    (``topk`` itself takes any of equal values.)
    """
    smallest = values.topk(k, dim=1).values[:, -1:]
    larger, equal = values > smallest, values == smallest
    room = k - larger.sum(dim=1, keepdim=True)
    chosen = larger | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))
    return chosen.nonzero()[:, 1].view(len(values), k)


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
    k: int = 10,
    weights: Weights = "majority",
    temperature: float = TEMPERATURE,
    feature: Feature = "projected",
) -> list[Figure]:
    """Accuracy and ``mean_per_class`` in percent of the images in ``root/test``, each answered by
    its k nearest of ``root/train``; both hold a folder per class.

    ``weights``: majority, or similarity with ``temperature``. Ranks share the test images out;
    figures do not depend on their number.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, wanted a number above 0")
    data = extract(extractor, root, feature)
    where, count = extractor.context, len(data.test)
    share = slice(
        count * where.rank // where.world_size, count * (where.rank + 1) // where.world_size
    )
    num_classes = data.protocol["num_classes"]

    def answer() -> IntArray:
        near, rows = nearest(data.test[share], data.train, k, where.device)
        return vote(near, data.train_labels[rows], num_classes, weights, temperature)

    predicted = np.concatenate(gather_objects(together(answer)))
    protocol = {
        "name": "knn",
        "k": k,
        "weights": weights,
        "temperature": temperature if weights == "similarity" else None,
        "ties": "larger sum of similarities, then smaller label",
        **data.protocol,
    }
    return accuracy_figures(predicted, data.test_labels, protocol)
