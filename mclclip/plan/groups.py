"""What a plan makes of the groups of a training: found on disk, or assumed where none are yet."""

from __future__ import annotations

from typing import Any

import numpy as np

from mclclip.data.coverage import Coverage, coverage_report
from mclclip.data.groups import GroupedIndex, Policy
from mclclip.data.labels import label_space

# Where there are no labels, plans are shown for both: the coverage depends on the sizes of the
# groups, and MCL's Fig. 7 says that they are long-tailed without giving numbers.
ASSUMED = ("equal", "long-tailed")
NOTE = (
    "note: no labels yet. equal: all possible labels have the same size. long-tailed: the k-th",
    "largest cluster of a stage has 1/k of the largest one's samples, and stages are independent",
)
_MOST_LABELS = 1_000_000


def assumed(
    num_samples: int, radices: tuple[int, ...], global_batch: int, policy: Policy
) -> list[dict[str, Any]]:
    """``summary`` for each of ``ASSUMED``; none for more labels than can be listed or filled."""
    if label_space(radices) > min(num_samples, _MOST_LABELS):
        return []
    return [
        summary(sizes, coverage_report(_grouped(num_samples, radices, sizes), global_batch, policy))
        for sizes in ASSUMED
    ]


def summary(sizes: str, report: Coverage) -> dict[str, Any]:
    """An epoch in figures; ``sizes`` says where those of the groups come from."""
    return {
        "sizes": sizes,
        "steps": report.steps,
        "full_label_share": report.full_label_share,
        "mixed_steps": report.mixed_steps,
        "negatives": report.negatives,
        "left_out": report.remainder,
        "left_out_share": report.remainder / max(report.num_samples, 1),
        "repeated": report.repeated,
    }


def _grouped(num_samples: int, radices: tuple[int, ...], sizes: str) -> GroupedIndex:
    """All labels of ``radices`` with the sizes that are assumed; it holds no sample ids."""
    share = np.ones(1)
    for radix in radices:
        cluster = np.ones(radix) if sizes == "equal" else 1 / np.arange(1, radix + 1)
        share = np.outer(share, cluster / cluster.sum()).reshape(-1)
    starts = np.round(np.append(0.0, np.cumsum(share)) * num_samples).astype(np.int64)
    starts[-1] = num_samples
    filled = np.flatnonzero(np.diff(starts))
    nobody = np.broadcast_to(np.int64(0), num_samples)
    return GroupedIndex(nobody, np.append(starts[filled], num_samples), filled, radices)
