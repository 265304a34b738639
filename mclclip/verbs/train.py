"""Verb: index + labels -> checkpoints; ``method`` and ``cli`` call it, it calls ``train.loop``.

This file opens the artifact, writes the grouped index, and resumes; ``train.build`` builds the
objects from the options, and ``train.loop`` runs the steps, one loop for every method.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np

from mclclip.checkpoint import keep_finished, path_of
from mclclip.config import Config, TrainConfig, rules
from mclclip.data.coverage import check_coverage, coverage_report
from mclclip.data.decode import Pixels
from mclclip.data.epoch_plan import total_steps
from mclclip.data.extras import directory_of, report_edits
from mclclip.data.groups import GroupSizes, LabelBlocks, StageGroups
from mclclip.data.index_tables import check_shards
from mclclip.data.labels import permute_labels, read_pseudo_labels
from mclclip.data.row_store import IMAGE_ROWS, StoredRows
from mclclip.data.sample_index import SampleIndex
from mclclip.models import weights
from mclclip.models.loading import start_from_rows
from mclclip.models.options import ModelConfig
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import artifacts
from mclclip.run.artifacts import Artifact, RunPaths
from mclclip.run.recorder import PeakMemory
from mclclip.run.runlog import count_of
from mclclip.run.steps import Made, Step, find_artifact, make
from mclclip.train import build
from mclclip.train.build import StageTraining, TrainingInputs
from mclclip.train.loop import Evaluate, ModelWithObjective, PeriodicEvaluation
from mclclip.train.options import EvaluateConfig
from mclclip.util.files import digest_file, move_aside
from mclclip.util.remake import Remake

log = logging.getLogger("mclclip")

_GROUPS = "grouped_index"  # folder of a training


def run(
    config: Config,
    context: Context,
    *,
    stage: int,
    variant: str = "mcl",
    force: Remake = Remake.NOTHING,
    evaluate: Evaluate | None = None,
) -> Path:
    """Trains stage ``stage`` of ``variant`` and returns its directory (skips if finished).

    Stage 0 trains ``config.model`` under ``config.base``. Later stages train under
    ``config.train``, from stage 0's export unless ``train.start`` or ``trained_model`` says
    otherwise: on the pseudo labels of ``cluster`` (``mcl``), without groups (``ungrouped``), or on
    the same labels permuted over the samples (``random_groups``). The two controls take as many
    steps as MCL's training of the stage, and draw captions and augmentations from the same keys
    (seed, stage, epoch, sample).
    ``evaluate`` measures checkpoints where ``evaluate.every`` asks for it.
    Raises ValueError where options and data do not fit, and RuntimeError for a control whose
    number of steps is not known yet, before anything is written.
    """
    layout = RunPaths.of(config, variant)
    options = _options(config, layout, stage)
    index = collectives.on_main(lambda: SampleIndex.open(layout.index))
    job = StageTraining.of(config, options, context, layout, stage, index)
    rules.check(config, num_ranks=context.world_size, training=job.name)
    how = TrainingRun(job, evaluate, PeakMemory(context.device))
    make(collectives.on_main(lambda: _step_of(job)), job.directory, how, force)
    collectives.on_main(lambda: keep_finished(job.directory, options.checkpoint.keep_every))
    return job.directory


@dataclass(frozen=True)
class TrainingRun:
    """A training, what measures its checkpoints, and its peaks of memory."""

    job: StageTraining
    evaluate: Evaluate | None
    peaks: PeakMemory


@dataclass(frozen=True)
class Training(Step[TrainingRun]):
    """Weights and optimizer after the last step, as a checkpoint.

    data    ``pixels``, how images become pixels, where they are read
    steps   of the training that this is a control of (None: it is none, or ``train`` says it)
    """

    kind = "train"
    all_ranks = True
    stage: int
    variant: str
    seed: int
    model: ModelConfig
    train: TrainConfig
    data: Mapping[str, Pixels]
    steps: int | None

    def reads(self, how: TrainingRun) -> dict[str, str]:
        """The artifacts and files that a training depends on."""
        return _inputs(how.job)

    def make(self, out: Artifact, how: TrainingRun) -> Made:
        """Trains from the last checkpoint on, or from the start."""
        job = how.job
        opened = _opened(job)
        model = build.build_model(job)
        if (rows := opened.image_rows) is not None:
            collectives.raise_on_every_rank(lambda: start_from_rows(model, rows))
        objective = build.objective_of(job, model, opened.classes)
        collectives.on_main(lambda: _begin(job, opened, out))
        trainee = build.trainee_of(job, model, objective)
        steps, exported = _train(how, opened, trainee, out.identity, self.steps)
        counts = {"steps": steps, "samples_seen": steps * job.options.global_batch}
        counts |= {} if exported is None else {"exported_step": exported}
        lacking = {k: len(v) for k, v in job.left_out.items() if k.startswith("without_")}
        groups = StageGroups(job.directory / _GROUPS)
        return Made(counts | lacking, collectives.on_main(groups.records))


def _options(config: Config, layout: RunPaths, stage: int) -> TrainConfig:
    """The options of a training. See ``run`` for errors."""
    options = config.base if stage == 0 else config.train
    if options is None:
        raise ValueError("stage 0 is a given encoder (base is null): there is nothing to train")
    if layout.variant != "mcl" and not options.objective.reads.groups:
        raise ValueError(
            f"--variant {layout.variant} does not apply to train.objective.kind="
            f"{options.objective.kind}, which reads no groups: leave it out"
        )
    return options


def _step_of(job: StageTraining) -> Training:
    """Returns the step that makes a training; a control trains as long as what it controls."""
    options, is_control = job.options, job.layout.variant != "mcl"
    if options.evaluate.metric is None:  # figures that are only recorded
        options = replace(options, evaluate=EvaluateConfig())
    return Training(
        job.stage, job.layout.variant, job.config.seed, job.config.model_of(job.name), options,
        data={} if job.reads_image_rows else {"pixels": job.pixels},
        steps=_controlled_steps(job) if is_control and options.steps is None else None,
    )  # fmt: skip


def _opened(job: StageTraining) -> TrainingInputs:
    """The files that a training reads beside its index: rank 0 reads and checks them (on_main), and
    all ranks map those that they read from (together)."""
    config, index = job.config, job.index

    def checked() -> TrainingInputs:
        if edits := job.options.objective.reads.edits:
            report_edits(edits, index, config.data, job.name)
        opened = TrainingInputs(job.classes, build.locations_of(job))
        if job.reads_image_rows:
            whole = not config.writes_image_rows
            opened = replace(opened, image_rows=StoredRows.of_images(job.layout, index, whole))
        check_shards(index.directory, index.shards, config.data)
        return opened

    collectives.raise_on_every_rank(lambda: job.extras)
    opened = collectives.on_main(checked)
    collectives.raise_on_every_rank(lambda: opened.locations.table)
    return opened


def _begin(job: StageTraining, opened: TrainingInputs, out: Artifact) -> None:
    """Opens the directory for writing, with the grouped index in it; writes nothing if the groups
    do not fit."""
    groups, bad_ids = StageGroups(job.directory / _GROUPS), job.index.bad_ids()
    planned = None if groups.is_written else _planned(job, bad_ids)
    if out.force is not Remake.NOTHING and groups.damage() is not None:
        move_aside(job.directory)
    out.begin()
    _report_samples(job, opened)
    if not groups.is_written:  # with --force the ones found before may have been moved aside
        groups.write(*(planned or _planned(job, bad_ids)), bad_ids)


def _report_samples(job: StageTraining, opened: TrainingInputs) -> None:
    """Logs which samples a training draws, and where it reads them."""
    reasons = {
        "without_caption": "have no caption",
        "without_attribute": f"have no {job.options.objective.reads.attribute}",
        "without_embedding": "have no embedding of stage 0",
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
    if (rows := opened.image_rows) is not None:
        log.info(
            "stage %d: starts from what the frozen part of the image tower made of every image, "
            "at %s", job.stage, rows.directory,
        )  # fmt: skip
    if opened.locations.directory is not None:
        log.info("stage %d: samples are read from copies at %s", job.stage, opened.locations.source)


def _controlled_steps(job: StageTraining) -> int:
    """Steps of the training that this one is a control of.

    An epoch over other groups can have another number of steps (policies drop and wrap), so the
    number comes from the groups that the controlled training draws from.
    """
    options = job.options
    mcl = StageTraining.of(
        job.config, options, job.context, RunPaths.of(job.config), job.stage, job.index
    )
    # Raises where the controlled training was made with other options or labels than those of now.
    # It is no control, so that this is not called again.
    find_artifact(
        _step_of(mcl), mcl.directory, TrainingRun(mcl, None, PeakMemory(job.context.device))
    )
    controlled = StageGroups(mcl.directory / _GROUPS)
    if not controlled.is_written:
        raise RuntimeError(
            f"a control takes as many steps as the training it controls, and {controlled.directory}"
            f" is not there: run 'mclclip train --stage {job.stage}' first, or set train.steps"
        )
    report = coverage_report(controlled.read()[0], options.global_batch, options.plan.policy)
    return total_steps(None, options.epochs, report.steps)


def _planned(job: StageTraining, bad_ids: np.ndarray) -> tuple[LabelBlocks, GroupSizes]:
    """The labels of all samples, without those that this training leaves out, and their groups;
    logs the coverage. Raises ValueError where the groups do not fit the batch."""
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
    blocks = LabelBlocks(labels, radices, np.union1d(left_out, bad_ids), weights=job.weights)
    sizes = blocks.sizes()
    check_coverage(sizes, job.options.global_batch, job.options.plan.policy)
    return blocks, sizes


def _inputs(job: StageTraining) -> dict[str, str]:
    """The digests of the artifacts that a training depends on."""
    _ = job.left_out  # its errors come first: no other verb makes what the samples lack
    reads, layout = job.options.objective.reads, job.layout
    inputs = {"index": job.index.digest}
    if reads.attribute is not None and job.classes is not None:
        inputs["attribute"] = job.classes.digest
    if job.weights is not None:
        inputs["weights"] = job.weights.digest
    file = job.config.model_of(job.name).image_weights
    # In later stages the base's digest stands for it.
    if file is not None and (job.stage == 0 or job.config.trained_model is not None):
        inputs["model.image_weights"] = digest_file(weights.checked_image_weights(file))
    if job.stage == 0:
        return inputs
    inputs["base"] = artifacts.read_manifest(layout.export(0), "export").digest
    if job.reads_image_rows:
        rows = layout.image_rows, IMAGE_ROWS
        if not job.config.writes_image_rows:
            rows = layout.embeddings(0), "embeddings"
        inputs["image_rows"] = artifacts.read_manifest(*rows).digest
    if "images" in reads.base:
        embedded = artifacts.read_manifest(layout.embeddings(0), "embeddings")
        inputs["embeddings"] = embedded.digest
    for edits in job.stored_texts:
        name = "text_embeddings" if edits is None else "edited_texts"
        directory = directory_of(layout, edits)
        inputs[name] = artifacts.read_manifest(directory, "text_embeddings").digest
    if reads.clusters and job.classes is not None:
        inputs["clusters"] = job.classes.digest
    if job.reads_groups:
        labels = artifacts.read_manifest(layout.pseudo_labels(job.stage), "pseudo_labels")
        inputs["pseudo_labels"] = labels.digest
    return inputs


def _train(
    how: TrainingRun,
    opened: TrainingInputs,
    trainee: ModelWithObjective,
    identity: str,
    steps: int | None,
) -> tuple[int, int | None]:
    """Trains model and objective; returns the number of steps of the whole training, and the one
    that is exported where it may be another than the last."""
    job, evaluate, peaks = how.job, how.evaluate, how.peaks
    options = job.options
    groups = StageGroups(job.directory / _GROUPS)
    grouped, known_bad = collectives.on_main(groups.read)
    engine = build.engine_of(job, trainee, peaks)
    plan = job.plan(grouped)
    total = steps or total_steps(options.steps, options.epochs, plan.steps_per_epoch)
    checkpoints, evaluation = build.checkpoints_of(job, identity), None
    if (when := options.evaluate).every is not None:
        assert evaluate is not None, "whoever asks for evaluations passes what makes them"
        every = when.every * (plan.steps_per_epoch if when.unit == "epochs" else 1)
        evaluation = PeriodicEvaluation(engine, evaluate, when, every, total)
    start = checkpoints.resume(evaluation or engine)
    if evaluation:
        checkpoints.best = evaluation.exported_step
    if start:
        log.info("resumed from %s", path_of(checkpoints.directory, start))
    log.info(
        "stage %d (%s): %s from %d, %d per epoch, global batch %d over %s",
        job.stage, job.title, count_of(total, "step"), start, plan.steps_per_epoch,
        options.global_batch, count_of(job.context.world_size, "rank"),
    )  # fmt: skip
    if start < total or evaluation:  # a resumed training evaluates its first step again
        trainer = build.trainer_of(
            job, trainee, engine, checkpoints, plan, start, total, evaluation, peaks
        )
        left = range(start, total)
        loader = build.loader_of(job, opened, plan, known_bad, trainee.model, left)
        total = trainer.run(loader, start, total, f"stage {job.stage}")
    return total, evaluation.exported_step if evaluation else None
