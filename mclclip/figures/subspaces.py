"""Figure: t-SNE in the subspaces that gates select (SimLAP, Fig. 5). An encoder runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip.figures import drawing, tsne
from mclclip.figures.gates import unlike_pairs
from mclclip.figures.inputs import EXPORTS, GATES, Figure, Inputs
from mclclip.figures.overlap import class_similarity


def draw(inputs: Inputs, path: Path) -> dict[str, Any] | None:
    """t-SNE in all dimensions and in the subspaces of two pairs of classes: the pair whose gates
    are least alike, and the one whose are most alike.

    ``cosine`` is the mean over pairs of samples of the two classes, and ``cosine_to_others`` the
    mean over classes of that between the two and any other, in the same dimensions (Fig. 1 and 10).
    """
    data: dict[str, Any] = {}
    lines: list[dict[str, drawing.Plane]] = []
    drawn = inputs.ids[inputs.draw_places(tsne.MAX_LAID_OUT, 8)]
    for stage in inputs.stages:
        learned = inputs.gates.get(stage.name)
        encoder = inputs.encoder(stage, learned) if learned is not None else None
        if learned is None or encoder is None:
            continue
        ids = drawn[learned.codes[drawn] >= 0]
        if len(ids) < tsne.FEWEST:
            continue
        features = encoder.of_samples(inputs, ids)
        codes, pairs = learned.codes[ids], unlike_pairs(learned.of_classes(), 1)
        spaces: dict[str, tuple[Sequence[int], NDArray[np.float32]]]
        spaces = {"all dimensions": ((), np.ones(features.shape[1], np.float32))}
        for pair, gates in zip(pairs.tolist(), learned.of_pairs(pairs), strict=True):
            spaces[learned.title(pair)] = pair, gates
        panels: dict[str, dict[str, Any]] = {}
        lines.append({})
        for title, (pair, gates) in spaces.items():
            inside = features * gates
            places = tsne.layout(inside, inputs.config.seed)
            lines[-1][f"{stage.name}: {title}"] = places, codes, learned.names
            panels[title] = {"places": places.tolist()}
            if pair:
                panels[title] |= _likeness(features, inside, codes, pair)
        data[stage.name] = {
            "samples": inputs.run.index.keys(ids),
            "classes": list(learned.names),
            "codes": codes.tolist(),
            "panels": panels,
        }
    if not lines:
        return None
    drawing.planes(path, "t-SNE in subspaces of pairs of classes", lines)
    return data


def _likeness(
    features: NDArray[np.float32],
    inside: NDArray[np.float32],
    codes: NDArray[np.integer],
    pair: Sequence[int],
) -> dict[str, float | None]:
    """Mean cosines of the pair and of the pair with others, in the subspace and in all dimensions;
    None for classes without samples."""
    likeness: dict[str, float | None] = {}
    for space, rows in (("", inside), ("_in_all_dimensions", features)):
        classes, cosines = class_similarity(rows, codes)
        own = np.isin(classes, pair)
        table = cosines[own]
        likeness[f"cosine{space}"] = float(table[0, own][1]) if own.sum() == 2 else None
        likeness[f"cosine_to_others{space}"] = (
            float(table[:, ~own].mean()) if own.any() and not own.all() else None
        )
    return likeness


FIGURE = Figure(draw, f"{GATES}, and {EXPORTS}", encoder=True)
