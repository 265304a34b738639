"""The state that a finished training has left: the model and the objective, by name."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mclclip.checkpoint.step_files import check_identity, path_of, steps
from mclclip.checkpoint.storage import load_model_state
from mclclip.run import artifacts


def trained_state(train_directory: Path, *, averaged: bool) -> dict[str, Tensor]:
    """The tensors of a finished training, on the CPU, by name: of its last checkpoint, or of the
    one that its manifest names as ``exported_step``.

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
    step = manifest.counts.get("exported_step", trained)
    if step not in saved:
        raise RuntimeError(
            f"{directory} has lost step {step}, the best one of the training: run 'mclclip train "
            "--force' to train again, or set evaluate.best=false"
        )
    state = load_model_state(directory, step)
    told = {name: manifest.config[name] for name in ("stage", "variant") if name in manifest.config}
    check_identity(path_of(directory, step), told | {"digest": manifest.digest})
    return state | load_model_state(directory, step, part="ema") if averaged else state
