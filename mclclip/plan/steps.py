"""How many steps every training takes, and over what: counted from disk as far as that is there."""

from __future__ import annotations

from typing import Any

import numpy as np

from mclclip.config import Config
from mclclip.data.coverage import Coverage, coverage_report
from mclclip.data.epoch_plan import (
    ALONE,
    check_samples,
    require_steps,
    steps_per_epoch,
    total_steps,
)
from mclclip.data.groups import GroupSizes, LabelBlocks, StageGroups
from mclclip.data.labels import SampleWeights, label_space, read_pseudo_labels
from mclclip.data.options import Policy
from mclclip.data.sample_index import SampleIndex
from mclclip.run import artifacts
from mclclip.run.artifacts import Layout

Range = tuple[int, int]
# Where there are no labels, plans are shown for both: the coverage depends on the sizes of the
# groups, and MCL's Fig. 7 says that they are long-tailed without giving numbers.
ASSUMED = ("equal", "long-tailed")
NOTE = (
    "note: no labels yet. equal: all possible labels have the same size. long-tailed: the k-th",
    "largest cluster of a stage has 1/k of the largest one's samples, and stages are independent",
)
_MOST_LABELS = 1_000_000


def count(config: Config, samples: int | None) -> dict[str, Any]:
    """``samples`` and ``trainings``, in order.

    Samples: number, usable (not known as undecodable), captions, without_caption (of the usable),
    the bytes of their shards, and whether they were counted.

    A training: stage, variant, option, steps, steps_per_epoch and groups as [fewest, most] or None,
    whether they are exact, and coverage, what an epoch makes of the groups (``_epoch``; none
    for trainings without groups). A control takes as many steps as the training it controls. Raises
    ValueError for groups or batches that the samples cannot fill.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"--samples is {samples}: wanted at least 1")
    layout = Layout.of(config)
    index = SampleIndex.open(layout.index) if artifacts.is_finished(layout.index) else None
    found = _samples(index, samples)
    trainings = [] if config.base is None else [_training(config, index, found, 0, "mcl")]
    stages = range(1, config.num_stages + 1)
    controlled = [_training(config, index, found, stage, "mcl") for stage in stages]
    trainings += controlled
    for variant in config.controls:
        for training in controlled:
            control = _training(config, index, found, training["stage"], variant)
            control |= {name: training[name] for name in ("steps", "samples_seen")}
            trainings.append(control | {"exact": control["exact"] and training["exact"]})
    return {"samples": found, "trainings": trainings}


def _samples(index: SampleIndex | None, given: int | None) -> dict[str, Any]:
    if index is None:
        numbers: dict[str, Any] = {"number": given, "usable": given, "captions": given}
        return numbers | {"without_caption": 0, "size_bytes": None, "exact": False}
    bad = index.bad_ids()
    return {
        "number": len(index),
        "usable": len(index) - len(bad),
        "captions": int(index.num_captions.sum()),
        "without_caption": int((np.delete(index.num_captions, bad) == 0).sum()),
        "size_bytes": sum(shard.size_bytes for shard in index.shards),
        "exact": True,
    }


def _training(
    config: Config, index: SampleIndex | None, samples: dict[str, Any], stage: int, variant: str
) -> dict[str, Any]:
    name = "train" if stage else "base"
    options = config.trainings[name]
    known = usable = samples["usable"]
    batch, policy = options.global_batch, options.plan.policy
    radices = _radices(config, stage, variant)
    most = label_space(radices)
    groups, epoch, coverage = (1, most), None, []
    drawn, on_disk = options.plan.samples_per_epoch or usable, None
    if index is not None:
        reads = options.objective.reads
        lacking = index.left_out(
            options.reader(name), captions=reads.captions, attribute=reads.attribute
        )
        left_out = np.union1d(index.bad_ids(), lacking)
        usable = len(index) - len(left_out)
        weights = SampleWeights.open(index, config.data, options.plan, f"{name}.plan")
        drawn = options.plan.samples_per_epoch or usable if weights is None else weights.num_draws
    if usable is not None:
        _check_samples(config, name, known, usable, drawn, stage, most)
        groups = 1, min(most, usable)
    if index is not None:
        on_disk = _on_disk(config, index, stage, variant, left_out, weights)
    if on_disk is not None:
        found = int(on_disk.groups["num_groups"])
        groups, epoch = (found, found), (on_disk.steps, on_disk.steps)
        coverage = [_epoch("found", on_disk)] if radices else []
    elif drawn is not None:
        epoch = steps_per_epoch(drawn, batch, policy, most)
        coverage = assumed_epochs(drawn, radices, batch, policy) if radices else []
    total = None  # steps of the training, as ``train`` counts them
    if epoch is not None or options.steps is not None:
        low, high = epoch or (0, 0)
        total = tuple(total_steps(options.steps, options.epochs, steps) for steps in (low, high))
    return {
        "stage": stage,
        "variant": variant,
        "option": name,
        "groups": groups,
        "steps_per_epoch": epoch,
        "steps": total,
        "samples_seen": total and tuple(steps * batch for steps in total),
        "exact": on_disk is not None or (samples["exact"] and not radices),
        "coverage": coverage,
    }


def _radices(config: Config, stage: int, variant: str) -> tuple[int, ...]:
    """The number of clusters of each stage whose labels make up the training's pseudo labels; ()
    without groups."""
    if variant == "ungrouped" or not config.train.objective.reads.groups:
        return ()
    radices = tuple(config.clusters[:stage])
    return radices[-1:] if config.cluster.label_mode == "last" else radices


def _check_samples(
    config: Config, name: str, known: int, usable: int, drawn: int, stage: int, labels: int
) -> None:
    """Refuses what the run would refuse once it has its index, or its labels.

    ``known`` samples are clustered, ``usable`` ones of them are trained on, and ``drawn`` an epoch.
    """
    options = config.trainings[name]
    batch, policy = options.global_batch, options.plan.policy
    most = max(config.clusters[:stage], default=1)
    draws = None if drawn == usable else drawn
    check_samples(name, batch, policy, most, known, known - usable, draws)
    if policy in ALONE and labels * batch > drawn:
        raise ValueError(
            f"{labels:,} possible labels x {name}.global_batch={batch:,} are more than the "
            f"{drawn:,} samples of an epoch, which {name}.plan.policy=drop does not allow: use "
            "policy backoff, fewer clusters or a smaller global batch"
        )


def _on_disk(
    config: Config,
    index: SampleIndex,
    stage: int,
    variant: str,
    left_out: np.ndarray,
    weights: SampleWeights | None,
) -> Coverage | None:
    """The coverage of a training that has begun on today's labels, or whose labels are there.

    Raises ValueError where its groups fill no batch.
    """
    options = config.trainings["train" if stage else "base"]
    layout = Layout.of(config, variant)
    bad, inputs = index.bad_ids(), {"index": index.digest}
    labels, radices = np.broadcast_to(np.int64(0), len(index)), tuple[int, ...]()
    if stage > 0 and _radices(config, stage, variant):
        directory = layout.pseudo_labels(stage)
        if not artifacts.is_finished(directory):
            return None
        labels, radices, inputs["pseudo_labels"] = read_pseudo_labels(directory, index)
    inputs |= {} if weights is None else {"weights": weights.digest}
    begun = StageGroups(layout.train(stage) / "grouped_index")
    made_of = artifacts.made_of(layout.train(stage)).get("inputs", {})
    if begun.written and inputs.items() <= made_of.items():
        grouped: GroupSizes = begun.read()[0]
    elif radices and variant != "mcl" and (len(bad) or weights is not None):
        # Which groups of random labels lose a bad sample, or get a heavy one, depends on the draw.
        return None
    else:
        grouped = LabelBlocks(labels, radices, left_out, weights=weights).sizes()
    batch, policy = options.global_batch, options.plan.policy
    report = coverage_report(grouped, batch, policy)
    require_steps(report.steps, grouped.sizes, batch, policy)
    return report


# --- what an epoch makes of its groups ----------------------------------------------------------


def assumed_epochs(
    num_samples: int, radices: tuple[int, ...], global_batch: int, policy: Policy
) -> list[dict[str, Any]]:
    """``_epoch`` for each of ``ASSUMED``; none for more labels than can be listed or filled."""
    if label_space(radices) > min(num_samples, _MOST_LABELS):
        return []
    return [
        _epoch(sizes, coverage_report(_grouped(num_samples, radices, sizes), global_batch, policy))
        for sizes in ASSUMED
    ]


def _epoch(sizes: str, report: Coverage) -> dict[str, Any]:
    """An epoch in figures; ``sizes`` says where those of the groups come from."""
    return {
        "sizes": sizes,
        "steps": report.steps,
        "full_label_share": report.full_label_share,
        "mixed_steps": report.mixed_steps,
        "negatives": report.negatives,
        "left_out": report.remainder,
        "left_out_share": report.remainder / max(report.num_samples, 1),
        "repeated": report.repeated,
    }


def _grouped(num_samples: int, radices: tuple[int, ...], sizes: str) -> GroupSizes:
    """Groups for a plan before there are clusters: all labels of ``radices``, equally large, or in
    each stage cluster k in proportion to 1 / k."""
    share = np.ones(1)
    for radix in radices:
        cluster = np.ones(radix) if sizes == "equal" else 1 / np.arange(1, radix + 1)
        share = np.outer(share, cluster / cluster.sum()).reshape(-1)
    starts = np.round(np.append(0.0, np.cumsum(share)) * num_samples).astype(np.int64)
    starts[-1] = num_samples
    filled = np.flatnonzero(np.diff(starts))
    return GroupSizes(np.append(starts[filled], num_samples), filled, radices)
