"""Scores and near pairs of the data, shown so that thresholds can be chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mclclip import search
from mclclip.analysis.near_duplicates import Components, Groups
from mclclip.filter.material import (
    Material,
    among,
    equal_pairs,
    in_groups,
    labels_of,
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
    some, share, whole_groups = _some_pairs(material, left, np.random.default_rng([seed, 7]))
    pairs = dict.fromkeys(SURVEYED, 0)
    components = {above: Components(len(left)) for above in SURVEYED}
    for piece in some:
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


def _some_pairs(
    material: Material, left: NDArray[np.bool_], random: np.random.Generator
) -> tuple[Iterator[search.Pairs], float, bool]:
    """Near pairs of some samples that are left, their share of all, and whether they are pairs of
    whole groups."""
    lowest = min(SURVEYED)
    if material.clusters is not None:
        groups = Groups.of(labels_of(material), left)
        drawn = groups.drawn(random.permutation(len(groups)), SURVEYED_PAIRS)
        return in_groups(material, drawn, lowest), len(drawn.ids) / max(len(groups.ids), 1), True
    ids = np.flatnonzero(left)
    total = search.num_blocks(len(ids))
    most = max(SURVEYED_PAIRS // (search.QUERY_ROWS * search.BANK_ROWS), 1)
    chosen = set(random.permutation(total)[:most].tolist())
    blocks = (block for number, block in enumerate(search.blocks(len(ids))) if number in chosen)
    found = among(material, ids, lowest, blocks, len(chosen))
    return found, len(chosen) / max(total, 1), len(chosen) == total
