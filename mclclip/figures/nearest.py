"""Figure: some samples, and those that are nearest to them in each stage's space (MCL, Fig. 3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.inputs import Inputs, unit_rows
from mclclip.util.search import nearest_to_few

ANCHORS, NEIGHBOURS = 8, 8


def draw(inputs: Inputs, path: Path) -> dict[str, Any]:
    """Draws a sheet of anchors, which the seed chooses, with their neighbours; it has a row for
    each anchor and stage."""
    inputs.require_samples(NEIGHBOURS + 1)
    ids, keys = inputs.ids, inputs.run.index.keys
    anchors = np.random.default_rng([inputs.config.seed, 5]).permutation(len(ids))[:ANCHORS]
    data: dict[str, list[dict[str, Any]]] = {}
    near_ids = {}
    for name, rows in inputs.features.items():
        cosines, near = nearest_samples(rows, anchors, NEIGHBOURS)
        near_ids[name] = ids[near]
        data[name] = [
            {"anchor": key, "nearest": keys(others), "cosines": values.tolist()}
            for key, others, values in zip(keys(ids[anchors]), ids[near], cosines, strict=True)
        ]
    pictures, labels = [], []
    for number, anchor in enumerate(anchors):
        for name, near in near_ids.items():
            pictures.append(inputs.run.pictures([ids[anchor], *near[number]]))
            labels.append(name)
    drawing.sheet(path, "an anchor, and its nearest samples", pictures, labels)
    return data


def nearest_samples(
    features: ArrayLike, anchors: ArrayLike, k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Finds the k samples with the highest cosine to each anchor, without the anchor itself.

    ``features`` are [N, D], ``anchors`` [A] are row numbers; 1 <= k < N. Returns the cosines and
    the row numbers of the neighbours, both [A, k], nearest first.
    """
    bank, anchor_rows = unit_rows(features).astype(np.float32), np.asarray(anchors, dtype=np.int64)
    similarity, rows = nearest_to_few(bank[anchor_rows], bank, k + 1)
    # If an anchor has more than k copies, it may itself be missing; then the last row is dropped.
    drop = np.where(
        (rows == anchor_rows[:, None]).any(axis=1), (rows == anchor_rows[:, None]).argmax(1), k
    )
    keep = np.arange(k + 1) != drop[:, None]
    return similarity[keep].reshape(-1, k), rows[keep].reshape(-1, k)
