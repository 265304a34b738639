"""Reads, writes, checks and removes the directory of one saved step.

`mclclip.checkpoint` draws the directory. torch.distributed.checkpoint (DCP) writes the tensors.
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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
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
"""Size and SHA-256 of each file of a step by name, as in its state.json."""
Identity = Mapping[str, Any]
"""Identifies a training: 'stage', 'variant', and 'digest' of all else that the weights need."""


class Damaged(Exception):
    """A step on disk is damaged. The message says how: 'state.json is missing or damaged'."""


# --- names -------------------------------------------------------------------------------------


def steps(directory: Path) -> list[int]:
    """Returns the steps saved in ``directory``, ascending, without unfinished and damaged ones."""
    return parse_steps(path.name for path in Path(directory).glob("step_*"))


def parse_steps(names: Iterable[str]) -> list[int]:
    """Returns the steps among names of directories, ascending: 400 for 'step_00000400'."""
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d+", name))


def path_of(directory: Path, step: int) -> Path:
    """Returns the directory of the saved step ``step``."""
    return Path(directory) / f"step_{step:08d}"


def temporary_of(directory: Path, step: int) -> Path:
    """Returns the directory in which ``step`` is written until it is complete."""
    return Path(directory) / f".step_{step:08d}.tmp"


# --- intact or damaged -------------------------------------------------------------------------


def read_entries(path: Path, step: int) -> Entries:
    """Reads the list of files in the state.json of ``step`` and compares their sizes on disk.

    Raises Damaged if the list is missing or damaged, or a file does not match it.
    """
    try:
        state = files.read_json(path / STATE)
        entries = {name: files.Record(**entry) for name, entry in state["files"].items()}
        fits = state["step"] == step and isinstance(state["identity"], dict)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        fits, entries = False, {}
    if not fits or METADATA not in entries:
        raise Damaged(f"its {STATE} is missing or damaged")
    check_sizes(path, entries)
    return entries


def find_defect(directory: Path, step: int) -> str | None:
    """Returns the damage of the saved ``step`` as a text, or None if it is intact."""
    try:
        read_entries(path_of(directory, step), step)
    except Damaged as error:
        return str(error)
    return None


def check_identity(path: Path, identity: Identity) -> None:
    """Raises RuntimeError if the intact step at ``path`` is of another training."""
    saved = files.read_json(path / STATE)["identity"]
    fields = [name for name in identity if saved.get(name) != identity[name]]
    if not fields:
        return
    there = ", ".join(f"{name} {saved.get(name)!r}" for name in fields if name != "digest")
    here = ", ".join(f"{name} {identity[name]!r}" for name in fields if name != "digest")
    raise RuntimeError(
        f"the checkpoint {path} is of another training ("
        + (f"{there}; this one has {here}" if there else "other options or inputs")
        + "): put the checkpoints of this one back, or remove it"
    )


def check_sizes(path: Path, entries: Entries) -> None:
    """Raises Damaged if a file in ``entries`` is missing below ``path`` or has another size."""
    for name, entry in entries.items():
        try:
            size: int | None = (path / name).stat().st_size
        except OSError:
            size = None
        if size != entry.size_bytes:
            defect = "is missing" if size is None else f"has {size} bytes, not {entry.size_bytes}"
            raise Damaged(f"{name} {defect}")


# --- publishing and removing -------------------------------------------------------------------


def publish(
    directory: Path,
    step: int,
    entries: Entries,
    world_size: int,
    identity: Identity,
) -> None:
    """Completes a step whose files all ranks have written: writes its state.json and renames its
    directory.

    Raises OSError if a file in ``entries`` is missing here or state.json cannot be written.
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
    if final.exists():  # an earlier start has saved the same step
        _remove(final, f".{final.name}.replaced.tmp")
    os.rename(temporary, final)
    files.fsync_directory(Path(directory))


def choose_old(saved: Iterable[int], newest: int, keep: int, keep_every: int | None) -> list[int]:
    """Returns those of the ``saved`` steps that may be removed, ascending.

    Of the steps up to ``newest`` the last ``keep`` stay, and those divisible by ``keep_every``.
    """
    old = sorted(step for step in saved if step <= newest)
    return [step for step in old[:-keep] if keep_every is None or step % keep_every]


def remove(directory: Path, doomed: Iterable[int]) -> None:
    """Removes the steps ``doomed``; warns if one cannot be removed."""
    for step in doomed:
        try:
            _remove(path_of(directory, step), temporary_of(directory, step).name)
        except OSError as error:
            log.warning("the old checkpoint %s cannot be removed (%s)", error.filename, error)


def _remove(path: Path, name: str) -> None:
    """Removes the directory of a step. Renames it to ``name`` first, so that a step that is half
    removed when the process is killed does not look complete."""
    os.rename(path, path.with_name(name))
    shutil.rmtree(path.with_name(name))


State = dict[str, Any]
_COPY_AHEAD_BYTES = 10_000_000  # copied from the GPU while the tensor before is written

# DCP warns at every save of a single process. The filter is set once for the whole process, since
# ``catch_warnings`` is not thread-safe.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


# --- writing -----------------------------------------------------------------------------------


class Writer(FileSystemWriter):
    """DCP's writer, except that it raises the OSError of a full disk instead of torch's own error.

    ``copied``: True if the state is already in main memory. Then DCP gets no CUDA streams to copy
    while it writes, since these would open a context on the first GPU in every rank's thread.
    """

    def __init__(self, path: Path, *, copied: bool) -> None:
        ahead = 0 if copied else _COPY_AHEAD_BYTES
        super().__init__(str(path), sync_files=True, per_thread_copy_ahead=ahead)
        # After a failure torch closes the stream once more when it frees it. That would flush a
        # closed file, for which Python 3.13 prints a traceback.
        streams: Any = getattr(self, "transforms", None)
        if hasattr(streams, "transform_save_stream"):
            torch_open = streams.transform_save_stream

            def open_stream(item: Any, file: Any) -> tuple[Any, list[str]]:
                stream, names = torch_open(item, file)
                stream.close = lambda: None if file.closed else file.flush()
                return stream, names

            streams.transform_save_stream = open_stream

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's part. If an OSError caused torch's error, raises that instead."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None


def select_local_part(state: State, rank: int, world_size: int) -> State:
    """Returns the part of ``state`` that this rank writes.

    All ranks hold every plain tensor, so each is given to one rank, balanced by size; every rank
    computes the same division. DTensors stay in all parts: each rank writes its own shards.
    """
    plain = [name for name, value in state.items() if not hasattr(value, "to_local")]
    plain.sort()
    sizes = [getattr(state[name], "nbytes", 1) for name in plain]
    numbers = balance_by_cost(sizes, world_size)[rank]
    others = {*plain} - {plain[number] for number in numbers}
    return {name: value for name, value in state.items() if name not in others}


write = state_dict_saver.save
"""Writes each rank's part to disk. It is torch's own function, which fails on all ranks together;
if code of ours around it failed on one rank, the other ranks would wait in it."""


# --- reading -----------------------------------------------------------------------------------


def read(path: Path, state: State, *, alone: bool) -> None:
    """Fills the tensors of ``state`` in place from the step at ``path``.

    All ranks call it together, unless ``alone``. Raises RuntimeError on all ranks if reading fails.
    """
    reader = FileSystemReader(str(path))
    try:
        state_dict_loader.load(state, storage_reader=reader, no_dist=alone)
    except (Exception, CheckpointException) as error:
        raise make_read_error(path, error) from error


def load_model_state(directory: Path, step: int, part: str = "model") -> dict[str, Tensor]:
    """Reads the tensors of one ``part`` ('model' or 'ema') of a saved step, on the CPU, by name.

    One rank may call it alone. Raises RuntimeError if the step is damaged or has no such part.
    """
    path = path_of(directory, step)
    try:
        read_entries(path, step)
        stored = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except (Exception, CheckpointException) as error:  # every kind of error means damage
        raise make_read_error(path, error) from error
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
    """Removes the steps of a finished training, except the last one, the exported one and those
    divisible by ``keep_every``.

    If the last or the exported step is damaged, warns and removes nothing.
    """
    directory = train_directory / "checkpoints"
    counts = artifacts.read_manifest(train_directory, "train").counts
    needed = {counts["steps"], counts.get("exported_step", counts["steps"])}
    try:
        files.remove_leftovers(directory)
        old = choose_old(steps(directory), counts["steps"], 1, keep_every)
        if doomed := [step for step in old if step not in needed]:
            for step in needed:
                read_entries(path_of(directory, step), step)
            remove(directory, doomed)
    except (OSError, Damaged) as error:
        log.warning("old checkpoints in %s stay (%s)", directory, describe_error(error))


def trained_state(train_directory: Path, *, averaged: bool) -> dict[str, Tensor]:
    """Reads the model's tensors of a finished training, on the CPU, by name.

    Reads the step that the manifest counts as ``exported_step``, else the last step. ``averaged``:
    returns the moving average of the tensors that have one. Raises FileNotFoundError if the
    training has not finished or that step is gone, and RuntimeError if it is damaged or of another
    training.
    """
    directory = train_directory / "checkpoints"
    manifest = artifacts.read_manifest(train_directory, "train")
    step = manifest.counts.get("exported_step", manifest.counts["steps"])
    if step not in steps(directory):
        raise FileNotFoundError(
            f"no checkpoint of step {step} in {directory}, from which the training is exported: "
            f"bring it back, or remove {train_directory / artifacts.MANIFEST} and run 'mclclip "
            "train' again, which goes on from the newest checkpoint that is left"
        )
    state = load_model_state(directory, step)
    config = manifest.config
    identity = {name: config[name] for name in ("stage", "variant") if name in config} | {
        "digest": manifest.digest
    }
    check_identity(path_of(directory, step), identity)
    return state | load_model_state(directory, step, part="ema") if averaged else state


# --- errors ------------------------------------------------------------------------------------


def make_read_error(path: Path, error: BaseException) -> RuntimeError:
    """Returns the error to raise if ``error`` came while the step at ``path`` was read."""
    return RuntimeError(
        f"the checkpoint {path} cannot be read ({describe_error(error)}): remove that directory to "
        f"resume from the one before; where it is the only one, run 'mclclip train --force'"
    )


def describe_error(error: BaseException) -> str:
    """Returns a short line on ``error``, such as 'OSError: No space left on device'.

    DCP wraps the errors of all ranks in a CheckpointException: then describes the first of them, or
    raises it if it is a KeyboardInterrupt.
    """
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, KeyboardInterrupt):
        raise error
    text = " ".join(str(error).split())
    text = text if len(text) <= 200 else text[:200] + "..."
    return text if isinstance(error, Damaged) else f"{type(error).__name__}: {text}"
