"""The embedded default: the whole method and its controls on rendered pictures, per seed."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from mclclip import artifacts, config, make_dataset, pipeline
from mclclip.config import Config
from mclclip.data.patterns import ATTRIBUTES, RARELY_NAMED
from mclclip.eval import results
from mclclip.eval.results import Result
from mclclip.parallel import process_group
from mclclip.parallel.process_group import Context
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
        context = _context(settled)
        with RunLock(Path(settled.run_dir)), process_group.num_threads(settled.num_threads):
            log.info("=== demo, seed %d", seed)
            make_dataset.run("patterns", out / f"data_{seed}", seed=seed)
            run_dir = pipeline.run(settled, context)
        runs.append(results.read(run_dir / "results.jsonl"))
    table = seed_table(runs)
    artifacts.write_bytes(out / "table.md", table.encode())
    print(table)
    return table


def _context(settled: Config) -> Context:
    """One process, on the device that the options name."""
    device = process_group.pick_device(settled.device, deterministic=settled.deterministic)
    return Context(device=device)


def seed_table(runs: Sequence[Sequence[Result]]) -> str:
    """A Markdown table, models by attributes: percent, over several runs mean ± deviation.

    ``runs`` holds the rows of results.jsonl of one run each; the deviation is the standard
    deviation over runs. ``rare`` is the mean of the attributes that captions seldom name,
    ``average`` that of all.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for rows in runs:
        for model, figures in _by_model(rows).items():
            for metric, value in figures.items():
                values.setdefault(model, {}).setdefault(metric, []).append(value)
    columns = [*ATTRIBUTES, "rare", "average"]
    lines = [f"| {len(runs)} seed(s) | {' | '.join(columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for model, found in values.items():
        cells = [_cell(found.get(metric, [])) for metric in columns]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _by_model(rows: Sequence[Result]) -> dict[str, dict[str, float]]:
    """The figures of each model in one run, ``rare`` among them."""
    models: dict[str, dict[str, float]] = {}
    for row in rows:
        models.setdefault(row.model, {})[row.metric] = row.value
    for figures in models.values():
        rare = [figures[name] for name in RARELY_NAMED if name in figures]
        if rare:
            figures["rare"] = statistics.mean(rare)
    return models


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
