"""Logs to Trackio, whose environment variables apply: TRACKIO_SPACE_ID for a Space of the Hugging
Face hub, TRACKIO_DIR for another folder of the local store. ``trackio show`` opens it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio  # type: ignore[import-not-found, unused-ignore]

from mclclip.run.trackers import Tracker, read_or_write_id


class Trackio(Tracker):
    """A run of Trackio; files become versions of an artifact."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Logs a row."""
        self.run.log(dict(row), step=step)

    def attach(self, path: Path) -> None:
        """Logs an artifact of the file's name."""
        self.run.log_artifact(str(path), name=path.stem, type=path.stem)

    def close(self) -> None:
        """Sends what is left."""
        self.run.finish()


def open_tracker(directory: Path, *, name: str, config: Mapping[str, Any]) -> Trackio:
    """Opens the run of Trackio, or goes on in it, in the project 'mclclip'."""
    title = f"{name} {read_or_write_id(directory)}"  # a run is found again by its name
    run = trackio.init(project="mclclip", name=title, config=dict(config), resume="allow")
    return Trackio(run)
