"""Opens the inputs of one training, and builds its model, objective, engine, batches and loop from
its options; ``verbs.train`` calls it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.checkpoint import Checkpoints, path_of
from mclclip.config import Config, TrainConfig, to_tree
from mclclip.data.batches import Batch, TrainingBatches
from mclclip.data.decode import Pixels
from mclclip.data.epoch_plan import EpochPlan, total_steps
from mclclip.data.extras import (
    BaseFeatures,
    EditedCaptions,
    EqualityDigests,
    report_edits,
    report_equal,
)
from mclclip.data.groups import GroupedIndex, Integers, StageGroups
from mclclip.data.index_tables import check_shards
from mclclip.data.labels import AttributeClasses, ClassLabels, SampleWeights
from mclclip.data.loader import Loader
from mclclip.data.locations import Locations
from mclclip.data.picture_transform import PictureTransform, as_transform
from mclclip.data.row_store import StoredRows, left_out
from mclclip.data.sample_index import SampleIndex, SharedBadSamples
from mclclip.data.samples import Extra, TarDataset
from mclclip.data.text_rows import TextRows, report_missing, width_of
from mclclip.engines import build_engine
from mclclip.engines.engine import Engine
from mclclip.models.clip import clean_caption
from mclclip.models.encoder import Encoder, load_model
from mclclip.models.loading import (
    load_towers,
    prepare_model,
    refuse_folded_norms,
    start_from_rows,
    train_transform,
)
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer, learning_rate
from mclclip.models.parameters import describe_groups
from mclclip.models.tokenizer import fetch_tokenizer
from mclclip.models.transforms import fast_transform
from mclclip.objectives.base import Objective, ObjectiveInputs, Teacher
from mclclip.ranks import collectives
from mclclip.ranks.process_group import STARTED, Context, choose_memory, choose_peak_tflops
from mclclip.ranks.step_boundary import StepBoundary
from mclclip.run.artifacts import RunPaths, read_identity, read_manifest
from mclclip.run.recorder import Recorder, StepProfiler
from mclclip.run.runlog import count_of
from mclclip.train.loop import Evaluate, ModelWithObjective, PeriodicEvaluation, Trainer
from mclclip.train.near_copies import report_near
from mclclip.train.symptoms import Symptoms
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.randomness import mix

log = logging.getLogger("mclclip")

_WEIGHTS = 5  # purpose of a random number: initial weights of a stage with train.start=random


@dataclass(frozen=True)
class StageTraining:
    """The training of one stage of one variant: its options, its place in the run, its samples.

    ``evaluate`` measures its checkpoints where its options ask for evaluations.
    """

    config: Config
    options: TrainConfig
    context: Context
    layout: RunPaths
    stage: int
    index: SampleIndex
    evaluate: Evaluate | None = None

    @property
    def name(self) -> str:
        """The option that holds its settings: ``base`` for stage 0, else ``train``."""
        return "train" if self.stage else "base"

    @property
    def directory(self) -> Path:
        """The directory of checkpoints, metrics and the grouped index."""
        return self.layout.train(self.stage)

    @property
    def title(self) -> str:
        """The name in log lines: the variant if the objective reads groups, such as
        'random_groups', else the kind of the objective."""
        objective = self.options.objective
        return self.layout.variant if objective.reads.groups and self.stage else objective.kind

    @property
    def reads_groups(self) -> bool:
        """True if each batch is made of samples that share a pseudo label."""
        groups = self.options.objective.reads.groups and self.stage > 0
        return groups and self.layout.variant != "ungrouped"

    @property
    def reads_image_rows(self) -> bool:
        """True if stored outputs of frozen blocks, or of the whole frozen tower, replace images."""
        return self.stage > 0 and self.config.image_rows.enabled

    @property
    def reads_text_rows(self) -> bool:
        """True if rows that the user brings stand for captions: ``model.text_rows``."""
        return bool(
            self.options.objective.reads.captions and self.config.model_of(self.name).text_rows
        )

    @property
    def stored_texts(self) -> tuple[HardCaptions | None, ...]:
        """``TrainConfig.stored_texts`` after stage 0, which itself reads captions."""
        return self.options.stored_texts if self.stage > 0 else ()

    @cached_property
    def left_out(self) -> dict[str, np.ndarray]:
        """Returns the ids of the samples that lack what the objective reads, by what they lack:
        'without_caption', 'without_attribute' or 'without_embedding'.

        Raises ValueError where all samples lack what the objective reads.
        """
        reads, reader = self.options.objective.reads, self.options.reader(self.name)
        lacking: dict[str, np.ndarray] = {}
        if reads.captions:
            lacking["without_caption"] = self.index.without_caption(reader)
        if reads.attribute is not None:
            lacking["without_attribute"] = self.index.without_attribute(reads.attribute, reader)
        every = {encoder for encoder, what in reads.encoders if what == "image_features"}
        if every:
            folders = [self.layout.encoder(encoder) / "embeddings" for encoder in every]
            without = [left_out(folder, len(self.index.shards)) for folder in folders]
            lacking["without_embedding"] = reduce(np.union1d, without)
        return lacking

    @cached_property
    def weights(self) -> SampleWeights | None:
        """How often an epoch draws each sample; None: once. Raises the errors of
        ``SampleWeights.open``."""
        plan, option = self.options.plan, f"{self.name}.plan"
        return SampleWeights.open(self.index, self.config.data, plan, option)

    @cached_property
    def classes(self) -> ClassLabels | AttributeClasses | None:
        """The clusters of the stage before, or the values of an attribute, for objectives that
        read them; else None. Reads and compares their files: rank 0 alone asks for it, and all
        ranks are given what it read in ``TrainingInputs``."""
        reads = self.options.objective.reads
        if reads.attribute is not None:
            return AttributeClasses(self.index, reads.attribute)
        if not reads.clusters:
            return None
        directory = self.layout.clusters(self.stage - 1)
        return ClassLabels(directory, self.index, reads.clusters, reads.threshold)

    @cached_property
    def text_rows(self) -> TextRows | None:
        """The user's rows that stand for captions, where ``model.text_rows`` is set. Raises the
        errors of ``TextRows``."""
        files = self.config.model_of(self.name).text_rows
        return TextRows([self.layout.text_rows], width_of(files)) if files else None

    def read_extras(self) -> list[Extra]:
        """Returns further tensors of every sample, which the objective reads. Raises ValueError
        where the index cannot tell equal pictures, and the errors of ``BaseFeatures``."""
        reads, extras = self.options.objective.reads, list[Extra]()
        if reads.digests:
            pictures = self.index if self.reads_image_rows else None
            extras.append(EqualityDigests(clean_caption, pictures, sorted(reads.digests)))
        edits = next(filter(None, self.stored_texts), None)
        if reads.stored or edits:
            extras.append(BaseFeatures(self.layout, self.index, reads.stored, edits))
        return extras

    @cached_property
    def pixels(self) -> Pixels:
        """How images become pixels: 'exact' or 'fast'. If ``data.pixels`` is ``auto``, a control
        uses the same as the training that it is compared with."""
        if self.config.data.pixels == "auto" and self.layout.variant != "mcl":
            original = read_identity(RunPaths.of(self.config).train(self.stage)).get("config", {})
            taken: Pixels | None = original.get("data", {}).get("pixels")
            if taken is not None:  # it read pictures
                return taken
        return self.config.pixels_of(self.name)

    def plan(self, grouped: GroupedIndex) -> EpochPlan:
        """The plan of the first epoch.

        Without groups no blocks stay together: neighbours in the index may have more in common than
        two samples of a batch by chance.
        """
        options, how = self.options, self.options.plan
        return EpochPlan(
            grouped, options.global_batch, how.policy, how.order, self.config.seed, self.stage,
            epoch=0, block=how.block if self.reads_groups else 1,
        )  # fmt: skip


@dataclass(frozen=True)
class TrainingInputs:
    """The files that a training reads beside its index, as all ranks have opened them."""

    classes: ClassLabels | AttributeClasses | None
    locations: Locations
    extras: list[Extra]
    image_rows: StoredRows | None = None


def read_inputs(training: StageTraining) -> TrainingInputs:
    """Opens and checks the files that a training reads; all ranks call it.

    Rank 0 reads the small ones and sends them to the others; each rank memory-maps the large ones.
    """
    config, index = training.config, training.index

    def check() -> tuple[ClassLabels | AttributeClasses | None, Locations, StoredRows | None]:
        if edits := training.options.objective.reads.edits:
            report_edits(edits, index, config.data, training.name)
        if training.reads_text_rows:
            assert training.text_rows is not None
            report_missing(training.text_rows, index, config.data)
        classes, locations, image_rows = training.classes, _open_locations(training), None
        if training.reads_image_rows:
            whole = not config.writes_image_rows
            image_rows = StoredRows.of_images(training.layout, index, whole)
        check_shards(index.directory, index.shards, config.data)
        return classes, locations, image_rows

    extras = collectives.raise_on_every_rank(training.read_extras)
    classes, locations, image_rows = collectives.on_main(check)
    collectives.raise_on_every_rank(lambda: locations.table)  # maps it, in every process
    return TrainingInputs(classes, locations, extras, image_rows)


def _open_locations(training: StageTraining) -> Locations:
    """Returns the places of the samples: in the copies that ``relocate`` wrote for this stage's
    groups if the options ask for them, else in the shards of the index."""
    options, layout = training.config.relocate, training.layout
    if not options.enabled or not training.reads_groups or layout.variant != "mcl":
        return Locations(training.index)
    directory = layout.relocated(training.stage, options.folder)
    url = options.url and f"{options.url.rstrip('/')}/stage_{training.stage}"
    return Locations.open(directory, training.index, url, training.config.data.remote)


def build_model(training: StageTraining, image_rows: StoredRows | None = None) -> Model:
    """Returns the model that a stage starts from, with its locks and adapters, on its device.

    With ``image_rows`` it begins after the frozen blocks whose outputs these rows are.

    Raises ValueError where the objective reads captions and the model has no text tower, and where
    batch norms are trained that were folded into weights.
    """
    config, options, stage = training.config, training.options, training.stage
    base = config.model_of(training.name)
    same: dict[str, Any] = {"projector": base.projector, "augmentation": base.augmentation}
    if stage == 0 or config.trained_model is not None:
        same |= {"image_weights": base.image_weights, **base.of_towers}
        model = load_towers(base.name, base.pretrained, seed=config.seed, **same)
    elif options.start == "random":
        # Every stage has its own seed: without groups the stages are a seed ensemble.
        seed = int(mix(config.seed, stage, _WEIGHTS) >> np.uint64(33))
        model = load_towers(training.layout.export(0), load_weights=False, seed=seed, **same)
    else:
        model = load_towers(
            training.layout.export(stage - 1 if options.start == "previous" else 0), **same
        )
    if base.text_rows:
        model.tokenizer = training.text_rows
    if options.objective.reads.captions and not model.reads_texts:
        raise ValueError(
            f"objective.kind={options.objective.kind} reads captions, and the model has no text "
            "tower: take an objective of views, such as nt_xent, or a CLIP model"
        )
    prepare_model(model, **options.model_arguments(), seed=config.seed)
    refuse_folded_norms(model)
    model.to(training.context.device)
    if options.engine.compile == "model":
        model.compile_blocks()
    if image_rows is not None:
        collectives.raise_on_every_rank(lambda: start_from_rows(model, image_rows))
    return model


def build_objective(
    training: StageTraining, model: Model, classes: ClassLabels | AttributeClasses | None
) -> Objective:
    """Returns the objective with its own parameters, such as class centers.

    Raises ValueError for a batch of one sample if batch norms are trained.
    """
    options = training.options
    objective = options.objective.build(
        ObjectiveInputs(
            model=model,
            context=training.context,
            seed=int(mix(training.config.seed, training.stage) >> np.uint64(33)),
            precision=options.precision,
            betas=options.betas,
            eps=options.eps,
            classes=classes,
            teacher=partial(_open_teacher, training.layout),
        )
    )
    modules = (*model.modules(), *objective.modules())
    if options.global_batch == 1 and any(isinstance(m, _BatchNorm) and m.training for m in modules):
        raise ValueError(
            f"{training.name}.global_batch is 1, and batch norms are trained, which need several "
            "samples: raise it"
        )
    return objective


def _open_teacher(layout: RunPaths, name: str | None) -> Teacher:
    """Returns an encoder that an objective reads; its weights are read when it is loaded."""
    directory = layout.encoder(name) / "export"
    counts = read_manifest(directory, "export" if name is None else "teacher").counts
    return Teacher(counts["width"], counts["logit_scale"], partial(_load_teacher, directory))


@cache
def _load_teacher(directory: Path) -> Encoder:
    """Loads a teacher once for all terms of an objective."""
    return load_model(directory)


def log_groups(training: StageTraining, module: ModelWithObjective) -> None:
    """Logs the learning rates, weight decays and numbers of the parameters of each part.

    Call it before an engine replaces the parameters. Raises ValueError for patterns of
    ``parameters`` that match nothing.
    """
    how, decay = training.options, training.options.weight_decay
    for row in describe_groups(module, how.lr, how.parameters, decay):
        lowest, highest = (f"{rate:.3g}" for rate in row["lr"])
        rates = lowest if lowest == highest else f"{lowest} to {highest}"
        log.info(
            "stage %d: %s: lr %s, weight decay %g, %s, %s weights", training.stage, row["name"],
            rates, row["weight_decay"], count_of(row["tensors"], "tensor"), f"{row['weights']:,}",
        )  # fmt: skip


def build_trainer(
    training: StageTraining,
    inputs: TrainingInputs,
    module: ModelWithObjective,
    groups: StageGroups,
    identity: str,
    steps: int | None,
    operations: Mapping[int | None, int],
) -> Trainer:
    """Builds the loop of a training and loads its last checkpoint, if there is one.

    identity     digest of the inputs and options, for ``build_checkpoints``
    steps        number of steps of the whole training; None: as the options say
    operations   floating-point operations of a sample in a step, by the size of its pictures
    """
    options, context, config = training.options, training.context, training.config
    grouped, known_bad = collectives.on_main(groups.read)
    plan = training.plan(grouped)
    total = steps or total_steps(options.steps, options.epochs, plan.steps_per_epoch)
    if options.engine.compile == "step":
        module.compile()
    engine = build_engine(
        options.engine, module, partial(build_optimizer, **options.optimizer_arguments()), context,
        blocks=module.model.blocks(), outside=module.objective.outside(),
        precision=options.precision, ema_decay=options.ema_decay,
        clip_grad_norm=options.clip_grad_norm,
    )  # fmt: skip
    checkpoints = build_checkpoints(training, identity)
    evaluation = _build_evaluation(training, engine, plan, total)
    start = checkpoints.resume(evaluation or engine)
    checkpoints.best = evaluation.exported_step if evaluation else None
    if start:
        log.info("resumed from %s", path_of(checkpoints.directory, start))
    log.info(
        "stage %d (%s): %s from %d, %d per epoch, global batch %d over %s",
        training.stage, training.title, count_of(total, "step"), start, plan.steps_per_epoch,
        options.global_batch, count_of(context.world_size, "rank"),
    )  # fmt: skip
    sizes = options.image_sizes(total, plan.steps_per_epoch)
    recorder = Recorder(
        training.directory, context, name=f"stage {training.stage}",
        global_batch=options.global_batch, start=start, total=total,
        steps_per_epoch=plan.steps_per_epoch, log_every=options.log_every,
        share_bad=SharedBadSamples(training.index, config.data.max_bad_fraction).add,
        track=list(config.track), config=to_tree(config), evaluates=evaluation is not None,
        leaves_out=engine.leaves_out, operations=partial(_operations_at, sizes, operations),
        peak_tflops=choose_peak_tflops(context.device),
    )  # fmt: skip
    if options.image_size:
        own = module.model.image_size
        parts = [f"{size or own} pixels from step {at + 1}" for at, size in sizes]
        log.info("stage %d: pictures have %s", training.stage, ", ".join(parts))
    compiles = options.engine.compile != "off"
    return Trainer(
        module=module, engine=engine, checkpoints=checkpoints, recorder=recorder,
        evaluation=evaluation, symptoms=Symptoms(module, engine, recorder),
        batches=build_loader(
            training, inputs, plan, known_bad, module.model, range(start, total), sizes
        ),
        boundary=_build_boundary(training),
        learning_rate=partial(
            learning_rate, total_steps=total, warmup_steps=round(options.warmup * total),
            lr=options.lr, schedule=options.schedule,
        ),
        seed_words=(config.seed, training.stage), checkpoint_every=options.checkpoint.every,
        profiler=_build_profiler(training, total),
        compile_steps={start, *(at for at, _ in sizes)} if compiles else set(),
    )  # fmt: skip


def _operations_at(
    sizes: Sequence[tuple[int, int | None]], operations: Mapping[int | None, int], step: int
) -> int:
    """Returns the operations of a sample at a step; ``sizes`` of pictures by their first steps."""
    return operations[[size for start, size in sizes if start <= step][-1]]


def _build_boundary(training: StageTraining) -> StepBoundary:
    config, run_dir = training.config, training.layout.run_dir
    deadline = None if config.wall_time_s is None else STARTED + config.wall_time_s
    return StepBoundary(training.context, run_dir, poll_s=config.poll_s, deadline=deadline)


def _build_profiler(training: StageTraining, total: int) -> StepProfiler:
    directory, context = training.directory / "profile", training.context
    steps = training.options.profile_steps
    return StepProfiler(directory, steps, total, context.device, context.rank)


def _build_evaluation(
    training: StageTraining, engine: Engine, plan: EpochPlan, total: int
) -> PeriodicEvaluation | None:
    """Builds the evaluations within a training; None where its options ask for none."""
    options = training.options.evaluate
    if options.every is None:
        return None
    assert training.evaluate is not None, "a caller that asks for evaluations passes them"
    every = options.every * (plan.steps_per_epoch if options.unit == "epochs" else 1)
    return PeriodicEvaluation(engine, training.evaluate, options, every, total)


def build_checkpoints(training: StageTraining, identity: str) -> Checkpoints:
    """Returns the checkpoints of a training, whose inputs and options have the digest ``identity``.

    The digest is a part of the folder's name in the mirror, so that a training with other options
    or inputs does not find these checkpoints there.
    """
    options, folder = training.options.checkpoint, training.directory / "checkpoints"
    if options.mirror is not None:
        inside = folder.relative_to(training.layout.run_dir)
        mirror = f"{options.mirror.rstrip('/')}/{inside}/{identity[:12]}"
        options = replace(options, mirror=mirror)
    digest = {"stage": training.stage, "variant": training.layout.variant, "digest": identity}
    return Checkpoints(folder, options, identity=digest)


def build_loader(
    training: StageTraining,
    inputs: TrainingInputs,
    plan: EpochPlan,
    known_bad: np.ndarray,
    model: Model,
    steps: range,
    sizes: Sequence[tuple[int, int | None]] = ((0, None),),
) -> Loader[Batch]:
    """This rank's batches of ``steps``, in order; ``sizes`` of pictures by their first steps."""
    say_equal = steps.start == 0 and training.context.is_main
    make = partial(_build_batches, training, inputs, plan, known_bad, model, say_equal, sizes)
    batches = collectives.raise_on_every_rank(make, "train")
    dataset = batches.dataset

    def ids_of(step: int) -> Integers:
        epoch, epoch_step = divmod(step, plan.steps_per_epoch)
        rows = range(batches.rank * batches.local_batch, (batches.rank + 1) * batches.local_batch)
        return batches.plan(epoch).batch(epoch_step).ids[rows]

    return Loader(
        batches,
        steps,
        num_workers=training.config.data.num_workers,
        timeout_s=training.config.peer_timeout_s,
        describe=lambda step: dataset.bytes.describe(f"the batch of step {step + 1}", ids_of(step)),
        pin_memory=choose_memory(training.context.device) == "pinned",
        fresh=bool(dataset.bytes.reader.urls),
    )


def _build_batches(
    training: StageTraining,
    inputs: TrainingInputs,
    plan: EpochPlan,
    known_bad: np.ndarray,
    model: Model,
    say_equal: bool,
    sizes: Sequence[tuple[int, int | None]],
) -> TrainingBatches:
    """This rank's batches, of which the first samples have been tried; ``say_equal``: says how many
    rows have an equal caption or picture, or near copies."""
    objective = training.options.objective
    cached = training.stage > 0 and training.options.reads_text_embeddings
    text = StoredRows(training.layout.text_embeddings, training.index) if cached else None
    edits: list[Extra] = []
    if objective.reads.edits and text is None:
        edits.append(EditedCaptions(objective.reads.edits, fetch_tokenizer(model.tokenizer)))
    augmentation = training.config.model_of(training.name).augmentation
    rows = training.text_rows if training.reads_text_rows else None
    tokenized = objective.reads.captions and text is None and rows is None
    transforms = list[tuple[int, PictureTransform]]()
    for start, size in sizes:
        train = train_transform(model, augmentation, size)
        fast = training.pixels == "fast"
        transforms.append((start, as_transform(fast_transform(train) if fast else train)))
    dataset = TarDataset(
        training.index,
        training.config.data,
        transforms[0][1],
        tokenizer=fetch_tokenizer(model.tokenizer) if tokenized else None,
        image_rows=inputs.image_rows,
        text_features=text,
        text_rows=rows,
        locations=inputs.locations,
        extras=inputs.extras + edits,
    )
    batches = TrainingBatches(
        dataset,
        plan,
        num_views=objective.reads.num_views,
        sentences=training.options.sentences,
        rank=training.context.rank,
        world_size=training.context.world_size,
        class_labels=inputs.classes,
        bad_ids=known_bad,
        transforms=transforms if inputs.image_rows is None else (),
    )
    dataset.check()
    is_far = bool(dataset.bytes.reader.urls)
    if say_equal and dataset.reads_text and (objective.reads.digests or not is_far):
        report_equal(batches, clean_caption)
    if say_equal:
        base = next((extra for extra in inputs.extras if isinstance(extra, BaseFeatures)), None)
        for near in objective.reads.near_copies:
            report_near(batches, near, base, clean_caption)
    return batches
