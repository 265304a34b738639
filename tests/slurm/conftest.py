"""``cluster``: a real SLURM of two nodes on this machine, started for the session, ended after it.

It needs root and Debian's packages ``slurm-wlm`` and ``munge``; with ``MCLCLIP_INSTALL_SLURM=1``
the fixture installs them. Keys, sockets, spools and logs lie in a temporary directory, ports are
free ones, so that neither another cluster nor the machine's configuration is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "runuser")
NODES = ("n1", "n2")
START_S = 60.0
HIGHEST_PORT = 17_900
CONFIGURATION = """
ClusterName=one_machine
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for cred_expire: two minutes where nothing is said.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=1,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=10
NodeName=n[1-2] NodeHostname={host} Port=[{first}-{last}] CPUs=1
PartitionName=gpu Nodes=n[1-2] Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-2] State=UP PriorityTier=2
"""


class Cluster:
    """Daemons by name, and the commands of a user of the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self.started: list[str] = []

    # --- daemons -------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all daemons; returns when both nodes are idle."""
        self._start_munge()
        host = socket.gethostname().split(".")[0]
        port = free_ports(1 + len(NODES))
        self.configuration.write_text(
            CONFIGURATION.format(
                host=host, port=port, first=port + 1, last=port + 2, folder=self.folder
            )
        )
        (self.folder / "state").mkdir()
        self._daemon("slurmctld", "slurmctld")
        for node in NODES:
            (self.folder / f"spool.{node}").mkdir()
            self._daemon(f"slurmd.{node}", "slurmd", "-N", node)
        wait_until(
            lambda: self("sinfo", "-h", "-o", "%T %D", check=False).split() == ["idle", "2"],
            START_S,
            self.logs,
        )

    def _start_munge(self) -> None:
        """munged runs as its own user and wants folders that nobody else can write."""
        folder = self.folder / "munge"
        folder.mkdir(mode=0o755)
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        for path in (folder, folder / "key"):
            shutil.chown(path, "munge", "munge")
        files = {"key": "key", "pid": "pid", "log": "log", "seed": "seed"}
        options = [f"--{name}-file={folder / file}" for name, file in files.items()]
        self._daemon(
            "munge", "runuser", "-u", "munge", "--",
            "munged", f"--socket={folder}/socket", *options,
        )  # fmt: skip
        (self.folder / "munge.socket").symlink_to(folder / "socket")
        (self.folder / "munge.pid").symlink_to(folder / "pid")

    def _daemon(self, name: str, *command: str) -> None:
        """A program that goes into the background and writes its process id."""
        self.started.append(name)
        self(*command)

    def stop(self) -> None:
        """Ends jobs, then daemons, the last started first."""
        if "slurmctld" in self.started:
            self("scancel", "--quiet", "--user", "root", check=False)
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not self("squeue", "-h", check=False), 30, self.logs)
        for name in reversed(self.started):
            end(self.folder / f"{name}.pid")

    def logs(self) -> str:
        """The end of every daemon's log."""
        paths = sorted([*self.folder.glob("*.log"), *self.folder.glob("munge/log")])
        return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in paths)

    # --- commands ------------------------------------------------------------------------------

    def __call__(self, *command: str, check: bool = True, **options: str | Path) -> str:
        """The output of a command that knows of this cluster."""
        environment = {**os.environ, "SLURM_CONF": str(self.configuration)}
        done = subprocess.run(
            command,
            env=environment | {k: str(v) for k, v in options.items() if k != "cwd"},
            cwd=options.get("cwd"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """What scontrol knows of a job."""
        words = self("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.partition("=")[::2] for word in words)


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on."""
    for first in range(17_000, HIGHEST_PORT, 10):
        try:
            with contextlib.ExitStack() as stack:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
        except OSError:
            continue
        return first
    raise RuntimeError(f"no {count} free ports in a row below {HIGHEST_PORT}")


def wait_until(condition: Callable[[], object], limit_s: float, report: Callable[[], str]) -> None:
    """Returns when the condition holds; after ``limit_s`` fails with the report."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s\n{report()}"
        time.sleep(0.2)


def end(pid_file: Path) -> None:
    """Ends the process that the file names, by force if it takes too long."""
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            time.sleep(0.1)
            os.kill(pid, 0)
        os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):  # it never started, or has ended
        return


def why_not() -> str | None:
    """Why there can be no cluster here, or None."""
    if os.geteuid() != 0:
        return "a SLURM of one's own needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing and os.environ.get("MCLCLIP_INSTALL_SLURM") == "1" and shutil.which("apt-get"):
        install()
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return (
            f"no {', '.join(missing)}: apt-get install {' '.join(PACKAGES)}, or set "
            "MCLCLIP_INSTALL_SLURM=1 to have the test do it"
        )
    return None


def install() -> None:
    """Installs the packages without their recommendations."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        subprocess.run(
            ["apt-get", "-qq", *command], env=environment, check=True, stdout=subprocess.DEVNULL
        )


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The session's cluster; skips where there can be none."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="mclclip_slurm_"))
    folder.chmod(0o755)  # munged and the nodes' daemons look in
    found = Cluster(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)
