"""``python -m tests.gpu``: checks what only a GPU can show; see README.md.

Every check runs in a process of its own and gives one line; the exit code is 1 where one failed.
Without a GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tests.gpu import running
from tests.gpu.running import Job, Outcome

DEVICE = "MCLCLIP_GPU_DEVICE"
LIMIT_S = 570.0
CPU_FACTOR = 8.0  # that a limit is longer by on a CPU, whose cores may have other work


def parser(description: str) -> argparse.ArgumentParser:
    """The options of checks and figures."""
    found = argparse.ArgumentParser(prog="python -m tests.gpu", description=description)
    found.add_argument(
        "--device",
        choices=["auto", "cuda", "cpu"],
        default=os.environ.get(DEVICE, "auto"),
        help=f"auto: the GPU, if there is one; cpu: the same at small sizes (default: {DEVICE})",
    )
    found.add_argument("--only", nargs="+", default=[], metavar="WORD", help="in their names")
    found.add_argument("--out", type=Path, help="folder of logs (default: a temporary one)")
    found.add_argument(
        "--limit-s", type=float, help=f"seconds for all together (default: {LIMIT_S:g} on a GPU)"
    )
    found.add_argument("--list", action="store_true", help="print the names and leave")
    return found


def ready(options: argparse.Namespace) -> int | None:
    """Says why nothing can be run here; returns the exit code then, else None."""
    if (why := running.unusable(options.device)) is not None:
        if running.hidden_gpu() or options.device == "cuda":
            print(f"{why}, though there should be one: see 'mclclip doctor' and nvidia-smi")
            return 1
        print(f"{why}: nothing was run ({DEVICE}=cpu runs the same on the CPU, at small sizes)")
        return 0
    if missing := running.missing_wheels():
        print(f"missing: {', '.join(missing)}: see tests/gpu/README.md for the wheels to carry")
        return 1
    return None


def jobs_of(catalogue: str, options: argparse.Namespace) -> list[Job]:
    """The entries of a catalogue whose names hold one of the words (all, where there is none)."""
    words, factor = options.only, CPU_FACTOR if options.device == "cpu" else 1.0
    return [
        Job(catalogue, name, factor * entry.limit_s)
        for name, entry in import_module(catalogue).entries().items()
        if not words or any(word in name for word in words)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; returns the exit code."""
    found = parser("Checks on one GPU what nothing else can show; under ten minutes.")
    found.add_argument(
        "--jobs", type=int, help="checks side by side (default: by cores, at most 4)"
    )
    options = found.parse_args(arguments)
    if not options.list and (code := ready(options)) is not None:
        return code
    jobs = jobs_of("tests.gpu.checks", options)
    if options.list:
        print("\n".join(job.name for job in jobs))
        return 0
    device = "cpu" if options.device == "cpu" else "cuda"
    out = options.out or Path(tempfile.mkdtemp(prefix="mclclip-gpu-"))
    at_once = options.jobs or (1 if device == "cpu" else max(1, min(4, (os.cpu_count() or 1) // 3)))
    print(f"{running.machine(device)}\n\n{_row('check', 's', 'verdict', '')}")
    print(_row("-" * 62, "-" * 6, "-" * 7, "-" * 20), flush=True)
    begun, outcomes = time.monotonic(), []
    for outcome in running.run(jobs, device, out, at_once=at_once, limit_s=limit_s(options)):
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
    return summary(outcomes, time.monotonic() - begun, out)


def limit_s(options: argparse.Namespace) -> float:
    """Seconds for all together."""
    given: float | None = options.limit_s
    return given or LIMIT_S * (CPU_FACTOR if options.device == "cpu" else 1.0)


def summary(outcomes: Sequence[Outcome], seconds: float, out: Path) -> int:
    """Prints the counts and returns the exit code."""
    count = {v: sum(o.verdict == v for o in outcomes) for v in ("ok", "skip", "FAIL")}
    counts = f"{count['ok']} ok, {count['skip']} skipped, {count['FAIL']} failed"
    print(f"\n{counts} in {seconds:.0f} s; logs in {out}")
    return 1 if count["FAIL"] or not outcomes else 0


def _line(outcome: Outcome) -> str:
    return _row(outcome.job.name, f"{outcome.seconds:.1f}", outcome.verdict, outcome.note)


def _row(name: str, seconds: str, verdict: str, note: str) -> str:
    return f"{name:62s}  {seconds:>6s}  {verdict:7s}  {note}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
