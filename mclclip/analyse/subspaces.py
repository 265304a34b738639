"""Figure: t-SNE in the subspaces that gates select. An encoder runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mclclip.analyse import encoders, gates
from mclclip.analyse.features import MAX_LAID_OUT
from mclclip.analyse.material import ClassGates, Figure, Material, pair_title
from mclclip.analysis import gates as analysis
from mclclip.analysis import pictures
from mclclip.analysis import tsne as layouts
from mclclip.analysis.class_overlap import class_similarity


def subspaces(material: Material, path: Path) -> dict[str, Any] | None:
    """t-SNE in all dimensions and in the subspaces of two pairs of classes (SimLAP, Fig. 5): the
    pair whose gates are least alike, and the one whose are most alike.

    ``cosine`` is the mean over pairs of samples of the two classes, and ``cosine_to_others`` the
    mean over classes of that between the two and any other, in the same dimensions (Fig. 1 and 10).
    """
    data: dict[str, Any] = {}
    lines: list[dict[str, pictures.Plane]] = []
    rows = material.some(MAX_LAID_OUT, 8)
    for stage, name in material.stages.items():
        learned = material.gates.get(name)
        encoder = encoders.load(material, stage, learned) if learned is not None else None
        if learned is None or encoder is None:
            continue
        ids = material.ids[rows[learned.codes[material.ids[rows]] >= 0]]
        if len(ids) < layouts.FEWEST:
            continue
        features = encoders.features_of(material, encoder, ids)
        codes, spaces = learned.codes[ids], _spaces(learned)
        data[name] = {"samples": material.index.keys(ids), "classes": list(learned.names)}
        data[name] |= {"codes": codes.tolist(), "panels": {}}
        lines.append({})
        for title, (pair, gate) in spaces.items():
            inside = features * gate
            places = layouts.tsne(inside, material.seed)
            lines[-1][f"{name}: {title}"] = places, codes, learned.names
            data[name]["panels"][title] = {"places": places.tolist()}
            if pair:
                data[name]["panels"][title] |= _likeness(features, inside, codes, pair)
    if not lines:
        return None
    pictures.planes(path, "t-SNE in subspaces of pairs of classes", lines)
    return data


def _spaces(learned: ClassGates) -> dict[str, tuple[Sequence[int], NDArray[np.float32]]]:
    """All dimensions, and the subspaces of two pairs: classes (none: no pair) and gates [D]."""
    pairs = analysis.unlike_pairs(learned.of_classes(), 1)
    gates_of_pairs = learned.of_pairs(pairs)
    spaces: dict[str, tuple[Sequence[int], NDArray[np.float32]]]
    spaces = {"all dimensions": ((), np.ones(gates_of_pairs.shape[1:], np.float32))}
    for pair, gate in zip(pairs.tolist(), gates_of_pairs, strict=True):
        spaces[pair_title(learned.names, pair)] = pair, gate
    return spaces


def _likeness(
    features: NDArray[np.float32],
    inside: NDArray[np.float32],
    codes: NDArray[np.integer],
    pair: Sequence[int],
) -> dict[str, float | None]:
    """Mean cosines of the pair and of the pair with others, in the subspace and in all dimensions;
    None for classes without samples."""
    found: dict[str, float | None] = {}
    for space, rows in (("", inside), ("_in_all_dimensions", features)):
        classes, cosines = class_similarity(rows, codes)
        own = np.isin(classes, pair)
        table = cosines[own]
        found[f"cosine{space}"] = float(table[0, own][1]) if own.sum() == 2 else None
        found[f"cosine_to_others{space}"] = (
            float(table[:, ~own].mean()) if own.any() and not own.all() else None
        )
    return found


FIGURES = {"subspaces": Figure(subspaces, f"{gates.NEEDS}, and {encoders.NEEDS}", encoder=True)}
