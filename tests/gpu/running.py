"""Runs checks or figures, each in a process of its own, and prints one line for each.

A fault of one (an assertion of CUDA, which spoils its process, a crash, a hang) does not touch the
others. What a check prints goes to a log of its own.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

ROOT = Path(__file__).resolve().parents[2]
WHEELS = (
    "open_clip", "webdataset", "braceexpand", "ftfy", "wcwidth", "pydantic", "pydantic_core",
    "annotated_types", "typing_inspection", "simplejpeg", "shtab",
)  # fmt: skip
"""What a GPU machine without a network is known to lack; see README.md."""
Verdict = Literal["ok", "skip", "FAIL"]


@dataclass(frozen=True)
class Job:
    """A check or a figure, by its catalogue (a module) and name; ended after ``limit_s``."""

    catalogue: str
    name: str
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    """How a job ended; ``found`` is what it returned, or had in partial.json when it failed."""

    job: Job
    verdict: Verdict
    seconds: float
    note: str
    found: Any = None


def unusable(device: str) -> str | None:
    """Why nothing can be run on ``device`` (``auto`` and ``cuda``: the GPU), or None."""
    if device == "cpu" or torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} sees no GPU here"


def hidden_gpu() -> bool:
    """Whether the machine has a GPU that torch should have seen."""
    return Path("/dev/nvidia0").exists()


def missing_wheels() -> list[str]:
    """The packages of ``WHEELS`` that cannot be imported here."""
    return [name for name in WHEELS if find_spec(name) is None]


def machine(device: str) -> str:
    """Where this runs, in one line."""
    where = f"Python {sys.version.split()[0]}, torch {torch.__version__}, {os.cpu_count()} cores"
    if device == "cpu":
        return f"device cpu, {where}"
    properties = torch.cuda.get_device_properties(0)
    memory_gib = properties.total_memory / 2**30
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return (
        f"{properties.name}, {memory_gib:.0f} GiB, capability {properties.major}."
        f"{properties.minor}, CUDA {torch.version.cuda}, NCCL {nccl}, {where}"
    )


def run(
    jobs: Sequence[Job], device: str, out: Path, *, at_once: int, limit_s: float
) -> Iterator[Outcome]:
    """Runs the jobs, up to ``at_once`` side by side, and yields how each ended.

    ``limit_s`` is that of all together: what has not ended by then is ended, and what has not
    begun has failed. Logs and files lie below ``out``.
    """
    deadline = time.monotonic() + limit_s
    waiting, running = list(jobs), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once and time.monotonic() < deadline:
                running.append(_Running(waiting.pop(0), device, out, deadline))
            if time.monotonic() >= deadline:
                yield from (Outcome(job, "FAIL", 0.0, "not run: out of time") for job in waiting)
                waiting = []
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                yield one.outcome()
            time.sleep(0.05)
    finally:
        for one in running:
            one.end()


class _Running:
    """A job in its process."""

    def __init__(self, job: Job, device: str, out: Path, deadline: float) -> None:
        self.job = job
        words = "".join(c if c.isalnum() else "_" for c in job.name)
        self.folder = out / words
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run before
        self.folder.mkdir(parents=True)
        self.result, self.log = self.folder / "result.json", out / f"{words}.log"
        self.begun = time.monotonic()
        self.deadline = min(self.begun + job.limit_s, deadline)
        self.late = False
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.gpu.child", job.catalogue, job.name),
                    *(device, str(self.folder), str(self.result)),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that what it starts ends with it
                env={
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "2",
                    "PYTHONFAULTHANDLER": "1",
                    **os.environ,
                    "PYTHONPATH": path,
                },
            )

    def has_ended(self) -> bool:
        if self.process.poll() is not None:
            return True
        self.late = time.monotonic() > self.deadline
        if self.late:
            self.process.send_signal(signal.SIGABRT)  # it writes where it was into its log
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            self.end()
        return self.late

    def end(self) -> None:
        """Ends the process and what it has started, or left behind, in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def outcome(self) -> Outcome:
        self.end()
        seconds = time.monotonic() - self.begun
        found: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.result.read_text())
        rows = found.get("found")
        with contextlib.suppress(OSError, ValueError):
            rows = rows or json.loads((self.folder / "partial.json").read_text())
        if self.late:
            verdict, note = "FAIL", f"not done after {seconds:.0f} s"
        elif found and self.process.returncode == 0:
            verdict, note = found["verdict"], found["note"]
        else:
            code = self.process.returncode
            ended = f"by signal {-code}" if code < 0 else f"with code {code}"
            verdict, note = "FAIL", f"{found.get('note') or 'its process ended'} {ended}"
        if verdict == "FAIL":
            note = f"{note} (log: {self.log})"
        return Outcome(self.job, verdict, seconds, note, rows)  # type: ignore[arg-type]
