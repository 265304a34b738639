"""Options of the clustering of one stage's embeddings."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import NonNegativeFloat, PositiveInt

from mclclip.data.options import LabelMode
from mclclip.util.options import NO_RESULT, STRICT

Algorithm = Literal["spherical", "euclidean"]
Init = Literal["auto", "plus_plus", "random"]


@checked_dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    """k-means over the embeddings of one stage, and the labels made of it."""

    num_clusters: PositiveInt | Annotated[list[PositiveInt], Field(min_length=1)] = 10
    """K, clusters per stage: one number, or one for each clustered stage (0, 1, ...)."""
    algorithm: Algorithm = "spherical"
    """``spherical`` assigns by cosine; ``euclidean`` is what the MCL authors released."""
    method: Literal["flat", "two_level"] = "flat"
    """``flat``: Lloyd over all rows; ``two_level``: rows are split into groups, which are clustered
    one by one (for a million clusters and more)."""
    num_splits: PositiveInt | None = None
    """two_level: groups of the first level (null: about the square root of K)."""
    init: Init = "auto"
    """How the first centroids are drawn: ``plus_plus``, greedy k-means++, whose cost grows with the
    square of K; ``random``, distinct rows; ``auto``, k-means++ up to 1,000 clusters, else random.
    """
    feature: Literal["image", "mean"] = "image"
    """What is clustered: image embeddings, or the mean of a sample's image and text embedding."""
    labels_per_sample: PositiveInt = 1
    """L: number of nearest centroids stored for every sample, with their similarities."""
    restarts: PositiveInt = 3
    """Independent starts; the one with the lowest inertia is kept."""
    max_iterations: PositiveInt = 100
    """Largest number of Lloyd iterations."""
    tolerance: NonNegativeFloat = 1e-5
    """Iteration stops when an update lowers inertia by at most this share of it."""
    init_samples: PositiveInt = 100_000
    """Number of random rows from which k-means++ draws the first centroids. At least 256 K are
    taken, or all rows if there are fewer."""
    label_mode: LabelMode = field(default="prefix", metadata=NO_RESULT)
    """``prefix``: labels of all earlier stages (paper, Eq. 2); ``last``: only the last stage's."""

    def __post_init__(self) -> None:
        num_splits = self.num_splits if self.method == "two_level" else None
        for name, number in (
            ("labels_per_sample", self.labels_per_sample),
            ("num_splits", num_splits or 1),
        ):
            if number > self.fewest:
                raise ValueError(
                    f"cluster.{name}={number} is more than "
                    f"cluster.num_clusters={self.num_clusters}: lower it"
                )

    @property
    def fewest(self) -> int:
        """The smallest K of any stage."""
        return self.num_clusters if isinstance(self.num_clusters, int) else min(self.num_clusters)

    def clusters_of(self, stage: int) -> int:
        """K for clustering ``stage``; ValueError if the list ``num_clusters`` is too short."""
        if isinstance(self.num_clusters, int):
            return self.num_clusters
        if stage >= len(self.num_clusters):
            raise ValueError(
                f"cluster.num_clusters has {len(self.num_clusters)} entries, stage {stage} needs "
                f"entry {stage}: give one K per clustered stage, or one number for all"
            )
        return self.num_clusters[stage]
