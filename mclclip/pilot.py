"""Whether the full run will pay: a verdict on a pilot, which is stage 1 and its ungrouped control
on a share of the samples (``pilot.share``), trained for the same share of the steps, or another one
(``pilot.steps_share``).

A run delivers its joined stages, and the question is whether they are better than the same compute
without groups. So the verdict compares stages 0 and 1 joined with stage 0 and the ungrouped stage 1
joined, on the same items of ``eval.suite``, in every metric of the level ``headline``. It is a gain
where the first is better beyond chance in one of them, and better than stage 0 there too. All of it
is read from the run directory, and written to ``pilot/verdict.json``.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from mclclip import compare
from mclclip.compare import LEVEL, Comparison, Reader, Row
from mclclip.config import Config, to_tree
from mclclip.data.coverage import coverage_report
from mclclip.data.groups import StageGroups
from mclclip.data.labels import outside_of_share
from mclclip.eval import outcomes, results
from mclclip.eval.outcomes import Outcomes
from mclclip.files import clean, digest_json, parse_json, read_json, write_json
from mclclip.opened_run import JOINED, Run
from mclclip.plan import steps
from mclclip.run.artifacts import PILOTS, Layout

log = logging.getLogger("mclclip")

VERDICT = "verdict.json"
_MIXED = 0.05  # share of steps below the full label, beyond the full run's, that a sentence names
_PREFIX = 12  # characters of a log line before its text
_NAMED = 5  # strata that are named in a sentence


def check(config: Config) -> None:
    """Raises ValueError, before a run begins, for a pilot that could not be judged."""
    if config.pilot.share is None:
        return
    objective, named = config.train.objective, f"pilot.share={config.pilot.share}"
    if not config.has_stages:
        raise ValueError(f"{named} tries out stage 1, and num_stages is 0: leave one of them out")
    if "ungrouped" not in objective.controls:
        raise ValueError(
            f"{named} compares stage 1 with its ungrouped control, which train.objective.kind="
            f"{objective.kind} does not have: leave pilot.share out"
        )
    if not config.eval.suite:
        raise ValueError(f"{named} is judged by benchmarks, and eval.suite is empty: set it")


def check_begun(config: Config) -> None:
    """Raises ValueError, before a pilot is trained, where its share fills no batch, stage 0 has no
    figure that a verdict could be based on, or the run may end by figures on training images."""
    run, batch, share = Run.of(config), config.train.global_batch, config.pilot.share
    assert share is not None
    samples = len(run.index)
    drawn = samples - len(outside_of_share(samples, share, config.seed))
    if drawn < batch:
        raise ValueError(
            f"pilot.share={share} draws {drawn:,} of the index's {samples:,} samples, fewer than "
            f"train.global_batch={batch:,}: raise it to {2 * batch / samples:.2g} or more"
        )
    rows = [row for row in run.result_rows if row.benchmark in config.eval.suite]
    if config.pilot.stop_without_gain:
        choice = "whether the run goes on (pilot.stop_without_gain)"
        results.check_unseen(rows, [*config.eval.suite], choice)
    if not any(row.protocol.get("level") == "headline" for row in rows):
        raise ValueError(
            f"pilot.share={share} is judged by main metrics, and eval.suite ("
            f"{', '.join(config.eval.suite)}) has none: add a benchmark, or an official direction"
        )


def settings(config: Config) -> Config:
    """The configuration of the pilot's trainings: stage 1 alone, and one joined encoder."""
    name = encoder_of(config)
    variant: list[Any] = [name.removeprefix("concat_")] if name.startswith("concat_") else []
    joined = replace(config.export, concat=variant, soup=name.startswith("soup_"))
    every = replace(config.eval, encoders=None)
    return replace(config, num_stages=1, export=joined, eval=every)


def judge(config: Config) -> dict[str, Any]:
    """Judges a finished pilot, logs the verdict, and returns what ``pilot/verdict.json`` holds.

    A verdict on the same figures and options is read, not made again. Raises FileNotFoundError
    where the pilot's trainings or figures are not there.
    """
    whole, layout = Run.of(config), Layout.of(config, "pilot")
    wanted = config.eval.suite
    base = [r for r in whole.result_rows if r.model == "stage_0" and r.benchmark in wanted]
    results.copy(base, whole.layout.results, layout.results)
    rows = compare.read_runs([layout.pilot])
    tree = to_tree(config)
    used = {name: tree[name] for name in ("train", "cluster", "num_stages", "controls")}
    shares = [config.pilot.share, *filter(None, [config.pilot.steps_share])]
    basis = digest_json([asdict(row) for row, _ in rows] + [used, *shares])
    path = layout.pilot / VERDICT
    verdict: dict[str, Any] = read_json(path) if path.exists() else {}
    if verdict.get("basis") != basis:
        verdict = _verdict(config, rows) | {"basis": basis}
        write_json(path, verdict)
    for sentence in verdict["sentences"]:
        for line in textwrap.wrap(clean(sentence), results.WIDTH - _PREFIX):
            log.info("%s", line)
    return verdict


def reason_to_stop(config: Config) -> str | None:
    """Why the run ends after its pilot, in one line; None where it goes on."""
    path = Layout.of(config).pilot / VERDICT
    if config.pilot.share is None or not config.pilot.stop_without_gain or not path.exists():
        return None
    if read_json(path)["gain"]:
        return None
    return (
        f"the run ends after its pilot, which shows no gain ({path}), as pilot.stop_without_gain "
        "asks: with pilot.stop_without_gain=false the same command goes on"
    )


def gain(rows: Sequence[Row], joined: str) -> tuple[bool, list[Comparison], list[Comparison]]:
    """Whether ``joined`` is better than its ungrouped control beyond chance in a headline metric,
    and above stage 0 there; and its comparisons with the control and with stage 0."""
    control = compare.compare(rows, [joined], f"control_ungrouped_{joined}")
    base = compare.compare(rows, [joined], "stage_0")
    above = {(c.row.benchmark, c.row.metric) for c in base if c.gain > 0}
    better = [c for c in control if c.verdict == "better"]
    return any((c.row.benchmark, c.row.metric) in above for c in better), control, base


def encoder_of(config: Config) -> str:
    """The name of the encoder that a run is judged by: joined stages, or stage 1 without any."""
    preferred = ("concat_stage_norm", *JOINED)
    return next((name for name in preferred if name in config.encoders), "stage_1")


def _verdict(config: Config, rows: Sequence[Row]) -> dict[str, Any]:
    joined = encoder_of(config)
    gained, control, base = gain(rows, joined)
    forgotten = _forgotten(rows)
    planned = steps.count(config, None)["trainings"]
    trained, cost = _trained(config, planned), _price(config, planned)
    table = compare.frame([*control, *base]).to_dict("records")
    verdict = {
        "gain": gained,
        "encoder": joined,
        "against": control[0].against.model,
        **trained,
        "comparisons": [
            {k: None if v is None or v != v else v for k, v in row.items()}  # noqa: PLR0124  nan
            for row in table
        ],
        "forgotten": forgotten,
        "price": cost,
    }
    against = verdict["against"]
    conclusion = (
        f"Verdict: a gain. {joined} is better than {against} beyond chance, and than stage_0."
        if gained
        else f"Verdict: no gain. {joined} is in no main metric both better than {against} beyond "
        "chance and better than stage_0."
    )
    sentences = [_of_training(trained), *(c.sentence() for c in control)]
    sentences += [conclusion, *(c.sentence() for c in base)]
    sentences += list(dict.fromkeys(t for metric in forgotten for t in _of_forgotten(metric)))
    return verdict | {"sentences": [*sentences, *_of_price(cost)]}


# --- what was trained, and what the rest will cost ------------------------------------------------


def _trained(config: Config, planned: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Samples and steps of the pilot, and the share of its steps at the full label, and of those of
    stage 1 of the full run."""
    pilot, options = Run.of(config, "pilot"), config.train
    grouped, _ = StageGroups(pilot.stage(1).directory("train") / "grouped_index").read()
    report = coverage_report(grouped, options.global_batch, options.plan.policy)
    whole = next(t["coverage"] for t in planned if t["stage"] == 1 and t["variant"] == "mcl")
    return {
        "share": config.pilot.share,
        "steps_share": config.pilot.steps_share or config.pilot.share,
        "samples": grouped.num_samples,
        "samples_of_index": len(pilot.index),
        "full_label_share": report.full_label_share,
        "full_label_share_of_run": whole[0]["full_label_share"] if whole else None,
    }


def _price(config: Config, planned: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Steps and samples that are left to train, and their GPU-hours at the speed of the pilot.

    Epochs without a speed do not count, and there may be none at all: a training that was killed
    after its last checkpoint does not repeat a step.
    """
    trainings = [t for t in planned if t["stage"] > 0]
    samples, rank_s, ranks = 0.0, 0.0, 1
    for variant in PILOTS:
        path = Run.of(config, variant).stage(1).directory("train") / "epochs.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        for row in (parse_json(line, str(path)) for line in lines):  # all: they are added up
            if row["samples_per_s_per_rank"] > 0:
                seen = row["steps"] * config.train.global_batch
                samples += seen
                rank_s += seen / row["samples_per_s_per_rank"]
                ranks = max(1, round(row["samples_per_s"] / row["samples_per_s_per_rank"]))
    left = [sum(t["samples_seen"][end] for t in trainings) for end in (0, 1)]
    speed = samples / rank_s if rank_s else None
    names = [Layout(Path(), t["variant"]).model_name(f"stage_{t['stage']}") for t in trainings]
    return {
        "steps": {name: list(t["steps"]) for name, t in zip(names, trainings, strict=True)},
        "samples_seen": left,
        "samples_per_s_per_rank": speed,
        "gpu_hours": None if speed is None else [number / speed / 3600 for number in left],
        "gpu_hours_of_pilot": rank_s / 3600,
        "ranks_of_pilot": ranks,
    }


# --- what stage 1 has forgotten -------------------------------------------------------------------


def _forgotten(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each headline metric that counts items: those that stage 0 gets right and the encoder of
    stage 1 (not a joined one) wrong, of all items and of each stratum; p-values of strata are
    corrected for their number (Holm)."""
    items = {(row.model, row.benchmark, row.metric): (row, path) for row, path in rows}
    read, forgotten = Reader(), []
    for c in compare.compare(rows, ["stage_1"], "stage_0"):
        before, after = (
            read(*items[row.model, row.benchmark, row.metric]) for row in (c.against, c.row)
        )
        if before.statistic != "mean":  # one item alone is neither found nor missed
            continue
        of_after = after.of_each_stratum()
        strata = {n: _lost(own, of_after[n]) for n, own in before.of_each_stratum().items()}
        for lost, p_value in zip(
            strata.values(), outcomes.holm([s["p_value"] for s in strata.values()]), strict=True
        ):
            lost["p_value"] = p_value
        what = {"benchmark": c.row.benchmark, "metric": c.row.metric, **_lost(before, after)}
        forgotten.append(what | {"trials": c.row.protocol.get("trials", "items"), "strata": strata})
    return forgotten


def _lost(before: Outcomes, after: Outcomes) -> dict[str, Any]:
    """Figures in percent, and items (sums of shares) that ``before`` finds, that ``after`` lost and
    won; the p-value counts items that are better against those that are worse."""
    change = after.values.astype(np.float64) - before.values
    return {
        "stage_0": 100.0 * before.value(),
        "stage_1": 100.0 * after.value(),
        "count": len(before),
        "found": float(np.sum(before.values, dtype=np.float64)),
        "lost": float(np.abs(change[change < 0]).sum()),
        "won": float(change[change > 0].sum()),
        "p_value": outcomes.mcnemar(int((change > 0).sum()), int((change < 0).sum())),
    }


# --- in words -------------------------------------------------------------------------------------


def _of_training(trained: dict[str, Any]) -> str:
    of_run, share = trained["full_label_share_of_run"], trained["full_label_share"]
    text = (
        f"The pilot trained on {trained['samples']:,} of {trained['samples_of_index']:,} samples, "
        f"with groups and without, for {100 * trained['steps_share']:.3g} % of the steps, from the "
        "run's own stage 0 and its clusters."
    )
    if of_run is not None and share < of_run - _MIXED:
        text += (
            f" Its groups are smaller: {100 * share:.0f} % of its steps compare samples of one "
            f"full label, of the run's {100 * of_run:.0f} %. A larger share is closer to the run."
        )
    return text


def _of_forgotten(metric: dict[str, Any]) -> list[str]:
    """Sentences on what stage 1 forgot in one metric, and in which strata beyond chance."""
    text = (
        f"{metric['benchmark']}: stage_0 finds {metric['found']:,g} of {metric['count']:,} "
        f"{metric['trials']}; stage_1 alone misses {metric['lost']:,g} of them, and finds "
        f"{metric['won']:,g} others."
    )
    worse = [
        (name, s)
        for name, s in metric["strata"].items()
        if s["p_value"] < LEVEL and s["lost"] > s["won"]
    ]
    worse.sort(key=lambda item: item[1]["stage_1"] - item[1]["stage_0"])
    named = ", ".join(
        f"{name} ({s['stage_0']:.1f} -> {s['stage_1']:.1f})" for name, s in worse[:_NAMED]
    )
    if not worse:
        return [text]
    more = f", and {len(worse) - _NAMED} more" if len(worse) > _NAMED else ""
    return [text, f"{metric['benchmark']}: stage_1 alone forgets beyond chance: {named}{more}."]


def _of_price(cost: dict[str, Any]) -> list[str]:
    samples = _between(*(f"{number:,}" for number in cost["samples_seen"]))
    counted = "; ".join(
        f"{name} {_between(*(f'{number:,}' for number in numbers))}"
        for name, numbers in cost["steps"].items()
    )
    price = "the pilot's speed is not known, since it was killed and resumed at its end"
    if cost["gpu_hours"] is not None:
        hours, wall = (
            _between(*(f"{number / ranks:,.3g}" for number in cost["gpu_hours"]))
            for ranks in (1, cost["ranks_of_pilot"])
        )
        price = (
            f"which is {hours} GPU-hours at the {cost['samples_per_s_per_rank']:,.1f} samples/s of "
            f"a rank (a GPU, or a process on a CPU) in the pilot, or {wall} hours on its "
            f"{cost['ranks_of_pilot']} rank(s)"
        )
    return [
        f"The trainings of the full run see {samples} samples, {price}. Embedding, clustering and "
        f"evaluation come on top. Steps: {counted}.",
        f"The full run goes on from the same index, stage 0, embeddings and clusters; only the "
        f"pilot's own trainings, {cost['gpu_hours_of_pilot']:.3g} GPU-hours, are not part of it.",
    ]


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
