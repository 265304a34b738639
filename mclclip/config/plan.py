"""Options of a training's plan: which samples form its batches, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from mclclip.data.epoch_plan import Order
from mclclip.data.groups import Policy
from mclclip.data.sample_weights import MOST_DRAWS
from mclclip.options import STRICT


@checked_dataclass(frozen=True, config=STRICT)
class PlanConfig:
    """Which samples form a batch, and how often each is drawn."""

    policy: Policy = "backoff"
    """What happens to samples that do not fill a batch of their group (see ``data.groups``)."""
    order: Order = "proportional"
    """``round_robin``: Algorithm 1 of MCL; ``proportional``: a seeded shuffle of all batches."""
    weights: str | None = None
    """``.npy`` file of one number per sample of the index, in its order: how often an epoch draws
    the sample (0: never), such as weights.npy of ``blindspots`` or of ``filter``. Multiplied by
    ``data.sources.NAME.weight``."""
    samples_per_epoch: Annotated[int, Field(ge=1, le=MOST_DRAWS)] | None = None
    """Draws of an epoch, to which all weights are scaled (null: the sum of the weights, which is
    the number of samples where none is set)."""
    block: Annotated[int, Field(ge=1, le=2**20)] = 1
    """Samples of a group, neighbours in the index, that stay together in every epoch, so that they
    can be read in one piece from the shards of ``mclclip reshard`` (1: none do; small groups have
    smaller blocks). Trainings without groups have none."""

    def identity(self) -> dict[str, Any]:
        """Fields that results depend on; the weights' digest is among a training's inputs."""
        drawn = {"samples_per_epoch": self.samples_per_epoch} if self.samples_per_epoch else {}
        drawn |= {"block": self.block} if self.block > 1 else {}
        return {"policy": self.policy, "order": self.order, **drawn}

    def weight_options(self, by_source: Mapping[str, float], share: float = 1.0) -> dict[str, Any]:
        """Arguments of ``SampleWeights.open`` beside the index and the option's name; ``share`` is
        that of the samples which a pilot draws from."""
        per_epoch = self.samples_per_epoch and max(1, round(share * self.samples_per_epoch))
        return {"path": self.weights, "by_source": by_source, "per_epoch": per_epoch}
