"""The directory of a saved step: its name, its list of files, checks, publishing and removal; its
state, written and read through torch.distributed.checkpoint (DCP), also of a finished training.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mclclip import __version__
from mclclip.ranks.sharded_rows import balance_by_cost
from mclclip.run import artifacts
from mclclip.util import files

log = logging.getLogger("mclclip")

STATE = "state.json"
METADATA = ".metadata"
Entries = dict[str, files.Record]
"""The files of a step, as listed in its state.json."""
Identity = Mapping[str, Any]
"""Of which training a step is: its stage, its variant, and the digest of all else that its weights
depend on."""


class Damaged(Exception):
    """A step on disk is not what was saved; the message names the difference."""


# --- names -------------------------------------------------------------------------------------


def steps(directory: Path) -> list[int]:
    """Steps saved in ``directory``, ascending (unfinished and damaged ones have other names)."""
    return parse_steps(path.name for path in Path(directory).glob("step_*"))


def parse_steps(names: Iterable[str]) -> list[int]:
    """The steps among names of directories, ascending."""
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d+", name))


def path_of(directory: Path, step: int) -> Path:
    """Directory of the checkpoint of ``step``."""
    return Path(directory) / f"step_{step:08d}"


def temporary_of(directory: Path, step: int) -> Path:
    """Directory in which ``step`` is written; leftovers are removed at the next start."""
    return Path(directory) / f".step_{step:08d}.tmp"


# --- whole or damaged --------------------------------------------------------------------------


def read_entries(path: Path, step: int) -> Entries:
    """The files listed in the state.json of ``step``, checked for presence and size.

    Raises Damaged where they do not match.
    """
    try:
        state = files.read_json(path / STATE)
        if state["step"] != step or not isinstance(state["identity"], dict):
            raise Damaged(f"its {STATE} is not of step {step}")
        entries = {name: files.Record(**entry) for name, entry in state["files"].items()}
    except FileNotFoundError as error:
        raise Damaged(f"it has no {STATE}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"its {STATE} cannot be read") from error
    if METADATA not in entries:
        raise Damaged(f"its {STATE} lists no {METADATA}")
    check_sizes(path, entries)
    return entries


def check_identity(path: Path, identity: Identity) -> None:
    """Raises RuntimeError where the intact step at ``path`` is of another training."""
    saved = files.read_json(path / STATE)["identity"]
    fields = [name for name in identity if saved.get(name) != identity[name]]
    if not fields:
        return
    what = ", ".join(f"{name} {saved.get(name)!r}" for name in fields if name != "digest")
    here = ", ".join(f"{name} {identity[name]!r}" for name in fields if name != "digest")
    raise RuntimeError(
        f"the checkpoint {path} is of another training ("
        + (f"{what}; this one has {here}" if what else "other options or inputs")
        + "): put the checkpoints of this one back, or remove it"
    )


def check_sizes(path: Path, entries: Entries) -> None:
    """Raises Damaged where a listed file is not there or has another size."""
    for name, entry in entries.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{name} is missing") from error
        if size != entry.size_bytes:
            raise Damaged(f"{name} has {size} bytes, not {entry.size_bytes}")


# --- published, kept, removed ------------------------------------------------------------------


def publish(
    directory: Path,
    step: int,
    entries: Entries,
    world_size: int,
    identity: Identity,
) -> None:
    """Writes the list of files of a step that all ranks have written, and renames it.

    Raises OSError where a listed file is missing or cannot be written.
    """
    temporary, final = temporary_of(directory, step), path_of(directory, step)
    try:
        check_sizes(temporary, entries)
    except Damaged as error:
        raise OSError(f"{error}: do all nodes see the same {directory}?") from error
    state: dict[str, Any] = {
        "step": step,
        "world_size": world_size,
        "package_version": __version__,
        "files": {name: asdict(entries[name]) for name in sorted(entries)},
        "identity": dict(identity),
    }
    files.write_json(temporary / STATE, state)
    files.fsync_directory(temporary)
    if final.exists():  # the same step of an earlier start
        _remove(final, f".{final.name}.replaced.tmp")
    os.rename(temporary, final)
    files.fsync_directory(Path(directory))


def superfluous(saved: Iterable[int], newest: int, keep: int, keep_every: int | None) -> list[int]:
    """Steps up to ``newest`` that are neither among the last ``keep`` nor kept for good."""
    old = sorted(step for step in saved if step <= newest)
    return [step for step in old[:-keep] if keep_every is None or step % keep_every]


def remove(directory: Path, doomed: Iterable[int]) -> None:
    """Removes steps; warns of those that cannot be removed."""
    for step in doomed:
        try:
            _remove(path_of(directory, step), temporary_of(directory, step).name)
        except OSError as error:
            log.warning("the old checkpoint %s cannot be removed (%s)", error.filename, error)


def _remove(path: Path, name: str) -> None:
    """Removes a step; renames it to ``name`` first, so that a kill leaves nothing that looks
    complete."""
    os.rename(path, path.with_name(name))
    shutil.rmtree(path.with_name(name))


State = dict[str, Any]
_COPY_AHEAD_BYTES = 10_000_000  # copied from the GPU while the previous tensor is written

# DCP warns at every save of a single process. The filter is set once for the whole process, since
# ``catch_warnings`` is not thread-safe.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


# --- writing -----------------------------------------------------------------------------------


class Writer(FileSystemWriter):
    """DCP's writer, which raises the OSError of a full disk instead of torch's own error.

    ``copied``: the state is already in main memory; then DCP's CUDA streams, which overlap copies
    with writing, are not used, since they would open a context on the first GPU in every rank's
    thread.
    """

    def __init__(self, path: Path, *, copied: bool) -> None:
        ahead = 0 if copied else _COPY_AHEAD_BYTES
        super().__init__(str(path), sync_files=True, per_thread_copy_ahead=ahead)
        # A stream that failed is closed once more when it is freed, and then flushes a closed file,
        # of which Python 3.13 prints a traceback.
        streams: Any = getattr(self, "transforms", None)
        if hasattr(streams, "transform_save_stream"):
            open_stream = streams.transform_save_stream

            def opened(item: Any, file: Any) -> tuple[Any, list[str]]:
                stream, names = open_stream(item, file)
                stream.close = lambda: None if file.closed else file.flush()
                return stream, names

            streams.transform_save_stream = opened

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's part; raises the OSError behind torch's error, if there is one."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            behind: BaseException | None = error
            while behind is not None and not isinstance(behind, OSError):
                behind = behind.__context__
            raise (behind or error) from None


def local_part(state: State, rank: int, world_size: int) -> State:
    """The part of the state that this rank writes.

    Plain tensors, which all ranks hold, are dealt to the W ranks by size, the same way on each, so
    that each is written once. DTensors stay in all parts: each rank writes its own shards.
    """
    plain = [name for name, value in state.items() if not hasattr(value, "to_local")]
    plain.sort()
    sizes = [getattr(state[name], "nbytes", 1) for name in plain]
    numbers = balance_by_cost(sizes, world_size)[rank]
    others = {*plain} - {plain[number] for number in numbers}
    return {name: value for name, value in state.items() if name not in others}


write = state_dict_saver.save
"""Writes each rank's part, on disk when it returns. It is torch's own and fails on all ranks
together: an error of ours around it on one rank would leave the others waiting in it."""


# --- reading -----------------------------------------------------------------------------------


def read_metadata(path: Path) -> Metadata:
    """DCP's metadata of the step at ``path``. Raises RuntimeError where it cannot be read."""
    try:
        return FileSystemReader(str(path)).read_metadata()
    except (Exception, CheckpointException) as error:  # of many types; all mean that it is damaged
        raise unreadable(path, error) from error


def read(path: Path, state: State, *, alone: bool) -> None:
    """Fills the tensors of ``state`` in place from the step at ``path``.

    Collective unless ``alone``. Raises RuntimeError on all ranks where reading fails.
    """
    reader = FileSystemReader(str(path))
    try:
        state_dict_loader.load(state, storage_reader=reader, no_dist=alone)
    except (Exception, CheckpointException) as error:
        raise unreadable(path, error) from error


def check_fit(path: Path, state: State) -> None:
    """Raises RuntimeError where an intact step is of another model or training than ``state``."""
    stored = read_metadata(path).state_dict_metadata
    lacking = [name for name in state if name not in stored]
    foreign = [name for name in stored if name.startswith("model.") and name not in state]
    other = [
        f"{name} is {list(item.size)} there, {list(value.shape)} here"
        for name, value in state.items()
        if isinstance(item := stored.get(name), TensorStorageMetadata) and item.size != value.shape
    ]
    what = (
        f"it lacks {_count(lacking)}" if lacking
        else f"it holds {_count(foreign)}, which the model lacks" if foreign
        else other[0] if other
        else None
    )  # fmt: skip
    if what is not None:
        raise RuntimeError(
            f"the checkpoint {path} does not fit: {what}. It is of another model or training: use "
            f"the options it was made with, or another run directory"
        )


def _count(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def load_model_state(directory: Path, step: int, part: str = "model") -> dict[str, Tensor]:
    """The tensors of one part (``model``, ``ema``) of a checkpoint on the CPU, by name.

    Not a collective. Raises RuntimeError, one line, where the checkpoint is damaged or has no such
    part.
    """
    path = path_of(directory, step)
    try:
        read_entries(path, step)
    except Damaged as error:
        raise unreadable(path, error) from error
    stored = read_metadata(path).state_dict_metadata
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in stored.items()
        if name.startswith(f"{part}.") and isinstance(item, TensorStorageMetadata)
    }
    if not state:
        parts = sorted({name.partition(".")[0] for name in stored})
        raise RuntimeError(f"the checkpoint {path} has no part {part!r}, only {', '.join(parts)}")
    read(path, state, alone=True)
    return {name.removeprefix(f"{part}."): tensor for name, tensor in state.items()}


def keep_finished(train_directory: Path, keep_every: int | None) -> None:
    """Removes the steps of a finished training that nothing reads any more: all but the last, the
    exported one and those kept for good. If one of the first two is damaged, it warns and removes
    nothing. The next call removes what a killed call leaves."""
    directory = train_directory / "checkpoints"
    counts = artifacts.read_manifest(train_directory, "train").counts
    needed = {counts["steps"], counts.get("exported_step", counts["steps"])}
    try:
        files.remove_leftovers(directory)
        old = superfluous(steps(directory), counts["steps"], 1, keep_every)
        if doomed := [step for step in old if step not in needed]:
            for step in needed:
                read_entries(path_of(directory, step), step)
            remove(directory, doomed)
    except (OSError, Damaged) as error:
        log.warning("old checkpoints in %s stay (%s)", directory, cause(error))


def trained_state(train_directory: Path, *, averaged: bool) -> dict[str, Tensor]:
    """The tensors of a finished training by name, on the CPU, from its last checkpoint or the one
    that its manifest names as ``exported_step``.

    ``averaged``: the moving average in place of the trained tensors. Raises FileNotFoundError if
    the training has not finished or its checkpoints are gone, and RuntimeError if they are damaged
    or of another training.
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
    config = manifest.config
    identity = {name: config[name] for name in ("stage", "variant") if name in config} | {
        "digest": manifest.digest
    }
    check_identity(path_of(directory, step), identity)
    return state | load_model_state(directory, step, part="ema") if averaged else state


# --- errors ------------------------------------------------------------------------------------


def unreadable(path: Path, error: BaseException) -> RuntimeError:
    """The error to raise for a step that cannot be read; it says what to do."""
    return RuntimeError(
        f"the checkpoint {path} cannot be read ({cause(error)}): remove that directory to resume "
        f"from the one before; where it is the only one, run 'mclclip train --force'"
    )


def cause(error: BaseException) -> str:
    """One short line on an error, or on the error inside of DCP's CheckpointException.

    Raises KeyboardInterrupt if that is what DCP wrapped.
    """
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, KeyboardInterrupt):
        raise error
    text = " ".join(str(error).split())
    text = text if len(text) <= 200 else text[:200] + "..."
    return text if isinstance(error, Damaged) else f"{type(error).__name__}: {text}"
