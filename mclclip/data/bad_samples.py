"""The undecodable samples that a verb finds, made known to all ranks and recorded in the index."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from mclclip.data.sample_index import SampleIndex
from mclclip.ranks import collectives

log = logging.getLogger("mclclip")


class BadSamples:
    """The undecodable samples of an index that one verb knows of; every rank makes one at once."""

    def __init__(self, index: SampleIndex, max_bad_fraction: float) -> None:
        self.index = index
        self.max_bad_fraction = max_bad_fraction
        # Asked of one process: where there are some, all keys of the index are read for them.
        self.known = set(collectives.on_main(index.bad_ids).tolist())

    def share(self, found: Mapping[int, str]) -> int:
        """Tells all ranks which samples this rank found (sample_id -> reason); returns the number
        of all known ones.

        A collective: every rank calls it. Rank 0 adds new ones to the index's ``bad_samples.json``
        and logs some of them. Raises ValueError on all ranks where more than ``max_bad_fraction``
        of the index's samples are known to be bad.
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
            log.warning("%d sample(s) cannot be used: %s", len(new), ", ".join(reasons))
        self.index.check_bad_fraction(len(self.known), self.max_bad_fraction)
        return len(self.known)
