"""Options of shards in the order of groups."""

from __future__ import annotations

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveInt

from mclclip.options import STRICT


@checked_dataclass(frozen=True, config=STRICT)
class ReshardConfig:
    """Copies of the samples in the order of a stage's groups (``mclclip reshard``)."""

    enabled: bool = False
    """Make them before each stage is trained on groups, and let its training read them: the same
    batches, from fewer and longer reads where ``train.plan.block`` is above 1."""
    folder: str | None = None
    """Where they lie, in a folder per stage, on a disk that all ranks share (null: in the run
    directory). They take as much room as the data, for each stage."""
    url: str | None = None
    """Where trainings read these shards instead, such as ``s3://bucket/copies``: upload those of
    each stage to ``stage_1`` and so on below it, after ``reshard`` and before ``train``."""
    samples_per_shard: PositiveInt = 10_000
    """Samples of a shard."""
