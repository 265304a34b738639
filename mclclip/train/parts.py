"""Options become objects: the model, engine, objective, batches and loop of one training."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from mclclip.checkpoint import Checkpoints
from mclclip.config import Config, TrainConfig, to_tree
from mclclip.data.batches import Batch, TrainingBatches
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import GroupedIndex
from mclclip.data.samples import BadSamples, TextFeatures
from mclclip.engines.build import build_engine
from mclclip.engines.engine import Engine
from mclclip.models.clip import ClipModel, load_clip
from mclclip.models.optimizer import build_optimizer, is_elementwise, learning_rate
from mclclip.models.tokenizer import fetched
from mclclip.objectives.class_centers.kernels import kernels_of
from mclclip.objectives.class_centers.margins import Margin
from mclclip.objectives.class_centers.rows import HeadOptimizer
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.mlcd import ClassCenterLoss, build_class_center_loss
from mclclip.randomness import mix
from mclclip.ranks.process_group import Context, process_start, start_loader_worker
from mclclip.ranks.step_boundary import StepBoundary
from mclclip.run.layout import Layout
from mclclip.run.profiling import StepProfiler
from mclclip.run.recorder import Recorder
from mclclip.train.job import Job
from mclclip.train.loop import Trainee, Trainer, prepare_model


def engine_of(job: Job, model: ClipModel, objective: InfoNCE | ClassCenterLoss) -> Engine:
    """The engine around model and objective, with the optimizer the options name."""
    options, how = job.options, job.options.engine
    trainee = Trainee(model, objective, options.precision).to(job.context.device)
    if how.compile == "step":
        trainee.compile()
    return build_engine(
        how.name,
        trainee,
        partial(build_optimizer, **options.optimizer_arguments()),
        job.context,
        blocks=model.blocks(),
        shard_ranks=how.shard_ranks,
        zero_stage=how.zero_stage,
        elementwise=is_elementwise(options.optimizer),
        precision=options.precision,
        clip_grad_norm=options.clip_grad_norm,
        micro_batch=how.micro_batch,
        ema_decay=options.ema_decay,
        outside=[objective.centers] if isinstance(objective, ClassCenterLoss) else [],
    )


def objective_of(job: Job, model: ClipModel) -> InfoNCE | ClassCenterLoss:
    """What is minimised, with new class centers where it has some."""
    how, labels = job.options.class_centers, job.class_labels
    if how is None or labels is None:
        return InfoNCE()
    centroids = labels.centroids()
    return build_class_center_loss(
        len(centroids),
        model.embed_dim,
        centroids if how.centers == "centroids" else None,
        kind=how.kind,
        context=job.context,
        seed=int(mix(job.seed, job.stage) >> np.uint64(33)),
        scale=how.scale,
        margin=Margin(how.margin, how.margin_size, how.margin_gradient),
        sample_rate=how.sample_rate,
        rule=how.negatives,
        optimizer=HeadOptimizer(
            how.lr_scale, how.weight_decay, job.options.betas, job.options.eps, how.lazy
        ),
        kernels=kernels_of(how.kernel, job.context.device, job.options.precision),
        dtype=torch.float64 if job.options.precision == "float64" else torch.float32,
    )


def trainer_of(
    job: Job, engine: Engine, checkpoints: Checkpoints, plan: EpochPlan, start: int, total: int
) -> Trainer:
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
        share_bad=BadSamples(job.index, job.config.data.max_bad_fraction).share,
        track=list(job.config.track),
        config=to_tree(job.config),
        peaks=job.peaks,
    )
    limit = job.config.wall_time_s
    return Trainer(
        engine,
        checkpoints,
        recorder,
        StepBoundary(
            context,
            job.layout.run_dir,
            poll_s=job.config.poll_s,
            deadline=None if limit is None else process_start() + limit,
        ),
        learning_rate=partial(
            learning_rate,
            total_steps=total,
            warmup_steps=round(options.warmup * total),
            lr=options.lr,
            schedule=options.schedule,
        ),
        prepare=partial(_to, options=options, context=context),
        seed_words=(job.seed, job.stage),
        checkpoint_every=options.checkpoint.every,
        profiler=StepProfiler(
            job.directory / "profile", options.profile_steps, total, context.device, context.rank
        ),
    )


def checkpoint_options(job: Job, identity: str) -> dict[str, Any]:
    """Arguments of Checkpoints; every training has a folder of its own in the mirror.

    With other options or inputs it has another one: what was mirrored before is of no use to it.
    """
    options = to_tree(job.options.checkpoint)
    del options["every"]
    if options["mirror"] is not None:
        inside = (job.directory / "checkpoints").relative_to(job.layout.run_dir)
        options["mirror"] = f"{options['mirror'].rstrip('/')}/{inside}/{identity[:12]}"
    return options


def build_model(
    config: Config, layout: Layout, stage: int, options: TrainConfig, context: Context
) -> ClipModel:
    """The model a stage starts from, locked as configured and on its device."""
    if stage == 0:
        model = load_clip(
            config.model.name,
            config.model.pretrained,
            seed=config.seed,
            augmentation=config.model.augmentation,
        )
    elif (own := config.trained_model) is not None:
        model = load_clip(own.name, own.pretrained, seed=config.seed, augmentation=own.augmentation)
    else:
        model = load_clip(f"local-dir:{layout.export(0)}", augmentation=config.model.augmentation)
    prepare_model(model, **options.model_arguments(), seed=config.seed)
    model.to(context.device)
    if options.engine.compile == "model":
        model.compile_blocks()
    return model


def loader_of(
    job: Job, grouped: GroupedIndex, known_bad: np.ndarray, model: ClipModel, steps: range
) -> DataLoader[Batch]:
    """This rank's batches of ``steps``, in order."""
    options, data = job.options, job.config.data
    text = TextFeatures(job.layout.text_embeddings, job.index) if job.uses_cached_text else None
    batches = TrainingBatches(
        index=job.index,
        grouped=grouped,
        transform=model.preprocess_train,
        tokenizer=fetched(model.tokenizer) if text is None and job.class_labels is None else None,
        text_features=text,
        global_batch=options.global_batch,
        policy=options.plan.policy,
        order=options.plan.order,
        seed=job.seed,
        stage=job.stage,
        rank=job.context.rank,
        world_size=job.context.world_size,
        class_labels=job.class_labels,
        bad_ids=known_bad,
        max_image_pixels=data.max_image_pixels,
        max_open_files=data.max_open_files,
    )
    return DataLoader(
        batches,
        batch_size=None,
        sampler=steps,
        num_workers=data.num_workers,
        worker_init_fn=start_loader_worker,
        pin_memory=job.context.device.type == "cuda",
        persistent_workers=False,
    )


def _to(batch: Batch, options: TrainConfig, context: Context) -> Batch:
    batch = batch.to(context.device)
    if options.precision == "float64":
        batch.image = batch.image.double()
        if batch.text_features is not None:
            batch.text_features = batch.text_features.double()
    return batch
