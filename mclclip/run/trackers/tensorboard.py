"""Writes event files for TensorBoard, which are read by ``tensorboard --logdir runs/mine``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils import tensorboard

from mclclip.run.trackers import Tracker, numbers_of


class TensorBoard(Tracker):
    """Writes rows as scalars, and files of Markdown as text; it shows no pages of HTML."""

    def __init__(self, directory: Path) -> None:
        module: Any = tensorboard
        self.writer = module.SummaryWriter(str(directory))

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Writes every number of a row as a scalar."""
        for name, value in numbers_of(row).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def attach(self, path: Path) -> None:
        """Writes the text of a file of Markdown."""
        if path.suffix == ".md":
            self.writer.add_text(path.stem, path.read_text())

    def close(self) -> None:
        """Closes the event file."""
        self.writer.close()


def open_tracker(directory: Path, *, name: str, config: Mapping[str, Any]) -> TensorBoard:
    """Opens a further event file in ``directory``."""
    return TensorBoard(directory)
