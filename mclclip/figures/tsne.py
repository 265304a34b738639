"""Figure: t-SNE, which puts features on a plane so that near ones stay near (SimLAP, Fig. 5).

Source: van der Maaten and Hinton, "Visualizing Data using t-SNE" (2008), by scikit-learn. SimLAP
names no settings; perplexity 30 and the start from principal components are scikit-learn's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.inputs import Inputs, unit_rows

MAX_LAID_OUT = 2_000
FEWEST = 5
"""The smallest number of samples that is drawn."""

_PERPLEXITY = 30.0


def draw(inputs: Inputs, path: Path) -> dict[str, Any]:
    """Draws the features of every stage on a plane, coloured by each attribute in turn."""
    inputs.require_samples(FEWEST)
    rows = inputs.draw_places(MAX_LAID_OUT, 8)
    ids = inputs.ids[rows]
    places = {
        name: layout(features[rows], inputs.config.seed)
        for name, features in inputs.features.items()
    }
    colours = {name: inputs.run.index.attribute(name) for name in inputs.attributes}
    lines: list[dict[str, drawing.Plane]] = [
        {f"{stage}, by {name}": (xy, codes[ids], values) for stage, xy in places.items()}
        for name, (codes, values) in colours.items()
    ]
    plain: dict[str, drawing.Plane] = {n: (xy, None, ()) for n, xy in places.items()}
    drawing.planes(path, "t-SNE of the features", lines or [plain])
    return {
        "samples": inputs.run.index.keys(ids),
        "places": {name: xy.tolist() for name, xy in places.items()},
        "attributes": {
            name: {"values": values, "codes": codes[ids].tolist()}
            for name, (codes, values) in colours.items()
        },
    }


def layout(features: ArrayLike, seed: int) -> NDArray[np.float32]:
    """Returns places [N, 2] on the plane for rows [N, D], which are scaled to unit length first.

    ``seed`` is that of t-SNE. Perplexity is 30, or a third of N - 1 if that is less. N must be at
    least ``FEWEST``.
    """
    # scikit-learn takes seconds to import, so it is imported only if the figure is drawn.
    from sklearn.manifold import TSNE

    rows = unit_rows(features).astype(np.float32)
    perplexity = min(_PERPLEXITY, (len(rows) - 1) / 3)
    start = "pca" if rows.shape[1] > 1 else "random"
    places: NDArray[np.float32] = TSNE(
        2, perplexity=perplexity, init=start, random_state=seed
    ).fit_transform(rows)
    return places
