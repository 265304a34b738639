"""Figure: samples by pseudo label, most frequent first, of every stage (MCL, Fig. 7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mclclip.figures import drawing
from mclclip.figures.inputs import Figure, Inputs
from mclclip.figures.singular_values import effective_rank


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """The histograms of the pseudo labels, a line per stage."""
    data = {
        stage.name: histogram(stage.labels)
        for stage in inputs.stages[1:]
        if stage.has("pseudo_labels")
    }
    if not data:
        return None
    sizes = {name: entry["counts"] for name, entry in data.items()}
    drawing.lines(path, "pseudo labels", sizes, "label, most frequent first", "samples", log=True)
    return data


def histogram(labels: ArrayLike) -> dict[str, Any]:
    """Of ``labels`` [N], of which -1 is none: ``counts`` of samples, most first; the ``share`` of
    the most frequent label; and ``effective``, the exp of the entropy, which is how many labels of
    equal size would be spread as much. ValueError where nobody has a label.
    """
    every = np.asarray(labels)
    counts = np.unique(every[every >= 0], return_counts=True)[1]
    if not len(counts):
        raise ValueError("no sample has a label")
    return {
        "counts": np.sort(counts)[::-1].tolist(),
        "share": float(counts.max() / counts.sum()),
        "effective": effective_rank(counts),
    }


FIGURE = Figure(draw, "pseudo labels: run 'mclclip cluster --stage 0'")
