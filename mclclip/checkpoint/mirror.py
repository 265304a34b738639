"""A copy of every step in another place, for a job that restarts with an empty disk."""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import obstore

from mclclip import files
from mclclip.checkpoint import step_files
from mclclip.checkpoint.step_files import STATE, parse_steps, path_of, temporary_of
from mclclip.options import protocol_of
from mclclip.stores import open_folder, reason_of

log = logging.getLogger("mclclip")

POLL_S = 5.0  # no collective waits longer than this for work of the first rank alone
_PROTOCOLS = (None, "file", "s3", "gs", "az")
_RETRIES, _TIMEOUT_S = 6, 60.0  # of one request
_BLOCK_BYTES, _AT_ONCE = 1 << 24, 4  # of one request, and requests of one file that is copied


class Mirror:
    """Copies the steps of ``directory`` to ``url``, a folder or a url of an object store, in a
    background thread.

    A round copies every step that the mirror lacks, the newest first, then removes old ones there;
    so a step that failed to be copied is tried again in the next round. The state.json of a copy is
    written last and removed first: a step without it does not count. Failures are only warned of.
    Raises ValueError for another url.
    """

    def __init__(self, url: str, directory: Path, keep: int, keep_every: int | None) -> None:
        if protocol_of(url) not in _PROTOCOLS:
            raise ValueError(
                f"mirror={files.clean(url)!r} cannot be used: give a folder, or a url of s3://, "
                "gs:// or az://"
            )
        self.url, self.directory = url.rstrip("/"), Path(directory)
        self.keep, self.keep_every = keep, keep_every
        self.failures = 0  # rounds that failed
        self.copying: int | None = None  # the step being copied, which must not be removed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._round: Future[None] | None = None

    def start_round(self) -> None:
        """Starts a round in the background, after those that are under way."""
        self._round = self._thread.submit(self._copy_new)

    def busy(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s`` for the started rounds; True if they still go on."""
        return self._round is not None and bool(wait_for([self._round], timeout_s).not_done)

    def fetch(self, tried: set[int]) -> int | None:
        """Copies the newest whole step that is not in ``tried`` to the local directory.

        Returns the step; None where there is none, or where the mirror fails (with a warning). The
        caller checks whether it is intact.
        """
        try:
            store = self._open()
            sizes = _sizes(store)
            steps = [step for step in _whole_steps(sizes) if step not in tried]
            if not steps:
                return None
            final = path_of(self.directory, steps[-1])
            temporary = temporary_of(self.directory, steps[-1])
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for name in _names_of(final.name, sizes):
                with open(temporary / name.rpartition("/")[2], "wb") as file:
                    for at in range(0, sizes[name], _BLOCK_BYTES):
                        end = min(at + _BLOCK_BYTES, sizes[name])
                        file.write(obstore.get_range(store, name, start=at, end=end))
            files.fsync_directory(temporary)
            temporary.rename(final)
        except Exception as error:  # every store has errors of its own
            self._warn("be read", error)
            return None
        return steps[-1]

    def _open(self) -> Any:
        return open_folder(self.url, _RETRIES, _TIMEOUT_S)

    def _warn(self, what: str, error: Exception) -> None:
        self.failures += 1
        log.warning(
            "the mirror %s cannot %s (%s: %s), failure %d: training does not depend on it",
            self.url, what, type(error).__name__, reason_of(error), self.failures,
        )  # fmt: skip

    def _copy_new(self) -> None:
        try:
            store, saved = self._open(), step_files.steps(self.directory)
            for step in reversed(saved):
                self.copying = step
                path = path_of(self.directory, step)
                try:
                    _copy(store, path, step)
                except FileNotFoundError:
                    if path.exists():  # else the step itself was removed
                        raise
                finally:
                    self.copying = None
            if saved:
                self._prune(store, saved[-1])
        except Exception as error:  # every store has errors of its own
            self._warn("be brought up to date", error)

    def _prune(self, store: Any, newest: int) -> None:
        """Removes old steps, and copies that were never finished."""
        sizes = _sizes(store)
        whole = _whole_steps(sizes)
        doomed = step_files.superfluous(whole, newest, self.keep, self.keep_every)
        for folder in {name.partition("/")[0] for name in sizes}:
            for step in parse_steps([folder]):
                if step in doomed or (step not in whole and step <= newest):
                    _remove(store, folder, sizes)


def _copy(store: Any, path: Path, step: int) -> None:
    sizes, state = _sizes(store), (path / STATE).read_bytes()
    copied_state = f"{path.name}/{STATE}"
    if copied_state in sizes and obstore.get(store, copied_state).bytes() == state:
        return
    _remove(store, path.name, sizes)
    for name in step_files.read_entries(path, step):
        obstore.put(
            store, f"{path.name}/{name}", path / name,
            chunk_size=_BLOCK_BYTES, max_concurrency=_AT_ONCE,
        )  # fmt: skip
    obstore.put(store, copied_state, state)


def _remove(store: Any, folder: str, sizes: dict[str, int]) -> None:
    for name in _names_of(folder, sizes):
        obstore.delete(store, name)


def _names_of(folder: str, names: dict[str, int]) -> list[str]:
    """The objects of a step, its state first."""
    of_folder = [name for name in names if name.startswith(f"{folder}/")]
    return sorted(of_folder, key=lambda name: not name.endswith(f"/{STATE}"))


def _sizes(store: Any) -> dict[str, int]:
    """The objects of the mirror by name, with their sizes."""
    return {entry["path"]: entry["size"] for entry in obstore.list(store).collect()}


def _whole_steps(names: dict[str, int]) -> list[int]:
    """Completely copied steps, ascending."""
    return parse_steps(name.removesuffix(f"/{STATE}") for name in names if name.endswith(STATE))
