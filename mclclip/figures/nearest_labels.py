"""Figure: some samples, their nearest clusters, and the samples that are nearest to the centroids
of these (MLCD, Fig. 2 and 5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.figures import drawing
from mclclip.figures.inputs import Inputs

SAMPLES, LABELS, EXAMPLES = 4, 3, 6
BLOCK = 1 << 20


def draw(inputs: Inputs, path: Path) -> dict[str, Any]:
    """Draws a sheet of samples, which the seed chooses, with a row for each of their nearest
    clusters, which shows other samples of this cluster.
    """
    ids = inputs.ids[inputs.draw_places(SAMPLES, 6)]
    data: dict[str, list[dict[str, Any]]] = {}
    pictures, names = [], []
    for name, clusters in inputs.clusters.items():
        nearest, similar = clusters.labels, clusters.similarities
        # One example more, since the sample itself may be among them.
        examples = examples_of(nearest, similar, nearest[ids, :LABELS], EXAMPLES + 1)
        data[name] = []
        for sample in ids.tolist():
            labels = []
            for cluster, near in zip(
                nearest[sample, :LABELS], similar[sample, :LABELS], strict=True
            ):
                others = examples[int(cluster)]
                others = others[others != sample][:EXAMPLES]
                keys = inputs.run.index.keys(others)
                labels.append(
                    {"cluster": int(cluster), "similarity": float(near), "examples": keys}
                )
                pictures.append(inputs.run.pictures([sample, *others]))
                names.append(f"{name}: cluster {cluster}, similarity {near:.2f}")
            data[name].append({"sample": inputs.run.index.keys([sample])[0], "labels": labels})
    drawing.sheet(path, "a sample, and examples of its nearest labels", pictures, names)
    return data


def examples_of(
    nearest_clusters: NDArray[np.integer],
    similarities: NDArray[np.floating],
    cluster_ids: ArrayLike,
    count: int,
) -> dict[int, NDArray[np.int64]]:
    """Maps each of ``cluster_ids`` to at most ``count`` rows for which it is the nearest cluster,
    the most similar first; a cluster can have none.

    ``nearest_clusters`` and ``similarities`` are [N, L], nearest first. They may be memory-mapped;
    they are read once, in blocks.
    """
    clusters = np.unique(np.asarray(cluster_ids, dtype=np.int64))
    examples = {int(cluster): np.zeros(0, np.int64) for cluster in clusters}
    for start in range(0, len(nearest_clusters), BLOCK):
        labels = np.asarray(nearest_clusters[start : start + BLOCK, 0])
        rows = np.flatnonzero(np.isin(labels, clusters))
        for cluster in np.unique(labels[rows]).tolist():
            here = np.concatenate([examples[cluster], start + rows[labels[rows] == cluster]])
            order = np.argsort(-similarities[here, 0], kind="stable")
            examples[cluster] = here[order[:count]]
    return examples
