"""Lets all ranks agree between two training steps whether to save or to leave.

A signal may reach the ranks at different times, and only rank 0 knows the wall-time limit and the
request files in the run directory. So every rank passes what it knows to an all-reduce in a gloo
group of its own, which runs during the next step. Its result is used at the next boundary: all
ranks act after the same step, and no step waits.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mclclip.ranks import collectives, signals
from mclclip.ranks.process_group import Context
from mclclip.ranks.signals import Preempted

log = logging.getLogger("mclclip")

SAVE_NOW, STOP = "save_now", "stop"
# Reasons to leave, the strongest last: the all-reduce takes the maximum of the indices.
_REASONS = (
    None,
    "the file 'stop'",
    "the wall-time limit",
    "SIGINT",
    "SIGHUP",
    "SIGUSR1",
    "SIGTERM",
)


@dataclass(frozen=True)
class Decision:
    """The action of all ranks at a step boundary: save, leave, both, or neither.

    ``leave`` is the reason to leave, such as 'SIGTERM'; None: the training goes on.
    """

    save: bool = False
    leave: str | None = None

    def make_error(self) -> Preempted:
        """Returns the error to raise. No scheduler starts a run again that the user has stopped."""
        stopped_by_user = self.leave in (_REASONS[1], signals.INTERRUPT)
        return Preempted(self.leave or "", requeue=not stopped_by_user)


class StepBoundary:
    """Makes the ranks' common `Decision`; each rank calls `decide` once between any two steps.

    ``deadline``: wall-time limit as a time of ``time.monotonic()`` (None: no limit). Every
    ``poll_s`` seconds rank 0 looks for the files ``save_now`` and ``stop`` in ``run_dir`` and
    removes them.
    """

    def __init__(
        self, context: Context, run_dir: Path, *, poll_s: float, deadline: float | None = None
    ) -> None:
        self.context, self.run_dir = context, Path(run_dir)
        self.poll_s, self.deadline = poll_s, deadline
        self._read_at = float("-inf")
        self._save, self._stop = False, False
        self._stuck: set[str] = set()  # request files that could not be removed
        self._group = collectives.side_group()
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None

    def decide(self) -> Decision:
        """Returns the decision that the last call started, and starts the next one."""
        decision = self.finish()
        if self.context.is_main and time.monotonic() - self._read_at >= self.poll_s:
            self._read_requests()
        request = torch.tensor([self._reason(), int(self._save)])
        self._save = False
        work = None
        if self._group is not None:
            work = dist.all_reduce(request, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (request, work)
        return decision

    def finish(self) -> Decision:
        """Returns the decision that the last `decide` started; called after the last step."""
        if self._pending is None:
            return Decision()
        (request, work), self._pending = self._pending, None
        if work is not None:
            work.wait()
        reason, save = request.tolist()
        return Decision(bool(save), _REASONS[reason])

    def _reason(self) -> int:
        """Returns the strongest reason that this rank knows, as its index in ``_REASONS``."""
        name = signals.get_request()
        if name is not None:
            return _REASONS.index(name)
        if self.deadline is not None and self.context.is_main and time.monotonic() > self.deadline:
            return 2
        return 1 if self._stop else 0

    def _read_requests(self) -> None:
        """Looks for the request files and removes them."""
        self._read_at = time.monotonic()
        self._save = self._take(SAVE_NOW) or self._save
        self._stop = self._take(STOP) or self._stop

    def _take(self, name: str) -> bool:
        """Removes the file (or folder) ``name``; returns True if it was there and is new."""
        path = self.run_dir / name
        if name in self._stuck or not path.exists():
            return False
        log.info("found the file %s", path)
        try:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as error:
            self._stuck.add(name)
            log.warning("%s cannot be removed (%s): remove it before the next start", path, error)
        return True
