"""``python -m tests.gpu.bench``: figures of one GPU, one after the other; see README.md.

Every figure is measured in a process of its own. The exit code is 1 where one failed; without a
GPU it says so and ends with 0.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu import running
from tests.gpu.__main__ import jobs_of, limit_s, parser, ready
from tests.gpu.running import Outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; returns the exit code."""
    found = parser("Figures of one GPU, with units; under ten minutes.")
    found.add_argument("--json", type=Path, help="where figures are written (default: in --out)")
    options = found.parse_args(arguments)
    if not options.list and (code := ready(options)) is not None:
        return code
    jobs = jobs_of("tests.gpu.figures", options)
    if options.list:
        print("\n".join(job.name for job in jobs))
        return 0
    device = "cpu" if options.device == "cpu" else "cuda"
    out = options.out or Path(tempfile.mkdtemp(prefix="mclclip-gpu-bench-"))
    machine, begun, outcomes = running.machine(device), time.monotonic(), []
    print(f"{machine}\n\n{_line('figure', 'value', 'unit', 'time', '')}")
    print(_line("-" * 74, "-" * 10, "-" * 17, "-" * 6, "-" * 20), flush=True)
    for outcome in running.run(jobs, device, out, at_once=1, limit_s=limit_s(options)):
        outcomes.append(outcome)
        print("\n".join(_lines(outcome)), flush=True)
    path = options.json or out / "figures.json"
    path.write_text(json.dumps(_record(machine, outcomes), indent=1))
    failed = [outcome for outcome in outcomes if outcome.verdict == "FAIL"]
    spent = time.monotonic() - begun
    print(f"\n{len(outcomes)} figures, {len(failed)} failed, in {spent:.0f} s; figures in {path}")
    return 1 if failed or not outcomes else 0


def _lines(outcome: Outcome) -> list[str]:
    """A figure's name with its verdict, and a line for each of its variants."""
    head = f"{outcome.job.name} ({outcome.seconds:.0f} s)"
    verdict = "" if outcome.verdict == "ok" else f" {outcome.verdict}: {outcome.note}"
    return [f"{head}:{verdict}", *(_row(row) for row in outcome.found or [])]


def _row(row: dict[str, Any]) -> str:
    value = "-" if row["value"] is None else f"{row['value']:,.4g}"
    if row["value"] is not None and row["value"] >= 1000:
        value = f"{row['value']:,.0f}"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
    return _line(f"  {row['variant']}", value, row["unit"], ratio, row["note"])


def _line(name: str, value: str, unit: str, ratio: str, note: str) -> str:
    return f"{name:74s}  {value:>10s}  {unit:17s}  {ratio:>6s}  {note}".rstrip()


def _record(machine: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is written as JSON."""
    figures = [
        {
            "figure": outcome.job.name,
            "verdict": outcome.verdict,
            "seconds": round(outcome.seconds, 1),
            "note": outcome.note,
            "rows": outcome.found or [],
        }
        for outcome in outcomes
    ]
    return {"date": str(datetime.date.today()), "machine": machine, "figures": figures}


if __name__ == "__main__":
    sys.exit(main())
