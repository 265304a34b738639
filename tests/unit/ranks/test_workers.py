"""Workers end with their parent, however and whenever the parent died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forks import is_running

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")

WAIT_S = 120.0  # for what takes moments, on a busy machine

CHILD = """
import os, sys, time
from pathlib import Path
from mclclip.ranks.workers import die_with_parent
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


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), CHILD])
    child = int(waited_for(tmp_path / "pid"))
    waited_for(tmp_path / "asked")
    assert is_running(child)
    parent.kill()
    parent.wait()
    assert ended(child)


# The first lines of torch's worker wait for a lock that another thread had as it was forked.
STUCK = """
import os, sys, time
from pathlib import Path
import torch
from mclclip.data.loader import Loader

def wait(_):
    Path(sys.argv[1], "written").write_text(str(os.getpid()))
    Path(sys.argv[1], "written").rename(Path(sys.argv[1], "pid"))
    time.sleep(600)

torch.manual_seed = wait
loader = Loader(torch.zeros(4), [0, 1], num_workers=1, timeout_s=600, describe=str)
next(iter(loader))
"""


def test_a_worker_that_has_not_begun_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path)])
    worker = int(waited_for(tmp_path / "pid"))
    parent.kill()
    parent.wait()
    assert ended(worker)


# --- a pool that is not waited for ----------------------------------------------------------------

# Two workers are at something that never ends when the program is asked to leave.
BUSY = """
import os

def work(folder, number):
    # Renamed when it is whole: the program ends this worker as soon as it sees the file.
    written = folder / f"{number}.written"
    written.write_text(str(os.getpid()))
    written.rename(folder / f"{number}.pid")
    while number:
        pass
    return number
"""
# A script as people write it, which no worker must run once more.
POOL = """
import sys, time
from pathlib import Path
from busy import work
from mclclip.ranks import workers, signals

folder = Path(sys.argv[1])
folder.joinpath("runs").open("a").write("x")
signals.install_handlers()
calls = [(folder, number) for number in (0, 1, 2)]
try:
    for done in workers.map_in_pool(work, calls, 2):
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
    (tmp_path / "busy.py").write_text(BUSY)
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
    assert (tmp_path / "runs").read_text() == "x"


SIBLINGS = """
import multiprocessing, os, sys, time
from pathlib import Path
from mclclip.ranks.workers import start_worker

def work(folder, number):
    while not (folder / "gone").exists():  # the owner
        time.sleep(0.01)
    time.sleep(number)
    start_worker()
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
    """A younger worker that is still starting holds the older one's pipe to the owner open."""
    (tmp_path / "program.py").write_text(SIBLINGS)
    subprocess.run([sys.executable, str(tmp_path / "program.py"), str(tmp_path)], check=True)
    (tmp_path / "gone").touch()
    for number in range(2):
        assert ended(int((tmp_path / f"{number}.pid").read_text()))
    assert not list(tmp_path.glob("*.began"))
