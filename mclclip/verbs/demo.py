"""The demo: the whole method and its controls on rendered pictures, for each seed."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
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


def recipe() -> Path:
    """The shipped recipe of the demo."""
    return shipped.RECIPES / "demo.yaml"


SHORT = (
    "num_stages=1",
    "controls=[ungrouped]",
    "cluster.num_clusters=4",
    "base.steps=20",
    "train.steps=20",
)
"""Overrides of the demo's short form, which also has fewer pictures and pairs."""
SHORT_SAMPLES, SHORT_PAIRS = 1_200, 20


def settings(out: Path, seed: int, overrides: Sequence[str]) -> Config:
    """The recipe with the paths and the seed of one demo run; ``overrides`` replace them."""
    data = out / f"data_{seed}"
    paths = [
        f"run_dir={_quote(out / f'seed_{seed}')}",
        f"seed={seed}",
        f"data.sources.patterns.shards={_quote(all_shards(data / 'shards'))}",
        f"eval.suite.pairs.path={_quote(data / 'pairs')}",
    ]
    return config.load(recipe(), [*paths, *overrides])


def _quote(value: Path | str) -> str:
    """A value of an override that is text, whatever characters it has."""
    return json.dumps(str(value))


def run(
    out: Path, *, seeds: Sequence[int], overrides: Sequence[str] = (), short: bool = False
) -> str:
    """Runs the demo for each seed, prints a table of all seeds and the path of every run's report,
    and returns what it printed.

    ``short`` runs every verb in seconds, to check an installation; its figures say nothing about
    the method. ``overrides`` replace its options and the recipe's. The table, with mean and
    standard deviation over several seeds, is written to ``out/table.md`` too.
    """
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"got the seeds {list(seeds)}: each may be given once")
    render = partial(make_dataset.run, "patterns")
    if short:
        render = partial(render, num_samples=SHORT_SAMPLES, num_pairs=SHORT_PAIRS)
    overrides = [*(SHORT if short else ()), *overrides]
    table = seed_table([_run(out, seed, overrides, render) for seed in seeds])
    files.write_bytes(out / "table.md", table.encode())
    parts = [table]
    if short:
        parts.append("The short form checks an installation: its figures mean nothing.\n")
    pages = [report.run(settings(out, seed, overrides).run_dir) for seed in seeds]
    parts.append("".join(f"Report of the run, to open in a browser: {page}\n" for page in pages))
    text = "\n".join(parts)
    print(text)
    return text


def _run(
    out: Path, seed: int, overrides: Sequence[str], render: Callable[..., Path]
) -> list[Result]:
    """Runs the method once and returns its rows of results.jsonl; ``render`` writes the pictures
    and pairs."""
    settled = settings(out, seed, overrides)
    device = process_group.pick_device(settled.device, deterministic=settled.deterministic)
    with RunLock(Path(settled.run_dir)), process_group.num_threads(settled.num_threads):
        log.info("=== demo, seed %d", seed)
        render(out / f"data_{seed}", seed=seed)
        run_dir = method.run(settled, Context(device=device))
    return results.read(run_dir / "results.jsonl")


def seed_table(runs: Sequence[Sequence[Result]]) -> str:
    """A Markdown table, models by attributes: percent, over several runs mean ± deviation.

    ``runs`` holds the rows of results.jsonl of one run each; the deviation is the standard
    deviation over runs. ``rare`` is the mean of the attributes that captions seldom name,
    ``average`` that of all.
    """
    found = [_by_model(rows) for rows in runs]
    columns = [*ATTRIBUTES, "rare", "average"]
    models = dict.fromkeys(model for one in found for model in one)
    rows = {
        model: [[one[model][c] for one in found if c in one.get(model, {})] for c in columns]
        for model in models
    }
    return _table(count_of(len(runs), "seed"), columns, rows)


def _table(
    first: str, columns: Sequence[str], rows: Mapping[str, Sequence[Sequence[float]]]
) -> str:
    """A Markdown table; a cell has the mean of its values, with their deviation if several."""
    lines = [[first, *columns], *([name, *map(_cell, cells)] for name, cells in rows.items())]
    head, *body = (f"| {' | '.join(line)} |\n" for line in lines)
    return head + "|---" * (len(columns) + 1) + "|\n" + "".join(body)


def _by_model(rows: Sequence[Result]) -> dict[str, dict[str, float]]:
    """The figures of each model in one run, ``rare`` among them."""
    models: dict[str, dict[str, float]] = {}
    for row in rows:
        models.setdefault(row.model, {})[row.metric] = row.value
    for figures in models.values():
        if rare := [figures[name] for name in RARELY_NAMED if name in figures]:
            figures["rare"] = statistics.mean(rare)
    return models


def _cell(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "-"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
