"""Saves and resumes the steps of a training; all ranks together."""

from __future__ import annotations

import logging
import shutil
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mclclip.checkpoint import CheckpointConfig, step_files
from mclclip.checkpoint.mirror import Mirror
from mclclip.checkpoint.step_files import (
    METADATA,
    Identity,
    State,
    path_of,
    steps,
    temporary_of,
)
from mclclip.ranks import collectives
from mclclip.run.recorder import NotFinite, not_finite
from mclclip.util import files

log = logging.getLogger("mclclip")


class Stateful(Protocol):
    """An object whose state can be saved and loaded, such as an engine. All ranks call both
    methods together."""

    def state_dict(self) -> dict[str, Tensor]:
        """Returns tensors by name. Each is the same full tensor on all ranks, or a DTensor."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads tensors with the names that `state_dict` returns."""


class Checkpoints:
    """Saves and resumes the steps of one training in ``directory``, such as RUN/stage_1/train/
    checkpoints. All ranks call each method together.

    directory, options  where steps are saved, and when and how (`CheckpointConfig`)
    identity            identifies the training, such as ``{"stage": 1, "digest": "3f..."}``. It is
                        saved with each step, and a step of another identity is not resumed
    best                a step to keep here however old it is; the mirror may remove it
    saved               the last step that this process knows to be on disk

    If a step cannot be written, earlier steps stay and the unfinished files are removed. A thread
    copies steps to the mirror.
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
        self.best: int | None = None
        self.saved: int | None = None
        self._writing: tuple[int, Future[str | None]] | None = None  # a step that a thread writes
        self._thread: ThreadPoolExecutor | None = None
        self._side: Any = None  # the process group of that thread

    def steps(self) -> list[int]:
        """Returns the saved steps that rank 0 sees on disk, ascending."""
        return collectives.on_main(lambda: step_files.steps(self.directory))

    # --- saving --------------------------------------------------------------------------------

    def save(self, step: int, source: Stateful) -> None:
        """Saves the state of ``source`` as ``step``; does nothing if that step is saved already.

        Waits first for the previous save, and raises its error. With ``asynchronous``, returns as
        soon as the state is copied to main memory; a thread writes it.

        Raises RuntimeError on all ranks if the step cannot be written, and NotFinite if the state
        holds NaN or infinity; then nothing is written and no step is removed.
        """
        self._finish_writing()
        if step == self.saved:
            return
        state: State = dict(source.state_dict())
        failure, part, writer = self._prepare(step, state)
        if failure is not None:
            self._take_result(step, failure)
        elif self.options.asynchronous:
            # DCP's async_save delays a step as long as this thread does. But it ends with the last
            # byte: publishing, pruning and mirroring would need one more thread.
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
                self._side = collectives.side_group()
            self._writing = step, self._thread.submit(self._write, step, part, writer)
        else:
            self._take_result(step, self._write(step, part, writer))

    def wait(self, mirror_s: float | None = None) -> None:
        """Waits until the last save is on disk, then for the mirror, at most ``mirror_s`` seconds
        (None: without a limit). Raises RuntimeError if the save failed.
        """
        self._finish_writing()
        if self.mirror is None:
            return
        collectives.on_main(partial(self.mirror.wait, mirror_s))
        if collectives.rank() == 0 and self.saved is not None:
            self._prune(self.saved)  # also steps that stayed because the mirror was copying them

    def _finish_writing(self) -> None:
        """Waits for the step that the thread writes, if there is one, and raises its error."""
        if self._writing is None:
            return
        (step, result), self._writing = self._writing, None
        self._take_result(step, result.result())

    def _take_result(self, step: int, failure: str | None) -> None:
        """Records that ``step`` is on disk, or raises its ``failure``."""
        if failure is not None:
            raise RuntimeError(
                f"the checkpoint {path_of(self.directory, step)} cannot be written ({failure}): "
                "make room, then run the same command again to resume"
            )
        self.saved = step

    def _prepare(
        self, step: int, state: State
    ) -> tuple[str | None, State, step_files.Writer | None]:
        """Makes the temporary directory and chooses what this rank writes.

        Returns the first failure of any rank (or None), this rank's part of the state, and the
        writer for it. With ``asynchronous`` the part is a copy in main memory. Raises NotFinite on
        all ranks if any part holds NaN or infinity.
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
            part = step_files.select_local_part(state, rank, collectives.world_size())
            spoiled = not_finite(part)
            if self.options.asynchronous:
                part = writer.stage(part)  # a copy in main memory
        except Exception as error:
            failure = step_files.describe_error(error)
        # Each rank leaves out the tensors that others write, so all must have the same names.
        names = zlib.crc32("\n".join(sorted(state)).encode())
        reports = collectives.gather_objects((failure, names, spoiled[:1]))
        assert len({names for _, names, _ in reports}) == 1, "the ranks' states differ in names"
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
        """Writes and publishes a step; returns the first failure on all ranks, or None.

        Runs in a thread if saving is asynchronous.
        """
        rank, temporary = collectives.rank(), temporary_of(self.directory, step)
        failure, entries = None, {}
        try:
            alone = collectives.world_size() == 1
            step_files.write(part, storage_writer=writer, process_group=self._side, no_dist=alone)
            # The files are read for their SHA-256 now, while they are still in the page cache.
            paths = sorted(temporary.glob(f"__{rank}_*"))
            paths = paths if rank else [temporary / METADATA, *paths]
            entries = files.records_of(temporary, *(path.name for path in paths))
        except (Exception, CheckpointException) as error:
            failure = step_files.describe_error(error)
        reports = collectives.gather_objects((failure, entries), self._side)
        failure = _first_failure([failure for failure, _ in reports])
        if rank == 0 and failure is None:
            every = {name: entry for _, part in reports for name, entry in part.items()}
            try:
                step_files.publish(self.directory, step, every, len(reports), self.identity)
            except Exception as error:
                failure = step_files.describe_error(error)
            else:
                self._prune(step)
                if self.mirror is not None:
                    self.mirror.start_round()
        if rank == 0 and failure is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # the disk may be full
        return collectives.gather_objects(failure, self._side)[0]

    def _prune(self, newest: int) -> None:
        """Removes old steps, except the best one and the one that the mirror is copying."""
        copying = None if self.mirror is None else self.mirror.copying
        saved, options = steps(self.directory), self.options
        old = step_files.choose_old(saved, newest, options.keep, options.keep_every)
        step_files.remove(self.directory, [s for s in old if s not in (copying, self.best)])

    # --- resuming ------------------------------------------------------------------------------

    def resume(self, target: Stateful) -> int:
        """Loads the newest intact step into ``target`` and returns its number; 0: none was saved.

        Damaged steps are renamed, with one warning for all of them. If no step here is intact, the
        newest intact one of the mirror is copied here. Raises RuntimeError if all saved steps are
        damaged, if there is none here and the mirror cannot be read, and if the newest intact one
        is of another training or cannot be read.
        """
        collectives.on_main(partial(files.remove_leftovers, self.directory))
        damage: list[str] = []  # a text for each step that was renamed
        from_mirror: set[int] = set()
        step, main = self._find_intact(damage, from_mirror), collectives.rank() == 0
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
        step_files.read(path, state, alone=collectives.world_size() == 1)
        target.load_state_dict(state)
        if main and (damage or from_mirror):
            what = f"damaged: {'; '.join(damage)}" if damage else "no checkpoint here"
            origin = f" of the mirror {self.mirror.url}" if self.mirror and from_mirror else ""
            log.warning("%s: %s, using step %d%s", self.directory, what, step, origin)
        self.saved = step or None
        if self.mirror is not None and step and main:
            self.mirror.start_round()  # copies the steps that an earlier process did not
        return step

    def _find_intact(self, damage: list[str], from_mirror: set[int]) -> int | None:
        """Returns the newest step whose files have their sizes, here or else in the mirror.

        Returns None if there is none. Renames damaged steps and adds a text on each to ``damage``;
        adds steps that it has copied from the mirror to ``from_mirror``.
        """
        while True:
            for step in reversed(self.steps()):
                # Rank 0 alone looks: all ranks would ask the storage for each of many files.
                defect = collectives.on_main(partial(step_files.find_defect, self.directory, step))
                if defect is None:
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


def _first_failure(failures: list[str | None]) -> str | None:
    """Returns the failure of the first rank that failed, or None; ``failures`` has one per rank.

    For example 'rank 2: disk full'; without the rank if all ranks failed in the same way.
    """
    failed = (f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure)
    return failures[0] if len(set(failures)) == 1 else next(failed)
