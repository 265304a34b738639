"""Scores and near pairs of the data, shown so that thresholds can be chosen."""

from __future__ import annotations

import logging
import math

import numpy as np
from numpy.typing import NDArray

from mclclip.analysis.near_duplicates import Components, Groups
from mclclip.filter.material import (
    Material,
    equal_pairs,
    labels_of,
    near_pairs,
    scores_of,
    tell_scores,
)

log = logging.getLogger("mclclip")

SURVEYED = (0.9, 0.95, 0.99)
SURVEYED_PAIRS = 2 * 10**10
"""Pairs that are compared at most: some minutes of one core."""


def show(material: Material, seed: int) -> None:
    """Shows the scores, and how many samples are near another, so that thresholds can be chosen.

    Of many samples some are compared, drawn by the seed, and the numbers of all are estimated.
    """
    tell_scores(material, scores_of(material))
    left = material.usable.copy()
    equal = 0
    for found in equal_pairs(material, material.usable, max(SURVEYED)):
        left[found.rows[:, 1]] = False
        equal += len(found.rows)
    drawn, share = _drawn(material, left, np.random.default_rng([seed, 7]))
    whole_groups = material.clusters is not None or share == 1
    pairs = dict.fromkeys(SURVEYED, 0)
    components = {above: Components(len(left)) for above in SURVEYED}
    for piece in near_pairs(material, min(SURVEYED), drawn):
        for above in SURVEYED:
            near = piece.rows[piece.cosines > above]
            pairs[above] += len(near)
            if whole_groups:
                components[above].add(near)
    log.info(
        "filter: %s samples are equal to an earlier one; near pairs of the others %s%s",
        f"{equal:,}", "among all" if material.clusters is None else "within clusters",
        "" if share == 1 else f", estimated from {100 * share:.2g} % of them",
    )  # fmt: skip
    for above in SURVEYED:
        copies = int((components[above].lowest() != np.arange(len(left))).sum())
        left_out = f", at most {equal + copies / share:,.0f} samples would be left out"
        log.info(
            "filter: %s pairs above %g%s", f"{pairs[above] / share:,.0f}", above,
            left_out if whole_groups else "",
        )  # fmt: skip
    log.info(
        "filter: nothing is written without --min-clip-score, --keep-share, --near-duplicates or "
        "--against"
    )


def _drawn(
    material: Material, left: NDArray[np.bool_], random: np.random.Generator
) -> tuple[NDArray[np.bool_], float]:
    """Draws samples of ``left``, whole clusters where there are some. Returns them, bool [N], and
    the share that their pairs are of all pairs that a filter would compare."""
    if material.clusters is not None:
        groups, power = Groups.of(labels_of(material), left), 1
        every, ids = groups.ids, groups.drawn(random.permutation(len(groups)), SURVEYED_PAIRS)
    else:
        every, power = np.flatnonzero(left), 2
        ids = random.permutation(every)[: math.isqrt(2 * SURVEYED_PAIRS)]
    drawn = np.zeros(len(left), bool)
    drawn[ids] = True
    return drawn, (len(ids) / len(every)) ** power if len(every) else 1.0
