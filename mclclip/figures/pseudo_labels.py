"""Figure: the number of samples of each pseudo label, most frequent first, by stage (MCL, Fig.
7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mclclip.figures import drawing
from mclclip.figures.inputs import Inputs, MissingInput
from mclclip.figures.singular_values import effective_rank


def draw(inputs: Inputs, path: Path) -> dict[str, Any]:
    """Draws the histogram of the pseudo labels as a line for each stage."""
    data = {
        stage.name: histogram(stage.labels)
        for stage in inputs.stages[1:]
        if stage.has("pseudo_labels")
    }
    if not data:
        raise MissingInput("pseudo labels: run 'mclclip cluster --stage 0'")
    sizes = {name: entry["counts"] for name, entry in data.items()}
    drawing.lines(path, "pseudo labels", sizes, "label, most frequent first", "samples", log=True)
    return data


def histogram(labels: ArrayLike) -> dict[str, Any]:
    """Counts ``labels`` [N], of which -1 means none; some sample must have one.

    counts     the number of samples of each label, most frequent first
    share      the share of the most frequent label
    effective  the exponential of the entropy: so many labels of equal size have the same entropy
    """
    every = np.asarray(labels)
    counts = np.unique(every[every >= 0], return_counts=True)[1]
    return {
        "counts": np.sort(counts)[::-1].tolist(),
        "share": float(counts.max() / counts.sum()),
        "effective": effective_rank(counts),
    }
