"""How many steps every training takes, and over what: counted from disk as far as that is there."""

from __future__ import annotations

from typing import Any

import numpy as np

from mclclip.config import Config, TrainConfig
from mclclip.data.coverage import Coverage, coverage_report
from mclclip.data.epoch_plan import check_samples, steps_per_epoch, total_steps
from mclclip.data.groups import GroupedIndex, StageGroups
from mclclip.data.labels import label_space, read_pseudo_labels
from mclclip.data.sample_index import SampleIndex
from mclclip.plan import groups as plan_groups
from mclclip.run import artifacts
from mclclip.run.layout import Layout

Range = tuple[int, int]


def count(config: Config, samples: int | None) -> dict[str, Any]:
    """``samples`` and ``trainings``, in order.

    Samples: number, usable (not known as undecodable), captions, without_caption (of the usable),
    and whether they were counted.

    A training: stage, variant, option, steps, steps_per_epoch and groups as [fewest, most] or None,
    whether they are exact, and coverage, what an epoch makes of the groups (``plan.groups``; none
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
            total = {name: training[name] for name in ("steps", "samples_seen")}
            exact = control["exact"] and training["exact"]
            trainings.append(control | total | {"exact": exact})
    return {"samples": found, "trainings": trainings}


def _samples(index: SampleIndex | None, given: int | None) -> dict[str, Any]:
    if index is None:
        numbers: dict[str, Any] = {"number": given, "usable": given, "captions": given}
        return numbers | {"without_caption": 0, "exact": False}
    bad = index.bad_ids()
    return {
        "number": len(index),
        "usable": len(index) - len(bad),
        "captions": int(index.num_captions.sum()),
        "without_caption": int((np.delete(index.num_captions, bad) == 0).sum()),
        "exact": True,
    }


def _training(
    config: Config, index: SampleIndex | None, samples: dict[str, Any], stage: int, variant: str
) -> dict[str, Any]:
    name, options = ("base", config.base) if stage == 0 else ("train", config.train)
    assert options is not None
    radices = _radices(config, stage, variant)
    left_out = _left_out(index, name, options)
    known, usable = samples["usable"], samples["usable"]
    if index is not None:
        usable = len(index) - len(left_out)
    clusters = max((config.cluster.clusters_of(earlier) for earlier in range(stage)), default=1)
    _check_samples(clusters, name, options, known, usable, radices)
    batch, policy = options.global_batch, options.plan.policy
    on_disk = _on_disk(config, index, stage, variant, options, left_out)
    most = label_space(radices)
    groups, epoch, coverage = (1, most), None, []
    if on_disk is not None:
        found = int(on_disk.groups["num_groups"])
        groups, epoch = (found, found), (on_disk.steps, on_disk.steps)
        coverage = [plan_groups.summary("found", on_disk)] if radices else []
    elif usable is not None:
        groups, epoch = (1, min(most, usable)), steps_per_epoch(usable, batch, policy, most)
        coverage = plan_groups.assumed(usable, radices, batch, policy) if radices else []
    if epoch is not None and epoch[1] == 0:
        raise ValueError(
            f"stage {stage} ({variant}) has no step: {usable:,} samples fill no batch of "
            f"{name}.global_batch={batch:,} under policy {policy!r}: "
            "lower it, or cluster into fewer groups"
        )
    total = _total(options, epoch)
    return {
        "stage": stage,
        "variant": variant,
        "option": name,
        "groups": groups,
        "steps_per_epoch": epoch,
        "steps": total,
        "samples_seen": total and tuple(steps * options.global_batch for steps in total),
        "exact": on_disk is not None or (samples["exact"] and not radices),
        "coverage": coverage,
    }


def _left_out(index: SampleIndex | None, name: str, options: TrainConfig) -> np.ndarray:
    """Ids of the samples that are in no batch of a training; none where there is no index yet."""
    if index is None:
        return np.zeros(0, np.int64)
    bad, reads = index.bad_ids(), options.objective.reads.captions
    return np.union1d(bad, index.without_caption(options.reader(name))) if reads else bad


def _total(options: TrainConfig, epoch: Range | None) -> Range | None:
    """Steps of a training, as ``train`` counts them."""
    if epoch is None and options.steps is None:
        return None
    low, high = (total_steps(options.steps, options.epochs, steps) for steps in epoch or (0, 0))
    return low, high


def _radices(config: Config, stage: int, variant: str) -> tuple[int, ...]:
    """Clusters of each stage that a training's labels are made of; () for one group."""
    if variant == "ungrouped" or not config.train.objective.reads.groups:
        return ()
    radices = tuple(config.cluster.clusters_of(earlier) for earlier in range(stage))
    return radices[-1:] if config.cluster.label_mode == "last" else radices


def _check_samples(
    clusters: int,
    name: str,
    options: TrainConfig,
    known: int | None,
    usable: int | None,
    radices: tuple[int, ...],
) -> None:
    """What the run would refuse once it has its index, or its labels.

    ``known`` samples are clustered, and ``usable`` ones of them are trained on.
    """
    if known is None or usable is None:
        return
    batch, policy = options.global_batch, options.plan.policy
    check_samples(name, batch, policy, clusters, known, known - usable)
    if policy == "drop" and label_space(radices) * batch > usable:
        raise ValueError(
            f"{label_space(radices):,} possible labels x {name}.global_batch={batch:,} are more "
            f"than the {usable:,} samples, which {name}.plan.policy=drop does not allow: use "
            "policy backoff, fewer clusters or a smaller global batch"
        )


def _on_disk(
    config: Config,
    index: SampleIndex | None,
    stage: int,
    variant: str,
    options: TrainConfig,
    left_out: np.ndarray,
) -> Coverage | None:
    """The coverage of a training that has begun, or whose labels are there."""
    layout = Layout.of(config, variant)
    begun = StageGroups(layout.train(stage) / "grouped_index")
    if begun.written:
        grouped = begun.read()[0]
    elif index is None:
        return None
    else:
        labels, radices = np.zeros(len(index), np.int64), tuple[int, ...]()
        if stage > 0 and _radices(config, stage, variant):
            directory = layout.pseudo_labels(stage)
            # Which groups of random labels lose a bad sample depends on the draw.
            if not artifacts.is_finished(directory) or (variant != "mcl" and len(index.bad_ids())):
                return None
            labels, radices, _ = read_pseudo_labels(directory, index)
            labels = labels.copy()
        labels[left_out] = -1
        grouped = GroupedIndex.build(labels, radices)
    return coverage_report(grouped, options.global_batch, options.plan.policy)
