"""Two hosts: network namespaces joined by a cable that can be cut, ``multinode.sh`` in both.

As in real life both see the same files, and each has its own name. It needs root, iproute2 and
unshare; namespaces that a killed test left behind are removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mclclip.checkpoint import step_files
from tests import tiny
from tests.e2e.conftest import Shell, Started, rows_of, training_in
from tests.matrix import in_soak

pytestmark = pytest.mark.slow

STEPS, CUT_AFTER = 20, 3
PEER_TIMEOUT_S = 10.0
# A later rank waits some seconds before it ends, torchrun ends within a second or two of its rank,
# and launch/common.sh waits six seconds for one that does not; the rest is for a busy machine.
END_S = PEER_TIMEOUT_S + 25.0
RUN_S = 180.0
PREFIX = "mclclip-"
TRAINING = "stage_0/train"
DEVICE, PORT = "veth0", 29500
OPTIONS = (
    f"base.steps={STEPS}",
    "base.log_every=1",
    "base.checkpoint.every=1",
    f"peer_timeout_s={PEER_TIMEOUT_S:g}",
)


# --- hosts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A network namespace, which is also the host's name, and its address."""

    name: str
    number: int

    @property
    def address(self) -> str:
        return f"10.0.0.{self.number + 1}"

    def command(self, *words: object) -> list[str]:
        """``words`` as a command line of this host."""
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts"]
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return [*inside, *named, *map(str, words)]

    def cable(self, state: str) -> None:
        """Plugs this host's end of the cable in (``up``), or out (``down``)."""
        ip("-netns", self.name, "link", "set", DEVICE, state)


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def join(a: Host, b: Host) -> None:
    """Makes the namespaces, and a cable between them."""
    for host in (a, b):
        ip("netns", "add", host.name)
    ends = [["name", DEVICE, "netns", host.name] for host in (a, b)]
    ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for host in (a, b):
        ip("-netns", host.name, "address", "add", f"{host.address}/24", "dev", DEVICE)
        ip("-netns", host.name, "link", "set", "lo", "up")
        host.cable("up")


def remove(name: str) -> None:
    """Ends what runs in a namespace, and the namespace."""
    for pid in ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "delete", name)


def leftovers() -> list[str]:
    """Namespaces of tests that are gone, and of this one."""
    names = [line.split()[0] for line in ip("netns", "list").splitlines()]
    owned = [(name, name.split("-")[1]) for name in names if name.startswith(PREFIX)]
    mine = str(os.getpid())
    return [name for name, pid in owned if pid == mine or not Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    if missing := [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    found = [Host(f"{PREFIX}{os.getpid()}-{side}", number) for number, side in enumerate("ab")]
    try:
        for name in leftovers():
            remove(name)
        join(*found)
    except RuntimeError as error:
        for name in leftovers():
            remove(name)
        pytest.skip(f"network namespaces are not to be had here: {error}")
    try:
        yield found
    finally:
        for host in found:
            remove(host.name)


# --- trainings ----------------------------------------------------------------------------------


class Job:
    """``multinode.sh`` training stage 0 on all hosts; ``with`` ends what is left of it."""

    def __init__(self, hosts: list[Host], config: Path, run_dir: Path, logs: Path) -> None:
        logs.mkdir()
        self.states = [logs / f"{host.number}.state" for host in hosts]
        self.sides = [
            Started(
                host.command(tiny.ROOT / "launch" / "multinode.sh", *train(config, run_dir)),
                run_dir,
                logs / f"{host.number}.log",
                HEAD_ADDRESS=f"{hosts[0].address}:{PORT}",
                NUM_NODES=len(hosts),
                NODE_RANK=host.number,
                NPROC_PER_NODE=1,
                LOCAL_ADDRESS=host.address,  # nobody knows the hosts' names
                GLOO_SOCKET_IFNAME=DEVICE,
                PYTHON=sys.executable,
                MCLCLIP_STATE_FILE=self.states[host.number],
            )
            for host in hosts
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for side in self.sides:
            side.end()

    @property
    def logs(self) -> list[str]:
        return [side.log.read_text() for side in self.sides]

    def wait(self, limit_s: float) -> tuple[list[int], list[float]]:
        """Exit codes of all sides, and after how many seconds they ended."""
        start, after_s = time.monotonic(), dict[int, float]()
        while len(after_s) < len(self.sides):
            now_s = time.monotonic() - start
            for number, side in enumerate(self.sides):
                if number not in after_s and side.launcher.poll() is not None:
                    after_s[number] = now_s
            left = [number for number in range(len(self.sides)) if number not in after_s]
            assert now_s < limit_s, (f"hosts {left} go on after {limit_s:g} s", *self.logs)
            time.sleep(0.02)
        for side in self.sides:
            side.gone_after_s()
        codes = [side.launcher.returncode for side in self.sides]
        return codes, [round(after_s[number], 1) for number in range(len(self.sides))]

    def wait_for_rows(self, count: int) -> None:
        """Until so many steps are done."""
        deadline = time.monotonic() + RUN_S
        while len(rows_of(self.sides[0].run_dir / TRAINING)) < count:
            assert time.monotonic() < deadline, self.logs
            assert None in [side.launcher.poll() for side in self.sides], self.logs
            time.sleep(0.002)


def train(config: Path, run_dir: Path) -> list[object]:
    return ["train", "--stage", 0, "--config", config, f"run_dir={run_dir}"]


def state_in(path: Path) -> tuple[str, bool]:
    record = json.loads(path.read_text())
    return record["state"], record["requeue"]


@pytest.fixture(scope="module")
def one_host(
    shell: Shell, indexed: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What two ranks on one host train."""
    run_dir = shutil.copytree(indexed[1], tmp_path_factory.mktemp("one_host") / "run")
    shell.ok(*train(indexed[0], run_dir), ranks=2)
    return training_in(run_dir / TRAINING)


# --- the tests ----------------------------------------------------------------------------------


def test_two_hosts_train_as_one(
    hosts: list[Host], indexed: Any, one_host: Any, tmp_path: Path
) -> None:
    """Bit for bit as two ranks on one host."""
    shutil.copytree(indexed[1], tmp_path / "run")
    with Job(hosts, indexed[0], tmp_path / "run", tmp_path / "logs") as job:
        codes, after_s = job.wait(RUN_S)
        assert codes == [0, 0], job.logs
    print(f"finished after {after_s} s")
    for path in (tmp_path / "run" / "run_state.json", *job.states):
        assert state_in(path) == ("finished", False)
    assert "over 2 ranks" in job.logs[0]
    found = training_in(tmp_path / "run" / TRAINING)
    assert found == one_host and len(found["rows"]) == STEPS


@in_soak
def test_a_cut_cable_ends_the_job_on_both_sides(
    hosts: list[Host], indexed: Any, one_host: Any, tmp_path: Path
) -> None:
    """Each says in time that the other does not answer; then the same command goes on."""
    run_dir, (config, prepared) = tmp_path / "run", indexed
    shutil.copytree(prepared, run_dir)
    with Job(hosts, config, run_dir, tmp_path / "cut") as job:
        job.wait_for_rows(CUT_AFTER)
        hosts[1].cable("down")
        try:
            codes, after_s = job.wait(END_S)
        finally:
            hosts[1].cable("up")
    done = len(rows_of(run_dir / TRAINING))
    print(f"cut after step {done}: ended after {after_s} s (limit {END_S:g})")
    assert CUT_AFTER <= done < STEPS, "the run was over before the cut"
    assert codes == [1, 1], job.logs
    for log in job.logs:
        (said,) = [line for line in log.splitlines() if line.startswith("mclclip: ")]
        assert "another rank" in said and "peer_timeout_s" in said and "in step" in said, job.logs
    for path in (run_dir / "run_state.json", *job.states):
        assert state_in(path) == ("failed", True)
    saved = step_files.steps(run_dir / TRAINING / "checkpoints")[-1]
    with Job(hosts, config, run_dir, tmp_path / "again") as job:
        assert job.wait(RUN_S)[0] == [0, 0], job.logs
    assert f"{STEPS} steps from {saved}," in job.logs[0]
    assert state_in(run_dir / "run_state.json") == ("finished", False)
    assert training_in(run_dir / TRAINING) == one_host
