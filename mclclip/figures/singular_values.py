"""Figure: in how many dimensions features vary, and how evenly they fill the sphere.

Sources: Jing et al., "Understanding Dimensional Collapse in Contrastive Self-supervised Learning"
(ICLR 2022), whose singular values SimLAP's Fig. 3 shows; effective rank after Roy and Vetterli
(2007), the exponential of the entropy of the values' shares; uniformity of Wang and Isola,
"Understanding Contrastive Representation Learning through Alignment and Uniformity on the
Hypersphere" (ICML 2020), Eq. 2.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.inputs import Inputs, unit_rows

TILE = 1024


def draw(inputs: Inputs, path: Path) -> dict[str, Any]:
    """Draws the singular values of the features' covariance by stage; the data have effective rank
    and uniformity too."""
    inputs.require_samples(2)
    data: dict[str, dict[str, Any]] = {}
    for name, rows in inputs.features.items():
        values = singular_values(rows)
        data[name] = {
            "singular_values": values.tolist(),
            "effective_rank": effective_rank(values),
            "uniformity": uniformity(rows),
        }
    series = {
        f"{name}: effective rank {entry['effective_rank']:.1f}": entry["singular_values"]
        for name, entry in data.items()
    }
    drawing.lines(path, "singular values", series, "number", "value", log=True)
    return data


def singular_values(features: ArrayLike) -> NDArray[np.float64]:
    """The singular values float64 [D], largest first, of the covariance of rows [n, D] (about their
    mean, divided by n)."""
    rows = np.asarray(features, dtype=np.float64)
    centred = rows - rows.sum(axis=0) / len(rows)
    values = np.linalg.svd(centred.T @ centred / len(rows), compute_uv=False)
    return np.asarray(values, dtype=np.float64)


def effective_rank(values: ArrayLike) -> float:
    """The exponential of the entropy of the shares of ``values`` [D] in their sum.

    It is 1 if one value is not 0, D if all are equal, and by definition 0 if all are 0, as for
    features that do not vary.
    """
    shares = np.asarray(values, dtype=np.float64)
    if shares.sum() == 0.0:
        return 0.0
    shares = shares[shares > 0.0] / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def uniformity(features: ArrayLike) -> float:
    """The logarithm of the mean of exp(-2 |x - y|^2) over all pairs of different rows [N, D], N >
    1.

    Rows are scaled to unit length. The value lies in [-8, 0]; it is 0 if all rows are one point,
    and the lower the more uniform they are.
    """
    rows = unit_rows(features)
    count = len(rows)
    total = 0.0
    for first in range(0, count, TILE):
        block = rows[first : first + TILE]
        kernel = np.exp(4.0 * (block @ rows.T - 1.0))  # |x - y|^2 = 2 - 2 x.y
        kernel[np.arange(len(block)), first + np.arange(len(block))] = 0.0
        total += float(kernel.sum())
    return math.log(total / (count * (count - 1)))
