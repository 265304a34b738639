"""Does a lower loss come with a lower error of a readout? Correlations over many encoders.

Source: IFM (Robinson et al., 2021), Fig. 2: Pearson correlations between the InfoNCE loss and the
errors of linear readouts of several features, over encoders trained with different settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Correlations:
    """Pearson correlations [n, n] between the columns ``names``, of which the first is ``loss``.

    nan stands where a column does not vary.
    """

    names: tuple[str, ...]
    matrix: NDArray[np.float64]

    def between(self, first: str, second: str) -> float:
        """The correlation of two columns."""
        return float(self.matrix[self.names.index(first), self.names.index(second)])


def loss_against_readouts(losses: ArrayLike, errors: Mapping[str, ArrayLike]) -> Correlations:
    """Correlations of the ``losses`` [M] of M encoders and their readout ``errors``, [M] by name.

    ValueError for fewer than two encoders, and for columns of different lengths.
    """
    columns = {"loss": np.asarray(losses, dtype=np.float64)}
    columns |= {name: np.asarray(column, dtype=np.float64) for name, column in errors.items()}
    lengths = {name: column.shape for name, column in columns.items()}
    if len(set(lengths.values())) > 1 or len(columns["loss"]) < 2:
        raise ValueError(
            f"columns are of {lengths}: wanted one number for each of 2 encoders or more"
        )
    table = np.stack(list(columns.values()))
    centred = table - table.mean(axis=1, keepdims=True)
    length = np.linalg.norm(centred, axis=1)
    length[length == 0.0] = np.nan
    matrix: NDArray[np.float64] = centred @ centred.T / np.outer(length, length)
    return Correlations(tuple(columns), matrix)
