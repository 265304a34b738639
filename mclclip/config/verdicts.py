"""Options of what judges a run before its end."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveInt

from mclclip.options import STRICT, PositiveShare


@checked_dataclass(frozen=True, config=STRICT)
class PilotConfig:
    """A pilot: stage 1 and its ungrouped control on a share of the samples, before the run."""

    share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the samples that the pilot draws, such as 0.1 (``mclclip run --pilot 0.1``); null:
    no pilot."""
    steps_share: PositiveShare | None = None
    """Share of the steps that the pilot takes, where it is another than that of the samples: 1 is
    as long a training as stage 1's, over fewer samples (null: ``share``)."""
    stop_without_gain: bool = False
    """End the run after a pilot that shows no gain, which on the demo missed gains that came late;
    false: the run goes on whatever the pilot shows, and its verdict stands in
    ``pilot/verdict.json``."""

    def __post_init__(self) -> None:
        if self.steps_share is not None and self.share is None:
            raise ValueError(
                f"pilot.steps_share={self.steps_share} is of a pilot, and there is none: set "
                "pilot.share too, or leave it out"
            )


@checked_dataclass(frozen=True, config=STRICT)
class EvaluateConfig:
    """Evaluations within a training, of the checkpoint at that step as it would be exported."""

    every: PositiveInt | None = None
    """Steps (or epochs, see ``unit``) between two; one more follows the last step. Null: none."""
    unit: Literal["steps", "epochs"] = "steps"
    """What ``every`` counts."""
    suite: list[str] = field(default_factory=list)
    """Benchmarks of ``eval.suite`` by their names; empty: all of them. The training waits."""
    metric: str | None = None
    """``BENCHMARK/METRIC``, such as ``mmvp/average``: the figure that ``patience`` and ``best`` go
    by. Null: figures are only recorded."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller figure is better."""
    patience: PositiveInt | None = None
    """Evaluations in a row without a better figure after which the training ends; null: never."""
    best: bool = False
    """Export the checkpoint with the best figure, which is kept, instead of the last one."""

    def __post_init__(self) -> None:
        if self.every is None and (self.metric is not None or self.suite):
            raise ValueError("evaluate has no effect without evaluate.every: set it")
        if self.metric is None and (self.best or self.patience is not None):
            raise ValueError("patience and best go by a figure: set evaluate.metric")
        if self.metric is not None and "/" not in self.metric:
            raise ValueError(f"metric={self.metric!r}: wanted BENCHMARK/METRIC, as mmvp/average")
