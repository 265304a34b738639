"""Figures of features: spectrum, neighbours, overlap of classes, t-SNE."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mclclip.analyse.material import Figure, Lacking, Material, check_attributes
from mclclip.analysis import class_overlap, hypersphere, neighbours, pictures, spectrum
from mclclip.analysis import tsne as layouts

log = logging.getLogger("mclclip")

ANCHORS, NEIGHBOURS = 8, 8
MODIFIED = 3  # anchors whose positive and negative IFM modifies
EPSILONS = (0.0, 0.1, 0.2, 0.5, 1.0)
KINDS: Sequence[Literal["positive", "negative"]] = ("positive", "negative")
MAX_LAID_OUT = 2_000
QUIET = 500 / 2048  # share of the dimensions that SimLAP's Fig. 1 takes


def _check_number(material: Material, fewest: int) -> None:
    """Raises Lacking for a run of fewer samples."""
    if len(material.ids) < fewest:
        raise Lacking(f"{fewest} samples or more: {len(material.ids)} can be used")


def singular_values(material: Material, path: Path) -> dict[str, Any] | None:
    """Singular values of the features' covariance, effective rank and uniformity by stage (SimLAP,
    Fig. 3)."""
    data = {}
    for name, rows in material.features.items():
        values = spectrum.singular_values(rows, alone=True)
        data[name] = {
            "singular_values": values.tolist(),
            "effective_rank": spectrum.effective_rank(values),
            "uniformity": hypersphere.uniformity(rows),
        }
    if not data:
        return None
    series = {
        f"{name}: effective rank {entry['effective_rank']:.1f}": entry["singular_values"]
        for name, entry in data.items()
    }
    pictures.lines(path, "singular values", series, "number", "value", log=True)
    return data


def nearest(material: Material, path: Path) -> dict[str, Any] | None:
    """The nearest samples of the same anchors in every stage's space (MCL, Fig. 3)."""
    if not material.features:
        return None
    _check_number(material, NEIGHBOURS + 1)
    anchors = np.random.default_rng([material.seed, 5]).permutation(len(material.ids))[:ANCHORS]
    found, shown, labels = {}, [], []
    for name, rows in material.features.items():
        cosines, near = neighbours.nearest_samples(rows, anchors, NEIGHBOURS)
        keys = [material.index.keys(material.ids[row]) for row in near]
        found[name] = [
            {"anchor": key, "nearest": others, "cosines": values.tolist()}
            for key, others, values in zip(
                material.index.keys(material.ids[anchors]), keys, cosines, strict=True
            )
        ]
    for number, anchor in enumerate(anchors):
        for name in found:
            near_keys = found[name][number]["nearest"]
            ids = [int(material.ids[anchor]), *material.index.ids_of(near_keys).tolist()]
            shown.append(material.images(ids))
            labels.append(name)
    pictures.sheet(path, "an anchor, and its nearest samples", shown, labels)
    return found


def overlap(material: Material, path: Path) -> dict[str, Any] | None:
    """Cosines within and between the values of each attribute, by stage (SimLAP, Fig. 4); and those
    of the two values that are least alike, with each other and with others, in the dimensions in
    which these two vary least (Fig. 1), where there is a third value.
    """
    check_attributes(material)
    if not material.features:
        return None
    data: dict[str, Any] = {}
    panels: dict[str, pictures.Series] = {}
    edges: Sequence[float] = ()
    for attribute in material.attributes:
        codes = material.codes(attribute)[material.ids]
        known = codes >= 0
        sizes = np.unique(codes[known], return_counts=True)[1]
        if len(sizes) < 2 or sizes.max() < 2:
            log.info("overlap: %s has no pairs both within and between values", attribute)
            continue
        for name, rows in material.features.items():
            found = class_overlap.class_overlap(rows[known], codes[known])
            title = f"{name}, {attribute}: overlap {found.overlap:.2f}"
            edges = found.edges.tolist()
            panels[title] = {"within": found.intra.tolist(), "between": found.inter.tolist()}
            data.setdefault(attribute, {})[name] = {"overlap": found.overlap, **panels[title]}
            if len(sizes) < 3:
                continue
            pair, few, shared = _least_alike(rows[known], codes[known])
            values = [material.index.attribute(attribute)[1][code] for code in pair]
            title = f"{name}, {' and '.join(values)}, {len(few)} dimensions: {shared.overlap:.2f}"
            panels[title] = {"within": shared.intra.tolist(), "between": shared.inter.tolist()}
            data[attribute][name]["pair"] = {
                "values": values,
                "dimensions": few.tolist(),
                "overlap": shared.overlap,
                **panels[title],
            }
    if not data:
        raise Lacking("an attribute with two values, one of them of two samples: there is none")
    pictures.histograms(path, "cosines within and between values", edges, panels)
    return {"edges": edges, "attributes": data}


def _least_alike(
    rows: NDArray[np.float32], codes: NDArray[np.integer]
) -> tuple[tuple[int, int], NDArray[np.int64], class_overlap.Overlap]:
    """The two classes with the lowest mean cosine, the dimensions in which they vary least, and the
    cosines there."""
    classes, similarity = class_overlap.class_similarity(rows, codes)
    np.fill_diagonal(similarity, np.inf)
    first, second = np.unravel_index(similarity.argmin(), similarity.shape)
    pair = int(classes[first]), int(classes[second])
    few = class_overlap.quietest_dimensions(rows, codes, pair, max(1, round(QUIET * rows.shape[1])))
    return pair, few, class_overlap.pair_overlap(rows, codes, pair, few)


def modified(material: Material, path: Path) -> dict[str, Any] | None:
    """The sample nearest to a positive, and to a negative, as IFM modifies it (IFM, Fig. 4).

    The positive of an anchor is the nearest sample that is no copy of it: embeddings have one view
    of each sample, and the paper's positive is another view. The negative is drawn by the seed.
    """
    if not material.features:
        return None
    _check_number(material, 3)
    random = np.random.default_rng([material.seed, 7])
    drawn = random.permutation(len(material.ids))[: 2 * MODIFIED]
    anchors, negatives = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    data: dict[str, list[dict[str, Any]]] = {}
    shown, titles = [], []
    for name, rows in material.features.items():
        positives = neighbours.nearest_different(rows, anchors)
        for anchor, *samples in zip(anchors, positives, negatives, strict=False):
            for kind, sample in zip(KINDS, samples, strict=True):
                if sample < 0:
                    continue
                cosines, near = neighbours.nearest_to_modified(
                    rows, rows[anchor], rows[sample], EPSILONS, kind
                )
                ids = material.ids[[anchor, *near]]
                keys = material.index.keys(ids)
                entry = {"kind": kind, "anchor": keys[0], "nearest": keys[1:]}
                own = material.index.keys(material.ids[[sample]])[0]
                entry |= {"sample": own, "cosines": cosines.tolist()}
                data.setdefault(name, []).append(entry)
                shown.append(material.images(ids.tolist()))
                titles.append(f"{name}: {kind}")
    columns = ["anchor", *(f"eps {eps:g}" for eps in EPSILONS)]
    pictures.sheet(path, "nearest to a modified sample", shown, titles, columns)
    return {"eps": EPSILONS, "stages": data}


def tsne(material: Material, path: Path) -> dict[str, Any] | None:
    """Features on a plane by t-SNE, of every stage, coloured by each attribute (SimLAP, Fig. 5)."""
    if not material.features:
        return None
    _check_number(material, layouts.FEWEST)
    rows = material.some(MAX_LAID_OUT, 8)
    places = {
        name: layouts.tsne(features[rows], material.seed)
        for name, features in material.features.items()
    }
    colours = {
        name: (material.codes(name)[material.ids[rows]], material.index.attribute(name)[1])
        for name in material.attributes
    }
    lines: list[dict[str, pictures.Plane]] = [
        {f"{stage}, by {name}": (found, *colour) for stage, found in places.items()}
        for name, colour in colours.items()
    ]
    plain: dict[str, pictures.Plane] = {n: (found, None, ()) for n, found in places.items()}
    pictures.planes(path, "t-SNE of the features", lines or [plain])
    return {
        "samples": material.index.keys(material.ids[rows]),
        "places": {name: found.tolist() for name, found in places.items()},
        "attributes": {
            name: {"values": values, "codes": codes.tolist()}
            for name, (codes, values) in colours.items()
        },
    }


_EMBEDDINGS = "embeddings: run 'mclclip embed --stage 0'"
FIGURES = {
    "singular_values": Figure(singular_values, _EMBEDDINGS),
    "nearest": Figure(nearest, _EMBEDDINGS),
    "overlap": Figure(overlap, _EMBEDDINGS),
    "modified": Figure(modified, _EMBEDDINGS),
    "tsne": Figure(tsne, _EMBEDDINGS),
}
