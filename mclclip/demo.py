"""The demo: the whole method and its controls on rendered pictures, for each seed.

Three regimes differ in the text tower. ``trained``: it is trained in every stage, as in the recipe.
``ignorant``: it is trained in stage 0, on captions that seldom name some attributes, and frozen
from stage 1 on. ``knowing``: it comes from a CLIP trained on captions that name every attribute,
and is frozen in all stages, including stage 0, with a random image tower.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from mclclip import config, files, make_dataset, pipeline, report, shipped
from mclclip.config import Config
from mclclip.data.patterns import ATTRIBUTES, RARELY_NAMED
from mclclip.eval import results
from mclclip.eval.results import Result
from mclclip.models import weights
from mclclip.models.loading import load_towers
from mclclip.options import all_shards
from mclclip.ranks import process_group
from mclclip.ranks.process_group import Context
from mclclip.run.artifacts import Layout
from mclclip.run.lock import RunLock
from mclclip.run.runlog import count_of

log = logging.getLogger("mclclip")

Regime = Literal["trained", "ignorant", "knowing"]
REGIMES: tuple[Regime, ...] = get_args(Regime)

# Columns of the table of regimes: results.jsonl's names of the models whose average it shows.
_STEPS = ("stage_1", "soup_uniform", "concat_stage_norm")
_JOINED = ("concat_stage_norm", "control_ungrouped_concat_stage_norm")
_COMPARED = ("stage_0", *_STEPS, *(f"control_ungrouped_{name}" for name in _STEPS))


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


def settings(out: Path, seed: int, overrides: Sequence[str], regime: Regime = "trained") -> Config:
    """The recipe with the paths and the seed of one demo run; ``overrides`` replace them, and the
    regime's own options replace ``overrides``."""
    frozen = ["train.lock.text=false"]
    of_regime = {
        "trained": [],
        "ignorant": frozen,
        "knowing": [
            *frozen,
            "base.lock.text=false",
            f"model.name={_quote(f'local-dir:{_first_model(out, seed)}')}",
        ],
    }
    data = out / f"data_{seed}"
    paths = [
        f"run_dir={_quote(_folder(out, regime) / f'seed_{seed}')}",
        f"seed={seed}",
        f"data.sources.patterns.shards={_quote(all_shards(data / 'shards'))}",
        f"eval.suite.pairs.path={_quote(data / 'pairs')}",
    ]
    return config.load(recipe(), [*paths, *overrides, *of_regime[regime]])


def _quote(value: Path | str) -> str:
    """A value of an override that is text, whatever characters it has."""
    return json.dumps(str(value))


def _folder(out: Path, regime: Regime) -> Path:
    return out if regime == "trained" else out / regime


def _first_model(out: Path, seed: int) -> Path:
    """The model that the regime ``knowing`` begins with."""
    return _folder(out, "knowing") / f"given_{seed}"


def run(
    out: Path,
    *,
    seeds: Sequence[int],
    regimes: Sequence[Regime] = ("trained",),
    overrides: Sequence[str] = (),
    short: bool = False,
) -> str:
    """Runs the demo for each regime and seed, prints a table of all seeds for each regime and the
    path of every run's report, and returns what it printed.

    ``short`` runs every verb in seconds, to check an installation; its figures say nothing about
    the method. ``overrides`` replace its options and the recipe's.

    With several seeds a table gives mean and standard deviation over them. It is written to
    ``table.md`` beside the runs: in ``out``, or in ``out/REGIME`` for other regimes than
    ``trained``. Several regimes are compared in one more table, ``out/regimes.md``.
    """
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"got the seeds {list(seeds)}: each may be given once")
    render = partial(make_dataset.run, "patterns")
    if short:
        render = partial(render, num_samples=SHORT_SAMPLES, num_pairs=SHORT_PAIRS)
    overrides = [*(SHORT if short else ()), *overrides]
    tables, runs = [], {}
    for regime in regimes:
        runs[regime] = [_run(out, seed, regime, overrides, render) for seed in seeds]
        table = seed_table(runs[regime])
        files.write_bytes(_folder(out, regime) / "table.md", table.encode())
        tables.append(table if len(regimes) == 1 else f"text tower {regime}:\n\n{table}")
    if len(regimes) > 1:
        tables.append(regime_table(runs))
        files.write_bytes(out / "regimes.md", tables[-1].encode())
    if short:
        tables.append("The short form checks an installation: its figures mean nothing.\n")
    every = [settings(out, seed, overrides, regime) for regime in regimes for seed in seeds]
    pages = [report.run(settled.run_dir) for settled in every]
    tables.append("".join(f"Report of the run, to open in a browser: {page}\n" for page in pages))
    text = "\n".join(tables)
    print(text)
    return text


def _run(
    out: Path, seed: int, regime: Regime, overrides: Sequence[str], render: Callable[..., Path]
) -> list[Result]:
    """Runs the method once and returns its rows of results.jsonl, after those of the teacher if
    there is one (``_give``). ``render`` writes the pictures and pairs."""
    settled = settings(out, seed, overrides, regime)
    context = _context(settled)
    with RunLock(Path(settled.run_dir)), process_group.num_threads(settled.num_threads):
        log.info("=== demo, seed %d, text tower %s", seed, regime)
        render(out / f"data_{seed}", seed=seed)
        before = _give(out, seed, overrides, render) if regime == "knowing" else []
        run_dir = pipeline.run(settled, context)
    return before + results.read(run_dir / "results.jsonl")


def _give(
    out: Path, seed: int, overrides: Sequence[str], render: Callable[..., Path]
) -> list[Result]:
    """Writes the model that the regime ``knowing`` begins with; returns its teacher's figures.

    The teacher, a CLIP, is trained like the recipe's stage 0, on the same pictures with captions
    that name every attribute. The model has the teacher's text tower, and a random image tower and
    logit scale.
    """
    folder, given = _folder(out, "knowing"), _first_model(out, seed)
    data = folder / f"data_{seed}"
    alone = [
        f"run_dir={_quote(folder / f'teacher_{seed}')}",
        f"data.sources.patterns.shards={_quote(all_shards(data / 'shards'))}",
        "num_stages=0",
        "controls=[]",
    ]
    settled = settings(out, seed, [*overrides, *alone])
    with RunLock(Path(settled.run_dir)), process_group.num_threads(settled.num_threads):
        log.info("=== demo, seed %d: a text tower that knows every attribute", seed)
        render(data, seed=seed, full_captions=True)
        run_dir = pipeline.run(settled, _context(settled))
        if not (given / weights.WEIGHTS).exists():
            model = load_towers(settled.model.name, seed=seed)
            drawn = model.clip.state_dict()
            learned = load_towers(f"local-dir:{Layout.of(settled).export(0)}").clip.state_dict()
            kept = {name: drawn[name] for name in drawn if name.startswith(("visual.", "logit_"))}
            model.clip.load_state_dict(learned | kept)
            model.save(given)
    rows = results.read(run_dir / "results.jsonl")
    return [replace(row, model="teacher") for row in rows if row.model == "stage_0"]


def _context(settled: Config) -> Context:
    device = process_group.pick_device(settled.device, deterministic=settled.deterministic)
    return Context(device=device)


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


def regime_table(runs: Mapping[Regime, Sequence[Sequence[Result]]]) -> str:
    """A Markdown table, regimes by models: the average over attributes in percent, over several
    runs mean ± standard deviation; last the difference of the two concats within a run.
    """
    number = len(next(iter(runs.values())))
    grouped, ungrouped = _JOINED
    table: dict[str, list[list[float]]] = {}
    for regime, of_seeds in runs.items():
        found = [
            {model: figures["average"] for model, figures in _by_model(rows).items()}
            for rows in of_seeds
        ]
        table[regime] = [[one[model] for one in found if model in one] for model in _COMPARED]
        both = [one for one in found if grouped in one and ungrouped in one]
        table[regime].append([one[grouped] - one[ungrouped] for one in both])
    columns = [*_COMPARED, "difference of concats"]
    return _table(f"text tower, {count_of(number, 'seed')}", columns, table)


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
