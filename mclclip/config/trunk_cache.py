"""Options of the frozen blocks' output on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass

from mclclip.data.remote import protocol_of
from mclclip.objectives.base import ObjectiveOptions
from mclclip.options import STRICT


@checked_dataclass(frozen=True, config=STRICT)
class TrunkCacheConfig:
    """The output of the image tower's frozen blocks for every sample, on disk."""

    enabled: bool = False
    """Write it at stage 0, and start every training after that and every embedding pass from it.
    Every epoch then sees the same crop of an image, that of validation."""
    folder: str | None = None
    """Where the rows lie, on a disk that all ranks share (null: in the run directory);
    ``mclclip config --plan`` says how much room they take."""
    dtype: Literal["float16", "float32"] = "float16"
    """Number format of the rows."""

    def __post_init__(self) -> None:
        if self.folder is not None and protocol_of(self.folder) is not None:
            raise ValueError(f"trunk_cache.folder={self.folder} is a url: give a folder of a disk")


def check_trunk_cache(
    objective: ObjectiveOptions,
    image_blocks: int | str,
    all_blocks: int | None,
    start: str,
    augmentation: Mapping[str, Any],
    has_trained_model: bool,
    reshard: bool,
) -> None:
    """Raises ValueError, one line, where a run with these options cannot start from the cache.

    ``all_blocks`` is the number of blocks that the image tower has; None: it is not known yet.
    """
    problems = {
        f"train.objective.kind={objective.kind} trains on {objective.num_views} views of an image, "
        "which would be equal: take an objective of one view": objective.num_views > 1,
        f"train.lock.image_blocks={image_blocks} freezes no block: give the number of the last "
        "blocks that are trained, fewer than there are": image_blocks in ("all", all_blocks),
        f"train.start={start} gives stages other first blocks than stage 0 has: leave it out": (
            start == "random"
        ),
        "trained_model has other first blocks than stage 0 has: leave it out": has_trained_model,
        f"model.augmentation={dict(augmentation)} would have no effect, since every epoch has the "
        "same crops: leave it out": augmentation not in ({}, {"kind": "none"}),
        "reshard.enabled copies images, which are not read then: leave one out": reshard,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"trunk_cache.enabled, but {problem}")
