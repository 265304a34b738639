"""Figure: the samples nearest to a positive, and to a negative, as IFM modifies them.

Source: IFM (Robinson et al., "Can Contrastive Learning Avoid Shortcut Solutions?", 2021), section
3.1 and Fig. 4: a modified positive v+ - eps v and a modified negative v- + eps v are shown by their
nearest neighbour in a memory bank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.inputs import EMBEDDINGS, Figure, Inputs, unit_rows
from mclclip.figures.nearest import nearest_samples
from mclclip.search import nearest_to_few

ANCHORS = 3  # whose positive and negative are modified
EPSILONS = (0.0, 0.1, 0.2, 0.5, 1.0)
_COPIES, _SAME = 16, 1e-5

Kind = Literal["positive", "negative"]
KINDS: Sequence[Kind] = ("positive", "negative")


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """The neighbours of modified samples, a row per anchor and kind, a column per epsilon.

    The positive of an anchor is the nearest sample that is no copy of it: embeddings have one view
    of each sample, and the paper's positive is another view. The negative is drawn by the seed.
    """
    if not inputs.features:
        return None
    inputs.require_samples(3)
    random = np.random.default_rng([inputs.config.seed, 7])
    drawn = random.permutation(len(inputs.ids))[: 2 * ANCHORS]
    anchors, negatives = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    data: dict[str, list[dict[str, Any]]] = {}
    pictures, titles = [], []
    for name, rows in inputs.features.items():
        positives = nearest_different(rows, anchors)
        for anchor, *samples in zip(anchors, positives, negatives, strict=False):
            for kind, sample in zip(KINDS, samples, strict=True):
                if sample < 0:
                    continue
                cosines, near = nearest_to_modified(
                    rows, rows[anchor], rows[sample], EPSILONS, kind
                )
                ids = inputs.ids[[anchor, *near]]
                own, *keys = inputs.run.index.keys([inputs.ids[sample], *ids])
                entry = {"kind": kind, "anchor": keys[0], "nearest": keys[1:]}
                entry |= {"sample": own, "cosines": cosines.tolist()}
                data.setdefault(name, []).append(entry)
                pictures.append(inputs.run.pictures(ids))
                titles.append(f"{name}: {kind}")
    columns = ["anchor", *(f"eps {eps:g}" for eps in EPSILONS)]
    drawing.sheet(path, "nearest to a modified sample", pictures, titles, columns)
    return {"eps": EPSILONS, "stages": data}


def nearest_different(features: ArrayLike, anchors: ArrayLike) -> NDArray[np.int64]:
    """The row [A] that is nearest to each of the ``anchors`` [A] without being a copy of it.

    Rows of the same direction are copies. -1 where there is no other among its 16 nearest ones.
    """
    rows = np.asarray(features)
    cosines, near = nearest_samples(rows, anchors, min(_COPIES, len(rows) - 1))
    different = cosines < 1.0 - _SAME
    first = near[np.arange(len(near)), different.argmax(axis=1)]
    return np.where(different.any(axis=1), first, -1)


def nearest_to_modified(
    features: ArrayLike, anchor: ArrayLike, sample: ArrayLike, eps: Sequence[float], kind: Kind
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The sample of the bank that is nearest to ``sample`` as IFM modifies it, for each of ``eps``.

    features   [N, D], the memory bank
    anchor     [D], v
    sample     [D], v+ or v-
    kind       ``positive``: v+ - eps v, away from the anchor; ``negative``: v- + eps v, towards it

    anchor and sample are brought to unit length first. Returns cosines and rows [len(eps)].
    ValueError where a modified sample is the zero vector.
    """
    v, s = unit_rows(np.stack([np.asarray(anchor), np.asarray(sample)]))
    sign = -1.0 if kind == "positive" else 1.0
    modified = unit_rows(s + sign * np.asarray(eps, dtype=np.float64)[:, None] * v)
    bank = unit_rows(features).astype(np.float32)
    similarity, rows = nearest_to_few(modified.astype(np.float32), bank, 1)
    return similarity[:, 0], rows[:, 0]


FIGURE = Figure(draw, EMBEDDINGS)
