"""Which class each sample of a batch is paired with: SimLAP's second label y2.

Source: SimLAP (Wu et al., 2024), section 3.3 ("one label from a mini-batch") and Fig. 8 (pairs of
the N closest classes). A draw depends on the seed, the step and the sample alone, so all ranks make
the same one, and a resumed run makes it again.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.nn import functional

from mclclip.randomness import Integers, mix

Pairing = Literal["arbitrary", "identical", "distinct", "n_closest"]


def draw_partners(
    classes: Integers,
    sample_ids: Integers,
    key: np.uint64,
    pairing: Pairing = "arbitrary",
    closest: Integers | None = None,
) -> Integers:
    """[B] int64: the class that each sample of the global batch is paired with; -1: there is none.

    classes, sample_ids   [B] of the global batch; equal ids get equal partners
    key                   of the step: every key is another draw
    pairing               ``arbitrary``: any class of the batch, uniformly; ``identical``: the
                          sample's own; ``distinct``: any other; ``n_closest``: its own or one of
                          its closest, those of them that the batch has, uniformly
    closest               for ``n_closest``, of each class of the batch in order (``np.unique``) the
                          classes closest to it, [P, n], its own not among them

    -1 is given by ``distinct`` alone, where the batch has one class.
    """
    if pairing == "identical":
        return classes.copy()
    present, place = np.unique(classes, return_inverse=True)
    numbers = np.asarray(mix(int(key), sample_ids))
    if pairing == "n_closest":
        assert closest is not None
        return _among(np.column_stack([present, closest]), present, place, numbers)
    count = len(present) - (pairing == "distinct")
    if count == 0:
        return np.full_like(classes, -1)
    drawn = (numbers % np.uint64(count)).astype(np.int64)
    if pairing == "distinct":
        drawn += drawn >= place
    return present[drawn]


def _among(
    near: Integers, present: Integers, place: Integers, numbers: npt.NDArray[np.uint64]
) -> Integers:
    """One of the ``present`` classes of row ``place`` of ``near`` for each of ``numbers``."""
    near = np.sort(near, axis=1)
    reached = np.isin(near, present).cumsum(axis=1)  # present classes up to each column
    wanted = (numbers % reached[:, -1][place].astype(np.uint64)).astype(np.int64) + 1
    columns = (reached[place] < wanted[:, None]).sum(axis=1)
    found: Integers = near[place, columns]
    return found


def closest_classes(vectors: Tensor, classes: Tensor, count: int) -> Tensor:
    """[P, count] int64: the classes whose vectors have the largest cosine with a class's own.

    ``vectors`` [K, E] has a row per class, ``classes`` [P] are the classes asked about; a class is
    not among its own closest. ``count`` is below K.
    """
    unit = functional.normalize(vectors.detach(), dim=1)
    cosine = unit[classes] @ unit.T
    cosine.scatter_(1, classes[:, None], float("-inf"))
    return cosine.topk(count, dim=1).indices
