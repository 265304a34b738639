"""Figure: how similar samples of one value of an attribute are, and of two: cosines of pairs.

Source: SimLAP (Wu et al., 2024), Fig. 4; Fig. 1, 10 and 12 for two values in chosen dimensions and
for similarities class by class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.inputs import EMBEDDINGS, Figure, Inputs, MissingInput, unit_rows

log = logging.getLogger("mclclip")

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
QUIET = 500 / 2048  # share of the dimensions that SimLAP's Fig. 1 takes
_TILE = 1024


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """Cosines within and between the values of each attribute, by stage (Fig. 4); and those of the
    two values that are least alike, with each other and with others, in the dimensions in which
    these two vary least (Fig. 1), where there is a third value.
    """
    inputs.require_attributes()
    if not inputs.features:
        return None
    data: dict[str, Any] = {}
    panels: dict[str, Overlap] = {}
    for attribute in inputs.attributes:
        every, names = inputs.index.attribute(attribute)
        codes = every[inputs.ids]
        known = codes >= 0
        sizes = np.unique(codes[known], return_counts=True)[1]
        if len(sizes) < 2 or sizes.max() < 2:
            log.info("overlap: %s has no pairs both within and between values", attribute)
            continue
        for stage, rows in inputs.features.items():
            cosines = class_overlap(rows[known], codes[known])
            panels[f"{stage}, {attribute}: overlap {cosines.overlap:.2f}"] = cosines
            own = data.setdefault(attribute, {})[stage] = cosines.as_json()
            if len(sizes) < 3:
                continue
            pair, few, shared = _least_alike(rows[known], codes[known])
            values = [names[code] for code in pair]
            title = f"{stage}, {' and '.join(values)}, {len(few)} dimensions: {shared.overlap:.2f}"
            panels[title] = shared
            own["pair"] = {"values": values, "dimensions": few.tolist(), **shared.as_json()}
    if not data:
        raise MissingInput(
            "an attribute with two values, one of them of two samples: there is none"
        )
    edges = cosines.edges.tolist()
    _draw_histograms(path, edges, panels)
    return {"edges": edges, "attributes": data}


@dataclass(frozen=True)
class Overlap:
    """Distributions of cosines.

    edges     [n + 1], from -1 to 1
    within    [n], shares of the pairs of one class in each bin; they add up to 1
    between   [n], the same of the pairs of two classes
    overlap   sum of the smaller shares: 0, separate, to 1, equal
    """

    edges: Floats
    within: Floats
    between: Floats
    overlap: float

    def as_json(self) -> dict[str, Any]:
        """The overlap and both histograms, for the figure's JSON file, which has the edges once."""
        shares = {"within": self.within.tolist(), "between": self.between.tolist()}
        return {"overlap": self.overlap, **shares}


def class_overlap(features: ArrayLike, labels: ArrayLike, bins: int = 100) -> Overlap:
    """Distributions of the cosines of all pairs of rows of [N, D], within and between ``labels``.

    ``labels`` are [N] integers. ValueError where there is no pair of one of the two kinds.
    """
    classes = np.asarray(labels)

    def kinds(block: slice) -> tuple[Booleans, Booleans]:
        numbers = np.arange(len(classes))
        later = numbers > numbers[block, None]
        same = classes[block, None] == classes
        return later & same, later & ~same

    return _overlap(unit_rows(features), kinds, bins)


def pair_overlap(
    features: ArrayLike, labels: ArrayLike, pair: tuple[int, int], bins: int = 100
) -> Overlap:
    """The same where samples of two classes are taken for alike (Fig. 1b): ``within`` are pairs of
    a sample of the first class and one of the second, ``between`` pairs of a sample of the two and
    one of another class."""
    classes = np.asarray(labels)

    def kinds(block: slice) -> tuple[Booleans, Booleans]:
        first, second = (classes == label for label in pair)
        others = ~(first | second)
        return first[block, None] & second, ~others[block, None] & others

    return _overlap(unit_rows(features), kinds, bins)


def _overlap(
    rows: Floats, kinds: Callable[[slice], tuple[Booleans, Booleans]], bins: int
) -> Overlap:
    """``kinds`` gives, for a block of rows, which pairs [n, N] are within and which between."""
    edges = np.linspace(-1.0, 1.0, bins + 1)
    counts = np.zeros((2, bins), dtype=np.int64)
    for first in range(0, len(rows), _TILE):
        block = slice(first, first + _TILE)
        cosine = np.clip(rows[block] @ rows.T, -1.0, 1.0)
        for kind, chosen in enumerate(kinds(block)):
            counts[kind] += np.histogram(cosine[chosen], edges)[0]
    total = counts.sum(axis=1, keepdims=True)
    if not total.all():
        raise ValueError(
            f"{total[0, 0]} pairs of one class and {total[1, 0]} of two: wanted some of both"
        )
    within, between = counts / total
    return Overlap(edges, within, between, float(np.minimum(within, between).sum()))


def class_similarity(features: ArrayLike, labels: ArrayLike) -> tuple[Integers, Floats]:
    """Classes [C] in order, and [C, C]: the mean cosine over all pairs of different samples.

    A class of one sample has nan with itself.
    """
    rows = unit_rows(features)
    classes, place, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    sums = np.zeros((len(classes), rows.shape[1]))
    np.add.at(sums, place, rows)
    similarity = sums @ sums.T / np.outer(counts, counts)
    own = np.square(sums).sum(axis=1) - counts  # without each sample with itself, which has 1
    pairs = (counts * (counts - 1)).astype(np.float64)
    pairs[pairs == 0.0] = np.nan
    np.fill_diagonal(similarity, own / pairs)
    return classes, similarity


def quietest_dimensions(
    features: ArrayLike, labels: ArrayLike, pair: tuple[int, int], count: int
) -> Integers:
    """[count]: the dimensions in which the samples of two classes vary least, quietest first.

    They are taken for the features that the two share (Fig. 1: 500 of 2,048). ValueError where
    there are none of them.
    """
    chosen = np.asarray(features)[np.isin(np.asarray(labels), pair)]
    if not len(chosen):
        raise ValueError(f"no sample is of class {pair[0]} or {pair[1]}")
    order = np.argsort(chosen.astype(np.float64).var(axis=0), kind="stable")
    quietest: Integers = order[:count].astype(np.int64)
    return quietest


def _least_alike(
    rows: NDArray[np.float32], codes: NDArray[np.integer]
) -> tuple[tuple[int, int], Integers, Overlap]:
    """The two classes with the lowest mean cosine, the dimensions in which they vary least, and the
    cosines there."""
    classes, similarity = class_similarity(rows, codes)
    np.fill_diagonal(similarity, np.inf)
    first, second = np.unravel_index(similarity.argmin(), similarity.shape)
    pair = int(classes[first]), int(classes[second])
    few = quietest_dimensions(rows, codes, pair, max(1, round(QUIET * rows.shape[1])))
    return pair, few, pair_overlap(rows[:, few], codes, pair)


def _draw_histograms(path: Path, edges: Sequence[float], panels: Mapping[str, Overlap]) -> None:
    """A panel per name with shares by bin, one step line each within and between values."""
    with drawing.canvas(path, 5.5, 0.6 + 1.7 * len(panels)) as figure:
        every = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (name, cosines) in zip(every, panels.items(), strict=True):
            for label, shares in (("within", cosines.within), ("between", cosines.between)):
                axes.stairs(shares, edges, label=label, fill=True, alpha=0.5)
            axes.set_title(name, fontsize="small")
            axes.legend(fontsize="small")
        every[-1].set_xlabel("cosine")
        figure.suptitle("cosines within and between values")


FIGURE = Figure(draw, EMBEDDINGS)
