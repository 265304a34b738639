"""Figure: gates of pairs of classes, and the dimensions that both open most (SimLAP, Fig. 11)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.gates import unlike_pairs
from mclclip.figures.inputs import GATES, Figure, Inputs

PAIRS = 3  # of the least and of the most similar gates
DIMENSIONS = 10


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """The mean gates of two classes, the dimensions in which they are highest, and the gates that
    the filter gives the pair.

    The pairs are those whose classes have the least similar gates, and those with the most similar.
    """
    data: dict[str, list[dict[str, Any]]] = {}
    panels = []
    for name, learned in inputs.gates.items():
        own = learned.of_classes()
        pairs = unlike_pairs(own, PAIRS)
        data[name] = []
        for pair, gates in zip(pairs.tolist(), learned.of_pairs(pairs), strict=True):
            mean = own[pair].mean(axis=0)
            dimensions = most_open(own, pair, DIMENSIONS)
            panels.append((f"{name}: {learned.title(pair)}", mean, gates, dimensions))
            data[name].append(
                {
                    "classes": [learned.names[code] for code in pair],
                    "dimensions": dimensions.tolist(),
                    "mean_of_gates": mean.tolist(),
                    "gates_of_pair": gates.tolist(),
                }
            )
    if not panels:
        return None
    with drawing.canvas(path, 9.0, 1.4 * len(panels) + 0.5) as figure:
        every = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (title, mean, gates, chosen) in zip(every, panels, strict=True):
            places = np.arange(len(mean))
            axes.bar(places, mean, width=1.0, color="lightsteelblue", label="mean of both")
            axes.bar(chosen, mean[chosen], width=1.0, color="darkred", label="most open")
            axes.step(places, gates, where="mid", color="black", linewidth=0.8, label="of the pair")
            axes.set_ylim(0, 1)
            axes.set_title(title, fontsize="small")
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize="small")
        every[-1].set_xlabel("dimension")
        figure.supylabel("gate")
        figure.suptitle("gates of pairs, and the dimensions that both open most")
    return data


def most_open(gates: ArrayLike, classes: ArrayLike, count: int) -> NDArray[np.int64]:
    """[count]: the dimensions with the highest mean of ``gates`` [C, D] over some classes, highest
    first."""
    mean = np.asarray(gates, dtype=np.float64)[np.asarray(classes)].mean(axis=0)
    return np.argsort(-mean, kind="stable")[:count].astype(np.int64)


FIGURE = Figure(draw, GATES)
