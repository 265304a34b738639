"""Ends the job, and names the ranks, when ranks hang, die with their node, or cannot be reached.

A collective waits for its slowest rank without saying which. Each rank therefore reports to the
launcher's TCP store that it lives and how often it made progress. A rank that does not report for
``timeout_s`` is named, or the one with the least progress if none was made for that long; then this
process ends. One thread talks to the store, which may block for ever when the network is cut;
another only compares times.

A rank that leaves while the others do not know says why in its last report: they leave, or fail,
for the same reason, also out of a collective in which they wait for it.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from mclclip.files import message_of
from mclclip.ranks import collectives, data_wait, signals
from mclclip.ranks.failures import Lost, is_lost_peer
from mclclip.ranks.process_group import Context
from mclclip.ranks.signals import Preempted

log = logging.getLogger("mclclip")

_PACKAGE = Path(__file__).parents[1]
_MOST_NAMED = 8
_MAX_ERROR_CHARS = 1000  # characters of an error
_QUIET = 4  # a living rank reports within so many periods, even on a busy machine
_GOES_ON = "the job ends; the same command goes on from the last checkpoint"
_DATA = "data"  # in a report: this rank waits for data
_LAST_WORD = "last word "  # what begins a rank's last report
_REPORT_S = 5.0  # for a busy machine to take this rank's last word; nobody learns it afterwards
_FOLLOW_S = 3.0  # for the main thread to find out by itself that another rank has left
_MISSED = 3  # this many periods without a report: the rank's last report is out of date


class _Progress:
    """Progress of this process: the number of ``note`` calls, and the time of the last one."""

    count = 0
    since: float | None = None  # time.monotonic(); None outside of a training


def note() -> None:
    """Records progress: call it after every batch that was read, every step and every save."""
    _Progress.count += 1
    if _Progress.since is not None:
        _Progress.since = time.monotonic()


@contextmanager
def training() -> Iterator[None]:
    """While the block runs, a rank that does not call ``note`` for too long counts as hanging."""
    _Progress.since = time.monotonic()
    try:
        yield
    finally:
        _Progress.since = None


@contextmanager
def pausing() -> Iterator[None]:
    """While the block runs within ``training``, no call of ``note`` is expected."""
    before, _Progress.since = _Progress.since, None
    try:
        yield
    finally:
        _Progress.since = None if before is None else time.monotonic()


class PeerWatch:
    """Context manager that watches the other ranks; does nothing where there is one process.

    When a rank is lost, ends the process by ``signals.end_now`` with Lost and exit code 1.
    Leaving the block by an error of a collective whose peer is gone raises Lost instead, or
    Preempted where that peer or this rank was asked to leave (KeyboardInterrupt: interrupted).
    """

    def __init__(self, context: Context, timeout_s: float) -> None:
        self.context, self.timeout_s = context, timeout_s
        self.period_s = min(max(timeout_s / 10, 0.1), 1.0)
        self._stop, self._wake, self._reported = (threading.Event() for _ in range(3))
        self._last_word: str | None = None
        self._names: list[str] = []
        self._answered_at = time.monotonic()
        # rank -> its last report, and when that was new here
        self._reports: dict[int, tuple[str, float]] = {}

    def __enter__(self) -> PeerWatch:
        if self.context.world_size == 1 or "MASTER_ADDR" not in os.environ:
            return self
        mine = f"rank {self.context.rank} (host {socket.gethostname()}, process {os.getpid()})"
        self._names = collectives.gather_objects(mine)
        now = time.monotonic()
        self._reports = {rank: ("", now) for rank in range(self.context.world_size)}
        self._answered_at = now
        for work in (self._exchange_reports, self._watch_reports):
            threading.Thread(target=work, name="peer-watch", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._names and error is not None and is_lost_peer(error):
                # The peer had the same request, and was quicker to answer it?
                asked = signals.counted_for()
                signals.ignore()  # the launcher ends the ranks that are left
                raise (asked or self._why_gone()) from error
            if error is not None:
                self.report(error)
        finally:
            self._stop.set()
            self._wake.set()

    def report(self, error: BaseException) -> None:
        """Reports to the other ranks why this one leaves, unless all leave by agreement."""
        if not self._names or not isinstance(error, Exception | Preempted):
            return
        if isinstance(error, Preempted):
            if error.agreed:
                return
            word = {"reason": error.reason, "requeue": error.requeue}
        else:
            word = {"failed": message_of(error, _MAX_ERROR_CHARS)}
        self._last_word = _LAST_WORD + json.dumps(word)
        self._wake.set()
        self._reported.wait(_REPORT_S)

    def _last_error(self) -> Lost | Preempted | None:
        """The error that another rank's last word stands for, if there is one."""
        for rank, (report, _) in self._reports.items():
            if rank != self.context.rank and report.startswith(_LAST_WORD):
                word = json.loads(report.removeprefix(_LAST_WORD))
                if "failed" not in word:
                    return Preempted(word["reason"], word["requeue"])
                return Lost(f"{self._names[rank]} has ended: {word['failed']}")
        return None

    def _why_gone(self) -> BaseException:
        """Returns the error to leave with: the peer's own, or else the request that this rank
        has recorded, or else who is gone.

        A peer that left for a request may have taken its last word with it, where it held the
        store; this rank then has the same request and did not come to the boundary to obey it.
        """
        found = self._gone()
        asked = signals.asked_within(0.0) if self._last_error() is None else None
        return asked or found

    def _gone(self) -> Lost | Preempted:
        """The error of a rank whose peer is gone: what the peer reported, or who it is.

        Waits a few periods to find those that stopped reporting.
        """
        deadline = time.monotonic() + 3 * _QUIET * self.period_s
        while True:
            if (peer_error := self._last_error()) is not None:
                return peer_error
            now = time.monotonic()
            quiet_s = {rank: now - at for rank, (_, at) in self._reports.items()}
            longest_s = max(quiet_s.values())
            if longest_s > _QUIET * self.period_s:
                break
            if now > deadline:
                return _lost("the connection to another rank is lost, though all report")
            time.sleep(self.period_s / 4)
        silent = [rank for rank, s in quiet_s.items() if s > longest_s - self.period_s]
        if self.context.rank in silent:  # the store is lost: see _problem
            return _lost(self._unreachable())
        return _lost(f"{self._named(silent)} has ended")

    # --- the thread that talks to the store ----------------------------------------------------

    def _exchange_reports(self) -> None:
        try:
            store = self._open_store()
            beat, everybody = 0, False
            while not self._stop.is_set():
                self._wake.wait(self.period_s)
                self._wake.clear()
                beat += 1
                word = self._last_word  # it may be given while a report is under way
                waits = _DATA if data_wait.waited_for() is not None else "-"
                beating = f"{beat} {_Progress.count} {waits} {_place()}"
                store.set(str(self.context.rank), word or beating)
                if word is not None:
                    return
                present = [rank for rank in self._reports if everybody or store.check([str(rank)])]
                everybody = len(present) == len(self._reports)
                reports = store.multi_get([str(rank) for rank in present])
                for rank, report in zip(present, reports, strict=True):
                    if report.decode() != self._reports[rank][0]:
                        self._reports[rank] = report.decode(), time.monotonic()
                self._answered_at = time.monotonic()
        except (RuntimeError, OSError) as error:
            # The other thread ends the process if nothing else ends it before.
            log.debug("the store does not answer: %s", error)
        finally:
            self._reported.set()  # no further report follows

    def _open_store(self) -> Store:
        """A second connection to the store: when it blocks, the training's is still free."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = datetime.timedelta(seconds=self.timeout_s)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"mclclip/peers/{start}", store)

    # --- the thread that looks at clocks -------------------------------------------------------

    def _watch_reports(self) -> None:
        left_at: float | None = None
        while not self._stop.wait(self.period_s):
            now = time.monotonic()
            if (peer_error := self._last_error()) is not None:
                left_at = left_at or now
                if now - left_at > _FOLLOW_S:
                    signals.end_now(peer_error, signals.code_of(peer_error))
            elif (problem := self._problem(now)) is not None and not self._stop.is_set():
                error = _lost(f"{problem} for {self.timeout_s:g} s (peer_timeout_s)")
                signals.end_now(error, signals.code_of(error))

    def _problem(self, now: float) -> str | None:
        """Returns the fault as one line, or None."""
        # A rank that does not see its own reports has lost the store, and so all others' reports.
        deaf_s = now - min(self._answered_at, self._reports[self.context.rank][1])
        if deaf_s > _MISSED * self.period_s:
            return self._unreachable() if deaf_s > self.timeout_s else None
        silent = [rank for rank, (_, at) in self._reports.items() if now - at > self.timeout_s]
        if silent:
            return f"{self._named(silent)} has not been heard of"
        since = _Progress.since
        if since is None or now - since <= self.timeout_s:
            return None
        # A rank that has stopped reporting will soon count as silent; its last count is too old.
        if now - min(at for _, at in self._reports.values()) > _MISSED * self.period_s:
            return None
        reports = {r: report.split() for r, (report, _) in self._reports.items()}
        counts = {rank: int(words[1]) if words else 0 for rank, words in reports.items()}
        behind = [rank for rank, count in counts.items() if count == min(counts.values())]
        # One that waits for data ends by itself, and notes the sample that it waits for.
        if any(reports[rank][2:3] == [_DATA] for rank in behind):
            if now - since <= self.timeout_s + data_wait.END_S:
                return None
        if len(behind) == len(counts):
            return f"no rank has got on with the training ({self._places(behind)})"
        if self.context.rank in behind:
            # The others report first: if this rank ended now, they would not see that it hung.
            if now - since <= self.timeout_s + _MISSED * self.period_s:
                return None
            faulthandler.dump_traceback(file=sys.stderr)
        return f"{self._named(behind)} is waited for ({self._places(behind)})"

    def _unreachable(self) -> str:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return f"{self._names[0]} or the launcher beside it at {where} cannot be reached"

    def _named(self, ranks: list[int]) -> str:
        return ", ".join(self._names[rank] for rank in ranks[:_MOST_NAMED])

    def _places(self, ranks: list[int]) -> str:
        places = [(rank, self._reports[rank][0].split(" ", 3)[3:]) for rank in ranks[:_MOST_NAMED]]
        return ", ".join(f"rank {rank} at {' '.join(place) or '?'}" for rank, place in places)


def _lost(problem: str) -> Lost:
    return Lost(f"{problem}: {_GOES_ON}")


def _place() -> str:
    """Returns where the main thread is: the data that it waits for, or the line of this package
    that it runs, such as ``recorder.py:70``."""
    if (waited := data_wait.waited_for()) is not None:
        return waited
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
