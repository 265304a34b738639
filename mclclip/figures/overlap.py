"""Figure: cosines of pairs of samples with the same value of an attribute, and with different ones.

Source: SimLAP (Wu et al., 2024), Fig. 4; Fig. 1, 10 and 12 for two values in a part of the
dimensions and for similarities between classes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.inputs import Inputs, MissingInput, unit_rows

log = logging.getLogger("mclclip")

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
QUIET = 500 / 2048  # the share of the dimensions in SimLAP's Fig. 1
TILE = 1024
_BINS = 100  # bins of cosines from -1 to 1


def draw(inputs: Inputs, path: Path) -> dict[str, Any]:
    """Draws, for each attribute and stage, cosines within and between values (Fig. 4).

    If there are three values, it also draws the cosines of the two least similar values with each
    other and with the rest, in the dimensions in which these two vary least (Fig. 1).
    """
    inputs.require_attributes()
    data: dict[str, Any] = {}
    panels: dict[str, dict[str, Any]] = {}
    for attribute in inputs.attributes:
        every, names = inputs.run.index.attribute(attribute)
        codes = every[inputs.ids]
        has_value = codes >= 0
        sizes = np.unique(codes[has_value], return_counts=True)[1]
        if len(sizes) < 2 or sizes.max() < 2:
            log.info("overlap: %s has no pairs both within and between values", attribute)
            continue
        for stage, rows in inputs.features.items():
            edges, cosines = class_overlap(rows[has_value], codes[has_value])
            panels[f"{stage}, {attribute}: overlap {cosines['overlap']:.2f}"] = cosines
            of_stage = data.setdefault(attribute, {})[stage] = {**cosines}
            if len(sizes) < 3:
                continue
            pair, few, shared = _least_alike(rows[has_value], codes[has_value])
            values = [names[code] for code in pair]
            title = f"{stage}, {' and '.join(values)}, {len(few)} dimensions"
            panels[f"{title}: {shared['overlap']:.2f}"] = shared
            of_stage["pair"] = {"values": values, "dimensions": few.tolist(), **shared}
    if not data:
        raise MissingInput(
            "an attribute with two values, one of them of two samples: there is none"
        )
    with drawing.canvas(path, 5.5, 0.6 + 1.7 * len(panels)) as figure:
        every = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (name, cosines) in zip(every, panels.items(), strict=True):
            for label in ("within", "between"):
                axes.stairs(cosines[label], edges, label=label, fill=True, alpha=0.5)
            axes.set_title(name, fontsize="small")
            axes.legend(fontsize="small")
        every[-1].set_xlabel("cosine")
        figure.suptitle("cosines within and between values")
    return {"edges": edges.tolist(), "attributes": data}


def class_overlap(
    features: ArrayLike, labels: ArrayLike, pair: tuple[int, int] | None = None
) -> tuple[Floats, dict[str, Any]]:
    """Distributions of the cosines of all pairs of rows [N, D] within classes and between classes.

    ``labels`` [N] are the numbers of the classes. Returns the edges [n + 1] of n bins from -1 to 1,
    and a mapping with

    within    [n], the share of the pairs of one class in each bin
    between   [n], the same for pairs of two classes
    overlap   the sum of the smaller share of each bin: 0 for separate distributions, 1 for equal

    With ``pair``, two classes count as one (Fig. 1b): ``within`` is of pairs of a sample of the
    first and one of the second, ``between`` of pairs of a sample of these two and one of another
    class. Pairs of both kinds must exist.
    """
    rows, classes = unit_rows(features), np.asarray(labels)
    edges, counts = np.linspace(-1.0, 1.0, _BINS + 1), np.zeros((2, _BINS), dtype=np.int64)
    numbers, others = np.arange(len(rows)), ~np.isin(classes, pair or ())
    for start in range(0, len(rows), TILE):
        block = slice(start, start + TILE)
        if pair is None:
            later = numbers > numbers[block, None]
            same = classes[block, None] == classes
            kinds = later & same, later & ~same
        else:
            first, second = (classes == label for label in pair)
            kinds = first[block, None] & second, ~others[block, None] & others
        cosine = np.clip(rows[block] @ rows.T, -1.0, 1.0)
        for kind, pairs in enumerate(kinds):
            counts[kind] += np.histogram(cosine[pairs], edges)[0]
    within, between = counts / counts.sum(axis=1, keepdims=True)
    overlap = float(np.minimum(within, between).sum())
    return edges, {"overlap": overlap, "within": within.tolist(), "between": between.tolist()}


def class_similarity(features: ArrayLike, labels: ArrayLike) -> tuple[Integers, Floats]:
    """Returns the classes [C] in order, and the mean cosine [C, C] of pairs of different samples of
    two classes; NaN for a class of one sample with itself.
    """
    rows = unit_rows(features)
    classes, place, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    sums = np.zeros((len(classes), rows.shape[1]))
    np.add.at(sums, place, rows)
    similarity = sums @ sums.T / np.outer(counts, counts)
    within = np.square(sums).sum(axis=1) - counts  # a sample's cosine with itself, 1, is taken off
    pairs = (counts * (counts - 1)).astype(np.float64)
    pairs[pairs == 0.0] = np.nan
    np.fill_diagonal(similarity, within / pairs)
    return classes, similarity


def quietest_dimensions(
    features: ArrayLike, labels: ArrayLike, pair: tuple[int, int], count: int
) -> Integers:
    """Returns the ``count`` dimensions in which the samples of two classes vary least, lowest
    variance first.

    They stand for the features that the two classes share (Fig. 1: 500 of 2,048).
    """
    samples = np.asarray(features)[np.isin(np.asarray(labels), pair)]
    order = np.argsort(samples.astype(np.float64).var(axis=0), kind="stable")
    return order[:count].astype(np.int64)


def _least_alike(
    rows: NDArray[np.float32], codes: NDArray[np.integer]
) -> tuple[tuple[int, int], Integers, dict[str, Any]]:
    """Returns the two classes with the lowest mean cosine, the dimensions in which they vary least,
    and their ``class_overlap`` in these dimensions."""
    classes, similarity = class_similarity(rows, codes)
    np.fill_diagonal(similarity, np.inf)
    first, second = np.unravel_index(similarity.argmin(), similarity.shape)
    pair = int(classes[first]), int(classes[second])
    few = quietest_dimensions(rows, codes, pair, max(1, round(QUIET * rows.shape[1])))
    return pair, few, class_overlap(rows[:, few], codes, pair)[1]
