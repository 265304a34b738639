"""Logs to Weights & Biases, whose environment variables apply, such as WANDB_MODE=offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb  # type: ignore[import-not-found, unused-ignore]

from mclclip.run.trackers import Tracker, read_or_write_id


class WeightsAndBiases(Tracker):
    """A run of wandb; files become versions of an artifact."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Logs a row."""
        self.run.log(dict(row), step=step)

    def attach(self, path: Path) -> None:
        """Logs an artifact of the file's name; a page of HTML is shown among the charts too."""
        if path.suffix == ".html":
            self.run.log({path.stem: wandb.Html(path.read_text(), inject=False)})
        artifact = wandb.Artifact(f"{path.stem}-{self.run.id}", type=path.stem)
        artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    def close(self) -> None:
        """Sends what is left."""
        self.run.finish()


def open_tracker(directory: Path, *, name: str, config: Mapping[str, Any]) -> WeightsAndBiases:
    """Opens the run of wandb, or goes on in it, in the project WANDB_PROJECT or else 'mclclip'."""
    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "mclclip"),
        name=os.environ.get("WANDB_NAME", name),
        id=read_or_write_id(directory),
        resume="allow",
        dir=str(directory),
        config=dict(config),
    )
    return WeightsAndBiases(run)
