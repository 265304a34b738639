"""The embedded default: the whole method and its controls on rendered pictures, per seed."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from mclclip import artifacts, config, make_dataset, pipeline
from mclclip.config import Config
from mclclip.eval import results
from mclclip.eval.results import Result
from mclclip.parallel import process_group
from mclclip.parallel.process_group import SINGLE
from mclclip.run_lock import RunLock

log = logging.getLogger("mclclip")


def recipe() -> Path:
    """The shipped recipe of the demo."""
    return Path(str(resources.files("mclclip") / "recipes" / "demo.yaml"))


def settings(out: Path, seed: int, overrides: Sequence[str]) -> Config:
    """The recipe with the paths and the seed of one demo run; ``overrides`` win."""
    own = [
        f"run_dir={out / f'seed_{seed}'}",
        f"seed={seed}",
        f"data.sources.patterns.shards={out / f'data_{seed}' / 'shards' / '*.tar'}",
        f"eval.suite.pairs.path={out / f'data_{seed}' / 'pairs'}",
    ]
    return config.load(recipe(), [*own, *overrides])


def run(out: Path, *, seeds: Sequence[int], overrides: Sequence[str] = ()) -> str:
    """Runs the demo for each seed, prints the table of all and returns it.

    With several seeds the table gives mean and standard deviation over them. It is written to
    ``out/table.md`` too.
    """
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"got the seeds {list(seeds)}: each may be given once")
    runs = []
    for seed in seeds:
        settled = settings(out, seed, overrides)
        with RunLock(Path(settled.run_dir)), process_group.num_threads(settled.num_threads):
            log.info("=== demo, seed %d", seed)
            make_dataset.run("patterns", out / f"data_{seed}", seed=seed)
            run_dir = pipeline.run(settled, SINGLE)
        runs.append(results.read(run_dir / "results.jsonl"))
    table = seed_table(runs)
    artifacts.write_bytes(out / "table.md", table.encode())
    print(table)
    return table


def seed_table(runs: Sequence[Sequence[Result]]) -> str:
    """A Markdown table, models by metrics: percent, and the standard deviation over runs if many.

    ``runs`` holds the rows of results.jsonl of one run each.
    """
    values: dict[tuple[str, str], list[float]] = {}
    for row in (row for rows in runs for row in rows):
        values.setdefault((row.model, row.metric), []).append(row.value)
    models = list(dict.fromkeys(model for model, _ in values))
    metrics = list(dict.fromkeys(metric for _, metric in values))
    lines = [f"| {len(runs)} seed(s) | {' | '.join(metrics)} |"]
    lines.append("|---" * (len(metrics) + 1) + "|")
    for model in models:
        cells = [_cell(values.get((model, metric), [])) for metric in metrics]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
