"""Verb ``demo``: the whole method and its controls on rendered pictures, for each seed."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mclclip import config, method
from mclclip.config import Config
from mclclip.data.patterns import ATTRIBUTES, RARELY_NAMED
from mclclip.eval import results
from mclclip.eval.results import Result
from mclclip.ranks import process_group
from mclclip.ranks.process_group import Context
from mclclip.run.lock import RunLock
from mclclip.run.runlog import count_of
from mclclip.util import files, shipped
from mclclip.util.options import all_shards
from mclclip.verbs import make_dataset, report

log = logging.getLogger("mclclip")


SHORT = (
    "num_stages=1",
    "controls=[ungrouped]",
    "cluster.num_clusters=4",
    "base.steps=20",
    "train.steps=20",
)
"""Overrides of the demo's short form."""
SHORT_SAMPLES, SHORT_PAIRS = 1_200, 20
"""Pictures and pairs per attribute of the short form."""


def settings(out: Path, seed: int, overrides: Sequence[str]) -> Config:
    """Returns the recipe with the paths and the seed of one run; ``overrides`` come last."""
    data = out / f"data_{seed}"
    paths = [
        f"run_dir={_quote(out / f'seed_{seed}')}",
        f"seed={seed}",
        f"data.sources.patterns.shards={_quote(all_shards(data / 'shards'))}",
        f"eval.suite.pairs.path={_quote(data / 'pairs')}",
    ]
    return config.load(shipped.RECIPES / "demo.yaml", [*paths, *overrides])


def _quote(value: Path | str) -> str:
    """Quotes text for an override, so that no character of it is special."""
    return json.dumps(str(value))


def run(
    out: Path | None,
    *,
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
    short: bool = False,
) -> str:
    """Runs the demo for each seed in ``out`` (default: runs/demo, or runs/demo_short); prints and
    returns a table of all seeds, and the path of every run's report.

    ``short`` runs every verb in seconds, to check an installation; its figures say nothing about
    the method. ``overrides`` replace options of the recipe and of the short form. The table, with
    mean and standard deviation over several seeds, is written to ``out/table.md`` too.
    """
    out = out or Path("runs/demo_short" if short else "runs/demo")
    render = partial(make_dataset.run, "patterns")
    if short:
        render = partial(render, num_samples=SHORT_SAMPLES, num_pairs=SHORT_PAIRS)
    overrides = [*(SHORT if short else ()), *overrides]
    table = seed_table([_run_seed(out, seed, overrides, render) for seed in seeds])
    files.write_bytes(out / "table.md", table.encode())
    parts = [table]
    if short:
        parts.append("The short form checks an installation: its figures mean nothing.\n")
    pages = [report.run(settings(out, seed, overrides).run_dir) for seed in seeds]
    parts.append("".join(f"Report of the run, to open in a browser: {page}\n" for page in pages))
    text = "\n".join(parts)
    print(text)
    return text


def _run_seed(
    out: Path, seed: int, overrides: Sequence[str], render: Callable[..., Path]
) -> list[Result]:
    """Renders the pictures of a seed with ``render``, runs the method, and returns its rows of
    results.jsonl."""
    settled = settings(out, seed, overrides)
    device = process_group.pick_device(settled.device, deterministic=settled.deterministic)
    with RunLock(Path(settled.run_dir)), process_group.num_threads(settled.num_threads):
        log.info("=== demo, seed %d", seed)
        render(out / f"data_{seed}", seed=seed)
        run_dir = method.run(settled, Context(device=device))
    return results.read(run_dir / "results.jsonl")


def seed_table(runs: Sequence[Sequence[Result]]) -> str:
    """Returns a Markdown table, models by attributes, in percent: of several runs the mean ± the
    standard deviation.

    ``runs``: of each run its rows of results.jsonl. The column ``rare`` is the mean of the
    attributes that captions seldom name, ``average`` that of all.
    """
    by_run = [_by_model(rows) for rows in runs]
    columns = [*ATTRIBUTES, "rare", "average"]
    lines = [[count_of(len(runs), "seed"), *columns]]
    for model in dict.fromkeys(model for models in by_run for model in models):
        figures = [models[model] for models in by_run if model in models]
        cells = ([of_run[name] for of_run in figures if name in of_run] for name in columns)
        lines.append([model, *map(_cell, cells)])
    head, *body = (f"| {' | '.join(line)} |\n" for line in lines)
    return head + "|---" * (len(columns) + 1) + "|\n" + "".join(body)


def _by_model(rows: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Returns the figures of each model in one run, and adds ``rare``."""
    models: dict[str, dict[str, float]] = {}
    for row in rows:
        models.setdefault(row.model, {})[row.metric] = row.value
    for figures in models.values():
        if rare := [figures[name] for name in RARELY_NAMED if name in figures]:
            figures["rare"] = statistics.mean(rare)
    return models


def _cell(values: Sequence[float]) -> str:
    """Returns for example '81.2', of several values '81.2 ± 0.4', of none '-'."""
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "-"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
