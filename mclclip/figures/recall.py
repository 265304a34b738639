"""Figure: label recall at l, the share of samples for which one of the l nearest clusters stands
for the right value of an attribute (MLCD, A.8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.inputs import Inputs, MissingInput


def draw(inputs: Inputs, path: Path) -> dict[str, Any]:
    """Draws recall over l as a line for each attribute and stage."""
    inputs.require_attributes()
    data: dict[str, list[float]] = {}
    for attribute in inputs.attributes:
        codes = inputs.run.index.attribute(attribute)[0]
        labelled = np.flatnonzero(codes >= 0)
        if not len(labelled):
            continue
        for name, clusters in inputs.clusters.items():
            near = np.asarray(clusters.labels[labelled])
            data[f"{name}, {attribute}"] = label_recall(near, codes[labelled]).tolist()
    if not data:
        raise MissingInput("samples with a value of an attribute: there are none")
    drawing.lines(path, "label recall", data, "nearest clusters", "share")
    return data


def dominant_classes(labels: ArrayLike, classes: ArrayLike) -> dict[int, int]:
    """Maps each label to the most frequent class of its samples; of equals, the smaller class."""
    table = pandas.DataFrame({"label": np.asarray(labels), "class": np.asarray(classes)})
    counts = table[table.label >= 0].groupby(["label", "class"], as_index=False).size()
    first = counts.sort_values("size", ascending=False, kind="stable").drop_duplicates("label")
    return dict(zip(first["label"].tolist(), first["class"].tolist(), strict=True))


def label_recall(nearest: ArrayLike, classes: ArrayLike) -> NDArray[np.float64]:
    """Returns for l = 1 to L the share of samples for which one of the l nearest clusters stands
    for their class.

    ``nearest`` [N, L] are clusters, nearest first (-1: none), ``classes`` [N] those of the samples.
    A cluster stands for the most frequent class of the samples whose nearest cluster it is.
    """
    clusters, truth = np.asarray(nearest), np.asarray(classes)
    dominant = dominant_classes(clusters[:, 0], truth)
    table = np.full(
        int(clusters.max(initial=0)) + 2, -2, dtype=np.int64
    )  # its last entry is for cluster -1
    table[list(dominant)] = list(dominant.values())
    recalled = np.logical_or.accumulate(table[clusters] == truth[:, None], axis=1)
    recall: NDArray[np.float64] = recalled.mean(axis=0)
    return recall
