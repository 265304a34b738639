"""Counts the steps of every training, and the groups and samples that they run over.

What is on disk (the index, pseudo labels) is counted; the rest is estimated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mclclip.config import Config
from mclclip.data.coverage import coverage_report
from mclclip.data.epoch_plan import (
    ALONE,
    check_samples,
    require_steps,
    steps_per_epoch,
    total_steps,
)
from mclclip.data.groups import GroupSizes, group_samples
from mclclip.data.labels import SampleWeights, label_space, read_pseudo_labels
from mclclip.data.options import Policy
from mclclip.data.sample_index import SampleIndex
from mclclip.run import artifacts
from mclclip.run.artifacts import RunPaths

Range = tuple[int, int]
# Without pseudo labels a plan shows the coverage for both distributions of group sizes, on which it
# depends. MCL's Fig. 7 shows that sizes are long-tailed, and has no numbers.
ASSUMED = ("equal", "long-tailed")
NOTE = (
    "note: no labels yet. equal: all possible labels have the same size. long-tailed: the k-th",
    "largest cluster of a stage has 1/k of the largest one's samples, and stages are independent",
)
_MOST_LABELS = 1_000_000  # for which a coverage is estimated


def count(config: Config, samples: int | None) -> dict[str, Any]:
    """Returns ``samples`` and ``trainings``; ``samples`` is their number if there is no index.

    Samples have a number, how many are usable (not known as undecodable), captions, how many usable
    ones are without_caption, size_bytes of their shards, and exact (True: counted in an index).

    A training has name, stage, variant, option ("base" or "train"), groups, steps_per_epoch, steps
    and samples_seen as [fewest, most] or None, exact (True: these were counted), and coverage: how
    an epoch covers the groups (the fields of ``Coverage``), and ``sizes``, where the groups' sizes
    are from ("found" on disk, or one of ``ASSUMED``); empty for trainings without groups. A control
    takes as many steps as the training that it controls. Raises ValueError for groups or batches
    that the samples cannot fill.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"--samples is {samples}: wanted at least 1")
    layout = RunPaths.of(config)
    index = SampleIndex.open(layout.index) if artifacts.is_finished(layout.index) else None
    numbers = _count_samples(index, samples)
    trainings = [] if config.base is None else [_training(config, index, numbers, 0, "mcl")]
    stages = range(1, config.num_stages + 1)
    controlled = [_training(config, index, numbers, stage, "mcl") for stage in stages]
    trainings += controlled
    for variant in config.controls:
        for training in controlled:
            control = _training(config, index, numbers, training["stage"], variant)
            control |= {name: training[name] for name in ("steps", "samples_seen")}
            trainings.append(control | {"exact": control["exact"] and training["exact"]})
    return {"samples": numbers, "trainings": trainings}


def _count_samples(index: SampleIndex | None, samples: int | None) -> dict[str, Any]:
    if index is None:
        numbers: dict[str, Any] = {"number": samples, "usable": samples, "captions": samples}
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
    """Describes a training. Its groups are counted if their labels are on disk, else estimated."""
    name = "train" if stage else "base"
    options, reads = config.trainings[name], config.trainings[name].objective.reads
    batch, policy = options.global_batch, options.plan.policy
    radices = _radices(config, stage, variant)
    most, usable, weights, grouped = label_space(radices), samples["usable"], None, None
    if index is not None:
        lacking = index.left_out(
            options.reader(name), captions=reads.captions, attribute=reads.attribute
        )
        left_out = np.union1d(index.bad_ids(), lacking)
        usable = len(index) - len(left_out)
        weights = SampleWeights.open(index, config.data, options.plan, f"{name}.plan")
    drawn = options.plan.samples_per_epoch or usable if weights is None else weights.num_draws
    if usable is not None:
        clusters, number = max(config.clusters[:stage], default=1), samples["usable"]
        draws = None if drawn == usable else drawn
        check_samples(name, batch, policy, clusters, number, number - usable, draws)
        if policy in ALONE and most * batch > drawn:
            raise ValueError(
                f"{most:,} possible labels x {name}.global_batch={batch:,} are more than the "
                f"{drawn:,} samples of an epoch, which {name}.plan.policy=drop does not allow: use "
                "policy backoff, fewer clusters or a smaller global batch"
            )
    if index is not None:
        grouped = _grouped_on_disk(config, index, stage, variant, left_out, weights)
    groups, epoch, coverage = (1, most if usable is None else min(most, usable)), None, []
    if grouped is not None:
        report = coverage_report(grouped, batch, policy)
        require_steps(report.steps, grouped.sizes, batch, policy)
        groups, epoch = (int(report.groups["num_groups"]),) * 2, (report.steps,) * 2
        coverage = [{"sizes": "found"} | vars(report)] if radices else []
    elif drawn is not None:
        epoch = steps_per_epoch(drawn, batch, policy, most)
        coverage = estimate_coverage(drawn, radices, batch, policy) if radices else []
    total = None  # steps of the whole training
    if epoch is not None or options.steps is not None:
        total = tuple(total_steps(options.steps, options.epochs, n) for n in epoch or (0, 0))
    return {
        "name": f"stage {stage}{'' if variant == 'mcl' else f', {variant}'}",
        "stage": stage,
        "variant": variant,
        "option": name,
        "groups": groups,
        "steps_per_epoch": epoch,
        "steps": total,
        "samples_seen": total and tuple(steps * batch for steps in total),
        "exact": grouped is not None or (samples["exact"] and not radices),
        "coverage": coverage,
    }


def _radices(config: Config, stage: int, variant: str) -> tuple[int, ...]:
    """Returns the number of clusters of each stage whose labels form the pseudo labels of a
    training; () if it has no groups."""
    if variant == "ungrouped" or not config.train.objective.reads.groups:
        return ()
    radices = tuple(config.clusters[:stage])
    return radices[-1:] if config.cluster.label_mode == "last" else radices


def _grouped_on_disk(
    config: Config,
    index: SampleIndex,
    stage: int,
    variant: str,
    left_out: np.ndarray,
    weights: SampleWeights | None,
) -> GroupSizes | None:
    """Returns the sizes of a training's groups if its pseudo labels are on disk, else None.

    None also for a control with random labels, if samples are bad or weighted: the draw then
    decides which groups these fall into.
    """
    labels, radices = np.broadcast_to(np.int64(0), len(index)), tuple[int, ...]()
    if stage > 0 and _radices(config, stage, variant):
        directory = RunPaths.of(config, variant).pseudo_labels(stage)
        if not artifacts.is_finished(directory):
            return None
        labels, radices, _ = read_pseudo_labels(directory, index)
        if variant != "mcl" and (len(index.bad_ids()) or weights is not None):
            return None
    return group_samples(labels, radices, left_out, weights)


# --- what an epoch makes of its groups ----------------------------------------------------------


def estimate_coverage(
    num_samples: int, radices: tuple[int, ...], global_batch: int, policy: Policy
) -> list[dict[str, Any]]:
    """Estimates the coverage of an epoch before there are clusters, for each of ``ASSUMED``.

    "equal": all labels have the same size. "long-tailed": in each stage cluster k has a share in
    proportion to 1 / k. ``radices`` are the numbers of clusters of the stages. Returns an empty
    list for more labels than samples, or more than a million.
    """
    if label_space(radices) > min(num_samples, _MOST_LABELS):
        return []
    epochs = []
    for sizes in ASSUMED:
        share = np.ones(1)
        for radix in radices:
            cluster = np.ones(radix) if sizes == "equal" else 1 / np.arange(1, radix + 1)
            share = np.outer(share, cluster / cluster.sum()).reshape(-1)
        starts = np.round(np.append(0.0, np.cumsum(share)) * num_samples).astype(np.int64)
        starts[-1] = num_samples
        filled = np.flatnonzero(np.diff(starts))
        grouped = GroupSizes(np.append(starts[filled], num_samples), filled, radices)
        epochs.append({"sizes": sizes} | vars(coverage_report(grouped, global_batch, policy)))
    return epochs
