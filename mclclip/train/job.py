"""What is fixed for one training before its first step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mclclip.config import Config, ModelConfig, TrainConfig
from mclclip.data.labels import ClassLabels
from mclclip.data.sample_index import SampleIndex
from mclclip.ranks.process_group import Context
from mclclip.run.layout import Layout
from mclclip.run.profiling import PeakMemory


@dataclass
class Job:
    """What is fixed for one training before its first step."""

    config: Config
    options: TrainConfig
    context: Context
    layout: Layout
    stage: int
    index: SampleIndex
    directory: Path
    peaks: PeakMemory

    @property
    def seed(self) -> int:
        """The seed of all randomness of the training; MCL and its controls have the same."""
        return self.config.seed

    @property
    def model(self) -> ModelConfig:
        """The encoder as it is named: stages s >= 1 may start from one of their own."""
        return self.config.model_of("train" if self.stage else "base")

    @property
    def method(self) -> str:
        """What log lines call it: MCL and its controls by the variant, others by the objective."""
        objective = self.options.objective
        return self.layout.variant if objective.reads.groups else objective.kind

    @property
    def uses_cached_text(self) -> bool:
        return self.stage > 0 and self.options.reads_text_embeddings

    @cached_property
    def class_labels(self) -> ClassLabels | None:
        """Which clusters of the stage before are whose, for objectives that read them."""
        reads = self.options.objective.reads
        if not reads.clusters:
            return None
        directory = self.layout.clusters(self.stage - 1)
        return ClassLabels(directory, self.index, reads.clusters, reads.threshold)
