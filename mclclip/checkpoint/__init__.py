"""Resumable state on torch.distributed.checkpoint (DCP).

One directory per saved step, independent of engine and number of ranks::

    checkpoints/
      step_00002000/           .metadata  __0_0.distcp  __1_0.distcp ...  state.json
      .step_00004000.tmp/      being written, or left by a killed process: removed at the next start
      .damaged_step_00003000/  found damaged at a start: kept, never used again

The state is a flat mapping from names to tensors. All ranks write a step under a temporary name and
the first renames it, so a directory with the final name is complete. ``state.json`` lists every
file with its size, which is compared before a step is loaded, and its SHA-256, which ``mclclip
doctor RUN`` compares. DCP reads its metadata with pickle, so only checkpoints of a trusted run may
be loaded.
"""

from __future__ import annotations

import logging
import shutil
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import PositiveInt
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mclclip.checkpoint import step_files
from mclclip.checkpoint.mirror import Mirror
from mclclip.checkpoint.step_files import (
    METADATA,
    Damaged,
    Identity,
    State,
    keep_finished,
    load_model_state,
    path_of,
    steps,
    temporary_of,
    trained_state,
)
from mclclip.ranks import collectives
from mclclip.run.recorder import NotFinite, not_finite
from mclclip.util import files
from mclclip.util.options import STRICT

__all__ = [
    "CheckpointConfig",
    "Checkpoints",
    "Stateful",
    "keep_finished",
    "load_model_state",
    "path_of",
    "steps",
    "trained_state",
]

log = logging.getLogger("mclclip")


@checked_dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """Resumable state: when it is saved, how long it is kept, and where it is copied to."""

    every: PositiveInt = 1000
    """Steps between checkpoints."""
    keep: PositiveInt = 2
    """Checkpoints that a training keeps while it runs (the newest); of a finished one the last
    stays, and the one that is exported."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps divisible by this are kept for good (null: none)."""
    asynchronous: bool = False
    """Continue training while a copy of the state is written to disk."""
    mirror: str | None = None
    """A folder that gets a copy of every checkpoint: a path, such as on a mounted disk, or a url of
    an object store, such as ``s3://bucket/run`` (``gs://`` and ``az://`` too)."""
    on_error: Literal["stop", "continue"] = "stop"
    """When a checkpoint cannot be written, such as on a full disk: end the run, or continue
    training and try again at the next checkpoint."""


class Stateful(Protocol):
    """State that can be saved and loaded by name, such as an engine."""

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name: the same full tensor on every rank, or a DTensor. Collective."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads tensors named as by ``state_dict``. Collective."""


class Checkpoints:
    """The saved steps of one training below ``directory``; every method is collective.

    The newest ``keep`` steps are kept, every step divisible by ``keep_every`` for good, and here,
    though not in the mirror, the one that ``best`` names. With ``asynchronous``, ``save`` returns
    when the state is copied, and a thread writes it. The mirror is copied to in the background.
    Where a checkpoint cannot be written, ``on_error`` decides: ``stop`` raises RuntimeError on all
    ranks, ``continue`` warns. In both cases earlier checkpoints stay, and partly written files are
    removed.

    ``identity`` names the training whose steps these are; it is saved with each, and a step of
    another one is not resumed. Raises ValueError for a mirror of an unknown protocol.
    """

    def __init__(
        self,
        directory: Path,
        options: CheckpointConfig,
        *,
        identity: Identity = MappingProxyType({}),
    ) -> None:
        self.directory, self.options, self.identity = Path(directory), options, identity
        self.mirror: Mirror | None = None
        if options.mirror is not None:
            self.mirror = Mirror(options.mirror, self.directory, options.keep, options.keep_every)
        self.best: int | None = None  # a step that is kept, however old
        self.saved: int | None = None  # the last step that this process knows to be on disk
        self._failed: RuntimeError | None = None  # why the last save is not on disk
        self._writing: tuple[int, Future[str | None]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._side: Any = None  # the process group of that thread

    def steps(self) -> list[int]:
        """Steps saved so far, ascending; the first rank's view, on all ranks."""
        return collectives.on_main(lambda: step_files.steps(self.directory))

    # --- saving --------------------------------------------------------------------------------

    def save(self, step: int, source: Stateful) -> None:
        """Saves ``source`` as ``step``; first waits for the previous save, and raises its error.

        Raises RuntimeError, one line and on all ranks, where a step cannot be written (a full
        disk) and ``on_error`` is ``stop``. Raises NotFinite on all ranks, whatever ``on_error``
        is, where the state holds NaN or infinity: nothing is written and no step is removed.
        """
        self._settle()
        if step == self.saved:
            return
        state: State = dict(source.state_dict())
        failure, part, writer = self._prepare(step, state)
        if failure is not None:
            self._take_result(step, failure)
        elif self.options.asynchronous:
            # DCP's async_save ends with the last byte, and holds a step up as long as this does:
            # publishing, pruning and mirroring would need a thread beside its own.
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
                self._side = collectives.side_group()
            self._writing = step, self._thread.submit(self._write, step, part, writer)
        else:
            self._take_result(step, self._write(step, part, writer))

    def wait(self, mirror_s: float | None = None) -> None:
        """Waits until the last save is on disk, then up to ``mirror_s`` seconds for the mirror
        (None: without a limit).

        Raises RuntimeError where the save failed, with ``on_error`` ``continue`` too: the caller is
        about to rely on it.
        """
        self._settle()
        if self._failed is not None:
            raise self._failed
        if self.mirror is None:
            return
        collectives.on_main(partial(self.mirror.wait, mirror_s))
        if collectives.rank() == 0 and self.saved is not None:
            self._prune(self.saved)  # steps that were kept while they were copied

    def _settle(self) -> None:
        """Waits for the save that is under way, if there is one."""
        if self._writing is None:
            return
        (step, result), self._writing = self._writing, None
        self._take_result(step, result.result())

    def _take_result(self, step: int, failure: str | None) -> None:
        path, self._failed = path_of(self.directory, step), None
        if failure is None:
            self.saved = step
            return
        self._failed = RuntimeError(
            f"the checkpoint {path} cannot be written ({failure}): make room, then run the same "
            f"command again to resume"
        )
        if self.options.on_error == "stop":
            raise self._failed
        if collectives.rank() == 0:
            log.warning(
                "the checkpoint %s cannot be written (%s): training goes on, the next one is tried",
                path, failure,
            )  # fmt: skip

    def _prepare(
        self, step: int, state: State
    ) -> tuple[str | None, State, step_files.Writer | None]:
        """Returns the first failure of any rank (or None), this rank's part of the state, and what
        writes it, which is there where no rank has failed.

        The part is a copy if training goes on while it is written. Raises NotFinite.
        """
        rank, failure, part, writer = collectives.rank(), None, {}, None
        temporary = temporary_of(self.directory, step)
        spoiled: list[str] = []
        try:
            if rank == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                files.remove_leftovers(self.directory)
                temporary.mkdir()
            writer = step_files.Writer(temporary, copied=self.options.asynchronous)
            part = step_files.local_part(state, rank, collectives.world_size())
            spoiled = not_finite(part)
            if self.options.asynchronous:
                part = writer.stage(part)  # a copy in main memory
        except Exception as error:
            failure = step_files.cause(error)
        # Each rank leaves out the tensors that others write, so all must have the same names.
        names = zlib.crc32("\n".join(sorted(state)).encode())
        reports = collectives.gather_objects((failure, names, spoiled[:1]))
        if len({names for _, names, _ in reports}) > 1:
            raise RuntimeError(f"step {step} cannot be saved: the ranks' states differ in names")
        failure = _first_failure([failure for failure, _, _ in reports])
        diverged = [name for _, _, spoiled in reports for name in spoiled]
        if (diverged or failure is not None) and rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if diverged:
            raise NotFinite(
                f"what was trained ({diverged[0]}) is not finite after step {step}", step
            )
        return failure, part, writer

    def _write(self, step: int, part: State, writer: step_files.Writer | None) -> str | None:
        """Writes and publishes a step; returns the first failure (or None), the same on all ranks.

        Runs in the background where saving is asynchronous.
        """
        rank, temporary = collectives.rank(), temporary_of(self.directory, step)
        failure, entries = None, {}
        try:
            alone = collectives.world_size() == 1
            step_files.write(part, storage_writer=writer, process_group=self._side, no_dist=alone)
            # They are read at once, while they are still in the page cache.
            paths = sorted(temporary.glob(f"__{rank}_*"))
            paths = paths if rank else [temporary / METADATA, *paths]
            entries = files.records_of(temporary, *(path.name for path in paths))
        except (Exception, CheckpointException) as error:
            failure = step_files.cause(error)
        reports = collectives.gather_objects((failure, entries), self._side)
        failure = _first_failure([failure for failure, _ in reports])
        if rank == 0 and failure is None:
            every = {name: entry for _, part in reports for name, entry in part.items()}
            try:
                step_files.publish(self.directory, step, every, len(reports), self.identity)
            except Exception as error:
                failure = step_files.cause(error)
            else:
                self._prune(step)
                if self.mirror is not None:
                    self.mirror.start_round()
        if rank == 0 and failure is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # makes room again
        return collectives.gather_objects(failure, self._side)[0]

    def _prune(self, newest: int) -> None:
        """Removes the ``superfluous`` steps, except the best one and one that is being copied."""
        copying = None if self.mirror is None else self.mirror.copying
        spare = [step for step in (copying, self.best) if step is not None]
        saved, options = steps(self.directory), self.options
        old = step_files.superfluous(saved, newest, options.keep, options.keep_every)
        step_files.remove(self.directory, [step for step in old if step not in spare])

    # --- resuming ------------------------------------------------------------------------------

    def resume(self, target: Stateful) -> int:
        """Loads the newest intact step into ``target`` and returns it (0: nothing saved).

        Damaged steps are renamed, with one warning for all of them. Where no intact one is left,
        the newest intact one of the mirror is fetched. Raises RuntimeError where steps were saved
        and none is intact, where none is here and the mirror cannot be read, and where the newest
        intact one does not fit ``target`` or is of another training.
        """
        collectives.on_main(partial(files.remove_leftovers, self.directory))
        damage: list[str] = []  # which steps were set aside, and why
        from_mirror: set[int] = set()
        step, main = self._newest_intact(damage, from_mirror), collectives.rank() == 0
        if step is None:
            aside = collectives.on_main(lambda: sorted(self.directory.glob(".damaged_step_*")))
            if aside:
                raise RuntimeError(
                    f"no intact checkpoint is left in {self.directory}, only damaged ones: "
                    f"{'; '.join(damage) or ', '.join(path.name for path in aside)}. Bring one "
                    "back, or remove them to start from the beginning"
                )
            return 0
        state, path = dict(target.state_dict()), path_of(self.directory, step)
        collectives.on_main(lambda: step_files.check_identity(path, self.identity))
        collectives.raise_on_every_rank(lambda: step_files.check_fit(path, state))
        step_files.read(path, state, alone=collectives.world_size() == 1)
        target.load_state_dict(state)
        if main and (damage or from_mirror):
            what = f"damaged: {'; '.join(damage)}" if damage else "no checkpoint here"
            origin = f" of the mirror {self.mirror.url}" if self.mirror and from_mirror else ""
            log.warning("%s: %s, using step %d%s", self.directory, what, step, origin)
        self.saved = step or None
        if self.mirror is not None and step and main:
            self.mirror.start_round()  # copies steps that an earlier process did not copy
        return step

    def _newest_intact(self, damage: list[str], from_mirror: set[int]) -> int | None:
        """The newest step without visible damage, here or else in the mirror; None: there is none.

        Adds steps that were set aside to ``damage``, and copied ones to ``from_mirror``.
        """
        while True:
            for step in reversed(self.steps()):
                if (defect := self._defect(step)) is None:
                    return step
                path = path_of(self.directory, step)
                move = partial(files.move_aside, path, f".damaged_{path.name}")
                aside = collectives.on_main(move)
                damage.append(f"step {step} ({defect}; now {aside.name})")
            if self.mirror is None:
                return None
            copied = collectives.on_main(partial(self.mirror.fetch, from_mirror))
            if copied is None:
                return None
            from_mirror.add(copied)

    def _defect(self, step: int) -> str | None:
        """The damage of a step in words, the same on all ranks; None where it is intact."""

        def defect() -> str | None:
            try:
                step_files.read_entries(path_of(self.directory, step), step)
            except Damaged as error:
                return str(error)
            return None

        # One rank looks at all sizes: many would ask the storage for each of many files.
        return collectives.on_main(defect)


def _first_failure(failures: list[str | None]) -> str | None:
    """The failure of the first rank that failed, with its number unless all failed alike."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            return failure if len(set(failures)) == 1 else f"rank {rank}: {failure}"
    return None
