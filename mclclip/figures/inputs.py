"""The inputs of figures: a run, and a seeded draw of its samples."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.config import Config
from mclclip.run.opened import Clusters, Run, Stage

log = logging.getLogger("mclclip")

MAX_SAMPLES = 5_000  # figures compare all pairs of at most so many samples


class MissingInput(Exception):
    """Says what a run lacks for a figure, and the command that makes it, as the end of "NAME needs
    ..."."""


@dataclass(frozen=True)
class Inputs:
    """The run of a configuration and a seeded draw of its samples. Everything is read on first
    use."""

    config: Config

    @cached_property
    def run(self) -> Run:
        """The run. Raises FileNotFoundError if it has no index yet."""
        run = Run.of(self.config)
        _ = run.index
        return run

    @cached_property
    def stages(self) -> list[Stage]:
        """All stages of the configuration, even those that the run does not have yet."""
        return [self.run.stage(number) for number in range(self.config.num_stages + 1)]

    @cached_property
    def attributes(self) -> list[str]:
        """The names of the attributes in the index, sorted."""
        sources = self.config.data.sources.values()
        return sorted({name for source in sources for name in source.attributes})

    def require_attributes(self) -> None:
        """Raises MissingInput if the index has no attributes."""
        if not self.attributes:
            raise MissingInput(
                "attributes: set data.sources.NAME.attributes to fields of the samples' .json, and "
                "run 'mclclip index' again"
            )

    def require_samples(self, fewest: int) -> None:
        """Raises MissingInput if fewer samples can be used."""
        if len(self.ids) < fewest:
            raise MissingInput(f"{fewest} samples or more: {len(self.ids)} can be used")

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The sorted ids of at most ``MAX_SAMPLES`` usable samples, drawn by the seed."""
        return self.run.draw_ids(MAX_SAMPLES, purpose=4)

    def draw_places(self, count: int, purpose: int) -> NDArray[np.int64]:
        """Draws at most ``count`` of ``ids`` by the seed; returns their places in it, sorted.
        Another ``purpose`` gives another draw."""
        drawn = np.random.default_rng([self.config.seed, purpose]).permutation(len(self.ids))
        return np.sort(drawn[:count])

    @cached_property
    def features(self) -> dict[str, NDArray[np.float32]]:
        """The embeddings [n, D] of ``ids``, by the name of the stage, for stages that have them.

        Raises MissingInput if there are none, and RuntimeError if some are of another index.
        """
        features = {}
        for stage in self.stages:
            if stage.has("embeddings"):
                features[stage.name] = stage.embeddings_of(self.ids)
            else:
                log.info(
                    "%s has no embeddings and is left out of figures of features: run "
                    "'mclclip embed --stage %d' to have it in them", stage.name, stage.number,
                )  # fmt: skip
        if not features:
            raise MissingInput("embeddings: run 'mclclip embed --stage 0'")
        return features

    @cached_property
    def clusters(self) -> dict[str, Clusters]:
        """The clusters by the name of the stage, for stages that are clustered.

        Raises MissingInput if there are none, and RuntimeError if some are of another index.
        """
        clusters = {s.name: s.clusters for s in self.stages if s.has("clusters")}
        if not clusters:
            raise MissingInput("clusters: run 'mclclip cluster --stage 0'")
        return clusters


def unit_rows(features: ArrayLike) -> NDArray[np.float64]:
    """Scales rows [N, D], none of them zeros, to unit length; returns float64."""
    rows = np.asarray(features, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    assert (lengths > 0.0).all()  # fails for NaN too
    unit: NDArray[np.float64] = rows / lengths
    return unit
