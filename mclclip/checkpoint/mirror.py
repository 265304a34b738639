"""A copy of every step on another file system, for a job that restarts with an empty disk."""

from __future__ import annotations

import logging
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mclclip import files
from mclclip.checkpoint import step_files
from mclclip.checkpoint.step_files import STATE, parse_steps, path_of, temporary_of

log = logging.getLogger("mclclip")

POLL_S = 5.0  # no collective waits longer than this for work of the first rank alone


class Mirror:
    """Copies the steps of ``directory`` to ``url`` (fsspec), in a background thread.

    A round copies every step that the mirror lacks, the newest first, then removes old ones there;
    so a step that failed to be copied is tried again in the next round. The state.json of a copy is
    written last: a step without it does not count. Failures are only warned of. Raises ValueError
    for a url whose protocol fsspec does not have.
    """

    def __init__(self, url: str, directory: Path, keep: int, keep_every: int | None) -> None:
        protocol = fsspec.core.split_protocol(url)[0] or "file"
        try:
            fsspec.get_filesystem_class(protocol)
        except (ValueError, ImportError) as error:
            raise ValueError(f"mirror={url!r} cannot be used: {error}") from error
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

    # --- to the mirror -------------------------------------------------------------------------

    def _warn(self, what: str, error: Exception) -> None:
        self.failures += 1
        log.warning(
            "the mirror %s cannot %s (%s: %s), failure %d: training does not depend on it",
            self.url, what, type(error).__name__, files.message_of(error), self.failures,
        )  # fmt: skip

    def _copy_new(self) -> None:
        try:
            fs, root = fsspec.core.url_to_fs(self.url)
            fs.makedirs(root, exist_ok=True)
            saved = step_files.steps(self.directory)
            for step in reversed(saved):
                self.copying = step
                path = path_of(self.directory, step)
                try:
                    self._copy(fs, root, path, step)
                except FileNotFoundError:
                    if path.exists():  # else the step itself was removed
                        raise
                finally:
                    self.copying = None
            if saved:
                self._prune(fs, root, saved[-1])
        except Exception as error:  # every file system has errors of its own
            self._warn("be brought up to date", error)

    def _copy(self, fs: Any, root: str, path: Path, step: int) -> None:
        final = f"{root}/{path.name}"
        state = (path / STATE).read_bytes()
        if fs.exists(f"{final}/{STATE}") and fs.cat_file(f"{final}/{STATE}") == state:
            return
        self._remove(fs, final)
        # Object stores have no rename: there the copy grows under its final name.
        by_rename = isinstance(fs, LocalFileSystem)
        target = f"{root}/.{path.name}.tmp" if by_rename else final
        self._remove(fs, target)
        fs.makedirs(target, exist_ok=True)
        for name in step_files.read_entries(path, step):
            fs.put_file(str(path / name), f"{target}/{name}")
        fs.pipe_file(f"{target}/{STATE}", state)
        if by_rename:
            fs.mv(target, final, recursive=True)

    def _prune(self, fs: Any, root: str, newest: int) -> None:
        """Removes old steps, and copies that were never finished."""
        whole = self._steps(fs, root)
        doomed = step_files.superfluous(whole, newest, self.keep, self.keep_every)
        for name in self._names(fs, root):
            half = [step for step in parse_steps([name]) if step not in whole and step <= newest]
            temporary = re.fullmatch(r"\.step_\d+\.tmp", name)
            if half or temporary or set(parse_steps([name])) & set(doomed):
                self._remove(fs, f"{root}/{name}")

    def _remove(self, fs: Any, path: str) -> None:
        if fs.exists(f"{path}/{STATE}"):
            fs.rm_file(f"{path}/{STATE}")
        if fs.exists(path):
            fs.rm(path, recursive=True)

    # --- from the mirror -----------------------------------------------------------------------

    def fetch(self, tried: set[int]) -> int | None:
        """Copies the newest whole step that is not in ``tried`` to the local directory.

        Returns the step; None where there is none, or where the mirror fails (with a warning). The
        caller checks whether it is intact.
        """
        try:
            fs, root = fsspec.core.url_to_fs(self.url)
            steps = [step for step in self._steps(fs, root) if step not in tried]
            if not steps:
                return None
            final = path_of(self.directory, steps[-1])
            temporary = temporary_of(self.directory, steps[-1])
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
            for source in fs.ls(f"{root}/{final.name}", detail=False):
                fs.get_file(source, str(temporary / source.rsplit("/", 1)[-1]))
            files.fsync_directory(temporary)
            temporary.rename(final)
        except Exception as error:
            self._warn("be read", error)
            return None
        return steps[-1]

    # --- what is there -------------------------------------------------------------------------

    def _names(self, fs: Any, root: str) -> list[str]:
        fs.invalidate_cache()
        if not fs.exists(root):
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in fs.ls(root, detail=False)]

    def _steps(self, fs: Any, root: str) -> list[int]:
        """Completely copied steps of the mirror, ascending."""
        steps = parse_steps(self._names(fs, root))
        return [step for step in steps if fs.exists(f"{root}/{path_of(Path(), step).name}/{STATE}")]
