"""A flat state into a directory and back, through torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageWriterTransforms,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mclclip.checkpoint import step_files
from mclclip.checkpoint.step_files import METADATA, Damaged
from mclclip.ranks.sharded_rows import deal

State = dict[str, Any]
_COPY_AHEAD_BYTES = 10_000_000  # from the GPU, while the tensor before is written

# DCP says so at every save of a single process. By message and once, since the scopes of
# ``catch_warnings`` are not for threads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


# --- writing -----------------------------------------------------------------------------------


class _Streams(_StorageWriterTransforms):
    """DCP's streams into one file, of which one that failed is let go in silence.

    Else it flushes the file, which is closed by then, and Python 3.13 prints a traceback of that.
    """

    def transform_save_stream(self, write_item: Any, raw_stream: Any) -> tuple[Any, list[str]]:
        """As DCP's."""
        stream: Any
        stream, names = super().transform_save_stream(write_item, raw_stream)

        def flush() -> None:
            if not raw_stream.closed:
                raw_stream.flush()

        stream.close = flush
        return stream, names


class _Writer(FileSystemWriter):
    """DCP's writer; says that a disk is full, where torch's file format stumbles over that."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.transforms = _Streams()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's part; raises the OSError behind torch's error, if there is one."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            behind: BaseException | None = error
            while behind is not None and not isinstance(behind, OSError):
                behind = behind.__context__
            raise (behind or error) from None


def own_part(state: State, rank: int, world_size: int) -> State:
    """Returns the part that this rank writes; of plain tensors, which all ranks hold, about 1/W.

    DTensors stay in all parts: each rank writes its own shards of them. All ranks cut the same
    names and sizes, so each plain tensor is written once.
    """
    plain = [name for name, value in state.items() if not hasattr(value, "to_local")]
    plain.sort()
    sizes = [getattr(state[name], "nbytes", 1) for name in plain]
    own = deal(sizes, world_size)[rank]
    others = {*plain} - {plain[number] for number in own}
    return {name: value for name, value in state.items() if name not in others}


def staged(state: State) -> State:
    """A copy in this process's memory that further training does not change."""
    copy: State = FileSystemWriter("").stage(state)
    return copy


def write(state: State, temporary: Path, *, group: Any, alone: bool, copied: bool) -> None:
    """Writes each rank's part, on disk when this returns; fails on all ranks together.

    Collective over ``group`` (None: the default one) unless ``alone``. What is ``copied`` is read
    from the CPU's memory as it lies; the streams that overlap copies would open a context on the
    first GPU for every rank's thread.
    """
    ahead = 0 if copied else _COPY_AHEAD_BYTES
    writer = _Writer(str(temporary), sync_files=True, per_thread_copy_ahead=ahead)
    state_dict_saver.save(state, storage_writer=writer, process_group=group, no_dist=alone)


def written_by(rank: int, temporary: Path) -> list[Path]:
    """The files that ``rank`` has just written (the first one writes the metadata)."""
    own = sorted(temporary.glob(f"__{rank}_*"))
    return own if rank else [temporary / METADATA, *own]


# --- reading -----------------------------------------------------------------------------------


def read_metadata(path: Path) -> Metadata:
    """DCP's metadata; RuntimeError where it cannot be read."""
    try:
        return FileSystemReader(str(path)).read_metadata()
    except (Exception, CheckpointException) as error:  # many types, all mean the same here
        raise unreadable(path, error) from error


def read(path: Path, state: State, *, alone: bool) -> None:
    """Fills ``state`` in place; RuntimeError, on all ranks, where that fails.

    Collective unless ``alone``.
    """
    reader = FileSystemReader(str(path))
    try:
        state_dict_loader.load(state, storage_reader=reader, no_dist=alone)
    except (Exception, CheckpointException) as error:
        raise_interrupt(error)
        raise unreadable(path, error) from error


def check_fit(path: Path, state: State) -> None:
    """RuntimeError where an intact step is of another model or training than ``state``."""
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
            f"the checkpoint {path} does not fit: {what}. It is of another model or training: go "
            f"on with its options, or in another run directory"
        )


def _count(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def load_model_state(directory: Path, step: int, part: str = "model") -> dict[str, Tensor]:
    """The tensors of one part (``model``, ``ema``) of a checkpoint on the CPU, by name.

    In this process alone. Raises RuntimeError, one line, where the checkpoint is damaged or has
    no such part.
    """
    path = step_files.path_of(directory, step)
    try:
        step_files.check_contents(path, step_files.read_entries(path, step))
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


# --- errors ------------------------------------------------------------------------------------


def unreadable(path: Path, error: BaseException) -> RuntimeError:
    """The error of a step that cannot be used, with what to do."""
    return RuntimeError(
        f"the checkpoint {path} cannot be read ({cause(error)}): remove that directory to resume "
        f"from the one before"
    )


def cause(error: BaseException) -> str:
    """The error that DCP wrapped (in an exception that no ``except Exception`` sees), short."""
    error = _unwrapped(error)
    text = " ".join(str(error).split())
    text = text if len(text) <= 200 else text[:200] + "..."
    return text if isinstance(error, Damaged) else f"{type(error).__name__}: {text}"


def raise_interrupt(error: BaseException) -> None:
    """Raises the KeyboardInterrupt that DCP took for a failed write, if it was one."""
    if isinstance(_unwrapped(error), KeyboardInterrupt):
        raise KeyboardInterrupt from error


def _unwrapped(error: BaseException) -> BaseException:
    if isinstance(error, CheckpointException) and error.failures:
        first: BaseException = next(iter(error.failures.values()))[0]
        return first
    return error
