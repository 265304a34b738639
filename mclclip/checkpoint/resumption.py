"""Finds the step to resume from: the newest intact one. It must fit the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from mclclip import files
from mclclip.checkpoint import step_files, storage
from mclclip.checkpoint.mirror import POLL_S, Mirror
from mclclip.checkpoint.step_files import Damaged, Entries, Identity, path_of
from mclclip.ranks import collectives

T = TypeVar("T")
log = logging.getLogger("mclclip")


class Stateful(Protocol):
    """State that can be saved and loaded by name, such as an engine."""

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors by name: the same full tensor on every rank, or a DTensor. Collective."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads tensors named as by ``state_dict``. Collective."""


class Resumption:
    """One search through ``directory`` and its mirror; every method is collective."""

    def __init__(
        self, directory: Path, mirror: Mirror | None, identity: Identity | None = None
    ) -> None:
        self.directory, self.mirror, self.identity = directory, mirror, identity
        self.damage: list[str] = []  # which step was set aside, and why
        self.fetched: set[int] = set()

    def run(self, target: Stateful) -> int:
        """Loads the step that is found into ``target``; see ``Checkpoints.resume``."""
        collectives.on_main(self._clear)
        step = self._newest_intact()
        if step is not None:
            state, path = dict(target.state_dict()), path_of(self.directory, step)
            if (identity := self.identity) is not None:
                collectives.on_main(lambda: step_files.check_identity(path, identity))
            collectives.together(lambda: storage.check_fit(path, state))
            storage.read(path, state, alone=collectives.world_size() == 1)
            target.load_state_dict(state)
        self._report(step)
        return step or 0

    def _clear(self) -> None:
        if self.directory.exists():
            files.remove_leftovers(self.directory)

    def _newest_intact(self) -> int | None:
        """The newest step without visible damage, here or else in the mirror."""
        while True:
            saved = collectives.on_main(lambda: step_files.steps(self.directory))
            for step in reversed(saved):
                if (what := self._defect(step)) is None:
                    return step
                self._set_aside(step, what)
            if self.mirror is None:
                return None
            fetched = _patiently(partial(self.mirror.fetch, self.fetched))
            if fetched is None:
                return None
            self.fetched.add(fetched)

    def _defect(self, step: int) -> str | None:
        """The damage of a step in words, the same on all ranks; None where it is intact."""
        path = path_of(self.directory, step)
        entries, what = collectives.on_main(lambda: _inspect(path, step))
        if what is None:
            # Files are dealt to the ranks in the order of their sizes, the biggest first.
            names = sorted(entries, key=lambda name: (-entries[name].size_bytes, name))
            own = names[collectives.rank() :: collectives.world_size()]
            try:
                step_files.check_contents(path, {name: entries[name] for name in own})
            except Damaged as error:
                what = str(error)
        return next(filter(None, collectives.gather_objects(what)), None)

    def _set_aside(self, step: int, what: str) -> None:
        path = path_of(self.directory, step)
        aside = collectives.on_main(lambda: files.move_aside(path, f".damaged_{path.name}"))
        self.damage.append(f"step {step} ({what}; now {aside.name})")

    def _report(self, step: int | None) -> None:
        """One line on what was damaged and what is used; RuntimeError where nothing is left."""
        damage = "; ".join(self.damage)
        if step is None:
            aside = collectives.on_main(lambda: sorted(self.directory.glob(".damaged_step_*")))
            if aside:
                raise RuntimeError(
                    f"no intact checkpoint is left in {self.directory}, only damaged ones: "
                    f"{damage or ', '.join(path.name for path in aside)}. Bring one back, or "
                    f"remove them to start from the beginning"
                )
        elif collectives.rank() == 0 and (damage or self.fetched):
            found = f"damaged: {damage}" if damage else "no checkpoint here"
            origin = f" of the mirror {self.mirror.url}" if self.mirror and self.fetched else ""
            log.warning("%s: %s, using step %d%s", self.directory, found, step, origin)


def _inspect(path: Path, step: int) -> tuple[Entries, str | None]:
    """A step's listed files, and its damage as far as that shows without reading them."""
    try:
        return step_files.read_entries(path, step), None
    except Damaged as error:
        return {}, str(error)


def _patiently(work: Callable[[], T]) -> T:
    """Runs slow ``work`` on the first rank; all ranks get its result or its error.

    The others wait in short collectives meanwhile, so that none times out.
    """
    thread = ThreadPoolExecutor(1)
    future = thread.submit(work) if collectives.rank() == 0 else None
    thread.shutdown(wait=False)
    while collectives.broadcast_object(
        future is not None and bool(wait_for([future], POLL_S).not_done)
    ):
        continue
    return collectives.on_main(lambda: future.result())  # type: ignore[union-attr]
