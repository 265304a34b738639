"""Samples that cannot be decoded: known to all ranks, kept beside the index, fatal when many."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from mclclip.data.sample_index import SampleIndex
from mclclip.ranks import collectives

log = logging.getLogger("mclclip")


class BadSamples:
    """The undecodable samples of an index, as one verb comes to know them."""

    def __init__(self, index: SampleIndex, max_bad_fraction: float) -> None:
        self.index = index
        self.max_bad_fraction = max_bad_fraction
        self.known = {int(sample_id) for sample_id in index.bad_ids()}

    def share(self, found: Mapping[int, str]) -> int:
        """Joins what each rank found (sample_id -> reason) and returns how many are known.

        A collective: every rank calls it. New ones are written beside the index by rank 0 and
        named in the log. Raises ValueError on all ranks together where the known ones exceed
        ``max_bad_fraction`` of the index.
        """
        everywhere = {
            i: r for part in collectives.gather_objects(dict(found)) for i, r in part.items()
        }
        new = {i: reason for i, reason in everywhere.items() if i not in self.known}
        self.known |= new.keys()
        if new and collectives.rank() == 0:
            self.index.add_bad(new)
            keys = self.index.keys(np.asarray(sorted(new)[:5]))
            reasons = [f"{key} ({new[i]})" for i, key in zip(sorted(new)[:5], keys, strict=True)]
            log.warning("%d sample(s) cannot be decoded: %s", len(new), ", ".join(reasons))
        self.index.check_bad_fraction(len(self.known), self.max_bad_fraction)
        return len(self.known)
