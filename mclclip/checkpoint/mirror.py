"""A copy of every step in another place, for a job that restarts with an empty disk."""

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
from mclclip.util.options import protocol_of
from mclclip.util.stores import open_folder, reason_of

log = logging.getLogger("mclclip")

_PROTOCOLS = (None, "s3", "gs", "az")
_RETRIES, _TIMEOUT_S = 6, 60.0  # of one request
BLOCK_BYTES, _AT_ONCE = 1 << 24, 4  # of one request, and requests of one file that is copied


class Mirror:
    """Copies the steps of ``directory`` to ``url``, a folder or a url of an object store, in a
    background thread.

    A round copies every step that the mirror lacks, the newest first, then removes old ones there;
    so a step that failed to be copied is tried again in the next round. The state.json of a copy is
    written last and removed first: a step without it does not count. A failed round only causes a
    warning. Raises ValueError for a url of an unknown protocol.
    """

    def __init__(self, url: str, directory: Path, keep: int, keep_every: int | None) -> None:
        if protocol_of(url) not in _PROTOCOLS:
            raise ValueError(
                f"mirror={files.printable(url)!r} cannot be used: give a folder by its path, or a "
                "url of s3://, gs:// or az://"
            )
        if protocol_of(url) is not None and ("?" in url or "@" in url):
            raise ValueError(
                f"mirror={files.printable(url.rpartition('@')[2])!r} holds a query or a password: "
                "leave it out, and put it into the environment, since warnings show this url"
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

    def wait(self, timeout_s: float | None) -> None:
        """Waits for the started rounds, up to ``timeout_s`` (None: without a limit)."""
        if self._round is not None:
            wait_for([self._round], timeout_s)

    def fetch(self, tried: set[int]) -> int | None:
        """Copies the newest whole step that is not in ``tried`` to the local directory.

        Returns the step, which the caller checks for damage; None where the mirror has none. Raises
        ValueError where the disk has no room for it, and RuntimeError, one line, where the mirror
        cannot be read: it may hold steps, and a training that began anew would replace them.
        """
        with self._reading():
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
        with self._reading():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for name in names:
                _fetch(store, name, sizes[name], temporary / name.rpartition("/")[2])
            files.fsync_directory(temporary)
            temporary.rename(final)
        return steps[-1]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns an error in the block into one line."""
        try:
            yield
        except Exception as error:  # every store has errors of its own
            raise RuntimeError(
                f"the mirror {self.url} cannot be read ({type(error).__name__}: "
                f"{reason_of(error)}), and {self.directory} holds no checkpoint: look after the "
                "mirror and run the same command again, or train without train.checkpoint.mirror"
            ) from None

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
            _remove_leftovers(store)
            sizes = _sizes(store)
            for step in reversed(saved):
                self.copying = step
                path = path_of(self.directory, step)
                try:
                    _copy(store, path, step, sizes)
                except (FileNotFoundError, Damaged) as error:
                    if path.exists():  # else the step itself was removed
                        self._warn(f"get a copy of step {step}", error)
                finally:
                    self.copying = None
            if saved:
                self._prune(store, saved[-1], sizes)
        except Exception as error:  # every store has errors of its own
            self._warn("be brought up to date", error)

    def _prune(self, store: Any, newest: int, sizes: dict[str, int]) -> None:
        """Removes old steps, and copies that were never finished."""
        whole = _whole_steps(sizes)
        doomed = step_files.superfluous(whole, newest, self.keep, self.keep_every)
        for folder in {name.partition("/")[0] for name in sizes}:
            for step in parse_steps([folder]):
                if step in doomed or (step not in whole and step <= newest):
                    _remove(store, folder, sizes)


def _copy(store: Any, path: Path, step: int, sizes: dict[str, int]) -> None:
    """Copies a step that the mirror lacks; keeps ``sizes``, the mirror's objects, up to date."""
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
    """Writes an object to ``path``, some blocks of it at once. (obstore's ``get_ranges`` would join
    neighbours to one request.)"""

    def block(start: int) -> Any:
        return obstore.get_range(store, name, start=start, end=min(start + BLOCK_BYTES, size))

    step = BLOCK_BYTES * _AT_ONCE
    with ThreadPoolExecutor(_AT_ONCE) as threads, open(path, "wb") as file:
        for start in range(0, size, step):
            starts = range(start, min(start + step, size), BLOCK_BYTES)
            file.writelines(threads.map(block, starts))


def _remove_leftovers(store: Any) -> None:
    """Removes what a killed process left of files that it copied to a folder: obstore writes them
    as NAME#1, and lists no such names."""
    if isinstance(store, obstore.store.LocalStore):
        for path in Path(str(store.prefix)).glob("step_*/*#[0-9]*"):
            path.unlink(missing_ok=True)
            with suppress(OSError):  # other files are there
                path.parent.rmdir()


def _remove(store: Any, folder: str, sizes: dict[str, int]) -> None:
    for name in _names_of(folder, sizes):
        obstore.delete(store, name)
        del sizes[name]


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
