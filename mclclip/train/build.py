"""Builds the model, engine, objective, batches and loop of one training from its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.checkpoint import Checkpoints
from mclclip.config import Config, TrainConfig, to_tree
from mclclip.data.batches import Batch, TrainingBatches
from mclclip.data.decode import Pixels
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.extras import BaseFeatures, EditedCaptions, EqualityDigests, report_equal
from mclclip.data.groups import GroupedIndex, Integers
from mclclip.data.labels import AttributeClasses, ClassLabels, SampleWeights
from mclclip.data.loader import Loader
from mclclip.data.locations import Locations
from mclclip.data.row_store import StoredRows, left_out
from mclclip.data.sample_index import SampleIndex, SharedBadSamples
from mclclip.data.samples import Extra, TarDataset
from mclclip.engines import build_engine
from mclclip.engines.engine import Engine
from mclclip.models.clip import clean_caption
from mclclip.models.loading import load_towers, prepare_model, refuse_folded_norms
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer, learning_rate
from mclclip.models.tokenizer import fetch_tokenizer
from mclclip.models.transforms import fast_transform
from mclclip.objectives.base import Objective, ObjectiveInputs
from mclclip.ranks import collectives
from mclclip.ranks.process_group import STARTED, Context, choose_memory
from mclclip.ranks.step_boundary import StepBoundary
from mclclip.run.artifacts import RunPaths, made_of
from mclclip.run.recorder import PeakMemory, Recorder, StepProfiler
from mclclip.train.loop import ModelWithObjective, PeriodicEvaluation, Trainer
from mclclip.train.symptoms import Symptoms
from mclclip.util.caption_rules import HardCaptions
from mclclip.util.options import protocol_of
from mclclip.util.randomness import mix

_WEIGHTS = 5  # purpose of a random number: initial weights of a stage with train.start=random


@dataclass(frozen=True)
class StageTraining:
    """One training, as its options decide it.

    name              its option, ``base`` or ``train``
    directory         of its artifact
    title             name in log lines: the variant if it has groups or is their control, else the
                      kind of the objective
    reads_groups      batches are made of groups of pseudo labels
    reads_image_rows  views are rows that frozen blocks, or a frozen tower, made of images once
    cached_text       captions come as embeddings from disk
    """

    config: Config
    options: TrainConfig
    context: Context
    layout: RunPaths
    stage: int
    index: SampleIndex
    name: str
    directory: Path
    title: str
    reads_groups: bool
    reads_image_rows: bool
    cached_text: bool

    @classmethod
    def of(
        cls,
        config: Config,
        options: TrainConfig,
        context: Context,
        layout: RunPaths,
        stage: int,
        index: SampleIndex,
    ) -> StageTraining:
        """Training of a stage."""
        objective = options.objective
        groups = objective.reads.groups and stage > 0
        return cls(
            config, options, context, layout, stage, index,
            name="train" if stage else "base",
            directory=layout.train(stage),
            title=layout.variant if groups else objective.kind,
            reads_groups=groups and layout.variant != "ungrouped",
            reads_image_rows=stage > 0 and config.image_rows.enabled,
            cached_text=stage > 0 and options.reads_text_embeddings,
        )  # fmt: skip

    @property
    def stored_texts(self) -> tuple[HardCaptions | None, ...]:
        """The texts whose embeddings the training reads (``TrainConfig.stored_texts``)."""
        return self.options.stored_texts if self.stage > 0 else ()

    @cached_property
    def left_out(self) -> dict[str, np.ndarray]:
        """Ids of the samples that the training leaves out, by reason: they lack the caption, the
        attribute or the embedding that the objective reads.

        Raises ValueError where all samples lack what the objective reads.
        """
        reads, reader = self.options.objective.reads, self.options.reader(self.name)
        found: dict[str, np.ndarray] = {}
        if reads.captions:
            found["without_caption"] = self.index.without_caption(reader)
        if reads.attribute is not None:
            found["without_attribute"] = self.index.without_attribute(reads.attribute, reader)
        if "images" in reads.base:
            embedded = self.layout.embeddings(0)
            found["without_embedding"] = left_out(embedded, len(self.index.shards))
        return found

    @cached_property
    def weights(self) -> SampleWeights | None:
        """How often an epoch draws each sample; None: once. Raises its errors (``open``)."""
        plan, option = self.options.plan, f"{self.name}.plan"
        return SampleWeights.open(self.index, self.config.data, plan, option)

    @cached_property
    def classes(self) -> ClassLabels | AttributeClasses | None:
        """Clusters of the stage before, or values of an attribute, by sample, for objectives that
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
    def extras(self) -> list[Extra]:
        """Further tensors of every sample, which the objective reads. Raises ValueError where the
        index cannot tell equal pictures, and the errors of ``BaseFeatures``."""
        reads, made = self.options.objective.reads, list[Extra]()
        if reads.digests:
            pictures = self.index if self.reads_image_rows else None
            made.append(EqualityDigests(clean_caption, pictures))
        edits = next(filter(None, self.stored_texts), None)
        if reads.base - {"model"} or edits:
            made.append(BaseFeatures(self.layout, self.index, reads.base, edits))
        return made

    @cached_property
    def pixels(self) -> Pixels:
        """How images become pixels. Where ``data.pixels`` is ``auto``, a control takes what the
        training that it controls took."""
        if self.config.data.pixels == "auto" and self.layout.variant != "mcl":
            original = made_of(RunPaths.of(self.config).train(self.stage)).get("config", {})
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
    """Files that a training reads beside its index, checked by rank 0 for all ranks."""

    classes: ClassLabels | AttributeClasses | None
    locations: Locations
    image_rows: StoredRows | None = None


def locations_of(job: StageTraining) -> Locations:
    """Returns where a training reads the samples: in copies that ``relocate`` made for its groups,
    or in the shards of the index. Raises the errors of ``Locations.open``."""
    how, layout = job.config.relocate, job.layout
    if not how.enabled or not job.reads_groups or layout.variant != "mcl":
        return Locations(job.index)
    directory = layout.relocated(job.stage, how.folder)
    url = how.url and f"{how.url.rstrip('/')}/stage_{job.stage}"
    return Locations.open(directory, job.index, url, job.config.data.remote)


def trainee_of(job: StageTraining, model: Model, objective: Objective) -> ModelWithObjective:
    """Model and objective as one module, on the device."""
    trainee = ModelWithObjective(model, objective, job.options.precision).to(job.context.device)
    if job.options.engine.compile == "step":
        trainee.compile()
    return trainee


def engine_of(job: StageTraining, trainee: ModelWithObjective, peaks: PeakMemory) -> Engine:
    """The engine around model and objective, with the optimizer the options name; its phases go
    to ``peaks``."""
    options = job.options
    return build_engine(
        options.engine,
        trainee,
        partial(build_optimizer, **options.optimizer_arguments()),
        job.context,
        blocks=trainee.model.blocks(),
        precision=options.precision,
        clip_grad_norm=options.clip_grad_norm,
        ema_decay=options.ema_decay,
        outside=trainee.objective.outside(),
        phase_ended=peaks.ended,
    )


def objective_of(
    job: StageTraining, model: Model, classes: ClassLabels | AttributeClasses | None
) -> Objective:
    """The objective, as its options build it.

    Raises ValueError for a batch of one sample where batch norms are trained.
    """
    options = job.options
    objective = options.objective.build(
        ObjectiveInputs(
            model=model,
            context=job.context,
            seed=int(mix(job.config.seed, job.stage) >> np.uint64(33)),
            precision=options.precision,
            betas=options.betas,
            eps=options.eps,
            classes=classes,
        )
    )
    modules = (*model.modules(), *objective.modules())
    if options.global_batch == 1 and any(isinstance(m, _BatchNorm) and m.training for m in modules):
        raise ValueError(
            f"{job.name}.global_batch is 1, and batch norms are trained, which need several "
            "samples: raise it"
        )
    return objective


def trainer_of(
    job: StageTraining,
    trainee: ModelWithObjective,
    engine: Engine,
    checkpoints: Checkpoints,
    plan: EpochPlan,
    start: int,
    total: int,
    evaluation: PeriodicEvaluation | None,
    peaks: PeakMemory,
) -> Trainer:
    """The loop of the steps ``start`` to ``total``, with what it records and obeys."""
    options, context = job.options, job.context
    recorder = Recorder(
        job.directory,
        context,
        name=f"stage {job.stage}",
        global_batch=options.global_batch,
        start=start,
        total=total,
        steps_per_epoch=plan.steps_per_epoch,
        log_every=options.log_every,
        share_bad=SharedBadSamples(job.index, job.config.data.max_bad_fraction).add,
        track=list(job.config.track),
        config=to_tree(job.config),
        peaks=peaks,
        evaluates=evaluation is not None,
        leaves_out=engine.leaves_out,
    )
    limit = job.config.wall_time_s
    deadline = None if limit is None else STARTED + limit
    poll_s, folder = job.config.poll_s, job.directory / "profile"
    return Trainer(
        trainee=trainee,
        engine=engine,
        checkpoints=checkpoints,
        recorder=recorder,
        symptoms=Symptoms(trainee, engine, recorder),
        boundary=StepBoundary(context, job.layout.run_dir, poll_s=poll_s, deadline=deadline),
        learning_rate=partial(
            learning_rate,
            total_steps=total,
            warmup_steps=round(options.warmup * total),
            lr=options.lr,
            schedule=options.schedule,
        ),
        seed_words=(job.config.seed, job.stage),
        checkpoint_every=options.checkpoint.every,
        steps_per_epoch=plan.steps_per_epoch,
        profiler=StepProfiler(folder, options.profile_steps, total, context.device, context.rank),
        evaluation=evaluation,
        compiles=options.engine.compile != "off",
    )


def checkpoints_of(job: StageTraining, identity: str) -> Checkpoints:
    """The checkpoints of a training, whose inputs and options have the digest ``identity``.

    It is a part of the folder's name in the mirror, so that a training with other options or inputs
    does not find these checkpoints. Raises ValueError for a mirror inside the run directory.
    """
    options, folder = job.options.checkpoint, job.directory / "checkpoints"
    if options.mirror is not None:
        is_folder, run_dir = protocol_of(options.mirror) is None, job.layout.run_dir.resolve()
        if is_folder and Path(options.mirror).expanduser().resolve().is_relative_to(run_dir):
            raise ValueError(
                f"checkpoint.mirror={options.mirror!r} lies in the run directory {run_dir}, with "
                "which it would be lost: give a folder outside of it, on another disk"
            )
        inside = folder.relative_to(job.layout.run_dir)
        mirror = f"{options.mirror.rstrip('/')}/{inside}/{identity[:12]}"
        options = replace(options, mirror=mirror)
    digest = {"stage": job.stage, "variant": job.layout.variant, "digest": identity}
    return Checkpoints(folder, options, identity=digest)


def build_model(job: StageTraining) -> Model:
    """The model a stage starts from, with its locks and adapters, on its device.

    Raises ValueError where the objective reads captions and the model has no text tower, and where
    batch norms are trained that were folded into weights.
    """
    config, options, layout, stage = job.config, job.options, job.layout, job.stage
    named = config.model_of(job.name)
    same: dict[str, Any] = {"projector": named.projector, "augmentation": named.augmentation}
    if stage == 0 or config.trained_model is not None:
        same |= {"text": named.text, "image_weights": named.image_weights}
        same["long_context"] = named.long_context
        model = load_towers(named.name, named.pretrained, seed=config.seed, **same)
    elif options.start == "random":
        # Every stage has its own seed: without groups the stages are a seed ensemble.
        seed = int(mix(config.seed, stage, _WEIGHTS) >> np.uint64(33))
        model = load_towers(layout.export(0), load_weights=False, seed=seed, **same)
    else:
        model = load_towers(layout.export(stage - 1 if options.start == "previous" else 0), **same)
    if options.objective.reads.captions and not model.reads_texts:
        raise ValueError(
            f"objective.kind={options.objective.kind} reads captions, and the model has no text "
            "tower: take an objective of views, such as nt_xent, or a CLIP model"
        )
    prepare_model(model, **options.model_arguments(), seed=config.seed)
    refuse_folded_norms(model)
    model.to(job.context.device)
    if options.engine.compile == "model":
        model.compile_blocks()
    return model


def loader_of(
    job: StageTraining,
    opened: TrainingInputs,
    plan: EpochPlan,
    known_bad: np.ndarray,
    model: Model,
    steps: range,
) -> Loader[Batch]:
    """This rank's batches of ``steps``, in order."""
    say_equal = steps.start == 0 and job.context.is_main
    make = partial(_batches_of, job, opened, plan, known_bad, model, say_equal)
    batches = collectives.raise_on_every_rank(make, "train")
    dataset = batches.dataset

    def ids_of(step: int) -> Integers:
        epoch, epoch_step = divmod(step, plan.steps_per_epoch)
        rows = range(batches.rank * batches.local_batch, (batches.rank + 1) * batches.local_batch)
        return batches.plan(epoch).batch(epoch_step).ids[rows]

    return Loader(
        batches,
        steps,
        num_workers=job.config.data.num_workers,
        timeout_s=job.config.peer_timeout_s,
        describe=lambda step: dataset.bytes.describe(f"the batch of step {step + 1}", ids_of(step)),
        pin_memory=choose_memory(job.context.device) == "pinned",
        fresh=bool(dataset.bytes.reader.urls),
    )


def _batches_of(
    job: StageTraining,
    opened: TrainingInputs,
    plan: EpochPlan,
    known_bad: np.ndarray,
    model: Model,
    say_equal: bool,
) -> TrainingBatches:
    """This rank's batches, of which the first samples have been tried; ``say_equal``: says how many
    rows have an equal caption or picture."""
    objective = job.options.objective
    text = StoredRows(job.layout.text_embeddings, job.index) if job.cached_text else None
    edits: list[Extra] = []
    if objective.reads.edits and text is None:
        edits.append(EditedCaptions(objective.reads.edits, fetch_tokenizer(model.tokenizer)))
    train = model.preprocess_train
    dataset = TarDataset(
        job.index,
        job.config.data,
        fast_transform(train) if job.pixels == "fast" else train,
        tokenizer=fetch_tokenizer(model.tokenizer)
        if objective.reads.captions and text is None
        else None,
        image_rows=opened.image_rows,
        text_features=text,
        locations=opened.locations,
        extras=job.extras + edits,
    )
    batches = TrainingBatches(
        dataset,
        plan,
        num_views=objective.reads.views,
        sentences=job.options.sentences,
        rank=job.context.rank,
        world_size=job.context.world_size,
        class_labels=opened.classes,
        bad_ids=known_bad,
    )
    dataset.check()
    is_far = bool(dataset.bytes.reader.urls)
    if say_equal and dataset.reads_text and (objective.reads.digests or not is_far):
        report_equal(batches, clean_caption)
    return batches
