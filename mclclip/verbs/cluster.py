"""Verb ``cluster``: embeddings of a stage -> its clusters, and pseudo labels for the next stage.

For every sample the L nearest centroids are stored with their similarities, so a training with
class centers can choose how many it uses. Pseudo labels use the nearest one. Row n belongs to
sample n of the index; the digest of the ordered sample keys is compared first. Samples that cannot
be decoded are not clustered and have the label -1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch import Tensor

from mclclip.clustering import kmeans
from mclclip.clustering.centroids import Block, Tally, assign_blocks
from mclclip.clustering.kmeans import Clustering
from mclclip.clustering.options import ClusterConfig
from mclclip.clustering.rows import RankRows
from mclclip.config import Config
from mclclip.data.arrays import open_npy, save_npy, write_npy_parts
from mclclip.data.labels import ami, combine_stages, group_statistics, size_statistics
from mclclip.data.options import LabelMode
from mclclip.data.row_store import MeanBlocks, RowBlocks
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Artifact
from mclclip.run.opened import Run, Stage
from mclclip.run.runlog import count_of
from mclclip.run.steps import Made, Step, make_artifact
from mclclip.util.files import digest_array, records_of
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")

_AMI_UP_TO = 2**24  # most pairs of clusters for which AMI is computed; its cost grows with them
_SIZES_UP_TO = 10_000  # most clusters whose sizes the manifest lists

T = TypeVar("T")


def run(config: Config, context: Context, *, stage: int, force: Remake = Remake.NOTHING) -> Path:
    """Clusters the embeddings of ``stage``; returns the directory of the clusters.

    Writes ``clusters/``: centroids.npy float32 [K, D]; cluster_labels.npy int32 [N, L], the nearest
    first, -1 for samples that are not clustered; similarities.npy float16 [N, L], cosines or, for
    euclidean clusters, 1 - squared distance / 2. If the objective groups samples, it also writes
    ``pseudo_labels.npy`` int64 [N, 1] of stage + 1. Raises ValueError for more clusters than
    samples, and RuntimeError if the embeddings are of another index.
    """
    opened, options = Run.of(config).stage(stage), config.cluster
    layout = opened.run.layout
    clusters = StageClusters(replace(options, num_clusters=options.clusters_of(stage)), config.seed)
    make_artifact(clusters, layout.clusters(stage), (opened, context), force)
    if config.train.objective.reads.groups:
        labels = PseudoLabels(options.label_mode)
        make_artifact(labels, layout.pseudo_labels(stage + 1), opened, force)
    return layout.clusters(stage)


# --- clusters --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageClusters(Step[tuple[Stage, Context]]):
    """k-means of a stage's embeddings: centroids, nearest labels, similarities."""

    kind = "clusters"
    all_ranks = True
    cluster: ClusterConfig
    seed: int

    def reads(self, how: tuple[Stage, Context]) -> dict[str, str]:
        """Returns the digests of index and embeddings. Raises RuntimeError if clusters of an
        earlier stage are of another index."""
        stage, run = how[0], how[0].run
        inputs = {"index": run.index.digest, "embeddings": stage.manifest("embeddings").digest}
        for earlier in range(stage.number):
            run.stage(earlier).manifest("clusters")
        if self.cluster.feature == "mean":
            texts = run.index.manifest_of(run.layout.text_embeddings, "text_embeddings")
            inputs["text_embeddings"] = texts.digest
        return inputs

    def make(self, out: Artifact, how: tuple[Stage, Context]) -> Made:
        """Clusters the rows. Raises ValueError for too many clusters, before it writes."""
        stage, context = how
        blocks = collectives.raise_on_every_rank(lambda: self._read_rows(stage))
        valid = np.ones(len(stage.run.index), dtype=bool)
        valid[collectives.on_main(stage.run.index.bad_ids)] = False
        # A sample that was restored after the embedding has no row yet.
        valid[collectives.on_main(blocks.rows.left_out)] = False
        rows = RankRows(blocks, self.cluster.algorithm, valid=valid, context=context)
        fit = kmeans.fit_two_level if self.cluster.method == "two_level" else kmeans.fit
        num_clusters, seed = self.cluster.clusters_of(stage.number), (self.seed, stage.number)
        clustering: Clustering = fit(rows, num_clusters, self.cluster, seed=seed)
        directory = out.begin()
        _save_centroids(directory / "centroids.npy", clustering, context)
        tally = _save_nearest(directory, rows, clustering, self.cluster.labels_per_sample)
        return collectives.on_main(lambda: self._describe(directory, stage, clustering, tally))

    def _read_rows(self, stage: Stage) -> RowBlocks:
        """Opens the rows to cluster, in index order."""
        if self.cluster.feature == "image":
            return RowBlocks(stage.embeddings)
        num_captions = stage.run.index.num_captions
        without = int((num_captions == 0).sum())
        log.info(
            "%d of %d samples have no caption: clustered by image alone", without, len(num_captions)
        )
        return MeanBlocks(stage.embeddings, stage.text_embeddings, num_captions)

    def _describe(
        self, directory: Path, stage: Stage, clustering: Clustering, tally: Tally
    ) -> Made:
        """Returns and logs sizes of clusters, inertia, and the agreement with earlier stages."""
        index, number = stage.run.index, stage.number
        labels = open_npy(directory / "cluster_labels.npy", "cluster")
        sizes = tally.counts.numpy()
        if empty := int((sizes == 0).sum()):
            log.warning("stage %d: %d of %d clusters are empty", number, empty, len(sizes))
        agreement: dict[str, float] = {}
        for earlier in range(number):
            before, num_clusters = _cluster_labels(stage.run.stage(earlier))
            if len(sizes) * num_clusters <= _AMI_UP_TO:
                value = ami(before, labels[:, 0])
                agreement |= {f"stage_{earlier}": value} if value is not None else {}
        statistics = size_statistics(sizes)
        log.info(
            "stage %d: %s of %s to %s samples (median %s), inertia %.6g after %s%s",
            number,
            count_of(statistics["num_groups"], "cluster"),
            *(f"{statistics[name]:,.0f}" for name in ("smallest", "largest", "median")),
            tally.inertia,
            count_of(clustering.iterations, "iteration"),
            "".join(f", AMI with {name} {value:z.2f}" for name, value in agreement.items()),
        )
        counts = {
            "samples": len(index),
            "bad_samples": len(index) - int(sizes.sum()),
            "inertia": tally.inertia,
            "iterations": clustering.iterations,
            "restart": clustering.restart,
            "empty_clusters": empty,
            "sizes": statistics,
            "cluster_sizes": sizes.tolist() if len(sizes) <= _SIZES_UP_TO else None,
            "ami": agreement,
        }
        if self.cluster.feature == "mean":  # samples without a caption are clustered by image
            counts["without_caption"] = int((index.num_captions == 0).sum())
        names = ("centroids.npy", "cluster_labels.npy", "similarities.npy")
        records = records_of(directory, *names)
        return Made(counts, records, dtype="int32", digest=digest_array(labels))


def _save_centroids(path: Path, clustering: Clustering, context: Context) -> None:
    """Writes the centroids part by part, so that rank 0 never holds those of all ranks at once.

    All ranks call it, since each may hold some centroids.
    """

    def write(parts: Iterator[Tensor]) -> None:
        shape = clustering.num_clusters, clustering.centroids.shape[1]
        with write_npy_parts(path, shape, np.float32) as append:
            for part in parts:
                append(part.numpy())

    pass_parts_to_main(kmeans.each_pass(clustering, context), write, context)


def _save_nearest(
    directory: Path, rows: RankRows, clustering: Clustering, labels_per_sample: int
) -> Tally:
    """Finds the nearest centroids on all ranks, and writes labels and similarities block by block.
    Returns the number of samples of each cluster, with the sum of their distances.
    """
    shape = rows.num_rows, labels_per_sample
    tally = Tally(clustering.num_clusters)
    nearest = assign_blocks(rows, clustering.centroids, labels_per_sample, held=clustering.held)
    share = 1.0 if rows.algorithm == "spherical" else 0.5

    def write(parts: Iterator[Block]) -> None:
        with (
            write_npy_parts(directory / "cluster_labels.npy", shape, np.int32) as append_labels,
            write_npy_parts(directory / "similarities.npy", shape, np.float16) as append,
        ):
            for _, near in parts:
                append_labels(near.labels.numpy())
                similarities = near.distances.mul(-share).add_(1.0).half()
                append(similarities.masked_fill_(near.labels < 0, 0.0).numpy())

    pass_parts_to_main(tally.of(nearest), write, rows.context)
    return tally


def pass_parts_to_main(
    parts: Iterator[T], write: Callable[[Iterator[T]], None], context: Context
) -> None:
    """Calls ``write(parts)`` on rank 0, while all ranks compute the parts together by collectives.

    An error of ``write`` is raised on all ranks, after all parts are computed. An error in the
    computation of a part is raised at once on this rank, because the other ranks wait for it.
    """
    is_computing = True
    error: Exception | None = None

    def until_the_end() -> Iterator[T]:
        nonlocal is_computing
        yield from parts
        is_computing = False

    every = until_the_end()
    try:
        if context.is_main:
            write(every)
    except Exception as caught:
        error = caught
    for _ in every:  # on the other ranks, and after an error, so that no rank waits for this one
        pass
    if error is not None and is_computing:
        raise error

    def raise_error() -> None:
        if error is not None:
            raise error

    collectives.raise_on_every_rank(raise_error)


def _cluster_labels(stage: Stage) -> tuple[np.ndarray, int]:
    """Returns the nearest cluster labels of a stage, int32 [N], and the number of its clusters."""
    clusters = stage.clusters
    return np.array(clusters.labels[:, 0]), clusters.manifest.config["cluster"]["num_clusters"]


# --- pseudo labels ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PseudoLabels(Step[Stage]):
    """The cluster labels of all stages up to this one, combined for the next (MCL, Eq. 2)."""

    kind = "pseudo_labels"
    label_mode: LabelMode

    def reads(self, how: Stage) -> dict[str, str]:
        """Returns the digests of the index and of the clusters of all stages up to this one."""
        inputs = {"index": how.run.index.digest}
        for number in range(how.number + 1):
            inputs[f"clusters_{number}"] = how.run.stage(number).manifest("clusters").digest
        return inputs

    def make(self, out: Artifact, how: Stage) -> Made:
        """Writes pseudo_labels.npy int64 [N, 1]."""
        stages = [_cluster_labels(how.run.stage(number)) for number in range(how.number + 1)]
        cluster_labels, nums_clusters = zip(*stages, strict=True)
        labels, radices = combine_stages(cluster_labels, nums_clusters, self.label_mode)
        save_npy(out.begin() / "pseudo_labels.npy", labels[:, None])
        counts = {"samples": len(how.run.index)} | group_statistics(labels, radices)
        records = records_of(out.directory, "pseudo_labels.npy")
        return Made(counts, records, dtype="int64", digest=digest_array(labels))
