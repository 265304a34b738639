"""Blind spots: pairs of images that one encoder confuses and another tells apart.

Source: Tong et al., Eyes Wide Shut (CVPR 2024), section 2: pairs whose cosine is above 0.95 for
CLIP and below 0.6 for DINOv2, of which MMVP was made. Here both encoders are any, pairs come in
order of the difference between their cosines, and an image is in a bounded number of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mclclip.search import Pairs, cosines

Integers = NDArray[np.int64]
Cosines = NDArray[np.float64]

ABOVE, BELOW = 0.95, 0.6
"""The cosines of the paper: what is confused, and what is told apart."""

POOL = 1_000_000
"""Pairs that are held at most, those of the largest differences; 40 bytes each, twice."""


class Chosen(Protocol):
    """Rows [N, D] of which some are read by their numbers."""

    def __getitem__(self, rows: Integers, /) -> NDArray[np.floating[Any]]:
        """The rows [n, D] of these numbers."""


@dataclass(frozen=True)
class Listed:
    """The pairs that are kept, in their order, and how many were left out, by reason.

    rows      [P, 2], the lower one first
    cosines   [P, 2], of the first and of the second encoder
    found     pairs there are
    left_out  per_image: beyond the cap of one of its images; total: beyond the cap of all;
              pool: beyond the pairs that are held
    """

    rows: Integers
    cosines: Cosines
    found: int
    left_out: dict[str, int]


@dataclass(frozen=True)
class Found:
    """Blind spots and near-duplicates among N images, with their counts.

    spots       blind spots, the largest difference of cosines first
    duplicates  pairs that both encoders confuse, the largest sum of cosines first
    confused    pairs that the first encoder confuses
    lowest      the lowest cosine of the second encoder among these; None where there are none
    counts      [N], blind spots of each image, whether they are kept or not
    """

    spots: Listed
    duplicates: Listed
    confused: int
    lowest: float | None
    counts: NDArray[np.int32]


@dataclass
class _Pool:
    """The pairs of the largest scores, ties by the lower rows; at most ``size`` of them."""

    size: int
    found: int = 0
    parts: list[tuple[Integers, Cosines, Cosines]] = field(default_factory=list)
    waiting: int = 0

    def add(self, rows: Integers, values: Cosines, scores: Cosines) -> None:
        """Takes pairs [P, 2] with cosines [P, 2] and scores [P]."""
        if len(rows):
            self.found += len(rows)
            self.parts.append((rows, values, scores))
            self.waiting += len(rows)
            if self.waiting > 2 * self.size:
                self.parts = [self.in_order()]
                self.waiting = len(self.parts[0][0])

    def in_order(self) -> tuple[Integers, Cosines, Cosines]:
        """The pairs that are held, the largest score first."""
        if not self.parts:
            return np.zeros((0, 2), np.int64), np.zeros((0, 2)), np.zeros(0)
        rows, values, scores = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        order = np.lexsort((rows[:, 1], rows[:, 0], -scores))[: self.size]
        return rows[order], values[order], scores[order]

    def listed(self, per_image: int, most: int) -> Listed:
        """Goes through the pairs in their order, and keeps those within both caps."""
        rows, values, _ = self.in_order()
        uses: Counter[int] = Counter()
        kept: list[int] = []
        beyond = 0
        for place, (lower, higher) in enumerate(rows.tolist()):
            if len(kept) == most:
                break
            if max(uses[lower], uses[higher]) >= per_image:
                beyond += 1
                continue
            uses.update((lower, higher))
            kept.append(place)
        left_out = {
            "per_image": beyond,
            "total": len(rows) - len(kept) - beyond,
            "pool": self.found - len(rows),
        }
        return Listed(rows[kept], values[kept], self.found, left_out)


def find(
    pieces: Iterable[Pairs],
    second: Chosen,
    usable: NDArray[np.bool_],
    *,
    above: float,
    below: float,
    per_image: int,
    max_pairs: int,
    pool: int = POOL,
) -> Found:
    """The blind spots among pairs that the first encoder confuses.

    pieces     those pairs, with their cosines, some at a time (``search.near_pairs``)
    second     embeddings of the second encoder, which need not have unit length
    usable     [N], images that both encoders have embedded; other pairs do not count
    above      two images whose cosine is above this are confused by the second encoder too
    below      two images whose cosine is below this are told apart by the second encoder
    per_image  pairs that are kept of one image, and ``max_pairs`` of all

    Pairs of the largest difference are kept first. At most ``pool`` of each kind are held; so a cap
    per image is exact among these. The result does not depend on how pairs are cut into pieces.
    """
    size = max(pool, max_pairs)
    spots, duplicates = _Pool(size), _Pool(size)
    counts = np.zeros(len(usable), np.int32)
    confused, lowest = 0, np.inf
    for rows, own in _usable(pieces, usable):
        other = _cosines_of(second, rows)
        confused += len(rows)
        lowest = min(lowest, float(other.min()))
        values = np.column_stack([own, other])
        apart, same = other < below, other > above
        spots.add(rows[apart], values[apart], (own - other)[apart])
        duplicates.add(rows[same], values[same], (own + other)[same])
        np.add.at(counts, rows[apart].ravel(), 1)
    return Found(
        spots.listed(per_image, max_pairs),
        duplicates.listed(per_image, max_pairs),
        confused,
        lowest if confused else None,
        counts,
    )


def _usable(
    pieces: Iterable[Pairs], usable: NDArray[np.bool_]
) -> Iterator[tuple[Integers, Cosines]]:
    """Pairs of usable images and their cosines, never none."""
    for piece in pieces:
        good = usable[piece.rows].all(axis=1)
        if good.any():
            yield piece.rows[good], piece.cosines[good]


def _cosines_of(embeddings: Chosen, pairs: Integers) -> Cosines:
    ids, places = np.unique(pairs, return_inverse=True)
    rows, (left, right) = embeddings[ids], places.reshape(-1, 2).T
    return cosines(rows[left], rows[right])


def sampling_weights(
    counts: NDArray[np.integer], usable: NDArray[np.bool_], most: int
) -> NDArray[np.float32]:
    """float32 [N]: 1 and the number of an image's blind spots, of which at most ``most`` count; 0
    for images that are not usable."""
    return np.where(usable, 1 + np.minimum(counts, most), 0).astype(np.float32)
