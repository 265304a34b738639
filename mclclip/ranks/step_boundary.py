"""The boundary between two training steps, where all ranks agree to save or to leave.

A request may reach the ranks at different moments (a signal), or only the first rank (a file in the
run directory, the wall-time limit). Every rank therefore passes the requests that it knows to an
all-reduce on a separate gloo group, which runs during the next step. The result is used one
boundary later: all ranks act at the same step, and no step waits.
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

log = logging.getLogger("mclclip")

SAVE_NOW, STOP = "save_now", "stop"
# Reasons to leave, the strongest last: the reduction takes the maximum.
_REASONS = (None, "the file 'stop'", "the wall-time limit", "SIGUSR1", "SIGTERM")


@dataclass(frozen=True)
class Decision:
    """The action that all ranks take at a step boundary: save, leave, both, or neither.

    ``leave`` is the reason to leave; None: the ranks go on.
    """

    save: bool = False
    leave: str | None = None

    @property
    def requeue(self) -> bool:
        """Whether the run is to be started again: False where its user asked it to stop."""
        return self.leave != _REASONS[1]


class StepBoundary:
    """The agreement of all ranks; each rank calls ``decide`` once between any two steps.

    ``deadline`` is a time of ``time.monotonic()`` (None: no wall-time limit). Every ``poll_s``
    seconds the first rank looks for the files ``save_now`` and ``stop`` in ``run_dir`` and removes
    those that it finds.
    """

    def __init__(
        self, context: Context, run_dir: Path, *, poll_s: float, deadline: float | None = None
    ) -> None:
        self.context, self.run_dir = context, Path(run_dir)
        self.poll_s, self.deadline = poll_s, deadline
        self._looked = float("-inf")
        self._save, self._stop = False, False
        self._group = collectives.side_group()
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None

    def decide(self) -> Decision:
        """Returns the decision that the last call started, and starts the next one."""
        decision = self.finish()
        self._ask()
        return decision

    def finish(self) -> Decision:
        """Returns the decision that ``decide`` started; all ranks call it after the last step."""
        if self._pending is None:
            return Decision()
        (request, work), self._pending = self._pending, None
        if work is not None:
            work.wait()
        reason, save = request.tolist()
        return Decision(bool(save), _REASONS[reason])

    def _ask(self) -> None:
        self._look()
        request = torch.tensor([self._reason(), int(self._save)])
        self._save = False
        work = None
        if self._group is not None:
            work = dist.all_reduce(request, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (request, work)

    def _reason(self) -> int:
        """The strongest reason this rank knows, as its place in the list."""
        name = signals.received()
        if name is not None:
            return _REASONS.index(name)
        if self.deadline is not None and self.context.is_main and time.monotonic() > self.deadline:
            return 2
        return 1 if self._stop else 0

    def _look(self) -> None:
        """Reads and removes the request files, on the first rank, every ``poll_s`` seconds."""
        if not self.context.is_main or time.monotonic() - self._looked < self.poll_s:
            return
        self._looked = time.monotonic()
        self._save = self._take(SAVE_NOW)
        self._stop = self._stop or self._take(STOP)

    def _take(self, name: str) -> bool:
        path = self.run_dir / name
        if not path.exists():
            return False
        log.info("found the file %s", path)
        path.unlink(missing_ok=True)
        return True
