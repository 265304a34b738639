"""Under a real torchrun: no process outlives its launcher, so a restart never has company."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.forks import is_running
from tests.matrix import in_soak, kept

NUM_RANKS = 2
WORKER = """
import os, sys, time
from pathlib import Path

folder, moment = Path(sys.argv[1]), sys.argv[2]
name = f"rank_{os.environ['RANK']}"


def note(name, pid):
    (folder / f".{name}").write_text(str(pid))
    (folder / f".{name}").rename(folder / name)


import torch
from mclclip.cli import process
from mclclip.ranks import collectives, process_group

if moment == "joining":
    process.start()
    note(name, os.getpid())
    if name == "rank_0":
        time.sleep(120)
    process.end(lambda: process_group.init("cpu").rank, debug=False)

context = process_group.init("cpu")
if moment == "finishing":
    assert float(collectives.all_reduce_sum(torch.ones(()))) == context.world_size
    process_group.leave(0)


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, number):
        note(f"loader_of_{name}", os.getpid())
        time.sleep(120)


if moment == "reading":
    loader = torch.utils.data.DataLoader(
        Slow(), num_workers=1, worker_init_fn=process_group.start_loader_worker
    )
    note(name, os.getpid())
    next(iter(loader))
if moment == "waiting in a collective":
    note(name, os.getpid())
    if context.is_main:
        time.sleep(120)
    collectives.barrier()
time.sleep(120)
"""


def survivors(pids: list[int]) -> list[int]:
    """Those that still run after a while."""
    deadline = time.monotonic() + 60
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


@contextmanager
def torchrun(folder: Path, moment: str) -> Iterator[subprocess.Popen[bytes]]:
    script = folder / "worker.py"
    script.write_text(WORKER)
    root = str(Path(__file__).parents[2])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(NUM_RANKS), str(script), str(folder), moment),
        ],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()
        for pid in pids_in(folder):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def pids_in(folder: Path) -> list[int]:
    # pathlib's * finds hidden names as well: those are being written.
    names = (path for path in folder.glob("*rank_*") if not path.name.startswith("."))
    return [int(path.read_text()) for path in names]


def pids_when(folder: Path, count: int) -> list[int]:
    """The pids of ``count`` processes, once all have come to the moment."""
    deadline = time.monotonic() + 300
    while len(pids := pids_in(folder)) < count:
        assert time.monotonic() < deadline, f"only {pids} of {count} processes"
        time.sleep(0.02)
    return pids


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
@pytest.mark.parametrize(
    ("moment", "count"),
    kept([("waiting in a collective", NUM_RANKS), ("reading", 2 * NUM_RANKS)], 1),
)
@in_soak
def test_nobody_survives_a_killed_launcher(tmp_path: Path, moment: str, count: int) -> None:
    """Once a rank has started; one that still imports then ends by the limit of its peers."""
    with torchrun(tmp_path, moment) as launcher:
        pids = pids_when(tmp_path, count)
        assert not [pid for pid in pids if not is_running(pid)]
        launcher.kill()
        launcher.wait()
        assert not survivors(pids)


@in_soak
def test_a_killed_worker_takes_all_with_it(tmp_path: Path) -> None:
    with torchrun(tmp_path, "waiting in a collective") as launcher:
        pids = pids_when(tmp_path, NUM_RANKS)
        os.kill(pids[0], signal.SIGKILL)
        assert launcher.wait(timeout=110) == 1
        assert not survivors(pids)


@in_soak
def test_a_worker_killed_before_it_joined_is_not_waited_for(tmp_path: Path) -> None:
    with torchrun(tmp_path, "joining") as launcher:
        pids = pids_when(tmp_path, NUM_RANKS)
        time.sleep(1.0)
        os.kill(int((tmp_path / "rank_0").read_text()), signal.SIGKILL)
        # torchrun asks the others to leave, and kills them after 30 s.
        assert launcher.wait(timeout=25) == 1
        assert not survivors(pids)


@in_soak
def test_a_finished_run_looks_finished(tmp_path: Path) -> None:
    with torchrun(tmp_path, "finishing") as launcher:
        assert launcher.wait(timeout=300) == 0
