"""t-SNE: features laid out on a plane so that near ones stay near (SimLAP, Fig. 5).

Source: van der Maaten and Hinton, "Visualizing Data using t-SNE" (2008), as scikit-learn has it.
SimLAP names no settings; perplexity 30 and the start from principal components are scikit-learn's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.analysis.hypersphere import unit_rows

_PERPLEXITY = 30.0
FEWEST = 5
"""Samples below which there is nothing to lay out."""


def tsne(features: ArrayLike, seed: int) -> NDArray[np.float32]:
    """[N, 2]: places of the rows of [N, D], which are brought to unit length first.

    The places depend on the seed. Perplexity is a third of the number of neighbours where that is
    below 30. ValueError for fewer than five rows.
    """
    # Only here: seconds that no other command should pay.
    from sklearn.manifold import TSNE

    rows = unit_rows(features).astype(np.float32)
    if len(rows) < FEWEST:
        raise ValueError(f"features have {len(rows)} rows: t-SNE wants at least {FEWEST}")
    perplexity = min(_PERPLEXITY, (len(rows) - 1) / 3)
    start = "pca" if rows.shape[1] > 1 else "random"
    layout = TSNE(2, perplexity=perplexity, init=start, random_state=seed)
    places: NDArray[np.float32] = layout.fit_transform(rows)
    return places
