"""Figures of the gates that SimLAP has learned, from the last checkpoint of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip.analyse.material import ClassGates, Figure, Material, pair_title
from mclclip.analysis import gates as analysis
from mclclip.analysis import pictures
from mclclip.analysis.class_overlap import class_similarity

PAIRS = 3  # of the least and of the most similar gates
DIMENSIONS = 10


def gates(material: Material, path: Path) -> dict[str, Any] | None:
    """The gates of every class and their sum, the size of its subspace (SimLAP, Fig. 9)."""
    data, panels = {}, {}
    for name, found in material.gates.items():
        values, names = _shown(found)
        sizes = analysis.subspace_sizes(values)
        panels[name] = names, values, sizes
        data[name] = {"classes": names, "gates": values.tolist(), "sizes": sizes.tolist()}
    if not data:
        return None
    pictures.gates(path, "gates of classes", panels)
    return data


def gate_pairs(material: Material, path: Path) -> dict[str, Any] | None:
    """The mean gates of two classes, the dimensions in which they are highest, and the gates that
    the filter gives the pair (SimLAP, Fig. 11).

    Shown are the pairs whose classes have the least similar gates, and those with the most similar.
    """
    data: dict[str, list[dict[str, Any]]] = {}
    panels = {}
    for name, found in material.gates.items():
        own, names = _shown(found)
        pairs = analysis.unlike_pairs(own, PAIRS)
        data[name] = []
        for pair, values in zip(pairs.tolist(), found.of_pairs(pairs), strict=True):
            mean = own[pair].mean(axis=0)
            dimensions = analysis.most_open(own, pair, DIMENSIONS).tolist()
            panels[f"{name}: {pair_title(names, pair)}"] = mean, values, dimensions
            entry = {"classes": [names[code] for code in pair], "dimensions": dimensions}
            entry |= {"mean_of_gates": mean.tolist(), "gates_of_pair": values.tolist()}
            data[name].append(entry)
    if not panels:
        return None
    pictures.pairs(path, "gates of pairs, and the dimensions that both open most", panels)
    return data


def class_likeness(material: Material, path: Path) -> dict[str, Any] | None:
    """How alike classes are by three measures (SimLAP, Fig. 12): the dimensions that both open, the
    mean cosine of their samples' features, and the cosine of their label embeddings.

    Features are those that the stage's encoder exports; a stage without embeddings lacks them.
    """
    data: dict[str, Any] = {}
    panels: dict[str, tuple[list[str], NDArray[Any]]] = {}
    for name, found in material.gates.items():
        values, names = _shown(found)
        labels = found.subspaces.filter.labels.weight.numpy()[: len(names)]
        measures = {
            "open in both": analysis.gate_similarity(values),
            "features": _of_features(material, name, found, len(names)),
            "label embeddings": analysis.label_similarity(labels),
        }
        present = {measure: m for measure, m in measures.items() if m is not None}
        panels |= {f"{name}: {measure}": (names, m) for measure, m in present.items()}
        data[name] = {"classes": names} | {
            measure: pictures.without_nan(m) for measure, m in present.items()
        }
    if not data:
        return None
    pictures.matrices(path, "how alike classes are", panels)
    return data


def _shown(found: ClassGates) -> tuple[NDArray[np.float32], list[str]]:
    """Gates [C, D] and names [C] of the classes that are shown."""
    gates = found.of_classes()
    return gates, list(found.names[: len(gates)])


def _of_features(
    material: Material, name: str, found: ClassGates, count: int
) -> NDArray[np.float64] | None:
    """[C, C] mean cosines of the first ``count`` classes, nan where one has too few samples."""
    if name not in material.features:
        return None
    codes = found.codes[material.ids]
    known = (codes >= 0) & (codes < count)
    if not known.any():
        return None
    classes, cosines = class_similarity(material.features[name][known], codes[known])
    table = np.full((count, count), np.nan)
    table[np.ix_(classes, classes)] = cosines
    return table


NEEDS = "a finished training whose objective learns gates, such as simlap, with its last checkpoint"
FIGURES = {
    "gates": Figure(gates, NEEDS),
    "gate_pairs": Figure(gate_pairs, NEEDS),
    "class_likeness": Figure(class_likeness, NEEDS),
}
