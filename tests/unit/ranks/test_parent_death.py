"""Processes end with the process that started them, however and whenever that one died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mclclip.ranks import parent_death
from tests.forks import is_running

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")

WAIT_S = 120.0  # for what takes moments, on a busy machine

CHILD = """
import os, sys, time
from pathlib import Path
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.01)
from mclclip.ranks.parent_death import die_with_parent
die_with_parent()
Path(sys.argv[1], "asked").touch()
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
Path(sys.argv[1], "pid").write_text(str(child.pid))
time.sleep(600)
"""


def waited_for(path: Path) -> str:
    deadline = time.monotonic() + WAIT_S
    while not path.exists() or (path.name.endswith("pid") and not path.read_text()):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)
    return path.read_text()


def ended(pid: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def start(folder: Path, **environment: str) -> tuple[subprocess.Popen[bytes], int]:
    """A parent and the pid of its child, which asks once there is a file ``go``."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), CHILD],
        env=os.environ | environment,
    )
    return parent, int(waited_for(folder / "pid"))


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path, by: signal.Signals) -> None:
    (tmp_path / "go").touch()
    parent, child = start(tmp_path)
    waited_for(tmp_path / "asked")
    assert is_running(child)
    parent.send_signal(by)
    parent.wait()
    assert ended(child)


def test_a_worker_whose_torchrun_died_before_it_could_ask_ends(tmp_path: Path) -> None:
    """Importing takes seconds: the launcher may be gone when the import is done."""
    parent, child = start(tmp_path, TORCHELASTIC_RUN_ID="x")
    parent.kill()
    parent.wait()
    (tmp_path / "go").touch()
    assert ended(child)
    assert not (tmp_path / "asked").exists()


def test_a_worker_of_a_living_torchrun_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert not parent_death._launcher_is_gone(os.getpid())  # this is a Python program
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not parent_death._launcher_is_gone(1)  # not started by torchrun: nothing to miss


def test_a_wrapper_between_torchrun_and_its_worker_is_no_orphan(tmp_path: Path) -> None:
    """torchrun --no-python ./bind.sh: the parent is a shell, torchrun is above it."""
    code = (
        "import os; from mclclip.ranks import parent_death as p; "
        "print(open(f'/proc/{os.getppid()}/comm').read().strip(), "
        "p._launcher_is_gone(os.getppid()))"
    )
    script = tmp_path / "bind.sh"
    script.write_text(f'#!/bin/sh\n"$PROGRAM" -c "{code}"\necho done\n')
    script.chmod(0o755)
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "x", "PROGRAM": sys.executable}
    shown = subprocess.run([script], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["bind.sh", "False", "done"]


# --- workers of a program that ends -------------------------------------------------------------

# A worker says what it is about to do, its parent ends as it is told to.
PROGRAM = """
import multiprocessing, signal, sys, time
from pathlib import Path
from mclclip.ranks.parent_death import start_pool_worker

def ignoring(folder):
    start_pool_worker()
    (folder / "ready").touch()
    time.sleep(600)

def about_to_ignore(folder):
    signal.signal(signal.SIGTERM, lambda *_: None)
    (folder / "ready").touch()
    time.sleep(0.3)
    ignoring(folder)

def tidy(folder):
    def leave(*_):
        signal.signal(signal.SIGTERM, lambda *_: (folder / "asked_twice").touch())
        time.sleep(0.3)
        (folder / "tidied").touch()
        sys.exit()
    signal.signal(signal.SIGTERM, leave)
    (folder / "ready").touch()
    time.sleep(600)

def main(folder, context, worker, how):
    child = context.Process(target=globals()[worker], args=(folder,), daemon=True)
    child.start()
    while not (folder / "ready").exists():
        time.sleep(0.01)
    (folder / "pid").write_text(str(child.pid))
    if how == "raise":
        raise KeyError("its own error")
    if how == "exit":
        sys.exit(7)

if __name__ == "__main__":
    folder, (method, where, *rest) = Path(sys.argv[1]), sys.argv[2:]
    context = multiprocessing.get_context(method)
    if where == "here":
        main(folder, context, *rest)
    child = context.Process(target=main, args=(folder, context, *rest))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def ends(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and stderr of the program, whose worker must be gone."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "program.py"), str(folder), *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=WAIT_S)
    assert not is_running(int((folder / "pid").read_text()))
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("method", "where", "how", "code"),
    [
        ("fork", "here", "end", 0),
        ("fork", "here", "exit", 7),
        ("spawn", "here", "raise", 1),
        ("fork", "in_a_child", "exit", 7),
        ("spawn", "in_a_child", "end", 0),
    ],
)
def test_a_program_that_ends_ends_its_workers(
    tmp_path: Path, method: str, where: str, how: str, code: int
) -> None:
    """With its own exit code and nothing said of the workers, however it ends."""
    found, said = ends(tmp_path, method, where, "ignoring", how)
    assert found == code
    assert said.strip().endswith("KeyError: 'its own error'") if how == "raise" else not said


def test_a_worker_that_ignores_signals_too_late_is_ended_too(tmp_path: Path) -> None:
    assert ends(tmp_path, "fork", "here", "about_to_ignore", "exit") == (7, "")


def test_another_daemon_of_the_program_may_tidy_up(tmp_path: Path) -> None:
    """It hears SIGTERM once and is waited for, as in a program without loaders."""
    assert ends(tmp_path, "fork", "here", "tidy", "exit") == (7, "")
    assert (tmp_path / "tidied").exists() and not (tmp_path / "asked_twice").exists()


# --- a pool that is not waited for ----------------------------------------------------------------

# Two workers are at something that never ends when the program is asked to leave.
POOL = """
import os, sys, time
from pathlib import Path
from mclclip.ranks import parent_death, signals

def work(folder, number):
    # Renamed when it is whole: the program ends this worker as soon as it sees the file.
    written = folder / f"{number}.written"
    written.write_text(str(os.getpid()))
    written.rename(folder / f"{number}.pid")
    while number:
        pass
    return number

if __name__ == "__main__":
    signals.install_handlers()
    folder = Path(sys.argv[1])
    calls = [(folder, number) for number in (0, 1, 2)]
    try:
        for done in parent_death.map_in_pool(work, calls, 2):
            (folder / "first").touch()
            while not (folder / "1.pid").exists():
                time.sleep(0.01)
            if sys.argv[2] == "stop":
                break
    except signals.Preempted as error:
        print("left", error, flush=True)
    except RuntimeError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "stop", "killed"])
def test_workers_that_never_end_are_not_waited_for(tmp_path: Path, how: str) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    command = [sys.executable, str(tmp_path / "pool.py"), str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        pids = [int(waited_for(tmp_path / "1.pid")), 0]
        if how != "stop":
            pids[1] = int(waited_for(tmp_path / "2.pid"))
        waited_for(tmp_path / "first")
        if how == "SIGTERM":
            program.send_signal(signal.SIGTERM)
        elif how == "killed":
            os.kill(pids[0], signal.SIGKILL)
        said, _ = program.communicate(timeout=WAIT_S)  # they never end by themselves
    assert program.returncode == 0
    assert all(ended(pid) for pid in pids if pid)
    expected = {
        "SIGTERM": "left SIGTERM\n",
        "stop": "",
        "killed": "one of 2 worker processes was killed from outside, probably because the memory "
        "ran out: use fewer of them\n",
    }
    assert said == expected[how]


SIBLINGS = """
import multiprocessing, os, sys, time
from pathlib import Path
from mclclip.ranks.parent_death import start_pool_worker

def work(folder, number):
    while not (folder / "gone").exists():  # the owner
        time.sleep(0.01)
    time.sleep(number)
    start_pool_worker()
    (folder / f"{number}.began").touch()
    time.sleep(600)

if __name__ == "__main__":
    folder, context = Path(sys.argv[1]), multiprocessing.get_context("fork")
    for number in range(2):
        child = context.Process(target=work, args=(folder, number))
        child.start()
        (folder / f"{number}.pid").write_text(str(child.pid))
    os._exit(0)
"""


def test_forked_siblings_do_not_hide_that_their_owner_is_gone(tmp_path: Path) -> None:
    """The younger one, still starting, holds the older one's pipe to the owner open."""
    (tmp_path / "program.py").write_text(SIBLINGS)
    subprocess.run([sys.executable, str(tmp_path / "program.py"), str(tmp_path)], check=True)
    (tmp_path / "gone").touch()
    for number in range(2):
        assert ended(int((tmp_path / f"{number}.pid").read_text()))
    assert not list(tmp_path.glob("*.began"))
