"""How much two labellings of the same samples have in common."""

from __future__ import annotations

import numpy as np


def ami(a: np.ndarray, b: np.ndarray) -> float:
    """Adjusted mutual information of two labellings [N], 1 for equal up to renaming, near 0 for
    independent ones (scikit-learn, arithmetic mean; MCL, Table 11).

    Rows that are -1 in either are left out. Raises ValueError where lengths differ or no row is
    left.
    """
    # Imported here: scikit-learn takes a second.
    from sklearn.metrics import adjusted_mutual_info_score

    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise ValueError(f"ami: the labellings have shapes {a.shape} and {b.shape}: wanted one")
    both = (a >= 0) & (b >= 0)
    if not both.any():
        raise ValueError(f"ami: none of the {len(a):,} samples has a label in both labellings")
    return float(adjusted_mutual_info_score(a[both], b[both]))
