"""How every benchmark here measures: variants in turn, medians, ratios, one table with units.

Machines are shared and drift, so the variants of a comparison run in turn within one process,
round after round, each round starting with another one. A ratio is taken within each round and
its median reported: what slows a whole round down cancels. CPU time is counted beside wall time,
because it hardly moves when other programs take the cores.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

ROUNDS = 7
ROOT = Path(__file__).resolve().parents[2]
TABLES = "MCLCLIP_BENCH_TABLES"
"""Environment variable: a file that every table is appended to."""

SHARED_DATA = Path(os.environ.get("MCLCLIP_SHARED_DATA", ROOT.parent / "shared" / "data"))


class Spent(NamedTuple):
    """Seconds that a variant measured itself, such as those of work in other processes."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Timings:
    """Seconds per variant and round; the figures below are medians over rounds."""

    spent: Mapping[str, Sequence[Spent]]

    def wall_s(self, name: str) -> float:
        """Wall time."""
        return statistics.median(item.wall_s for item in self.spent[name])

    def cpu_s(self, name: str) -> float:
        """CPU time of all threads."""
        return statistics.median(item.cpu_s for item in self.spent[name])

    def ratio(self, name: str, reference: str) -> float:
        """Wall time relative to ``reference`` in the same round."""
        return statistics.median(self._ratios(name, reference))

    def spread(self, name: str, reference: str) -> tuple[float, float]:
        """Lower and upper quartile of that ratio."""
        low, high = np.quantile(self._ratios(name, reference), [0.25, 0.75])
        return float(low), float(high)

    def cpu_ratio(self, name: str, reference: str) -> float:
        """CPU time relative to ``reference`` in the same round."""
        pairs = zip(self.spent[name], self.spent[reference], strict=True)
        return statistics.median(one.cpu_s / other.cpu_s for one, other in pairs)

    def _ratios(self, name: str, reference: str) -> list[float]:
        pairs = zip(self.spent[name], self.spent[reference], strict=True)
        return [one.wall_s / other.wall_s for one, other in pairs]

    def rows(
        self, reference: str, work: float, names: Iterable[str] | None = None
    ) -> list[list[str]]:
        """One row per variant for the columns of ``headers``; ``work`` units are done in a call."""
        found = []
        for name in names or self.spent:
            low, high = self.spread(name, reference)
            found.append(
                [
                    name,
                    number(1000 * self.wall_s(name)),
                    number(1000 * self.cpu_s(name)),
                    number(work / self.cpu_s(name)),
                    f"{self.ratio(name, reference):.3f} ({low:.3f} to {high:.3f})",
                    f"{self.cpu_ratio(name, reference):.3f}",
                ]
            )
        return found


def number(value: float) -> str:
    """Three digits or more, without exponents."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def headers(what: str, unit: str) -> list[str]:
    """The columns of ``Timings.rows``."""
    return [what, "wall ms", "CPU ms", f"{unit} per CPU s", "wall ratio (quartiles)", "CPU ratio"]


def interleave(
    variants: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, warm_ups: int = 1
) -> Timings:
    """Runs every variant once per round. One that returns ``Spent`` has measured itself."""
    names = list(variants)
    spent: dict[str, list[Spent]] = {name: [] for name in names}
    for number in range(-warm_ups, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            result = variants[name]()
            taken = Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)
            if number >= 0:
                spent[name].append(result if isinstance(result, Spent) else taken)
    return Timings(spent)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, its columns aligned; all but the first to the right."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in (cells[0], rule, *cells[1:])
    )


def machine() -> str:
    """Where and when this ran, in one line."""
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{datetime.date.today()}, {_cpu_model()}, {os.cpu_count()} cores, {memory_gib():.0f} GiB, "
        f"{torch.get_num_threads()} thread(s) per process, load {load}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_gib() -> float:
    """Main memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A heading, the machine, the table; kept for ``ratios`` where `TABLES` names a file."""
    kept = [list(map(str, row)) for row in rows]
    print(f"\n{title}\n{machine()}\n\n{table(columns, kept)}", flush=True)
    if file := os.environ.get(TABLES):
        entry = {"bench": Path(sys.argv[0]).stem, "title": title, "columns": list(columns)}
        with Path(file).open("a") as tables:
            tables.write(json.dumps(entry | {"rows": kept}) + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    found = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    found.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    found.add_argument("--short", action="store_true", help="the smallest sizes, once: it runs")
    return found


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, **short: object
) -> argparse.Namespace:
    """The options; under ``--short`` one round, and ``short`` for what is not given."""
    if parser.parse_args(arguments).short:
        parser.set_defaults(rounds=1, **short)
    return parser.parse_args(arguments)
