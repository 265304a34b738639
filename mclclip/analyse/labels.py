"""Figures of clusters and pseudo labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mclclip.analyse.material import Figure, Lacking, Material, check_attributes, of_clusters
from mclclip.analysis import label_counts, neighbours, pictures
from mclclip.clustering.agreement import ami
from mclclip.data.labels import read_pseudo_labels
from mclclip.run import artifacts

SAMPLES, LABELS, EXAMPLES = 4, 3, 6


def agreement(material: Material, path: Path) -> dict[str, Any] | None:
    """AMI of the stages' clusters with each other (MCL, Table 11) and with the attributes."""
    stages = {name: np.asarray(labels[:, 0]) for name, labels in material.clusters.items()}
    if not stages:
        return None
    others = stages | {name: material.codes(name) for name in material.attributes}
    values = [[ami(own, other) for other in others.values()] for own in stages.values()]
    pictures.matrix(path, "adjusted mutual information", [*stages], [*others], values)
    return {"rows": [*stages], "columns": [*others], "ami": values}


def pseudo_labels(material: Material, path: Path) -> dict[str, Any] | None:
    """Samples by pseudo label, most first, of every stage (MCL, Fig. 7)."""
    data = {}
    for stage, name in list(material.stages.items())[1:]:
        directory = material.layout.pseudo_labels(stage)
        if artifacts.is_finished(directory):
            found = label_counts.label_counts(read_pseudo_labels(directory, material.index)[0])
            data[name] = {
                "counts": found.counts.tolist(),
                "share": found.share,
                "effective": found.effective,
            }
    if not data:
        return None
    sizes = {name: entry["counts"] for name, entry in data.items()}
    pictures.lines(path, "pseudo labels", sizes, "label, most frequent first", "samples", log=True)
    return data


def recall(material: Material, path: Path) -> dict[str, Any] | None:
    """Share of the samples whose attribute is that of one of their l nearest clusters (MLCD, A.8);
    a cluster's value is that of most of its samples."""
    check_attributes(material)
    if not material.clusters:
        return None
    data: dict[str, list[float]] = {}
    for attribute in material.attributes:
        codes = material.codes(attribute)
        known = np.flatnonzero(codes >= 0)
        if not len(known):
            continue
        for name, clusters in material.clusters.items():
            near = np.asarray(clusters[known])
            data[f"{name}, {attribute}"] = label_counts.label_recall(near, codes[known]).tolist()
    if not data:
        raise Lacking("samples with a value of an attribute: there are none")
    pictures.lines(path, "label recall", data, "nearest clusters", "share")
    return data


def nearest_labels(material: Material, path: Path) -> dict[str, Any] | None:
    """The nearest clusters of some samples, each with the samples most similar to its centroid
    (MLCD, Fig. 2 and 5).

    An example of a cluster is a sample whose nearest one it is, other than the sample shown.
    """
    ids = material.ids[material.some(SAMPLES, 6)]
    data: dict[str, list[dict[str, Any]]] = {}
    shown, names = [], []
    for stage, name in material.stages.items():
        if name not in material.clusters:
            continue
        nearest = material.clusters[name]
        similar = of_clusters(material.layout.clusters(stage), "similarities.npy")
        # One more, for the sample shown is none.
        examples = neighbours.examples_of(nearest, similar, nearest[ids, :LABELS], EXAMPLES + 1)
        data[name] = []
        for sample in ids.tolist():
            labels = []
            for cluster, near in zip(
                nearest[sample, :LABELS], similar[sample, :LABELS], strict=True
            ):
                others = examples[int(cluster)]
                others = others[others != sample][:EXAMPLES]
                keys = material.index.keys(others)
                labels.append(
                    {"cluster": int(cluster), "similarity": float(near), "examples": keys}
                )
                shown.append(material.images([sample, *others.tolist()]))
                names.append(f"{name}: cluster {cluster}, similarity {near:.2f}")
            data[name].append({"sample": material.index.keys([sample])[0], "labels": labels})
    if not data:
        return None
    pictures.sheet(path, "a sample, and examples of its nearest labels", shown, names)
    return data


_CLUSTERS = "clusters: run 'mclclip cluster --stage 0'"
FIGURES = {
    "agreement": Figure(agreement, _CLUSTERS),
    "pseudo_labels": Figure(pseudo_labels, "pseudo labels: run 'mclclip cluster --stage 0'"),
    "recall": Figure(recall, _CLUSTERS),
    "nearest_labels": Figure(nearest_labels, _CLUSTERS),
}
