"""Scores and near pairs of the data, shown so that thresholds can be chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from mclclip import search
from mclclip.analysis import near_duplicates
from mclclip.analysis.near_duplicates import Components, Groups
from mclclip.filter.material import Material, labels_of, scores_of, tell_scores
from mclclip.run import runlog

log = logging.getLogger("mclclip")

SURVEYED = (0.9, 0.95, 0.99)
SURVEYED_PAIRS = 2 * 10**10
"""Pairs that are compared at most: some minutes of one core."""


def show(material: Material, seed: int) -> None:
    """Shows the scores, and how many samples are near another, so that thresholds can be chosen.

    Of many samples some are compared, drawn by the seed, and the numbers of all are estimated.
    """
    tell_scores(material, scores_of(material))
    count, random = len(material.index), np.random.default_rng([seed, 7])
    found, share, whole_groups = _surveyed_pairs(material, random)
    pairs = dict.fromkeys(SURVEYED, 0)
    components = {above: Components(count) for above in SURVEYED}
    for piece in found:
        for above in SURVEYED:
            near = piece.rows[piece.cosines > above]
            pairs[above] += len(near)
            if whole_groups:
                components[above].add(near)
    where = "among all samples" if material.clusters is None else "within clusters"
    log.info(
        "filter: near pairs %s%s", where,
        "" if share == 1 else f", estimated from {100 * share:.2g} % of them",
    )  # fmt: skip
    for above in SURVEYED:
        copies = int((components[above].lowest() != np.arange(count)).sum())
        left_out = f", --near-duplicates {above} leaves out {copies / share:,.0f} samples"
        log.info(
            "filter: %s pairs above %g%s", f"{pairs[above] / share:,.0f}", above,
            left_out if whole_groups else "",
        )  # fmt: skip
    log.info(
        "filter: nothing is written without --min-clip-score, --keep-share, --near-duplicates or "
        "--against"
    )


def _surveyed_pairs(
    material: Material, random: np.random.Generator
) -> tuple[Iterator[search.Pairs], float, bool]:
    """Near pairs of some samples, their share of all, and whether these are whole groups."""
    lowest, what = min(SURVEYED), "filter"
    if material.clusters is not None:
        groups = Groups.of(labels_of(material), material.usable)
        drawn = groups.drawn(random.permutation(len(groups)), SURVEYED_PAIRS)
        batches = drawn.batches(material.held_rows)
        shown = runlog.progress(batches, total=len(batches), description="filter, clusters")
        found = near_duplicates.near_in_groups(
            material.rows, drawn, lowest, shown, held_rows=material.held_rows, what=what
        )
        return found, len(drawn.ids) / max(len(groups.ids), 1), True
    ids = np.flatnonzero(material.usable)
    total = search.num_blocks(len(ids))
    most = max(SURVEYED_PAIRS // (search.QUERY_ROWS * search.BANK_ROWS), 1)
    chosen = set(random.permutation(total)[:most].tolist())
    over = (block for number, block in enumerate(search.blocks(len(ids))) if number in chosen)
    shown_blocks = runlog.progress(over, total=len(chosen), description="filter, blocks")
    found = near_duplicates.near_among(material.rows, ids, lowest, shown_blocks, what=what)
    return found, len(chosen) / max(total, 1), len(chosen) == total
