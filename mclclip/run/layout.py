"""Every path of a run directory (drawn in artifacts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

PILOTS = {"pilot": "mcl", "pilot_ungrouped": "ungrouped"}
"""Variants that are trained on a share of the samples -> the method that they try out."""


def folders_above(artifact: Path) -> Sequence[Path]:
    """The folders, nearest first, among which is the run directory that an artifact of a stage lies
    in; of a pilot's control it is the fifth."""
    return artifact.resolve().parents[:5]


class HasRunDir(Protocol):
    """The one field of a configuration that ``Layout`` reads."""

    @property
    def run_dir(self) -> str:
        """The run directory."""


class Layout:
    """Paths of a run (drawn in artifacts.py).

    variant          ``mcl``, the name of a control, or one of ``PILOTS``, which lie in a folder of
                     their own and share index, stage 0 and pseudo labels with the run
    is_pilot         whether the variant is trained on a share of the samples
    method           ``mcl`` or the name of a control, of a pilot too
    index            the sample index
    pilot            folder of the pilot: its stages, its controls, its results and its verdict
    root             folder of the stages of this variant
    results          results.jsonl, one row per figure; a pilot has its own
    text_embeddings  text embeddings of the frozen text tower (stage 0's)
    trunk_cache      what the frozen blocks of stage 0's encoder make of every image
    """

    def __init__(self, run_dir: Path, variant: str = "mcl") -> None:
        self.run_dir, self.variant = run_dir, variant
        self.is_pilot, self.method = variant in PILOTS, PILOTS.get(variant, variant)
        self.index = run_dir / "index"
        self.pilot = run_dir / "pilot"
        own = self.pilot if self.is_pilot else run_dir
        self.root = own if self.method == "mcl" else own / "controls" / self.method
        self.results = own / "results.jsonl"
        self.text_embeddings = run_dir / "stage_0" / "text_embeddings"
        self.trunk_cache = run_dir / "stage_0" / "trunk_cache"

    @classmethod
    def of(cls, config: HasRunDir, variant: str = "mcl") -> Layout:
        """The layout of a configuration's run directory."""
        return cls(Path(config.run_dir), variant)

    @property
    def controlled(self) -> Layout:
        """The layout of what this variant is a control of; of MCL, its own."""
        return Layout(self.run_dir, "pilot" if self.is_pilot else "mcl")

    def stage(self, stage: int) -> Path:
        """A stage's directory; stage 0 is shared by all variants."""
        return (self.run_dir if stage == 0 else self.root) / f"stage_{stage}"

    def embeddings(self, stage: int) -> Path:
        """Image embeddings of a stage."""
        return self.stage(stage) / "embeddings"

    def trunk_rows(self, folder: str | None, identity: str) -> Path:
        """Where its rows lie; in a folder elsewhere below the run's name and a part of the cache's
        ``identity``, since it may hold several."""
        if folder is None:
            return self.trunk_cache / "rows"
        name = f"trunk_{identity[:12]}"
        return Path(folder).expanduser() / self.run_dir.resolve().name / name

    def clusters(self, stage: int) -> Path:
        """k-means of a stage's embeddings."""
        return self.stage(stage) / "clusters"

    def pseudo_labels(self, stage: int) -> Path:
        """Labels that ``stage`` is trained on, made from the stages before; controls read MCL's."""
        return self.run_dir / f"stage_{stage}" / "pseudo_labels"

    def resharded(self, stage: int, folder: str | None) -> Path:
        """Copies of the samples in the order of a stage's groups; in a folder elsewhere below the
        run's name, since several runs may use it."""
        if folder is not None:
            return Path(folder).expanduser() / self.run_dir.resolve().name / f"stage_{stage}"
        return self.run_dir / f"stage_{stage}" / "resharded"

    def train(self, stage: int) -> Path:
        """A stage's training: checkpoints, metrics, grouped index."""
        return self.stage(stage) / "train"

    def export(self, stage: int) -> Path:
        """A stage's encoder as an open_clip directory."""
        return self.stage(stage) / "export"

    def joined(self, name: str) -> Path:
        """A joined encoder: ``concat_raw``, ``concat_stage_norm``, ``soup_uniform`` and so on."""
        return self.root / "exports" / name

    def model_name(self, name: str) -> str:
        """The name of a model in results.jsonl: ``stage_1``, ``control_ungrouped_stage_1``."""
        return name if self.method == "mcl" else f"control_{self.method}_{name}"
