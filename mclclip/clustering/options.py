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
    """First centroids: greedy k-means++ (``plus_plus``), whose cost grows with the square of K;
    ``random`` rows; or ``auto``: k-means++ up to 1,000 clusters, else random."""
    feature: Literal["image", "mean"] = "image"
    """Clustered rows: image embeddings, or the mean of a sample's image and text embedding."""
    labels_per_sample: PositiveInt = 1
    """L: number of nearest centroids stored for every sample, with their similarities."""
    restarts: PositiveInt = 3
    """Independent starts; the one with the lowest inertia is kept."""
    max_iterations: PositiveInt = 100
    """Largest number of Lloyd iterations."""
    tolerance: NonNegativeFloat = 1e-5
    """Relative change of inertia at which iteration stops."""
    init_samples: PositiveInt = 100_000
    """Rows from which k-means++ draws its start (at least 256 K, or all if there are fewer)."""
    label_mode: LabelMode = field(default="prefix", metadata=NO_RESULT)
    """``prefix``: labels of all earlier stages (paper, Eq. 2); ``last``: only the last stage's."""

    def __post_init__(self) -> None:
        if self.labels_per_sample > self.fewest:
            raise ValueError(
                f"cluster.labels_per_sample={self.labels_per_sample} is more than "
                f"cluster.num_clusters={self.num_clusters}: lower it"
            )

    @property
    def fewest(self) -> int:
        """The smallest K of any stage."""
        return self.num_clusters if isinstance(self.num_clusters, int) else min(self.num_clusters)

    def clusters_of(self, stage: int) -> int:
        """K of the clustering of ``stage``; ValueError where the list is too short."""
        if isinstance(self.num_clusters, int):
            return self.num_clusters
        if stage >= len(self.num_clusters):
            raise ValueError(
                f"cluster.num_clusters has {len(self.num_clusters)} entries, stage {stage} needs "
                f"entry {stage}: give one K per clustered stage, or one number for all"
            )
        return self.num_clusters[stage]
