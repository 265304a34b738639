"""Inputs of figures: a run and a seeded sample of its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mclclip.config import Config
from mclclip.run.opened import Clusters, Run, Stage

log = logging.getLogger("mclclip")

MAX_SAMPLES = 5_000  # of the figures that compare all pairs

EMBEDDINGS = "embeddings: run 'mclclip embed --stage 0'"
CLUSTERS = "clusters: run 'mclclip cluster --stage 0'"


class MissingInput(Exception):
    """Says what a run lacks for a figure, where it is not what ``Figure.needs`` says."""


@dataclass(frozen=True)
class Inputs:
    """The run of a configuration and a seeded sample of its rows, read as figures ask for them."""

    config: Config

    @cached_property
    def run(self) -> Run:
        """The run. Raises FileNotFoundError where it has no index yet."""
        run = Run.of(self.config)
        _ = run.index
        return run

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of the configuration, whether they are there yet or not."""
        return [self.run.stage(number) for number in range(self.config.num_stages + 1)]

    @cached_property
    def attributes(self) -> list[str]:
        """Names of the index's attributes."""
        sources = self.config.data.sources.values()
        return sorted({name for source in sources for name in source.attributes})

    def require_attributes(self) -> None:
        """Raises MissingInput for a run whose index has no attributes."""
        if not self.attributes:
            raise MissingInput(
                "attributes: set data.sources.NAME.attributes to fields of the samples' .json, and "
                "run 'mclclip index' again"
            )

    def require_samples(self, fewest: int) -> None:
        """Raises MissingInput for a run of fewer samples."""
        if len(self.ids) < fewest:
            raise MissingInput(f"{fewest} samples or more: {len(self.ids)} can be used")

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Sorted ids of at most ``MAX_SAMPLES`` samples that can be used, drawn by the seed."""
        return self.run.draw_ids(MAX_SAMPLES, purpose=4)

    def draw_places(self, count: int, purpose: int) -> NDArray[np.int64]:
        """Sorted places in ``ids`` of at most ``count`` samples, drawn by the seed."""
        drawn = np.random.default_rng([self.config.seed, purpose]).permutation(len(self.ids))
        return np.sort(drawn[:count])

    @cached_property
    def features(self) -> dict[str, NDArray[np.float32]]:
        """Features [n, D] of ``ids`` by stage, of the stages that have embeddings.

        Raises RuntimeError where some are of another index.
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
        return features

    @cached_property
    def clusters(self) -> dict[str, Clusters]:
        """The clusters by stage, of the stages that are clustered.

        Raises RuntimeError where some are of another index.
        """
        return {stage.name: stage.clusters for stage in self.stages if stage.has("clusters")}


@dataclass(frozen=True)
class Figure:
    """One figure, which is drawn at a path and whose data are returned.

    draw     the data, or None where the run has nothing for it; may raise MissingInput
    needs    the artifacts that the run must have for it, to end the message "NAME needs ...": what
             they are, and the command that makes them, as in ``EMBEDDINGS``
    """

    draw: Callable[[Inputs, Path], dict[str, Any] | None]
    needs: str


def unit_rows(features: ArrayLike) -> NDArray[np.float64]:
    """[N, D] -> rows of unit length, float64. ValueError for another shape, or a row of zeros."""
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2:
        raise ValueError(f"features are {list(rows.shape)}, wanted [N, D]")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0.0)).all():
        raise ValueError("a row of the features is zero or not finite: it has no direction")
    unit: NDArray[np.float64] = rows / lengths
    return unit
