"""Every end of a command, at every moment, on one and two ranks: all of them, not chosen cases.

A moment is the first call of one function of mclclip in the main thread: an undisturbed run writes
down all of them, in order, and those are the moments that there are. A kind of end is what a user,
a cluster or the code itself does to a command. A cell is a command, a number of ranks, a moment and
a kind. In every cell each process ends within ``LIMIT_S`` seconds with the exit code of its kind,
nothing is left of it (no worker, no pool), nobody who only interrupted reads a traceback, and the
recorded state says what happened.

``make test`` takes a few cells. ``MCLCLIP_SOAK=1`` takes every moment of every command on one and
on two ranks, each with one kind, which goes around with the moments; ``MCLCLIP_SOAK_SEED=1`` to
``6`` shift it, so that seven soaks have every kind at every moment. Beside these there are the
start of a real process, at points of time, and a program that uses the library.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mclclip
from tests import tiny
from tests.e2e.conftest import Finished, Shell, Started
from tests.e2e.soak import SEED
from tests.forks import is_running
from tests.matrix import IN_SOAK, SOAK, fuller_in_soak, in_soak

LIMIT_S = (
    90.0  # on a busy machine, of which mclclip itself takes 5 where the main thread does not answer
)
FIRST = "cli.py:_parse"  # the first moment at which mclclip answers signals
LAST = "process.py:_leave"  # from here on nobody is left to answer an error
# Errors in these are answered by libraries, which print them and go on: multiprocessing at exit,
# logging, and Python itself after a fork.
ANSWERED_ELSEWHERE = (
    "ranks/parent_death.py:_end_workers",
    "ranks/parent_death.py:_end_patiently",
    "ranks/signals.py:_forget",
    "run/runlog.py:_Formatter.formatMessage",
    "files.py:clean",
)
PACKAGE = str(Path(mclclip.__file__).parent)
EVAL = str(Path(mclclip.__file__).resolve().parents[1] / "eval")
OPTIONS = (
    "data.num_workers=1",
    "base.steps=3",
    "base.checkpoint.every=2",
    "train.steps=3",
    "poll_s=0.01",
)


# --- kinds of end -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Signals that every rank gets, one after the other, or an error; and what must come of it."""

    name: str
    numbers: tuple[int, ...]
    code: int
    state: str


KINDS = (
    Kind("term", (signal.SIGTERM,), 85, "preempted"),
    Kind("interrupt", (signal.SIGINT,), 130, "interrupted"),
    Kind("interrupt_twice", (signal.SIGINT, signal.SIGINT), 130, "interrupted"),
    Kind("hang_up", (signal.SIGHUP,), 85, "preempted"),
    Kind("usr1_repeated", (signal.SIGUSR1,) * 3, 85, "preempted"),
    Kind("kill", (signal.SIGKILL,), -signal.SIGKILL, "running"),
    Kind("error", (), 2, "failed"),
)


# --- moments ------------------------------------------------------------------------------------


def name_of(frame: FrameType) -> str | None:
    """``run/lock.py:RunLock._try`` for a function of mclclip; None for others."""
    code = frame.f_code
    for folder, prefix in ((PACKAGE, ""), (EVAL, "eval/")):
        if code.co_filename.startswith(folder + os.sep):
            path = code.co_filename[len(folder) + 1 :]
            return f"{prefix}{path}:{code.co_qualname}"
    return None


class Watching:
    """Calls ``seen(name)`` at the first call of every function of mclclip in the main thread."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        self.seen, self.known = seen, set[Any]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code in self.known:
            return
        self.known.add(frame.f_code)
        if (name := name_of(frame)) is not None and "<" not in name.replace("<locals>", ""):
            self.seen(name)


@dataclass(frozen=True)
class Record:
    """Writes down the moments of the first rank."""

    path: Path

    def __call__(self) -> None:
        if os.environ.get("RANK", "0") == "0":
            file = open(self.path, "w", buffering=1)
            sys.setprofile(Watching(lambda name: print(name, file=file)))


@dataclass(frozen=True)
class End:
    """Ends the command in the way ``kind`` when rank 0 comes to ``moment``.

    Every rank leads a session of its own, in which all that it starts stays, and notes its process
    below ``folder`` when it begins to answer signals. The other ranks get the signals too, as under
    a launcher.
    """

    folder: Path
    moment: str
    kind: Kind
    ranks: int

    def __call__(self) -> None:
        os.setsid()
        sys.setprofile(Watching(self._seen))

    def _seen(self, name: str) -> None:
        rank = os.environ.get("RANK", "0")
        if name == FIRST:
            (self.folder / f"{rank}.pid").write_text(str(os.getpid()))
            if rank != "0":
                sys.setprofile(None)
        if rank != "0" or name != self.moment:
            return
        sys.setprofile(None)
        # Once: after a loader worker has come here, its parent may, on its own way out.
        if (self.folder / "struck").exists():
            return
        # The first rank comes last, since a worker of it, in which this may run, ends with it.
        while len(pids := noted(self.folder)) < self.ranks:
            time.sleep(0.01)
        (self.folder / "struck").write_text(str(time.time()))
        if not self.kind.numbers:
            raise ValueError("planted")
        own = os.getpid()
        others = [pid for pid in pids if pid != own]
        for number in self.kind.numbers:
            for pid in [*others, own]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def noted(folder: Path) -> list[int]:
    """The processes of the ranks that have noted theirs, the last rank's first."""
    texts = [path.read_text() for path in sorted(folder.glob("*.pid"), reverse=True)]
    return [int(text) for text in texts if text]


# --- judging ------------------------------------------------------------------------------------


def left_of(sessions: set[int]) -> dict[int, str]:
    """Processes of the sessions that still run, with their names."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, fields = path.read_text().split("(", 1)[1].rsplit(")", 1)
            state, _, _, session = fields.split()[:4]
            if int(session) in sessions and state not in "ZX":
                found[int(path.parent.name)] = name
    return found


def faults(folder: Path, finished: Finished, kind: Kind, run_dir: Path, ended: float) -> list[str]:
    """What is wrong with an end, in words."""
    found = []
    sessions = {int(path.read_text()) for path in folder.glob("*.pid")}
    # A loader worker that fails before it has asked to die with its parent looks for it every 5 s.
    deadline = time.monotonic() + 60.0
    while (left := left_of(sessions)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        found.append(f"left behind: {left}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if (took := ended - float((folder / "struck").read_text())) > LIMIT_S:
        found.append(f"took {took:.1f} s")
    state = run_dir / "run_state.json"
    record = json.loads(state.read_text()) if state.exists() else None
    done = record is not None and record["state"] == "finished"
    # Asked too late, or an error that the code itself answers.
    wanted = {kind.code, 0} if done else {kind.code}
    first, *others = finished.codes if kind.numbers else finished.codes[:1]  # it strikes one rank
    if kind.code in others:
        wanted |= {0}  # the first had done its part; the launcher goes by the others
    # The others may have done their part: the launcher goes by the first code that is not 0.
    if first not in wanted or not set(others) <= wanted | {0}:
        found.append(f"exit codes {finished.codes}, wanted {sorted(wanted)}")
    if record is not None and not done and record["state"] != kind.state:
        found.append(f"recorded {record}")
    text = "\n".join(finished.stderrs)
    if "Traceback" in text or "Exception ignored" in text or "resource_tracker" in text:
        found.append("a traceback")
    if found:
        found.append(text[-3000:])
    return found


# --- the matrix ---------------------------------------------------------------------------------

VERBS: dict[str, tuple[str, ...]] = {
    "index": ("index",),
    "train": ("train", "--stage", "0"),
    "export": ("export", "--stage", "0"),
    "embed": ("embed", "--stage", "0"),
    "cluster": ("cluster", "--stage", "0"),
    "eval": ("eval", "--model", "stage_0/export"),
}


class Prepared:
    """A run directory as it is before each verb, and the moments of each verb."""

    def __init__(self, shell: Shell, data: Path, folder: Path) -> None:
        self.shell, self.folder = shell, folder
        self.config = tiny.write_config(folder / "config.yaml", folder / "run", data, *OPTIONS)
        self.data = data
        self._moments: dict[tuple[str, int], list[str]] = {}

    def words(self, verb: str, run_dir: Path) -> list[object]:
        command = [
            str(run_dir / word) if word.startswith("stage_") else word for word in VERBS[verb]
        ]
        return [*command, "--config", self.config, f"run_dir={run_dir}"]

    def before(self, verb: str) -> Path:
        """The run directory that ``verb`` starts from; made of the verbs before it."""
        path = self.folder / f"before_{verb}"
        if path.exists():
            return path
        names = [*VERBS]
        place = names.index(verb)
        if place == 0:
            path.mkdir()
            return path
        earlier = names[place - 1]
        making = self.folder / f"making_{verb}"
        shutil.copytree(self.before(earlier), making)
        file = self.folder / f"{earlier}_1.moments"
        self.shell.ok(*self.words(earlier, making), inside=Record(file))
        self._moments[earlier, 1] = moments_in(file)
        (making / "run_state.json").unlink()
        making.rename(path)
        return path

    def moments(self, verb: str, ranks: int) -> list[str]:
        """The moments of ``verb`` on the first of ``ranks``, in order."""
        if (verb, ranks) not in self._moments:
            run_dir = self.folder / f"recorded_{verb}_{ranks}"
            shutil.copytree(self.before(verb), run_dir)
            file = self.folder / f"{verb}_{ranks}.moments"
            self.shell.ok(*self.words(verb, run_dir), inside=Record(file), ranks=ranks)
            self._moments[verb, ranks] = moments_in(file)
            shutil.rmtree(run_dir)
        return self._moments[verb, ranks]

    def try_cell(self, verb: str, ranks: int, moment: str, kind: Kind) -> list[str]:
        """Ends the verb there; what was wrong about it."""
        folder = self.folder / "cell"
        run_dir = folder / "run"
        shutil.copytree(self.before(verb), run_dir)
        end = End(folder, moment, kind, ranks)
        launcher = threading.Thread(target=end_the_others, args=(folder,), daemon=True)
        launcher.start()
        finished = self.shell(
            *self.words(verb, run_dir), inside=end, ranks=ranks, timeout_s=3 * LIMIT_S
        )
        now = time.time()
        (folder / "over").touch()
        launcher.join()
        found = []
        if (folder / "struck").exists():
            found = faults(folder, finished, kind, run_dir, now)
        elif ranks == 1:
            found = [f"never came there: {finished.codes} {finished.stderr[-500:]}"]
        shutil.rmtree(folder)
        return found


def end_the_others(folder: Path) -> None:
    """What a launcher does: when one rank has ended, the others get a SIGTERM."""
    while not (folder / "over").exists():
        time.sleep(0.1)
        pids = [int(path.read_text() or 0) for path in folder.glob("*.pid")]
        living = [pid for pid in pids if is_running(pid)]
        if (folder / "struck").exists() and 0 < len(living) < len(pids):
            time.sleep(1.0)
            for pid in filter(is_running, living):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            return


def moments_in(file: Path) -> list[str]:
    """Those from the first on at which mclclip answers for how it ends."""
    names = file.read_text().splitlines()
    return names[names.index(FIRST) :]


@pytest.fixture(scope="module")
def prepared(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(shell, data, tmp_path_factory.mktemp("ends"))


def cells(moments: list[str], few: int) -> list[tuple[str, Kind]]:
    """Moments with kinds: all of them in the soak, else ``few``, spread over the command."""
    if SOAK:
        answered = moments.index(LAST)
        return [
            (moment, kind)
            for place, moment in enumerate(moments)
            if (kind := KINDS[(place + SEED) % len(KINDS)]).numbers
            or (place < answered and moment not in ANSWERED_ELSEWHERE)
        ]
    places = [len(moments) * (2 * number + 1) // (2 * few) for number in range(few)]
    return [
        (moments[place], KINDS[(few + number) % len(KINDS)]) for number, place in enumerate(places)
    ]


# (verb, ranks): how many cells of it are in `make test`; the others are left to the soak.
FEW = {("index", 1): 1, ("train", 1): 2, ("train", 2): 1}


@fuller_in_soak
@pytest.mark.parametrize(
    ("verb", "ranks"),
    [
        (verb, ranks) if (verb, ranks) in FEW else pytest.param(verb, ranks, marks=IN_SOAK)
        for verb in VERBS
        for ranks in (1, 2)
    ],
)
def test_a_command_ends_well_at_every_moment(prepared: Prepared, verb: str, ranks: int) -> None:
    wrong = {
        (moment, kind.name): found
        for moment, kind in cells(prepared.moments(verb, ranks), FEW.get((verb, ranks), 0))
        if (found := prepared.try_cell(verb, ranks, moment, kind))
    }
    assert not wrong, "\n".join(f"{cell}: {' '.join(found)}" for cell, found in wrong.items())


# --- the start of a real process ----------------------------------------------------------------

SIGNALLED = [kind for kind in KINDS if kind.numbers and kind.name != "kill"]


@in_soak
@pytest.mark.parametrize("kind", SIGNALLED, ids=lambda kind: kind.name)
def test_a_process_that_starts_ends_well(data: Path, tmp_path: Path, kind: Kind) -> None:
    """Python itself answers until mclclip's first line runs."""
    config = tiny.write_config(tmp_path / "config.yaml", tmp_path / "run", data, *OPTIONS)
    for number in range(40):
        words = tiny.command("index", "--config", str(config))
        run = Started(words, tmp_path / "run", tmp_path / f"{number}.log")
        try:
            time.sleep(0.1 * number)
            for signal_number in kind.numbers:
                if run.launcher.poll() is None:
                    run.launcher.send_signal(signal_number)
            run.gone_after_s()
            text = run.log.read_text()
            by_python = run.launcher.returncode in (-kind.numbers[0], 1) and number < 5
            assert run.launcher.returncode in (kind.code, 0) or by_python, (number, text)
            assert "Traceback" not in text or "mclclip" not in text, (number, text)
        finally:
            run.end()


# --- a program that uses the library ------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from mclclip.data.options import DataConfig
from mclclip.data.batches import Loader
from mclclip.data.sample_index import SampleIndex
from mclclip.data.samples import TarDataset

data = TarDataset(SampleIndex.open(Path(sys.argv[1])), DataConfig())
data.decoded = lambda raw, *_: raw
ids = [[n, n + 1] for n in range(0, 40, 2)]
loader = Loader(data, ids, num_workers=2, batched=True, describe=lambda item, place: "it")
for n, batch in enumerate(loader):
    if n == int(sys.argv[3]):
        if sys.argv[4] == "stopped":
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGSTOP)
        if sys.argv[2] == "break":
            break
        if sys.argv[2] == "error":
            raise ValueError("mine")
        print("waiting", flush=True)
        time.sleep(60)
"""


@in_soak
@pytest.mark.parametrize("workers", ["running", "stopped"])
@pytest.mark.parametrize("kind", ["break", "error", *(kind.name for kind in KINDS[:-1])])
def test_a_program_that_uses_the_library_ends(
    shell: Shell, data: Path, tmp_path: Path, kind: str, workers: str
) -> None:
    """Its workers end with it, also those that do not answer; signals are Python's own matter.

    A worker that is stopped before it has asked Linux to end with its owner outlives an owner that
    is killed: both workers have begun when the second item is there.
    """
    config = tiny.write_config(tmp_path / "config.yaml", tmp_path / "run", data, *OPTIONS)
    shell.ok("index", "--config", config)
    codes = {"break": 0, "error": 1}
    numbers = {known.name: known.numbers for known in KINDS}.get(kind, ())
    for moment in (0 if kind in codes else 1, 7, 19):
        words = [str(tmp_path / "run/index"), kind, str(moment), workers]
        log = tmp_path / f"{moment}.log"
        run = Started([sys.executable, "-c", PROGRAM, *words], tmp_path / "run", log)
        try:
            while numbers and "waiting" not in log.read_text():
                assert run.launcher.poll() is None, log.read_text()
                time.sleep(0.05)
            for number in numbers:
                if run.launcher.poll() is None:
                    run.launcher.send_signal(number)
                    time.sleep(0.2)
            if not numbers:
                run.launcher.wait(60)
            run.gone_after_s()
            wanted = {codes.get(kind, -(numbers or (0,))[0])}
            if kind.startswith("interrupt"):  # what torch runs at exit may make Python forget it
                wanted.add(1)
            assert run.launcher.returncode in wanted, log.read_text()
        finally:
            run.end()
