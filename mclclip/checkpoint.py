"""Resumable state on torch.distributed.checkpoint (DCP).

One directory per saved step, independent of the number of ranks::

    checkpoints/step_00002000/    .metadata  __0_0.distcp ...  state.json

Everything is named: parameters, buffers and optimizer moments by their module path. A step is
written under a temporary name by all ranks and renamed by the first: what has its final name is
whole. DCP reads its metadata with pickle, so only checkpoints of a trusted run may be loaded.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from mclclip import artifacts
from mclclip.parallel import collectives

log = logging.getLogger("mclclip")


def steps(directory: Path) -> list[int]:
    """Steps saved in ``directory``, ascending (unfinished ones have other names)."""
    found = Path(directory).glob("step_*")
    return sorted(int(path.name[5:]) for path in found if re.fullmatch(r"step_\d+", path.name))


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return Path(directory) / f"step_{step:08d}"


def save(
    directory: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, *, keep: int
) -> Path:
    """Saves a step from all ranks and removes all but the newest ``keep``; returns its path.

    Raises RuntimeError, one line and on all ranks, where it cannot be written (a full disk): the
    checkpoints before are still there.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: a resumable training keeps at least one checkpoint")
    final = path_of(directory, step)
    temporary = final.with_name(f".{final.name}.tmp")
    collectives.on_main(lambda: _prepare(directory, temporary))
    model_state, optimizer_state = get_state_dict(module, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    writer = FileSystemWriter(str(temporary), sync_files=True)
    alone = collectives.world_size() == 1
    try:
        _quiet(lambda: state_dict_saver.save(state, storage_writer=writer, no_dist=alone))
    except (Exception, CheckpointException) as error:
        raise RuntimeError(
            f"the checkpoint {final} cannot be written ({_cause(error)}): make room, then run the "
            f"same command again to resume"
        ) from error

    def publish() -> None:
        artifacts.write_json(temporary / "state.json", {"step": step})
        artifacts.fsync_directory(temporary)
        os.rename(temporary, final)
        artifacts.fsync_directory(Path(directory))
        for old in steps(directory)[:-keep]:
            _remove(path_of(directory, old))

    collectives.on_main(publish)
    return final


def load(directory: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Loads a step into ``module`` and ``optimizer`` in place, on any number of ranks.

    Raises RuntimeError, one line, where the checkpoint cannot be read or does not fit.
    """
    source = path_of(directory, step)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    _read(source, state)
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def load_model_state(directory: Path, step: int) -> dict[str, Tensor]:
    """The model part of a checkpoint on the CPU, by parameter name (for exports)."""
    source = path_of(directory, step)
    try:
        stored = FileSystemReader(str(source)).read_metadata().state_dict_metadata
    except (Exception, CheckpointException) as error:
        raise _unreadable(source, error) from error
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in stored.items()
        if name.startswith("model.") and isinstance(item, TensorStorageMetadata)
    }
    _read(source, state, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def _read(source: Path, state: dict[str, Any], no_dist: bool | None = None) -> None:
    alone = collectives.world_size() == 1 if no_dist is None else no_dist
    reader = FileSystemReader(str(source))
    try:
        _quiet(lambda: state_dict_loader.load(state, storage_reader=reader, no_dist=alone))
    except (Exception, CheckpointException) as error:  # many types, all mean the same here
        raise _unreadable(source, error) from error


def _unreadable(source: Path, error: BaseException) -> RuntimeError:
    return RuntimeError(
        f"the checkpoint {source} cannot be read ({_cause(error)}): remove that directory to "
        f"resume from the one before"
    )


def _cause(error: BaseException) -> str:
    """The error that DCP wrapped (in an exception that no ``except Exception`` sees), short."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 200 else text[:200] + '...'}"


def _prepare(directory: Path, temporary: Path) -> None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    artifacts.remove_leftovers(Path(directory))
    temporary.mkdir()


def _remove(path: Path) -> None:
    """Removes a checkpoint; renamed first, so that a kill leaves nothing that looks whole."""
    doomed = path.with_name(f".{path.name}.tmp")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _quiet(work: Callable[[], Any]) -> Any:
    """Runs a DCP call without the warnings it gives for every single-process save."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        return work()
