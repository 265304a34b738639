"""Copies every checkpoint to another place, for a job that restarts with an empty disk."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import obstore

from mclclip.checkpoint import step_files
from mclclip.checkpoint.step_files import STATE, Damaged, parse_steps, path_of, temporary_of
from mclclip.util import files
from mclclip.util.stores import open_folder, reason_of

log = logging.getLogger("mclclip")

_RETRIES, _TIMEOUT_S = 6, 60.0  # of one request to the store
BLOCK_BYTES, _AT_ONCE = 1 << 24, 4  # bytes of one request, and parallel requests for one file


class Mirror:
    """Copies the checkpoints in ``directory`` to ``url``, a folder or an object store, in a
    background thread.

    A round copies all steps that the mirror lacks, the newest first, and then removes old ones from
    the mirror. So a step that could not be copied is tried again in the next round; a failed round
    only causes a warning. The state.json of a step is copied last and removed first: a step without
    it counts as unfinished.

    keep, keep_every  which steps the mirror keeps, as in `CheckpointConfig`
    failures          number of failed rounds and steps
    copying           step that is being copied: it must not be removed
    """

    def __init__(self, url: str, directory: Path, keep: int, keep_every: int | None) -> None:
        self.url, self.directory = url.rstrip("/"), Path(directory)
        self.keep, self.keep_every = keep, keep_every
        self.failures = 0
        self.copying: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._round: Future[None] | None = None

    def start_round(self) -> None:
        """Queues a round; it starts when the rounds before it have ended."""
        self._round = self._thread.submit(self._copy_new)

    def wait(self, timeout_s: float | None) -> None:
        """Waits until all queued rounds have ended, at most ``timeout_s`` (None: no limit)."""
        if self._round is not None:
            wait_for([self._round], timeout_s)

    def fetch(self, tried: set[int]) -> int | None:
        """Copies the newest complete step from the mirror to the local directory and returns it.

        Steps in ``tried`` are skipped. Returns None if the mirror has no other. The caller checks
        the copy for damage. Raises ValueError if the disk has no room, and RuntimeError if the
        mirror cannot be read: it may hold steps, and a new training would replace them.
        """
        with self._one_line_errors():
            store = self._open()
            sizes = _sizes(store)
        steps = [step for step in _whole_steps(sizes) if step not in tried]
        if not steps:
            return None
        final = path_of(self.directory, steps[-1])
        temporary, names = temporary_of(self.directory, steps[-1]), _names_of(final.name, sizes)
        files.check_room(
            self.directory, sum(sizes[name] for name in names), (),
            f"step {steps[-1]} of the mirror {self.url}", "make room and run the command again",
        )  # fmt: skip
        with self._one_line_errors():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for name in names:
                _fetch(store, name, sizes[name], temporary / name.rpartition("/")[2])
            files.fsync_directory(temporary)
            temporary.rename(final)
        return steps[-1]

    @contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        """Converts any error in the block to a RuntimeError of one line."""
        try:
            yield
        except Exception as error:  # every store has errors of its own
            raise RuntimeError(
                f"the mirror {self.url} cannot be read ({type(error).__name__}: "
                f"{reason_of(error)}), and {self.directory} holds no checkpoint: look after the "
                "mirror and run the same command again, or train without checkpoint.mirror"
            ) from None

    def _open(self) -> Any:
        return open_folder(self.url, _RETRIES, _TIMEOUT_S)

    def _warn(self, attempt: str, error: Exception) -> None:
        """``attempt``: for example 'get a copy of step 400'."""
        self.failures += 1
        log.warning(
            "the mirror %s cannot %s (%s: %s), failure %d: training does not depend on it",
            self.url, attempt, type(error).__name__, reason_of(error), self.failures,
        )  # fmt: skip

    def _copy_new(self) -> None:
        try:
            store, saved = self._open(), step_files.steps(self.directory)
            _remove_leftovers(store)
            sizes = _sizes(store)
            for step in reversed(saved):
                self.copying = step
                path = path_of(self.directory, step)
                try:
                    _copy(store, path, step, sizes)
                except (FileNotFoundError, Damaged) as error:
                    if path.exists():  # else the training has removed the step meanwhile
                        self._warn(f"get a copy of step {step}", error)
                finally:
                    self.copying = None
            if saved:
                self._prune(store, saved[-1], sizes)
        except Exception as error:  # every store has errors of its own
            self._warn("be brought up to date", error)

    def _prune(self, store: Any, newest: int, sizes: dict[str, int]) -> None:
        """Removes old steps and unfinished copies from the mirror. ``sizes``: see `_sizes`."""
        whole = _whole_steps(sizes)
        doomed = step_files.choose_old(whole, newest, self.keep, self.keep_every)
        for folder in {name.partition("/")[0] for name in sizes}:
            for step in parse_steps([folder]):
                if step in doomed or (step not in whole and step <= newest):
                    _remove(store, folder, sizes)


def _copy(store: Any, path: Path, step: int, sizes: dict[str, int]) -> None:
    """Copies the step in ``path`` unless the mirror has it; updates ``sizes`` (see `_sizes`)."""
    state, entries = (path / STATE).read_bytes(), step_files.read_entries(path, step)
    copied_state = f"{path.name}/{STATE}"
    if copied_state in sizes and obstore.get(store, copied_state).bytes() == state:
        return
    _remove(store, path.name, sizes)
    for name, entry in entries.items():
        obstore.put(
            store, f"{path.name}/{name}", path / name,
            chunk_size=BLOCK_BYTES, max_concurrency=_AT_ONCE,
        )  # fmt: skip
        sizes[f"{path.name}/{name}"] = entry.size_bytes
    obstore.put(store, copied_state, state)
    sizes[copied_state] = len(state)


def _fetch(store: Any, name: str, size: int, path: Path) -> None:
    """Downloads the object ``name`` of ``size`` bytes to ``path``, several blocks in parallel.

    (obstore's ``get_ranges`` would join neighbouring blocks to one request.)
    """
    blocks = [(start, min(start + BLOCK_BYTES, size)) for start in range(0, size, BLOCK_BYTES)]
    with ThreadPoolExecutor(_AT_ONCE) as threads, open(path, "wb") as file:
        for first in range(0, len(blocks), _AT_ONCE):  # so few blocks are in memory at a time
            parts = threads.map(
                lambda block: obstore.get_range(store, name, start=block[0], end=block[1]),
                blocks[first : first + _AT_ONCE],
            )
            file.writelines(parts)


def _remove_leftovers(store: Any) -> None:
    """Removes half-copied files that a killed process left in a mirror that is a folder. obstore
    writes them as NAME#1 and does not list them."""
    if isinstance(store, obstore.store.LocalStore):
        for path in Path(str(store.prefix)).glob("step_*/*#[0-9]*"):
            path.unlink(missing_ok=True)
            with suppress(OSError):  # the folder holds other files
                path.parent.rmdir()


def _remove(store: Any, folder: str, sizes: dict[str, int]) -> None:
    for name in _names_of(folder, sizes):
        obstore.delete(store, name)
        del sizes[name]


def _names_of(folder: str, names: dict[str, int]) -> list[str]:
    """Returns the objects in ``folder``, such as step_00000400, with its state.json first."""
    of_folder = [name for name in names if name.startswith(f"{folder}/")]
    return sorted(of_folder, key=lambda name: not name.endswith(f"/{STATE}"))


def _sizes(store: Any) -> dict[str, int]:
    """Maps the name of each object of the mirror to its size: 'step_00000400/state.json': 812."""
    return {entry["path"]: entry["size"] for entry in obstore.list(store).collect()}


def _whole_steps(names: dict[str, int]) -> list[int]:
    """Returns the completely copied steps, ascending: those whose state.json is in the mirror."""
    return parse_steps(name.removesuffix(f"/{STATE}") for name in names if name.endswith(STATE))
