"""Options of shards in the order of groups."""

from __future__ import annotations

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveInt

from mclclip.data.remote import check_protocol
from mclclip.options import STRICT


@checked_dataclass(frozen=True, config=STRICT)
class ReshardConfig:
    """Copies of the samples in the order of a stage's groups (``mclclip reshard``)."""

    enabled: bool = False
    """Make them before each stage is trained on groups, and let its training read them: the same
    batches, from fewer and longer reads where ``train.plan.block`` is above 1."""
    folder: str | None = None
    """Where they lie, as ``FOLDER/NAME_OF_RUN/stage_1`` and so on, on a disk that all ranks share
    (null: in the run directory). They take as much room as the data, for each stage."""
    url: str | None = None
    """Where trainings read these shards instead, such as ``s3://bucket/copies``: upload those of
    each stage to ``stage_1`` and so on below it, after ``reshard`` and before ``train``."""
    samples_per_shard: PositiveInt = 10_000
    """Samples of a shard."""

    def __post_init__(self) -> None:
        if self.url is not None:
            check_protocol(self.url, "reshard.url")
