"""Every path of a run directory (drawn in artifacts.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class HasRunDir(Protocol):
    """The one field of a configuration that ``Layout`` reads."""

    @property
    def run_dir(self) -> str:
        """The run directory."""


@dataclass(frozen=True)
class Layout:
    """Paths of a run (drawn in artifacts.py). ``variant``: ``mcl`` or the name of a control."""

    run_dir: Path
    variant: str = "mcl"

    @classmethod
    def of(cls, config: HasRunDir, variant: str = "mcl") -> Layout:
        """The layout of a configuration's run directory."""
        return cls(Path(config.run_dir), variant)

    @property
    def index(self) -> Path:
        """The sample index."""
        return self.run_dir / "index"

    @property
    def results(self) -> Path:
        """results.jsonl, one row per figure."""
        return self.run_dir / "results.jsonl"

    @property
    def root(self) -> Path:
        """Folder of the stages of this variant."""
        return self.run_dir if self.variant == "mcl" else self.run_dir / "controls" / self.variant

    def stage(self, stage: int) -> Path:
        """A stage's directory; stage 0 is shared by all variants."""
        return (self.run_dir if stage == 0 else self.root) / f"stage_{stage}"

    def embeddings(self, stage: int) -> Path:
        """Image embeddings of a stage."""
        return self.stage(stage) / "embeddings"

    @property
    def text_embeddings(self) -> Path:
        """Text embeddings of the frozen text tower (stage 0's)."""
        return self.run_dir / "stage_0" / "text_embeddings"

    def clusters(self, stage: int) -> Path:
        """k-means of a stage's embeddings."""
        return self.stage(stage) / "clusters"

    def pseudo_labels(self, stage: int) -> Path:
        """Labels that ``stage`` is trained on, made from the stages before; controls read MCL's."""
        return self.run_dir / f"stage_{stage}" / "pseudo_labels"

    def train(self, stage: int) -> Path:
        """A stage's training: checkpoints, metrics, grouped index."""
        return self.stage(stage) / "train"

    def export(self, stage: int) -> Path:
        """A stage's encoder as an open_clip directory."""
        return self.stage(stage) / "export"

    def joined(self, name: str) -> Path:
        """A joined encoder: ``concat_raw``, ``concat_stage_norm`` or ``soup_uniform``."""
        return self.root / "exports" / name

    def model_name(self, name: str) -> str:
        """The name of a model in results.jsonl: ``stage_1``, ``control_ungrouped_stage_1``."""
        return name if self.variant == "mcl" else f"control_{self.variant}_{name}"
