"""Verb: index + labels -> checkpoints. One loop for every method.

This file opens the artifact, prepares labels and groups, and resumes; ``parts`` builds the objects
from the options, and ``loop`` runs the steps.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import numpy as np

from mclclip.checkpoint import path_of
from mclclip.config import Config, TrainConfig, to_tree
from mclclip.data import trunk_rows
from mclclip.data.coverage import coverage_report, plan_groups
from mclclip.data.epoch_plan import check_ranks, total_steps
from mclclip.data.groups import GroupSizes, LabelBlocks, StageGroups
from mclclip.data.labels import permute_labels, read_pseudo_labels
from mclclip.data.locations import Resharded
from mclclip.data.sample_index import SampleIndex
from mclclip.data.shard_check import check_shards
from mclclip.data.trunk_rows import TrunkRows
from mclclip.files import move_aside
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import artifacts
from mclclip.run.artifacts import Artifact, Force
from mclclip.run.layout import Layout
from mclclip.run.profiling import PeakMemory
from mclclip.train import parts
from mclclip.train.judging import Evaluate, Judging, Together
from mclclip.train.loop import Trainee
from mclclip.train.parts import Job

log = logging.getLogger("mclclip")

# Options of TrainConfig that change records or speed, not weights: a resumed run may change them.
_RECORDS = ("checkpoint", "log_every", "profile_steps", "engine")


def run(
    config: Config,
    context: Context,
    *,
    stage: int,
    variant: str = "mcl",
    force: Force = False,
    evaluate: Evaluate | None = None,
) -> Path:
    """Trains stage ``stage`` of ``variant`` and returns its directory (skips if finished).

    Stage 0 trains ``config.model`` under ``config.base``. Later stages train under
    ``config.train``, from stage 0's export unless ``train.start`` or ``trained_model`` says
    otherwise: on the pseudo labels of ``cluster`` (``mcl``), without groups (``ungrouped``), or on
    the same labels permuted over the samples (``random_groups``). The two controls take as many
    steps as MCL's training of the stage, and draw captions and augmentations from the same keys
    (seed, stage, epoch, sample). ``pilot`` and ``pilot_ungrouped`` are the first and the second on
    ``pilot.share`` of the samples, for that share of the steps or ``pilot.steps_share``.
    ``evaluate`` measures checkpoints where ``evaluate.every`` asks for it.
    Raises ValueError where options and data do not fit, and RuntimeError for a control whose
    number of steps is not known yet, before anything is written.
    """
    layout = Layout.of(config, variant)
    options = _options(config, layout, stage)
    # Compared with its record once; what the other ranks are handed is the path, which they map.
    index = collectives.on_main(lambda: SampleIndex.open(layout.index))
    check_ranks("train" if stage else "base", options.global_batch, context.world_size)
    peaks = PeakMemory(context.device)
    job = Job(config, options, context, layout, stage, index, layout.train(stage), peaks)
    if collectives.on_main(lambda: _prepare(job, force, write=False))[0].finished:
        log.info("%s is finished: skipped", job.directory)
        return job.directory
    collectives.together(lambda: parts.check_pixels(config, [job.name]))
    # Read and checked by the first rank alone; each rank keeps what it hands over.
    job.class_labels = collectives.on_main(lambda: job.class_labels)
    given = collectives.on_main(lambda: job.resharded and job.resharded.arguments)
    job.resharded = collectives.together(lambda: given and Resharded.mapped(*given))
    if job.reads_trunk:
        job.trunk = TrunkRows.open_together(layout, config.trunk_cache.folder, index)
    collectives.on_main(lambda: check_shards(index.directory, index.shards, config.data))
    model = parts.build_model(config, layout, stage, options, context)
    collectives.together(lambda: job.start_from_trunk(model))
    objective = parts.objective_of(job, model)
    artifact, groups = collectives.on_main(lambda: _prepare(job, force, write=True))
    trainee = parts.trainee_of(job, model, objective)
    steps, exported = _train(job, trainee, artifact.identity, groups, evaluate)
    if context.is_main:
        counts = {"steps": steps, "samples_seen": steps * options.global_batch}
        if exported is not None:
            counts["exported_step"] = exported
        for reason in ("without_caption", "without_attribute"):
            if reason in job.left_out:
                counts[reason] = len(job.left_out[reason])
        artifact.finish(counts)
    collectives.barrier()
    return job.directory


def _options(config: Config, layout: Layout, stage: int) -> TrainConfig:
    """The options of a training; a pilot has its share of the steps. See ``run`` for errors."""
    options = config.base if stage == 0 else config.train
    if options is None:
        raise ValueError("stage 0 is a given encoder (base is null): there is nothing to train")
    if layout.method != "mcl" and layout.method not in options.objective.controls:
        raise ValueError(
            f"--variant {layout.variant} does not apply to train.objective.kind="
            f"{options.objective.kind}, which has "
            f"{', '.join(options.objective.controls) or 'no controls'}: leave it out"
        )
    if not layout.is_pilot:
        return options
    if config.pilot.share is None or stage != 1:
        raise ValueError(
            f"--variant {layout.variant} trains stage 1 on a share of the samples, got stage "
            f"{stage} and pilot.share={config.pilot.share}: use --stage 1, and set pilot.share"
        )
    share, epochs = config.pilot.steps_share, options.epochs
    if share is not None:  # epochs over fewer samples have fewer steps already
        epochs *= share / config.pilot.share
    steps = options.steps and max(1, round(options.steps * (share or config.pilot.share)))
    return replace(options, steps=steps, epochs=epochs)


def _prepare(job: Job, force: Force, write: bool) -> tuple[Artifact, StageGroups]:
    """Opens the artifact and writes the grouped index; writes nothing if the groups do not fit.

    With ``write=False`` it only checks whether the artifact is finished.
    """
    options = {k: v for k, v in to_tree(job.options).items() if k not in _RECORDS}
    plan = options["plan"]
    del plan["weights"]  # their digest is among the inputs
    for name, default in (("samples_per_epoch", None), ("block", 1)):
        if plan[name] == default:  # absent where draws and order are as they have ever been
            del plan[name]
    if not job.options.patch_dropout:  # absent where training has ever been as it is
        del options["patch_dropout"]
    if job.options.evaluate.metric is None:  # figures that are only recorded
        del options["evaluate"]
    config = {
        "stage": job.stage,
        "variant": job.layout.variant,
        "seed": job.config.seed,
        "model": to_tree(job.config.model_of(job.name)),
        "train": options,
    }
    if job.pixels != "exact" and not job.reads_trunk:
        config["data"] = {"pixels": job.pixels}
    if job.layout.is_pilot:
        config["share"] = job.share
    if (steps := _controlled_steps(job)) is not None:
        config["steps"] = steps
    groups = StageGroups(job.directory / "grouped_index")
    opened = partial(
        Artifact.open, job.directory, kind="train", config=config, inputs=_inputs(job), force=force
    )
    artifact = opened(write=False)
    if artifact.finished or not write:
        return artifact, groups
    bad_ids = job.index.bad_ids()
    planned = None if groups.written else _planned(job, bad_ids)
    if force and groups.damage() is not None:
        move_aside(job.directory)
    artifact = opened(write=True)
    _report_samples(job)
    if not groups.written:  # with --force the ones found before may have been moved aside
        groups.write(*(planned or _planned(job, bad_ids)), bad_ids)
    return artifact, groups


def _report_samples(job: Job) -> None:
    """Logs which samples a training draws, and where it reads them."""
    reasons = {
        "without_caption": "have no caption",
        "without_attribute": f"have no {job.options.objective.reads.attribute}",
        "outside_of_share": "are outside of the pilot's share",
    }
    for reason, ids in job.left_out.items():
        if len(ids):
            log.info(
                "stage %d: %d of %d samples %s and are left out",
                job.stage, len(ids), len(job.index), reasons[reason],
            )  # fmt: skip
    if job.weights is not None:
        shares = job.weights.by_source(job.index)
        drawn = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        log.info("stage %d: samples are drawn by weight, of all draws: %s", job.stage, drawn)
    if job.trunk is not None:
        log.info(
            "stage %d: starts from what the first %d blocks made of every image, at %s",
            job.stage, job.trunk.num_blocks, job.trunk.folder,
        )  # fmt: skip
    if job.resharded is not None:
        log.info("stage %d: samples are read from copies at %s", job.stage, job.resharded.shown)


def _controlled_steps(job: Job) -> int | None:
    """Steps of the training that this one is a control of; None for MCL's own trainings, and where
    the options give the number.

    An epoch over other groups can have another number of steps (policies drop and wrap), so the
    number comes from the groups that the controlled training draws from.
    """
    options = job.options
    if job.layout.method == "mcl" or options.steps is not None:
        return None
    layout = job.layout.controlled
    # Raises where the controlled training was made with other options or labels than those of now.
    mcl = replace(job, layout=layout, directory=layout.train(job.stage))
    controlled = _prepare(mcl, force=False, write=False)[1]
    if not controlled.written:
        raise RuntimeError(
            f"a control takes as many steps as the training it controls, and {controlled.directory}"
            f" is not there: run 'mclclip train --stage {job.stage}' first, or set train.steps"
        )
    report = coverage_report(controlled.read()[0], options.global_batch, options.plan.policy)
    return total_steps(None, options.epochs, report.steps)


def _planned(job: Job, bad_ids: np.ndarray) -> tuple[LabelBlocks, GroupSizes]:
    """The labels of the samples that are trained on, and their groups, which fit the batch."""
    labels = _labels(job, bad_ids)
    return labels, plan_groups(labels, job.options.global_batch, job.options.plan.policy)


def _labels(job: Job, bad_ids: np.ndarray) -> LabelBlocks:
    """The labels of all samples, without those that this training leaves out."""
    left_out = reduce(np.union1d, job.left_out.values(), np.zeros(0, np.int64))
    labels, radices = np.broadcast_to(np.int64(0), len(job.index)), tuple[int, ...]()
    if job.reads_groups:
        directory = job.layout.pseudo_labels(job.stage)
        labels, radices, _ = read_pseudo_labels(directory, job.index)
    if radices and job.layout.variant == "random_groups":
        labels = np.array(labels)
        labels[left_out] = -1
        if job.weights is not None:  # so that groups keep their numbers of samples that are drawn
            labels[job.weights.units(np.arange(len(labels))) == 0] = -1
        labels = permute_labels(labels, job.config.seed, job.stage)
    return LabelBlocks(labels, radices, np.union1d(left_out, bad_ids), weights=job.weights)


def _inputs(job: Job) -> dict[str, str]:
    """The digests of the artifacts that a training depends on."""
    _ = job.left_out  # its errors come first: no other verb makes what the samples lack
    inputs = {"index": job.index.digest}
    if job.options.objective.reads.attribute is not None and job.class_labels is not None:
        inputs["attribute"] = job.class_labels.digest
    if job.weights is not None:
        inputs["weights"] = job.weights.digest
    if job.stage == 0:
        return inputs
    inputs["base"] = artifacts.read_manifest(job.layout.export(0), "export").digest
    if job.reads_trunk:
        inputs["trunk_cache"] = artifacts.read_manifest(
            job.layout.trunk_cache, trunk_rows.KIND
        ).digest
    if job.uses_cached_text:
        text = artifacts.read_manifest(job.layout.text_embeddings, "text_embeddings")
        inputs["text_embeddings"] = text.digest
    if job.options.objective.reads.clusters and job.class_labels is not None:
        inputs["clusters"] = job.class_labels.digest
    if job.reads_groups:
        directory = job.layout.pseudo_labels(job.stage)
        inputs["pseudo_labels"] = artifacts.read_manifest(directory, "pseudo_labels").digest
    return inputs


def _train(
    job: Job, trainee: Trainee, identity: str, groups: StageGroups, evaluate: Evaluate | None
) -> tuple[int, int | None]:
    """Trains model and objective; returns the number of steps of the whole training, and the one
    that is exported where it may be another than the last.

    ``identity`` is the digest of all that the weights depend on.
    """
    options, context = job.options, job.context
    grouped, known_bad = collectives.on_main(groups.read)
    engine = parts.engine_of(job, trainee)
    plan = job.plan(grouped)
    total = collectives.on_main(lambda: _controlled_steps(job)) or total_steps(
        options.steps, options.epochs, plan.steps_per_epoch
    )
    checkpoints, judging = parts.checkpoints_of(job, identity), None
    if (when := options.evaluate).every is not None:
        assert evaluate is not None, "whoever asks for evaluations passes what makes them"
        every = when.every * (plan.steps_per_epoch if when.unit == "epochs" else 1)
        judging = Judging(evaluate, when, every, total)
    start = checkpoints.resume(Together(engine, judging) if judging else engine)
    if judging:
        checkpoints.best = judging.kept_step
    if start:
        log.info("resumed from %s", path_of(checkpoints.directory, start))
    log.info(
        "stage %d (%s): %d steps from %d, %d per epoch (%d of %d samples), %d groups, "
        "global batch %d over %d rank(s)",
        job.stage, job.method, total, start, plan.steps_per_epoch, plan.scheduled,
        plan.scheduled + plan.remainder, grouped.num_groups, options.global_batch,
        context.world_size,
    )  # fmt: skip
    if start < total or judging:  # a resumed training evaluates its first step again
        trainer = parts.trainer_of(job, trainee, engine, checkpoints, plan, start, total, judging)
        loader = parts.loader_of(job, plan, known_bad, trainee.model, range(start, total))
        total = trainer.run(loader, start, total, f"stage {job.stage}")
    return total, judging.kept_step if judging else None
