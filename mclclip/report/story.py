"""The trainings of a run, with curves and costs, and what each stage clustered, trained and gained;
``page.html`` puts these facts into sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mclclip.eval import results
from mclclip.eval.units import PERCENT
from mclclip.report import charts
from mclclip.run.artifacts import read_manifest
from mclclip.run.opened import JOINED, Run, Stage
from mclclip.run.runlog import read_records

if TYPE_CHECKING:
    from pandas import DataFrame

COLOURS = {"mcl": "stage", "ungrouped": "control"}
"""The colours of variants, variables of the page's style; other variants have 'other'."""

_LINES = ("stage", "control", "joined", "other", "worse", "base")  # colours of benchmarks' lines


def trainings(run: Run) -> list[dict[str, Any]]:
    """Describes every training with recorded metrics: stage 0, MCL's stages, then the controls'.

    variant, stage         for example 'mcl' and 1
    finished               True if it has ended
    steps, samples         steps done and samples seen so far
    seconds, ranks         its duration and its number of processes
    rank_hours             hours times ranks, that is GPU hours if it ran on GPUs
    memory_gib             the peak memory of the rank with the largest
    first_loss, last_loss  the first and the last recorded loss
    options                the options of a finished training, otherwise empty

    A figure that was not recorded is None.
    """
    trainings = []
    for variant, run_of_variant in {"mcl": run, **run.controls}.items():
        for number in range(len(run.stages)):
            if number == 0 and variant != "mcl":
                continue  # all variants share stage 0
            stage = run_of_variant.stage(number)
            if len(rows := stage.metrics):
                trainings.append({"variant": variant, "stage": number} | _training(stage, rows))
    return trainings


def _training(stage: Stage, rows: DataFrame) -> dict[str, Any]:
    manifest = stage.manifest("train") if stage.has("train") else None
    epochs = read_records(stage.directory("train") / "epochs.jsonl")
    durations = _numbers([row.get("seconds") for row in epochs])
    seconds = sum(durations) if durations else None
    last, losses = rows.iloc[-1].to_dict(), _numbers(rows.get("loss", ()))
    counts = ("samples_per_s", "samples_per_s_per_rank", "samples_seen")
    every, each, seen = (sum(_numbers([last.get(name)])) for name in counts)
    ranks = round(every / each) if every and each else None
    return {
        "finished": manifest is not None,
        "steps": int(last["step"]),
        "samples": int(seen),
        "seconds": seconds,
        "ranks": ranks,
        "rank_hours": None if seconds is None or ranks is None else seconds * ranks / 3600,
        "memory_gib": max(_numbers(rows.get("memory_gib", ())), default=None),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "options": {} if manifest is None else manifest.config,
    }


def curves(run: Run) -> list[dict[str, Any]]:
    """Makes, for each ``stage`` that was trained, charts of ``loss`` and ``lr`` with a line per
    variant, and charts of evaluations during training, ``evaluated`` (``_evaluated``)."""
    curves = []
    for number in range(len(run.stages)):
        variants = {"mcl": run, **(run.controls if number else {})}
        recorded = {name: variant.stage(number).metrics for name, variant in variants.items()}
        if any(map(len, recorded.values())):
            loss = _chart(f"stage {number}: loss", "loss", recorded)
            rate = _chart(f"stage {number}: learning rate", "lr", recorded)
            shown = variants.items() if number else ()
            evaluated = [_evaluated(run, variant, number, name) for name, variant in shown]
            curve = {"stage": number, "loss": loss, "lr": rate}
            curves.append(curve | {"evaluated": [part for part in evaluated if part["lines"]]})
    return curves


def _evaluated(run: Run, run_of_variant: Run, number: int, variant: str) -> dict[str, Any]:
    """Shows how a training changed the encoder (``train.evaluate``): a ``chart`` with a line for
    each benchmark, the headline metric minus that of stage 0, from 0 at step 0 on; and colour and
    name of each of the ``lines``.

    Metrics that are not in percent, or that stage 0 does not have, are left out.
    """
    base = {(r.benchmark, r.metric): r.value for r in run.result_rows if r.model == "stage_0"}
    path = run_of_variant.stage(number).directory("train") / "evaluations" / "results.jsonl"
    points: dict[str, tuple[str, list[tuple[float, float]]]] = {}
    for row in results.read(path) if path.is_file() else ():
        step, start = row.model.removeprefix("step_"), base.get((row.benchmark, row.metric))
        headline = row.protocol.get("level") == "headline" and row.unit == PERCENT
        if not headline or start is None or not step.isdecimal():
            continue
        metric, line = points.setdefault(row.benchmark, (row.metric, [(0.0, 0.0)]))
        if metric == row.metric:
            line.append((float(step), row.value - start))
    lines = [
        (colour, f"{benchmark}: {metric}")
        for colour, (benchmark, (metric, _)) in zip(cycle(_LINES), points.items(), strict=False)
    ]
    drawn = [(c, line) for (c, _), (_, line) in zip(lines, points.values(), strict=True)]
    chart = charts.lines(f"stage {number}, {variant}: points from stage 0", "step", drawn)
    return {"variant": variant, "chart": chart, "lines": lines}


def _chart(title: str, name: str, recorded: Mapping[str, DataFrame]) -> Markup:
    """A chart with a line for each variant; MCL's is drawn last, above the others."""
    series = []
    for variant, rows in reversed([*recorded.items()]):
        values = zip(rows["step"], rows[name], strict=True) if name in rows else ()
        points = [(float(step), y) for step, value in values for y in _numbers([value])]
        series.append((COLOURS.get(variant, "other"), points))
    return charts.lines(title, "step", series)


def _numbers(values: Iterable[Any]) -> list[float]:
    """The values that are recorded and finite."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def total(values: Sequence[float | None]) -> float | None:
    """The sum of a figure of several trainings; None if one lacks it, or there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if values and len(numbers) == len(values) else None


# --- the story -----------------------------------------------------------------------------------


def chapters(
    run: Run,
    trainings: Sequence[Mapping[str, Any]],
    clusters: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Collects the facts of every stage that the page puts into sentences.

    number    the number of the stage
    training  its element of ``trainings``; None if it was not trained
    groups    the manifest of its pseudo labels; None if it has none
    clusters  its element of ``clusters``; None if it is not clustered
    """
    trained = {part["stage"]: part for part in trainings if part["variant"] == "mcl"}
    of_stage = {part["stage"]: part for part in clusters}
    return [
        {
            "number": stage.number,
            "training": trained.get(stage.number),
            "groups": read_manifest(stage.directory("pseudo_labels"), "pseudo_labels")
            if stage.has("pseudo_labels")
            else None,
            "clusters": of_stage.get(stage.number),
        }
        for stage in run.stages
    ]


def joined(run: Run) -> list[str]:
    """Names the joined encoders that the run has."""
    measured = {row.model for row in run.result_rows}
    return [n for n in JOINED if n in measured or run.layout.joined(n).is_dir()]
