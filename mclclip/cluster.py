"""Verb: embeddings of a stage -> its clusters, and the pseudo labels that the next stage trains on.

Rows are joined with the index by position, which the digest of the ordered sample keys allows.
Undecodable samples take no part and have the label -1.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from mclclip import artifacts
from mclclip.artifacts import Artifact, Manifest, digest_array, save_npy
from mclclip.config import Config, to_tree
from mclclip.data import pseudo_labels
from mclclip.data.sample_index import SampleIndex
from mclclip.layout import Layout
from mclclip.parallel import collectives, kmeans
from mclclip.parallel.process_group import Context
from mclclip.parallel.row_blocks import NpyBlocks

log = logging.getLogger("mclclip")


def run(
    config: Config, context: Context, *, stage: int, variant: str = "mcl", force: bool = False
) -> Path:
    """Clusters the embeddings of ``stage``; returns the directory of the clusters.

    Writes ``clusters/``: centroids.npy float32 [K, D], cluster_labels.npy int32 [N, 1],
    distances.npy float32 [N, 1] (1 - cosine, or the squared distance). For MCL (not its controls,
    which use MCL's labels or none) also ``pseudo_labels.npy`` int64 [N, 1] of stage + 1. Raises
    ValueError for more clusters than samples and RuntimeError where the embeddings are not those of
    the index.
    """
    layout = Layout.of(config, variant)
    index = SampleIndex.open(layout.index)

    def open_artifact(write: bool) -> Artifact:
        return collectives.on_main(lambda: _open(config, layout, stage, index, force, write))

    artifact = open_artifact(write=False)
    if artifact.finished:
        log.info("%s is finished: skipped", artifact.directory)
    else:
        found, labels, distances = _cluster(config, context, layout, stage, index)
        # Opened for writing only now: settings that cannot be clustered leave nothing behind.
        artifact = open_artifact(write=True)
        collectives.on_main(
            lambda: _write(artifact, layout, stage, index, found, labels, distances)
        )
    if variant == "mcl":
        collectives.on_main(lambda: _write_pseudo_labels(config, layout, stage + 1, index, force))
    return artifact.directory


def _open(
    config: Config, layout: Layout, stage: int, index: SampleIndex, force: bool, write: bool
) -> Artifact:
    """Finds finished work, or opens the directory, after a check of everything that is read."""
    embeddings = _manifest_of_index(layout.embeddings(stage), "embeddings", "embed", index)
    for earlier in range(stage):
        _manifest_of_index(layout.clusters(earlier), "clusters", "cluster", index)
    options = config.cluster
    fields = {name: v for name, v in to_tree(options).items() if name != "label_mode"}
    return Artifact.open(
        layout.clusters(stage),
        kind="clusters",
        config=fields | {"num_clusters": options.clusters_of(stage), "seed": config.seed},
        inputs={"index": index.digest, "embeddings": embeddings.digest},
        force=force,
        write=write,
    )


def _manifest_of_index(directory: Path, kind: str, verb: str, index: SampleIndex) -> Manifest:
    """The manifest of an artifact with one row per sample, after a check that it is this index's.

    Raises RuntimeError where it has other rows or other keys.
    """
    manifest = artifacts.read_manifest(directory, kind)
    if manifest.inputs["index"] != index.digest:
        raise RuntimeError(
            f"{kind} at {directory} has {manifest.counts['samples']:,} rows, the index has "
            f"{len(index):,} (and other sample keys): run 'mclclip {verb}' again after "
            f"'mclclip index'"
        )
    return manifest


def _read_embeddings(directory: Path, index: SampleIndex) -> NpyBlocks:
    """The rows of all shards in index order, after a check of their number."""
    paths = [directory / f"{number:05d}.npy" for number in range(len(index.shards))]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no {path}: run 'mclclip embed' again")
    blocks = NpyBlocks(paths)
    wanted = [shard.stop - shard.start for shard in index.shards]
    if blocks.num_rows != wanted:
        raise RuntimeError(
            f"embeddings at {directory} has {sum(blocks.num_rows):,} rows, the index has "
            f"{len(index):,} (compared per shard): run 'mclclip embed' again after 'mclclip index'"
        )
    return blocks


def _cluster(
    config: Config, context: Context, layout: Layout, stage: int, index: SampleIndex
) -> tuple[kmeans.KMeans, np.ndarray, np.ndarray]:
    """k-means over all ranks: the clusters, labels int32 [N, 1] and distances float32 [N, 1]."""
    options = config.cluster
    blocks = collectives.together(lambda: _read_embeddings(layout.embeddings(stage), index))
    valid = np.ones(len(index), dtype=bool)
    valid[collectives.on_main(index.bad_ids)] = False
    found = kmeans.fit(
        blocks,
        options.clusters_of(stage),
        algorithm=options.algorithm,
        seed=(config.seed, stage),
        restarts=options.restarts,
        max_iterations=options.max_iterations,
        tolerance=options.tolerance,
        init_samples=options.init_samples,
        valid=valid,
        context=context,
    )
    nearest = kmeans.assign(
        blocks, found.centroids, algorithm=options.algorithm, valid=valid, context=context
    )
    return found, nearest.labels.numpy().astype(np.int32), nearest.distances.numpy()


def _write(
    artifact: Artifact,
    layout: Layout,
    stage: int,
    index: SampleIndex,
    found: kmeans.KMeans,
    labels: np.ndarray,
    distances: np.ndarray,
) -> None:
    directory = artifact.directory
    save_npy(directory / "centroids.npy", found.centroids.numpy())
    save_npy(directory / "cluster_labels.npy", labels)
    save_npy(directory / "distances.npy", distances)
    counts = _report(layout, stage, index, found, labels)
    artifact.finish(counts, dtype="int32", content_digest=digest_array(labels))


def _report(
    layout: Layout, stage: int, index: SampleIndex, found: kmeans.KMeans, labels: np.ndarray
) -> dict[str, Any]:
    """What the manifest says of the clusters: sizes, inertia, agreement with earlier stages."""
    sizes = found.counts.numpy()
    ami = {
        f"stage_{earlier}": pseudo_labels.ami(
            _read_cluster_labels(layout, earlier, index)[0], labels[:, 0]
        )
        for earlier in range(stage)
    }
    statistics = pseudo_labels.size_statistics(sizes)
    log.info(
        "stage %d: %d clusters of %s to %s samples (median %s), inertia %.6g after %d iterations%s",
        stage,
        statistics["num_groups"],
        *(f"{statistics[name]:,.0f}" for name in ("smallest", "largest", "median")),
        found.inertia,
        found.iterations,
        "".join(f", AMI with {name} {value:.2f}" for name, value in ami.items()),
    )
    return {
        "samples": len(index),
        "bad_samples": len(index) - int(sizes.sum()),
        "inertia": found.inertia,
        "iterations": found.iterations,
        "restart": found.restart,
        "empty_clusters": int((sizes == 0).sum()),
        "sizes": statistics,
        "cluster_sizes": sizes.tolist(),
        "ami": ami,
    }


def _read_cluster_labels(
    layout: Layout, stage: int, index: SampleIndex
) -> tuple[np.ndarray, Manifest]:
    """The cluster labels int32 [N] of a stage (the nearest of several), and their manifest."""
    directory = layout.clusters(stage)
    manifest = _manifest_of_index(directory, "clusters", "cluster", index)
    labels = np.load(directory / "cluster_labels.npy", allow_pickle=False)
    return labels[:, 0], manifest


def _write_pseudo_labels(
    config: Config, layout: Layout, stage: int, index: SampleIndex, force: bool
) -> None:
    """Combines the cluster labels of all stages before ``stage`` (MCL, Eq. 2)."""
    stages = [_read_cluster_labels(layout, earlier, index) for earlier in range(stage)]
    artifact = Artifact.open(
        layout.pseudo_labels(stage),
        kind="pseudo_labels",
        config={"label_mode": config.cluster.label_mode},
        inputs={"index": index.digest}
        | {f"clusters_{number}": manifest.digest for number, (_, manifest) in enumerate(stages)},
        force=force,
    )
    if artifact.finished:
        log.info("%s is finished: skipped", artifact.directory)
        return
    labels, radices = pseudo_labels.combine_stages(
        [labels for labels, _ in stages],
        [manifest.config["num_clusters"] for _, manifest in stages],
        config.cluster.label_mode,
    )
    save_npy(artifact.directory / "pseudo_labels.npy", labels[:, None])
    counts = {"samples": len(index)} | pseudo_labels.group_statistics(labels, radices)
    artifact.finish(counts, dtype="int64", content_digest=digest_array(labels))
