"""Builds model, objective, engine, batches and loop of one training from its options and inputs;
``verbs.train`` calls it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.checkpoint.checkpoints import Checkpoints
from mclclip.checkpoint.step_files import path_of
from mclclip.data.batches import Batch, TrainingBatches
from mclclip.data.coverage import report_attributes
from mclclip.data.epoch_plan import EpochPlan, total_steps
from mclclip.data.extras import BaseFeatures, EditedCaptions
from mclclip.data.groups import Integers, StageGroups
from mclclip.data.labels import AttributeClasses, ClassLabels
from mclclip.data.loader import Loader
from mclclip.data.picture_transform import PictureTransform, as_transform
from mclclip.data.row_store import StoredRows
from mclclip.data.sample_index import SharedBadSamples
from mclclip.data.samples import Extra, TarDataset
from mclclip.engines.build import build_engine, choose_compile
from mclclip.engines.engine import Engine
from mclclip.models.clip import clean_caption, transforms_of
from mclclip.models.encoder import load_model
from mclclip.models.loading import load_towers
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer, learning_rate
from mclclip.models.parameters import describe_groups, freeze_objective
from mclclip.models.preparing import prepare_model, refuse_folded_norms, start_from_rows
from mclclip.models.state_dicts import PICTURE_POSITIONS
from mclclip.models.tokenizer import fetch_tokenizer
from mclclip.models.transforms import fast_transform
from mclclip.objectives.base import Objective, ObjectiveInputs, Teacher
from mclclip.objectives.near_copies import NearCopies
from mclclip.ranks import collectives
from mclclip.ranks.process_group import (
    STARTED,
    choose_flash_attention,
    choose_memory,
    choose_peak_tflops,
)
from mclclip.ranks.step_boundary import StepBoundary
from mclclip.run.artifacts import RunPaths, read_manifest
from mclclip.run.recorder import Recorder, StepProfiler, Work
from mclclip.run.runlog import count_of
from mclclip.train.inputs import StageTraining, TrainingInputs
from mclclip.train.loop import ModelWithObjective, PeriodicEvaluation, Trainer
from mclclip.train.near_copies import report_near
from mclclip.train.symptoms import Symptoms
from mclclip.util.randomness import mix

log = logging.getLogger("mclclip")

_WEIGHTS = 5  # purpose of a random number: initial weights of a stage with train.start=random


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
        same |= {"image_weights": base.image_weights, **base.tower_arguments}
        model = load_towers(base.name, base.pretrained, seed=config.seed, **same)
    elif options.start == "random":
        # Every stage has its own seed: without groups the stages are a seed ensemble.
        seed = int(mix(config.seed, stage, _WEIGHTS) >> np.uint64(33))
        model = load_towers(training.layout.export(0), load_weights=False, seed=seed, **same)
    else:
        model = load_towers(
            training.layout.export(stage - 1 if options.start == "previous" else 0), **same
        )
    if options.objective.reads.captions and not model.reads_texts:
        raise ValueError(
            f"objective.kind={options.objective.kind} reads captions, and the model has no text "
            "tower: take an objective of views, such as nt_xent, or a CLIP model"
        )
    prepare_model(model, **options.model_arguments(), seed=config.seed)
    refuse_folded_norms(model)
    model.to(training.context.device)
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
    freeze_objective(objective, options.parameters)
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


_load_teacher = cache(load_model)
"""Loads a teacher once for all terms of an objective."""


@contextmanager
def attention_kernels(model: Model, device: torch.device) -> Iterator[None]:
    """Lets the image tower's attention use the kernels that `choose_flash_attention` says. Other
    verbs' attention is as torch has it, whatever was trained before them in the same process."""
    positions = (p for n, p in model.visual.named_parameters() if n in PICTURE_POSITIONS)
    length = max((each.shape[-2] for each in positions), default=0)
    backends: Any = torch.backends.cuda
    was, deterministic = backends.flash_sdp_enabled(), torch.are_deterministic_algorithms_enabled()
    if length:
        backends.enable_flash_sdp(was and choose_flash_attention(device, length, deterministic))
    try:
        yield
    finally:
        backends.enable_flash_sdp(was)


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
    count_operations: Callable[[int | None], int],
) -> Trainer:
    """Builds the loop of a training and loads its last checkpoint, if there is one.

    identity           digest of the inputs and options, for ``build_checkpoints``
    steps              number of steps of the whole training; None: as the options say
    count_operations   returns the floating-point operations of a sample in a step, by image size;
                       None: the model's own
    """
    options, context, config = training.options, training.context, training.config
    grouped, known_bad = collectives.on_main(groups.read)
    plan = training.plan(grouped)
    total = steps or total_steps(options.steps, options.epochs, plan.steps_per_epoch)
    sizes = options.image_sizes(total, grouped.num_draws / options.global_batch)
    operations = [(first, count_operations(size)) for first, size in sizes]
    compiled = _compile(training, module, operations[-1][1] * total)
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
    _log_steps(training, plan, range(start, total), sizes, module.model.image_size)
    rates = Work(operations, choose_peak_tflops(context.device))
    recorder = _build_recorder(training, plan, range(start, total), rates, engine.leaves_out)
    return Trainer(
        module=module, engine=engine, checkpoints=checkpoints, recorder=recorder,
        evaluation=evaluation, symptoms=Symptoms(module, engine, recorder),
        batches=build_loader(
            training, inputs, plan, known_bad, module.model, range(start, total), sizes
        ),
        boundary=StepBoundary(
            context, training.layout.run_dir, poll_s=config.poll_s,
            deadline=None if config.wall_time_s is None else STARTED + config.wall_time_s,
        ),
        learning_rate=partial(
            learning_rate, total_steps=total, warmup_steps=round(options.warmup * total),
            lr=options.lr, schedule=options.schedule,
        ),
        seed_words=(config.seed, training.stage), checkpoint_every=options.checkpoint.every,
        profiler=StepProfiler(
            training.directory / "profile", options.profile_steps, total, context.device,
            context.rank,
        ),
        compile_steps={start, *(at for at, _ in sizes)} if compiled else set(),
    )  # fmt: skip


def _compile(training: StageTraining, module: ModelWithObjective, operations: int) -> bool:
    """Makes torch compile what `choose_compile` says at its first run; returns whether it will.

    ``operations`` are those of one sample in every step. Rank 0 chooses for all.
    """
    options, context, blocks = training.options, training.context, module.model.blocks()
    operations = operations * options.global_batch // context.world_size
    compiled = collectives.on_main(
        lambda: choose_compile(options.engine, context.device, blocks, operations)
    )
    if compiled == "none":
        return False
    log.info("stage %d: torch compiles the %s", training.stage, compiled)
    if compiled == "model":
        module.model.compile_blocks()
    else:
        module.compile()
    return True


def _log_steps(
    training: StageTraining,
    plan: EpochPlan,
    steps: range,
    sizes: Sequence[tuple[int, int | None]],
    own_size: int | tuple[int, int],
) -> None:
    options, ranks = training.options, training.context.world_size
    log.info(
        "stage %d (%s): %s from %d, %d per epoch, global batch %d over %s",
        training.stage, training.title, count_of(steps.stop, "step"), steps.start,
        plan.steps_per_epoch, options.global_batch, count_of(ranks, "rank"),
    )  # fmt: skip
    if options.image_size:
        parts = [f"{size or own_size} pixels from step {first + 1}" for first, size in sizes]
        log.info("stage %d: pictures have %s", training.stage, ", ".join(parts))


def _build_recorder(
    training: StageTraining, plan: EpochPlan, steps: range, work: Work, leaves_out: bool
) -> Recorder:
    options, config = training.options, training.config
    return Recorder(
        training.directory, training.context, name=f"stage {training.stage}",
        global_batch=options.global_batch, start=steps.start, total=steps.stop,
        steps_per_epoch=plan.steps_per_epoch, log_every=options.log_every,
        share_bad=SharedBadSamples(training.index, config.data.max_bad_fraction).add,
        track=list(config.track), config=asdict(config),
        evaluates=options.evaluate.every is not None, leaves_out=leaves_out, work=work,
    )  # fmt: skip


def _build_evaluation(
    training: StageTraining, engine: Engine, plan: EpochPlan, total: int
) -> PeriodicEvaluation | None:
    """Builds the evaluations within a training; None where its options ask for none."""
    options = training.options.evaluate
    if options.every is None:
        return None
    assert training.evaluate is not None, "a caller that asks for evaluations passes them"
    every = options.every * (plan.steps_per_epoch if options.unit == "epochs" else 1)
    is_loss = options.metric is not None and training.config.eval.is_loss(options.metric)
    return PeriodicEvaluation(engine, training.evaluate, options, every, total, is_loss)


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
    reports = steps.start == 0 and training.context.is_main
    make = partial(_build_batches, training, inputs, plan, known_bad, model, reports, sizes)
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
    reports: bool,
    sizes: Sequence[tuple[int, int | None]],
) -> TrainingBatches:
    """This rank's batches, of which the first samples have been tried; ``reports``: says what
    near copies, equal captions and pictures, and attributes do to them."""
    objective = training.options.objective
    cached = training.stage > 0 and training.options.reads_text_embeddings
    text = StoredRows(training.layout.text_embeddings, training.index) if cached else None
    edits: list[Extra] = []
    if objective.reads.edits and text is None:
        edits.append(EditedCaptions(objective.reads.edits, fetch_tokenizer(model.tokenizer)))
    augmentation = training.config.model_of(training.name).augmentation
    transforms = list[tuple[int, PictureTransform]]()
    for start, size in sizes:
        train = model.preprocess_train
        if size is not None:
            train, _ = transforms_of(model.visual, augmentation, size)
        fast = training.pixels == "fast"
        transforms.append((start, as_transform(fast_transform(train) if fast else train)))
    rows = training.text_rows
    tokenized = objective.reads.captions and text is None and rows is None
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
    if reports:
        compared = sorted(objective.reads.near_copies, key=repr)
        if dataset.reads_text and not dataset.bytes.reader.urls:  # equal ones, if it costs little
            compared.append(NearCopies(of=("captions",)))
            if training.index.image_crc32 is not None:
                compared.append(NearCopies(of=("pictures",)))
        base = next((extra for extra in inputs.extras if isinstance(extra, BaseFeatures)), None)
        report_near(batches, list(dict.fromkeys(compared)), base, clean_caption)
        report_attributes(training.index, plan)
    return batches
