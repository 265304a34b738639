"""All ratios of the benchmarks of one run in one table: what ``make bench`` ends with.

Benchmarks append their tables to the file that MCLCLIP_BENCH_TABLES names (``timing``). A ratio is
the time relative to the row whose ratio is 1, the reference of its comparison::

    python -m tests.benchmarks.ratios .bench/tables.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.benchmarks import timing

COLUMNS = ["benchmark", "comparison", "what", "wall", "CPU"]
_WIDEST = 60  # characters of a comparison's name


def ratios(lines: Iterable[str]) -> list[list[str]]:
    """The rows of the tables that have ratios, but for their references, in the order of the run.

    A ratio is a column whose name contains the word: of wall time (the first, or the only one) and
    of CPU time. Its quartiles are left out.
    """
    found = []
    for line in lines:
        entry = json.loads(line)
        columns = entry["columns"]
        wall = [i for i, name in enumerate(columns) if "ratio" in name and "CPU" not in name]
        cpu = [i for i, name in enumerate(columns) if "ratio" in name and "CPU" in name]
        if not wall + cpu:
            continue
        for row in entry["rows"]:
            shown = [row[places[0]].split(" ")[0] if places else "" for places in (wall, cpu)]
            if any(value.strip("10.") for value in shown):  # a reference is 1
                name = entry["title"].split("\n")[0][:_WIDEST]
                what = " ".join(itertools.takewhile(lambda cell: not _is_number(cell), row)).strip()
                found.append([entry["bench"].removeprefix("bench_"), name, what, *shown])
    return found


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").isdecimal()


def main(words: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tables", type=Path, help="what the benchmarks appended to")
    path = parser.parse_args(words).tables
    if not path.exists():
        parser.error(f"no file {path}: run the benchmarks with {timing.TABLES}={path}")
    with path.open() as lines:
        timing.print_table("Times relative to what stands beside them", COLUMNS, ratios(lines))


if __name__ == "__main__":
    main()
