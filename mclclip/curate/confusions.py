"""Pairs of images that one encoder confuses and another tells apart, and those that both confuse.

Source: Tong et al., Eyes Wide Shut (CVPR 2024), section 2: pairs whose cosine is above 0.95 for
CLIP and below 0.6 for DINOv2, of which MMVP was made. Here both encoders are any, pairs come in
order of the difference between their cosines, and an image is in a bounded number of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mclclip.curate import near
from mclclip.search import Integers, Pairs

Cosines = NDArray[np.float64]

POOL = 1_000_000
"""Pairs that are held at most, those of the largest differences; 40 bytes each, twice."""


@dataclass(frozen=True)
class KeptPairs:
    """The pairs that are kept, in their order, and how many were left out, by reason.

    rows      [P, 2], the lower one first
    cosines   [P, 2], of the first and of the second encoder
    num_pairs number of all pairs
    left_out  per_image: beyond the cap of one of its images; total: beyond the cap of all;
              pool: beyond the pairs that are held
    """

    rows: Integers
    cosines: Cosines
    num_pairs: int
    left_out: dict[str, int]


@dataclass(frozen=True)
class BlindSpots:
    """Blind spots and near-duplicates among N images, with their counts.

    spots       blind spots, the largest difference of cosines first
    duplicates  pairs that both encoders confuse, the largest sum of cosines first
    confused    number of pairs that the first encoder confuses
    lowest      the lowest cosine of the second encoder among these; None where there are none
    counts      [N], blind spots of each image, whether they are kept or not
    """

    spots: KeptPairs
    duplicates: KeptPairs
    confused: int
    lowest: float | None
    counts: NDArray[np.int32]


@dataclass
class _Pool:
    """The pairs of the largest scores, ties by the lower rows; at most ``size`` of them."""

    size: int
    num_pairs: int = 0
    held: int = 0
    parts: list[tuple[Integers, Cosines, Cosines]] = field(default_factory=list)

    def add(self, rows: Integers, cosines: Cosines, scores: Cosines) -> None:
        """Takes pairs [P, 2] with cosines [P, 2] and scores [P]."""
        if not len(rows):
            return
        self.parts.append((rows, cosines, scores))
        self.num_pairs += len(rows)
        self.held += len(rows)
        if self.held > 2 * self.size:
            self.parts = [self.in_order()]
            self.held = self.size

    def in_order(self) -> tuple[Integers, Cosines, Cosines]:
        """The pairs that are held, the largest score first."""
        if not self.parts:
            return np.zeros((0, 2), np.int64), np.zeros((0, 2)), np.zeros(0)
        rows, cosines, scores = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        order = np.lexsort((rows[:, 1], rows[:, 0], -scores))[: self.size]
        return rows[order], cosines[order], scores[order]

    def kept(self, per_image: int, max_pairs: int) -> KeptPairs:
        """Goes through the pairs in their order, and keeps those within both caps."""
        rows, cosines, _ = self.in_order()
        uses: Counter[int] = Counter()
        kept: list[int] = []
        beyond = 0
        for number, (lower, higher) in enumerate(rows.tolist()):
            if len(kept) == max_pairs:
                break
            if max(uses[lower], uses[higher]) >= per_image:
                beyond += 1
                continue
            uses.update((lower, higher))
            kept.append(number)
        left_out = {
            "per_image": beyond,
            "total": len(rows) - len(kept) - beyond,
            "pool": self.num_pairs - len(rows),
        }
        return KeptPairs(rows[kept], cosines[kept], self.num_pairs, left_out)


def find(
    pairs: Iterable[Pairs],
    second: near.Embeddings,
    *,
    above: float,
    below: float,
    per_image: int,
    max_pairs: int,
    pool: int = POOL,
) -> BlindSpots:
    """The blind spots among pairs that the first encoder confuses.

    pairs      those pairs of images that both encoders have embedded, some at a time
    second     embeddings [N, D] of the second encoder, which need not have unit length
    above      two images whose cosine is above this are confused by the second encoder too
    below      two images whose cosine is below this are told apart by the second encoder
    per_image  pairs that are kept of one image, and ``max_pairs`` of all

    Pairs of the largest difference are kept first. At most ``pool`` of each kind are held; so a cap
    per image is exact among these. The result does not depend on how pairs are cut into pieces.
    """
    size = max(pool, max_pairs)
    spots, duplicates = _Pool(size), _Pool(size)
    counts = np.zeros(len(second), np.int32)
    confused, lowest = 0, np.inf
    for piece in pairs:
        rows, own = piece.rows, piece.cosines
        other = near.cosines_of(second, *rows.T)
        confused += len(rows)
        lowest = min(lowest, float(other.min()))
        values = np.column_stack([own, other])
        apart, same = other < below, other > above
        spots.add(rows[apart], values[apart], (own - other)[apart])
        duplicates.add(rows[same], values[same], (own + other)[same])
        np.add.at(counts, rows[apart].ravel(), 1)
    return BlindSpots(
        spots.kept(per_image, max_pairs),
        duplicates.kept(per_image, max_pairs),
        confused,
        lowest if confused else None,
        counts,
    )
