"""The state that a finished training has left: the model and the objective, by name."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mclclip.checkpoint.step_files import check_identity, path_of, steps
from mclclip.checkpoint.storage import load_model_state
from mclclip.run import artifacts


def trained_state(train_directory: Path, *, averaged: bool) -> dict[str, Tensor]:
    """The tensors of the last checkpoint of a finished training, on the CPU, by name.

    ``averaged``: of what was trained, the moving average. Raises FileNotFoundError where the
    training has not finished or its checkpoints are gone, and RuntimeError where they are those of
    another training, or damaged.
    """
    directory = train_directory / "checkpoints"
    manifest = artifacts.read_manifest(train_directory, "train")
    trained = manifest.counts["steps"]
    saved = steps(directory)
    if not saved:
        raise FileNotFoundError(f"no checkpoint in {directory}: run 'mclclip train --force'")
    if saved[-1] != trained:
        raise RuntimeError(
            f"{directory} ends at step {saved[-1]}, the training at {trained}: remove "
            f"{train_directory / artifacts.MANIFEST}, then run 'mclclip train' again"
        )
    state = load_model_state(directory, saved[-1])
    told = {name: manifest.config[name] for name in ("stage", "variant") if name in manifest.config}
    check_identity(path_of(directory, saved[-1]), told | {"digest": manifest.digest})
    return state | load_model_state(directory, saved[-1], part="ema") if averaged else state
