"""Verb: index + labels -> checkpoints; ``method`` and ``cli`` call it, it calls ``train.loop``.

This file says what a training's identity is, and groups the samples. ``train.build`` opens its
inputs and builds model, objective and loop; ``train.loop`` runs the steps, for every method.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path

import numpy as np

from mclclip.checkpoint.step_files import keep_finished
from mclclip.config import Config, TrainConfig, rules
from mclclip.data.coverage import check_coverage, coverage_report
from mclclip.data.decode import Pixels
from mclclip.data.epoch_plan import total_steps
from mclclip.data.extras import directory_of, embeddings_of
from mclclip.data.groups import GroupedIndex, StageGroups, group_samples
from mclclip.data.labels import permute_labels, read_pseudo_labels
from mclclip.data.row_store import IMAGE_ROWS
from mclclip.data.sample_index import SampleIndex
from mclclip.data.text_rows import KIND
from mclclip.eval.identity import benchmark_digest
from mclclip.models.encoder_names import digests_of_files
from mclclip.models.options import ModelConfig
from mclclip.plan.memory import count_operations
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context
from mclclip.run import artifacts
from mclclip.run.artifacts import Artifact, RunPaths
from mclclip.run.steps import Made, Step, find_artifact, make_artifact
from mclclip.train import build
from mclclip.train.inputs import StageTraining, TrainingInputs, read_inputs
from mclclip.train.loop import Evaluate, ModelWithObjective
from mclclip.train.options import EvaluateConfig
from mclclip.util.files import move_aside
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

    Stage 0 trains ``config.model`` with the options ``config.base``. Later stages train with
    ``config.train``, from stage 0's export unless ``train.start`` or ``trained_model`` says
    otherwise. A variant decides the groups: the pseudo labels of ``cluster`` (``mcl``), no groups
    (``ungrouped``), or the same labels permuted over the samples (``random_groups``). The last two
    are controls: they take as many steps as MCL's training of the stage, and draw captions and
    augmentations from the same keys (seed, stage, epoch, sample).
    ``evaluate`` measures checkpoints where ``evaluate.every`` asks for it.
    Raises ValueError if options and data do not fit, and RuntimeError for a control that cannot
    know its number of steps yet, since MCL's samples are not grouped; both before anything is
    written.
    """
    layout = RunPaths.of(config, variant)
    options = _options(config, layout, stage)
    index = collectives.on_main(lambda: SampleIndex.open(layout.index))
    training = StageTraining(config, options, context, layout, stage, index, evaluate)
    rules.check(config, num_ranks=context.world_size, training=training.name)
    # Raises if all samples lack what the objective reads, before the verb that could make other
    # inputs is named: no verb makes captions.
    collectives.on_main(lambda: training.left_out)
    step = collectives.on_main(lambda: _step_of(training))
    # Skips a finished training; otherwise calls `Training.make` on all ranks.
    make_artifact(step, training.directory, training, force)
    # A training that another run lent by a link is left as it is.
    if training.directory.resolve().is_relative_to(Path(config.run_dir).resolve()):
        collectives.on_main(
            lambda: keep_finished(training.directory, options.checkpoint.keep_every)
        )
    return training.directory


@dataclass(frozen=True)
class Training(Step[StageTraining]):
    """The checkpoint after the last step: weights, optimizer, objective.

    These fields are the identity of the artifact; `StageTraining` is what it is made with.

    data    {"pixels": ...}, how images become pixels; empty if no images are read
    steps   of a control: those of MCL's training, unless ``train.steps`` is set; else None
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

    def reads(self, training: StageTraining) -> dict[str, str]:
        """Returns the digests of the artifacts and files that the training depends on."""
        reads, layout = training.options.objective.reads, training.layout
        index = training.index
        digests = {"index": index.digest, "pictures": index.pictures_digest}
        if reads.captions:
            digests["captions"] = index.captions_digest
        if (metric := training.options.evaluate.metric) is not None:  # it chooses the checkpoint
            name = metric.partition("/")[0]
            digests[f"benchmark {name}"] = benchmark_digest(training.config.eval.suite[name])
        if reads.attribute is not None and training.classes is not None:
            digests["attribute"] = training.classes.digest
        if training.weights is not None:
            digests["weights"] = training.weights.digest
        # In later stages the base's digest stands for it.
        if training.stage == 0 or training.config.trained_model is not None:
            model = training.config.model_of(training.name)
            digests |= {f"model.{name}": digest for name, digest in digests_of_files(model).items()}
        if training.text_rows is not None:
            digests[KIND] = artifacts.read_manifest(layout.text_rows, KIND).digest
        for name, (encoder, what) in reads.stored.items():
            if encoder is not None:
                digests[name] = artifacts.read_manifest(
                    *embeddings_of(layout, encoder, what)
                ).digest
        for teacher in reads.teachers:
            export = layout.encoder(teacher) / "export"
            digests[f"teacher {teacher}"] = artifacts.read_manifest(export, "teacher").digest
        if training.stage == 0:
            return digests
        digests["base"] = artifacts.read_manifest(layout.export(0), "export").digest
        if training.reads_image_rows:
            rows = layout.image_rows, IMAGE_ROWS
            if not training.config.writes_image_rows:
                rows = layout.embeddings(0), "embeddings"
            digests["image_rows"] = artifacts.read_manifest(*rows).digest
        if "image_features" in reads.of_stage_0:
            embedded = artifacts.read_manifest(layout.embeddings(0), "embeddings")
            digests["embeddings"] = embedded.digest
        for edits in training.stored_texts:
            name = "text_embeddings" if edits is None else "edited_texts"
            directory = directory_of(layout, edits)
            digests[name] = artifacts.read_manifest(directory, "text_embeddings").digest
        if reads.clusters and training.classes is not None:
            digests["clusters"] = training.classes.digest
        if training.reads_groups:
            labels = artifacts.read_manifest(layout.pseudo_labels(training.stage), "pseudo_labels")
            digests["pseudo_labels"] = labels.digest
        return digests

    def make(self, out: Artifact, training: StageTraining) -> Made:
        """Trains from the last checkpoint on, or from the start."""
        inputs = read_inputs(training)
        model = build.build_model(training, inputs.image_rows)
        objective = build.build_objective(training, model, inputs.classes)
        module = ModelWithObjective(model, objective, self.train.precision)
        module.to(training.context.device)
        build.log_groups(training, module)
        groups = StageGroups(training.directory / _GROUPS)
        collectives.on_main(lambda: _write_groups(training, inputs, groups, out))
        stored = training.stage > 0 and self.train.reads_text_embeddings
        count = partial(count_operations, module, self.train, training.context.device, stored)
        # Before an engine shards the parameters.
        with build.attention_kernels(model, training.context.device):
            trainer = build.build_trainer(
                training, inputs, module, groups, out.identity, self.steps, count
            )
            steps = trainer.run()
        counts = {"steps": steps, "samples_seen": steps * self.train.global_batch}
        if trainer.evaluation and (best := trainer.evaluation.exported_step) is not None:
            counts["exported_step"] = best
        lacking = {k: len(v) for k, v in training.left_out.items() if k.startswith("without_")}
        return Made(counts | lacking, collectives.on_main(groups.records))


def _options(config: Config, layout: RunPaths, stage: int) -> TrainConfig:
    """Returns the options of a stage's training. Raises ValueError if there is none, or if the
    variant has no meaning for its objective."""
    options = config.base if stage == 0 else config.train
    if options is None:
        raise ValueError("stage 0 is a given encoder (base is null): there is nothing to train")
    if layout.variant != "mcl" and not options.objective.reads.groups:
        raise ValueError(
            f"--variant {layout.variant} does not apply to train.objective.kind="
            f"{options.objective.kind}, which reads no groups: leave it out"
        )
    if layout.variant != "mcl" and options.evaluate.patience is not None:
        raise ValueError(
            f"--variant {layout.variant} takes as many steps as the training it controls, and "
            "train.evaluate.patience may end either of them early: leave patience out"
        )
    return options


def _step_of(training: StageTraining) -> Training:
    options, is_control = training.options, training.layout.variant != "mcl"
    if options.evaluate.metric is None:  # figures that are only recorded
        options = replace(options, evaluate=EvaluateConfig())
    config = training.config
    return Training(
        training.stage, training.layout.variant, config.seed,
        model=config.model_of(training.name), train=options,
        data={} if training.reads_image_rows else {"pixels": training.pixels},
        steps=_count_steps_of_mcl(training) if is_control and options.steps is None else None,
    )  # fmt: skip


def _write_groups(
    training: StageTraining, inputs: TrainingInputs, groups: StageGroups, out: Artifact
) -> None:
    """Begins the artifact and writes the grouped index into it, unless it is there. If the groups
    do not fit the batch, raises ValueError before anything is written."""
    bad_ids = training.index.bad_ids()
    grouped = None if groups.is_written else _group_samples(training, bad_ids)
    if out.force is not Remake.NOTHING and groups.damage() is not None:
        move_aside(training.directory)
    out.begin()
    _report_samples(training, inputs)
    if not groups.is_written:  # ``begin`` may have moved the old ones aside
        groups.write(grouped or _group_samples(training, bad_ids), bad_ids)


def _report_samples(training: StageTraining, inputs: TrainingInputs) -> None:
    """Logs which samples a training draws, and where it reads them."""
    reasons = {
        "without_caption": "have no caption",
        "without_attribute": f"have no {training.options.objective.reads.attribute}",
        "without_embedding": "have no embedding of an encoder that is read",
    }
    for reason, ids in training.left_out.items():
        if len(ids):
            log.info(
                "stage %d: %d of %d samples %s and are left out",
                training.stage, len(ids), len(training.index), reasons[reason],
            )  # fmt: skip
    if training.weights is not None:
        shares = training.weights.by_source(training.index)
        drawn = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
        log.info("stage %d: samples are drawn by weight, of all draws: %s", training.stage, drawn)
    if (rows := inputs.image_rows) is not None:
        log.info(
            "stage %d: starts from what the frozen part of the image tower made of every image, "
            "at %s", training.stage, rows.directory,
        )  # fmt: skip
    if inputs.locations.directory is not None:
        log.info(
            "stage %d: samples are read from copies at %s", training.stage, inputs.locations.source
        )


def _count_steps_of_mcl(training: StageTraining) -> int:
    """Returns the number of steps of MCL's training of this stage, which a control takes too.

    It comes from MCL's groups: over other groups an epoch can have another number of steps, since
    the plan's policy drops or repeats samples at the ends of groups.
    """
    options = training.options
    mcl = replace(training, layout=RunPaths.of(training.config))
    # Raises if MCL's training was made with other options or labels than those of now.
    find_artifact(_step_of(mcl), mcl.directory, mcl)
    controlled = StageGroups(mcl.directory / _GROUPS)
    if not controlled.is_written:
        raise RuntimeError(
            f"a control takes as many steps as the training it controls, and {controlled.directory}"
            f" is not there: run 'mclclip train --stage {training.stage}' first, or set train.steps"
        )
    report = coverage_report(controlled.read()[0], options.global_batch, options.plan.policy)
    return total_steps(None, options.epochs, report.steps)


def _group_samples(training: StageTraining, bad_ids: np.ndarray) -> GroupedIndex:
    """Sorts the samples that this training draws into groups; logs the coverage. Raises ValueError
    if the groups do not fit the batch."""
    left_out = reduce(np.union1d, training.left_out.values(), np.zeros(0, np.int64))
    labels, radices = np.broadcast_to(np.int64(0), len(training.index)), tuple[int, ...]()
    if training.reads_groups:
        directory = training.layout.pseudo_labels(training.stage)
        labels, radices, _ = read_pseudo_labels(directory, training.index)
    if radices and training.layout.variant == "random_groups":
        labels = np.array(labels)
        labels[left_out] = -1
        if training.weights is not None:  # each group keeps its number of drawn samples
            labels[training.weights.units(np.arange(len(labels))) == 0] = -1
        labels = permute_labels(labels, training.config.seed, training.stage)
    left_out = np.union1d(left_out, bad_ids)
    grouped = group_samples(labels, radices, left_out, training.weights)
    check_coverage(grouped, training.options.global_batch, training.options.plan.policy)
    return grouped
