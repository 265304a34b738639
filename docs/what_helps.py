"""Tables of docs/pages/evidence/what-helps.md, from tests/benchmarks/results/*.json.

::

    python docs/what_helps.py                          # writes the tables into the page
    python docs/what_helps.py --check                  # fails where the page has others
    python docs/what_helps.py NAME ARM=RUN:ENCODER ... # results of runs -> results/NAME.json
    python docs/what_helps.py NAME RUN/race.csv        # comparisons of a race -> results/NAME.json
    python docs/what_helps.py NAME --race ARM=RUN:ENCODER ... [BENCHMARK/METRIC ...]
                                                       # comparisons of arms that raced apart

A file of runs has a row per arm, seed and metric; its table has an arm per line, and in each cell
the mean and the standard deviation over seeds. Rows of an arm and seed that are measured again
replace older ones, so that a table grows cell by cell. A file of a race has the comparisons of
``race.csv``; its table has the differences to the ungrouped control, with their intervals. Seeds
that were trained apart, such as on several machines, are compared with ``--race``: arms are named
as remedies are, ``base`` and ``ungrouped`` among them, and each has a run of every seed. Of a run
only config.yaml, results.jsonl and outcomes/ are read, so that these may come from an archive.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import yaml
from tabulate import tabulate

from mclclip.report import race
from mclclip.run.opened import Run
from mclclip.util import files

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "pages" / "evidence" / "what-helps.md"
RESULTS = ROOT / "tests" / "benchmarks" / "results"
_TABLE = re.compile(r"(<!-- table (\S+) -->\n\n)((?:(?!<!--).)*?)(\n\n<!-- end -->)", re.DOTALL)
_KEPT = ("benchmark", "metric", "part", "model", "value", "against", "against_value", "difference",
         "ci_low", "ci_high", "p_corrected", "verdict")  # fmt: skip
_MARKDOWN: dict[str, Any] = {"tablefmt": "github", "disable_numparse": True}

Row = dict[str, Any]


def of_runs(arms: Sequence[str]) -> list[Row]:
    """The figures of encoders, each given as ARM=RUN:ENCODER."""
    rows = []
    for arm in arms:
        name, folder, encoder = _parts(arm)
        own = [row for row in Run(folder).result_rows if row.model == encoder]
        own = [row for row in own if row.protocol.get("level") != "detail"]
        if not own:
            raise ValueError(f"{folder} has no results of {encoder}")
        rows += [
            {
                **{"arm": name, "seed": _seed(folder), "benchmark": row.benchmark},
                **{"metric": row.metric, "value": round(row.value, 3)},
            }
            for row in own
        ]
    return rows


def _parts(arm: str) -> tuple[str, Path, str]:
    """Name, run directory and encoder of ARM=RUN:ENCODER."""
    name, _, place = arm.rpartition("=")
    folder, _, encoder = place.rpartition(":")
    return name, Path(folder), encoder


def _seed(folder: Path) -> int:
    """The seed of a run, whose other options may be those of an earlier version."""
    return int(yaml.safe_load((folder / "config.yaml").read_text())["seed"])


def of_race(words: Sequence[str]) -> Any:
    """The comparisons of arms that raced apart, as a table like ``race.csv``; other words are the
    metrics to compare (none: the main ones)."""
    entrants, seeds = dict[str, race.Entrant](), dict[str, list[int]]()
    for arm in (word for word in words if "=" in word):
        name, folder, encoder = _parts(arm)
        before = entrants.get(name, race.Entrant(name, encoder, []))
        entrants[name] = replace(before, runs=[*before.runs, folder])
        seeds.setdefault(name, []).append(_seed(folder))
        if encoder != before.encoder:
            raise ValueError(f"{arm}: wanted one encoder for all runs of {name}")
    if not seeds.keys() >= {"base", "ungrouped"} or len({*map(tuple, seeds.values())}) > 1:
        raise ValueError(f"wanted base, ungrouped and others, each in the same seeds: got {seeds}")
    base, control = entrants["base"], entrants["ungrouped"]
    remedies = [entrant for entrant in entrants.values() if entrant is not base]
    benchmarks = {row.benchmark for row in Run(base.runs[0]).result_rows}
    metrics = [word for word in words if "=" not in word]
    return race.frame(race.standings(base, control, remedies, [*benchmarks], metrics))


def collect(name: str, given: Sequence[str]) -> None:
    """Writes results/NAME.json from runs, or from the table of a race."""
    path = RESULTS / f"{name}.json"
    if given[0] == "--race" or given[0].endswith(".csv"):
        table = of_race(given[1:]) if given[0] == "--race" else pandas.read_csv(given[0])
        table = table[[*_KEPT]].fillna({"part": ""})
        rows = json.loads(table.round(3).to_json(orient="records"))
    else:
        rows = of_runs(given)
        again = {(row["arm"], row["seed"]) for row in rows}
        before = files.read_json(path) if path.exists() else []
        rows = [row for row in before if (row["arm"], row["seed"]) not in again] + rows
    lines = ",\n".join(json.dumps(row) for row in rows)
    files.write_bytes(path, f"[\n{lines}\n]\n".encode())


def _titles(metrics: Sequence[tuple[str, str]]) -> list[str]:
    """The titles of columns: metrics, with their benchmark where there are several."""
    several = len({benchmark for benchmark, _ in metrics}) > 1
    return [f"{benchmark}: {metric}" if several else metric for benchmark, metric in metrics]


def table_of_runs(rows: Sequence[Row]) -> str:
    """An arm per line: its seeds, and of every metric the mean and the deviation over seeds."""
    metrics = list(dict.fromkeys((row["benchmark"], row["metric"]) for row in rows))
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        cells = []
        for metric in metrics:
            values = [row["value"] for row in own if (row["benchmark"], row["metric"]) == metric]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}" if values else "")
        lines.append([arm, str(len({row["seed"] for row in own})), *cells])
    return tabulate(lines, ["encoder", "seeds", *_titles(metrics)], **_MARKDOWN)


def table_of_race(rows: Sequence[Row]) -> str:
    """A remedy per line: of every metric its value, its difference to the control, and the 95 %
    interval of that; bold where the verdict is that they differ."""
    whole = [row for row in rows if not row["part"]]
    control = next(row["against"] for row in whole if row["against"] != "base")
    metrics = list(dict.fromkeys((row["benchmark"], row["metric"]) for row in whole))
    values = {(r["model"], r["benchmark"], r["metric"]): r["value"] for r in whole}
    values |= {(r["against"], r["benchmark"], r["metric"]): r["against_value"] for r in whole}
    against = {
        (r["model"], r["benchmark"], r["metric"]): r for r in whole if r["against"] == control
    }
    lines = []
    for model in ["base", control, *dict.fromkeys(row["model"] for row in against.values())]:
        cells = []
        for metric in metrics:
            cell = f"{values[model, *metric]:.1f}"
            if row := against.get((model, *metric)):
                bold = "**" if row["verdict"] in ("better", "worse") else ""
                moved = "{difference:+.1f} ({ci_low:+.1f} to {ci_high:+.1f})".format(**row)
                cell += f", {bold}{moved}{bold}"
            cells.append(cell)
        lines.append([model, *cells])
    return tabulate(lines, ["remedy", *_titles(metrics)], **_MARKDOWN)


def table(name: str) -> str:
    """The table of results/NAME.json."""
    if not (RESULTS / f"{name}.json").exists():
        return "(Not measured yet.)"
    rows = files.read_json(RESULTS / f"{name}.json")
    return table_of_race(rows) if "against" in rows[0] else table_of_runs(rows)


def filled(page: str) -> str:
    """The text of the page with every table as its file has it."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]) + found[4], page)


def main(words: Sequence[str]) -> None:
    """See the module."""
    if words and words[0] != "--check":
        return collect(words[0], words[1:])
    text = PAGE.read_text()
    if words and filled(text) != text:
        sys.exit(f"{PAGE} has other tables than {RESULTS}: run python docs/what_helps.py")
    PAGE.write_text(filled(text))


if __name__ == "__main__":
    main(sys.argv[1:])
