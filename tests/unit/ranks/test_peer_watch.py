"""Who is named, judged by reports; real processes are in tests/e2e/test_preemption.py."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pytest

from mclclip.ranks import data_wait, peer_watch, signals
from mclclip.ranks.failures import is_lost_peer
from mclclip.ranks.peer_watch import PeerWatch
from mclclip.ranks.process_group import Context
from mclclip.ranks.signals import Preempted

TIMEOUT_S = 10.0
NOW = 1000.0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> PeerWatch:
    """Rank 0 of three, a moment after all were heard of."""
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("MASTER_PORT", "29500")
    watch = PeerWatch(Context(0, 3), TIMEOUT_S)
    watch._names = [f"rank {rank} (host h{rank}, process 1)" for rank in range(3)]
    watch._answered_at = NOW
    watch._reports = {rank: (f"5 7 - trainer.py:{rank}", NOW) for rank in range(3)}
    return watch


AGO = TIMEOUT_S + 1.0  # s: longer than the limit
STALLED, PLACE = -AGO, "samples.py:80"
HEAD = "rank 0 (host h0, process 1) or the launcher beside it at head:29500 cannot be reached"
# What is known at NOW: {rank: (report, seconds)}, when the store answered, since when the training
# has not got on (None: no training), when it is asked; and the start of the problem (None: none).
Reports = dict[int, tuple[str, float]]
KNOWN: dict[str, tuple[Reports, float, float | None, float, str | None]] = {
    "all is well": ({}, 0.0, -5.0, 1.0, None),
    "a silent rank is named": (
        {2: ("5 7 - trainer.py:2", -AGO)}, 0.0, None, 0.0,
        "rank 2 (host h2, process 1) has not been heard of",
    ),
    "a store that does not answer": ({}, -AGO, None, 0.0, HEAD),
    "who does not hear of itself has lost the store": (
        {rank: ("5 7 - x.py:1", -TIMEOUT_S - 0.1) for rank in range(3)},
        -TIMEOUT_S + 0.5,  # the end of the same round
        None, 0.0, HEAD,
    ),
    # Another's last report may be older than one's own last sign of the store.
    "who hears nothing waits before it names another": (
        {0: ("5 7 - x.py:1", -TIMEOUT_S + 0.5), 2: ("5 7 - trainer.py:2", -TIMEOUT_S - 0.5)},
        -TIMEOUT_S + 0.5, None, 0.0, None,
    ),
    "and then names the store": (
        {0: ("5 7 - x.py:1", -TIMEOUT_S + 0.5), 2: ("5 7 - trainer.py:2", -TIMEOUT_S - 0.5)},
        -TIMEOUT_S + 0.5, None, 1.0, HEAD,
    ),
    "the rank behind is waited for": (
        {1: (f"5 6 - {PLACE}", 0.0)}, 0.0, STALLED, 0.0,
        f"rank 1 (host h1, process 1) is waited for (rank 1 at {PLACE})",
    ),
    "who is behind lets the others report first": (
        {0: (f"5 6 - {PLACE}", 0.0)}, 0.0, STALLED, 0.0, None,
    ),
    "and then names itself": (
        {0: (f"5 6 - {PLACE}", 3.0), 1: ("5 7 - x.py:1", 3.0), 2: ("5 7 - x.py:1", 3.0)}, 3.0,
        STALLED, 3.0, "rank 0 (host h0, process 1) is waited for",
    ),
    "where none is behind all places are listed": (
        {}, 0.0, STALLED, 0.0,
        "no rank has got on with the training (rank 0 at trainer.py:0, rank 1 at trainer.py:1, "
        "rank 2 at trainer.py:2)",
    ),
    "who waits for data ends by itself, with its sample noted": (
        {1: ("5 7 data a batch", 0.0)}, 0.0, STALLED, 0.0, None,
    ),
    "and is named where it does not": (
        {1: ("5 7 data a batch", 0.0)}, 0.0, STALLED - data_wait.END_S, 0.0,
        "no rank has got on with the training (rank 0 at trainer.py:0, rank 1 at a batch, rank 2",
    ),
    # Behind, or gone? That shows when the silence has lasted long enough.
    "an old report is not judged": (
        {1: ("5 6 - trainer.py:1", -0.5 * TIMEOUT_S)}, 0.0, STALLED, 0.0, None,
    ),
    "outside of training only silence counts": (
        {1: ("5 6 - index.py:1", 0.0)}, 0.0, None, 0.0, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_the_problem_is_named(watch: PeerWatch, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    reports, answered, since, asked, problem = KNOWN[case]
    assert watch.period_s == 1.0
    monkeypatch.setattr(peer_watch._Progress, "since", None if since is None else NOW + since)
    watch._reports |= {rank: (report, NOW + at) for rank, (report, at) in reports.items()}
    watch._answered_at = NOW + answered
    found = watch._problem(NOW + asked)
    assert found is None if problem is None else (found or "").startswith(problem), found


def test_note_counts_and_moves_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with peer_watch.training():
        before = peer_watch._Progress.count
        monkeypatch.setattr(peer_watch._Progress, "since", time.monotonic() - 100.0)
        peer_watch.note()
        assert peer_watch._Progress.count == before + 1
        since = peer_watch._Progress.since
        assert since is not None and time.monotonic() - since < 10.0
    assert peer_watch._Progress.since is None


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:1234"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_what_a_lost_peer_looks_like(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost


def test_a_last_report_that_comes_late_is_waited_for(
    watch: PeerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is gone; what it had sent is read a moment later, and the others go on."""
    watch._reports = {rank: ("1 7 x.py:1", NOW) for rank in range(3)}
    now_s = [NOW]

    def report(seconds: float) -> None:  # while this rank sleeps
        now_s[0] += seconds
        for rank in (0, 1, 2) if now_s[0] < NOW + 1.5 * watch.period_s else (0, 2):
            watch._reports[rank] = (f"{now_s[0]} 7 x.py:1", now_s[0])

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=report)
    monkeypatch.setattr(peer_watch, "time", clock)
    assert str(watch._gone()).startswith("rank 1 (host h1, process 1) has ended: the job ends")


def test_where_nobody_is_heard_of_the_store_is_lost(watch: PeerWatch) -> None:
    watch.period_s = 0.02
    watch._reports = dict.fromkeys(range(3), ("1 7 x.py:1", time.monotonic()))
    assert "head:29500 cannot be reached" in str(watch._gone())


@pytest.mark.parametrize("report", [None, "failed", "asked"])
def test_a_request_of_its_own_stands_for_a_peer_that_cannot_be_heard(
    watch: PeerWatch, monkeypatch: pytest.MonkeyPatch, report: str | None
) -> None:
    """The first rank held the store and left for the same signal, which this rank had recorded."""
    watch.period_s = 0.02
    watch._reports = dict.fromkeys(range(3), ("1 7 x.py:1", time.monotonic()))
    words = {"failed": {"failed": "a mistake"}, "asked": {"reason": "SIGHUP", "requeue": True}}
    if report is not None:
        watch._reports[1] = (f"last word {json.dumps(words[report])}", time.monotonic())
    assert isinstance(watch._why_gone(), Preempted) is (report == "asked")
    monkeypatch.setattr(signals._State, "name", "SIGUSR1")
    found = watch._why_gone()
    if report == "failed":
        assert str(found) == "rank 1 (host h1, process 1) has ended: a mistake"
    else:
        assert isinstance(found, Preempted)
        assert found.reason == ("SIGUSR1" if report is None else "SIGHUP")


class _SlowStore:
    """One that answers, on a busy machine."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.busy = threading.Event()

    def set(self, rank: str, word: str) -> None:
        self.busy.set()
        time.sleep(0.5)
        self.held[rank] = word

    def check(self, ranks: list[str]) -> bool:
        return False

    def multi_get(self, ranks: list[str]) -> list[bytes]:
        return []


def test_a_rank_does_not_end_before_its_last_word_is_told(
    watch: PeerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the others report a lost peer, and a run that was stopped is started again. Here it
    is told while a report is under way."""
    store = _SlowStore()
    watch.period_s = 0.01
    monkeypatch.setattr(watch, "_open_store", lambda: store)
    threading.Thread(target=watch._exchange_reports, daemon=True).start()
    assert store.busy.wait(120.0)
    monkeypatch.setattr(peer_watch, "_REPORT_S", 120.0)
    watch.report(Preempted("the file 'stop'", requeue=False))
    assert store.held["0"] == 'last word {"reason": "the file \'stop\'", "requeue": false}'


def test_a_store_that_is_gone_is_not_waited_for(
    watch: PeerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("Connection refused")

    monkeypatch.setattr(watch, "_open_store", refuse)
    monkeypatch.setattr(peer_watch, "_REPORT_S", 600.0)
    watch._exchange_reports()
    start = time.monotonic()
    watch.report(ValueError("a mistake"))
    assert time.monotonic() - start < 300.0
