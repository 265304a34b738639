"""``shell``: the command line in processes of its own, without the seconds that imports take.

A server process imports everything once and forks a process per command (and per rank), which
calls ``entry.command`` as ``python -m mclclip`` does. Ranks find each other
as under torchrun, by environment variables.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import forks, tiny


@dataclass(frozen=True)
class Finished:
    """How a command ended: exit code and stderr of each rank (a negative code is a signal)."""

    codes: list[int]
    stderrs: list[str]
    stdout: str

    @property
    def code(self) -> int:
        """The exit code of the only rank, or the one that all ranks share."""
        assert len(set(self.codes)) == 1, (self.codes, self.stderrs)
        return self.codes[0]

    @property
    def stderr(self) -> str:
        """The first rank's stderr."""
        return self.stderrs[0]

    def complaints(self) -> list[str]:
        """mclclip's own last words on the first rank's stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("mclclip: ")]

    def refusal(self) -> str:
        """The one line in which every rank refused."""
        assert self.code == 2, (self.codes, self.stderrs)
        assert "Traceback" not in "".join(self.stderrs), self.stderrs
        (line,) = self.complaints()
        return line


# --- what may happen inside a command -----------------------------------------------------------


def at_call(
    owner: Any, name: str, count: int, act: Callable[[], object], before: bool = False
) -> None:
    """From now on ``act`` is called after (or before) the n-th call of a function of ``owner``."""
    original, calls = getattr(owner, name), itertools.count(1)

    def called(*args: Any, **kwargs: Any) -> Any:
        due = next(calls) == count
        if due and before:
            act()
        result = original(*args, **kwargs)
        if due and not before:
            act()
        return result

    setattr(owner, name, called)


@dataclass(frozen=True)
class Send:
    """A signal to this process and, where these are named, to its loader workers."""

    number: int
    to: tuple[str, ...] = ("self",)

    def __call__(self) -> None:
        me = os.getpid()
        if "workers" in self.to:
            for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
                os.kill(int(child), self.number)
        if "self" in self.to:
            os.kill(me, self.number)


@dataclass(frozen=True)
class KillAfter:
    """The process kills itself with -9 after its n-th call of ``update`` (engine) or ``save``
    (checkpoints): the worst that can happen at a step."""

    what: str
    count: int

    def __call__(self) -> None:
        from mclclip.checkpoint.checkpoints import Checkpoints
        from mclclip.engines.engine import Engine

        owner = {"update": Engine, "save": Checkpoints}[self.what]
        at_call(owner, self.what, self.count, Send(signal.SIGKILL))


@dataclass(frozen=True)
class KillAtFile:
    """The process kills itself with -9 when it begins to write its n-th file, or (``renamed``)
    right after that file got its name."""

    count: int
    renamed: bool

    def __call__(self) -> None:
        original, calls = os.replace, []

        def replace(source: Any, target: Any) -> None:
            calls.append(target)
            due = len(calls) == self.count
            if due and not self.renamed:
                os.kill(os.getpid(), signal.SIGKILL)
            original(source, target)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replace  # type: ignore[assignment]


@dataclass(frozen=True)
class Touch:
    """Makes a file, as a user would in a running job's directory."""

    path: Path

    def __call__(self) -> None:
        self.path.touch()


# Columns of metrics.jsonl that do not hang on the machine.
KEPT = ("step", "samples_seen", "loss", "lr", "logit_scale", "grad_norm", "bad_samples")


def rows_of(training: Path) -> list[dict[str, Any]]:
    """The rows of a training's metrics, without half a last one."""
    path = training / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def training_in(directory: Path) -> dict[str, Any]:
    """What a training results in: its last weights and moments bit for bit, and its rows."""
    from mclclip.checkpoint import step_files

    checkpoints = directory / "checkpoints"
    last = step_files.steps(checkpoints)[-1]
    found: dict[str, Any] = {"step": last}
    for part in ("model", "optimizer"):
        state = step_files.load_model_state(checkpoints, last, part)
        assert state
        found[part] = {name: tensor.numpy().tobytes() for name, tensor in state.items()}
    return found | {"rows": [{name: row[name] for name in KEPT} for row in rows_of(directory)]}


def state_of(run_dir: Path) -> dict[str, Any]:
    """What ``run_state.json`` says."""
    state: dict[str, Any] = json.loads((run_dir / "run_state.json").read_text())
    return state


@dataclass(frozen=True)
class RecordBatches:
    """Every batch that this rank trains on, as ``NNNNN_rankR.npz`` below ``directory``."""

    directory: Path

    def __call__(self) -> None:
        from mclclip.engines.engine import Engine

        original, calls = Engine.update, itertools.count()
        self.directory.mkdir(exist_ok=True)

        def update(engine: Any, batch: Any, lr: float) -> Any:
            path = self.directory / f"{next(calls):05d}_rank{os.environ.get('RANK', '0')}.npz"
            np.savez(path, step=batch.step, sample_id=batch.sample_id, group_ids=batch.group_ids)
            return original(engine, batch, lr)

        setattr(Engine, "update", update)  # noqa: B010

    def sample_ids(self, ranks: int = 1) -> np.ndarray:
        """int64 [updates, global_batch], of all ranks in rank order."""
        return self._read("sample_id", ranks)

    def group_ids(self, ranks: int = 1) -> np.ndarray:
        """int64 [updates, global_batch], truncated as the mask compares them."""
        return self._read("group_ids", ranks)

    def _read(self, name: str, ranks: int) -> np.ndarray:
        by_rank = []
        for rank in range(ranks):
            paths = sorted(self.directory.glob(f"*_rank{rank}.npz"))
            by_rank.append(np.stack([np.load(path)[name].reshape(-1) for path in paths]))
        return np.concatenate(by_rank, axis=1)


# --- commands -----------------------------------------------------------------------------------


def _child(
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    output: tuple[Path, Path],
    inside: Callable[[], None] | None,
) -> None:
    """One rank of one command, in a forked process."""
    for number, path in enumerate(output, start=1):
        sys.__dict__["stdout" if number == 1 else "stderr"].flush()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # the default
    if inside is not None:
        inside()
    from mclclip.cli import entry

    sys.argv[1:] = arguments
    entry.command()


LABELLED = ("index", "train --stage 0", "export --stage 0", "embed --stage 0", "cluster --stage 0")


class Shell:
    """``shell("train", "--stage", "1", ..., ranks=2)`` runs ``mclclip train --stage 1 ...``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls = itertools.count()
        self.context = forks.context()

    def __call__(
        self,
        *arguments: object,
        ranks: int = 1,
        inside: Callable[[], None] | None = None,
        timeout_s: float = 900.0,
    ) -> Finished:
        folder = self.directory / f"{next(self.calls):04d}"
        folder.mkdir()
        outputs = [(folder / f"{r}.out", folder / f"{r}.err") for r in range(ranks)]
        words = tuple(map(str, arguments))
        processes = [
            self.context.Process(
                target=_child, args=(words, environment, output, inside), daemon=False
            )
            for environment, output in zip(_environments(ranks), outputs, strict=True)
        ]
        for process in processes:
            process.start()
        _wait(processes, timeout_s)
        codes = [process.exitcode for process in processes]
        texts = [[path.read_text() for path in output] for output in outputs]
        assert None not in codes
        stderrs = [stderr for _, stderr in texts]
        return Finished([code or 0 for code in codes], stderrs, texts[0][0])

    def ok(self, *arguments: object, **options: Any) -> Finished:
        """The same, for a command that must succeed."""
        finished = self(*arguments, **options)
        assert finished.code == 0, "\n".join(finished.stderrs)
        return finished

    def through(self, *arguments: object, verbs: Iterable[str] = LABELLED, ranks: int = 1) -> None:
        """Verbs one after the other with the same arguments; of stage 0 as far as its labels."""
        for verb in verbs:
            self.ok(*verb.split(), *arguments, ranks=ranks)

    def refused(self, *arguments: object, **options: Any) -> str:
        """The same, for a command that must be refused: the one line in which it is."""
        return self(*arguments, **options).refusal()


def _environments(ranks: int) -> list[dict[str, str]]:
    common = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if ranks == 1:
        return [common]
    port = str(_free_port())
    common |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _free_port() -> int:
    """Below those that systems give to outgoing connections: the other test process opens many,
    and one could take the port before the first rank listens there."""
    for port in random.SystemRandom().sample(range(10_000, 16_000), 100):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port
    raise RuntimeError("no port between 10,000 and 16,000 is free")


def _wait(processes: list[ForkServerProcess], timeout_s: float) -> None:
    """Until all have ended; kills what has not ended in time."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.1))
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()


# --- under torchrun -----------------------------------------------------------------------------

SURVIVE_S = 90.0  # torchrun itself needs some of it, on a busy machine


class Started:
    """``command`` in processes that a variable of their environment marks; what it says goes to
    ``log``, and ``variables`` into its environment."""

    def __init__(self, command: list[str], run_dir: Path, log: Path, **variables: object) -> None:
        self.run_dir, self.log = run_dir, log
        self.mark = f"MCLCLIP_TEST_LOG={log}"
        words = {name: str(value) for name, value in variables.items()}
        with open(log, "wb") as output:
            self.launcher = subprocess.Popen(
                command,
                env=tiny.environment() | words | dict([self.mark.split("=", 1)]),
                stdout=output,
                stderr=output,
            )

    def processes(self) -> list[int]:
        """Process ids of all that still run of it."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self.owns(pid)]

    def owns(self, pid: int) -> bool:
        """True for a running process of this start (zombies have ended)."""
        try:
            marked = self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return marked and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][1] not in "ZX"
        except OSError:
            return False

    def workers(self) -> list[int]:
        """The ranks: children of the launcher, as long as it runs."""
        launcher = self.launcher.pid
        try:
            listed = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
        except OSError:
            return []
        return [pid for pid in map(int, listed.split()) if self.owns(pid)]

    def has_the_lock(self) -> bool:
        """True once the first rank is at work (half a lock file is none)."""
        try:
            return self.owns(json.loads((self.run_dir / "run.lock").read_text())["pid"])
        except (OSError, ValueError):
            return False

    def gone_after_s(self) -> float:
        """Seconds until no process is left; more than SURVIVE_S fails."""
        start = time.monotonic()
        while left := self.processes():
            assert time.monotonic() - start < SURVIVE_S, f"{left} survive\n{self.log.read_text()}"
            time.sleep(0.02)
        self.launcher.wait()
        return time.monotonic() - start

    def end(self) -> None:
        """Kills whatever is left of it."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("shell"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data of most tests here (read only)."""
    return tiny.make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def based(shell: Shell, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A configuration, and a run up to the labels of stage 1; tests copy it."""
    folder = tmp_path_factory.mktemp("based")
    config = tiny.write_config(folder / "config.yaml", folder / "run", data)
    shell.through("--config", config)
    return config, folder / "run"


@pytest.fixture(scope="module")
def indexed(
    shell: Shell,
    data: Path,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """A configuration with the module's OPTIONS, and a run directory that has its index."""
    folder = tmp_path_factory.mktemp("indexed")
    options = request.module.OPTIONS
    config = tiny.write_config(folder / "config.yaml", folder / "run", data, *options)
    shell.ok("index", "--config", config)
    return config, folder / "run"
