"""Verb: index + labels -> checkpoints. One loop for every method.

A method is a model and an objective; ``trainer`` has the loop. Here options become objects: what a
training is made of, whether it fits the data, and where it goes on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from mclclip import artifacts
from mclclip.artifacts import Artifact
from mclclip.checkpoint import Checkpoints, path_of
from mclclip.config import Config, TrainConfig, to_tree
from mclclip.data.bad_samples import BadSamples
from mclclip.data.epoch_plan import EpochPlan, GroupedIndex
from mclclip.data.randomness import mix
from mclclip.data.sample_index import SampleIndex
from mclclip.data.stage_groups import (
    StageGroups,
    build_groups,
    permute_labels,
    read_pseudo_labels,
)
from mclclip.data.step_counts import check_ranks, total_steps
from mclclip.data.tar_dataset import TextFeatures
from mclclip.data.training_batches import Batch, TrainingBatches
from mclclip.layout import Layout
from mclclip.models.clip import ClipModel, load_clip
from mclclip.models.optimizer import build_optimizer, is_elementwise, learning_rate
from mclclip.objectives.info_nce import InfoNCE
from mclclip.parallel import collectives
from mclclip.parallel.build_engine import build_engine
from mclclip.parallel.engines import Engine
from mclclip.parallel.process_group import Context, process_start, start_loader_worker
from mclclip.parallel.step_boundary import StepBoundary
from mclclip.profiling import PeakMemory, StepProfiler
from mclclip.recorder import Recorder
from mclclip.trainer import Trainee, Trainer, prepare_model

log = logging.getLogger("mclclip")

_VARIANTS = ("mcl", "ungrouped", "random_groups")
# Options of TrainConfig that change records or speed, not weights: a run may go on with others.
_RECORDS = ("checkpoint", "log_every", "profile_steps", "engine")


@dataclass
class _Stage:
    """What is fixed for one training before its first step."""

    config: Config
    options: TrainConfig
    context: Context
    layout: Layout
    stage: int
    seed: int
    index: SampleIndex
    directory: Path
    peaks: PeakMemory

    @property
    def uses_cached_text(self) -> bool:
        return self.stage > 0 and self.options.cached_text and not self.options.lock.text


def run(
    config: Config, context: Context, *, stage: int, variant: str = "mcl", force: bool = False
) -> Path:
    """Trains stage ``stage`` of ``variant`` and returns its directory (skips if finished).

    Stage 0 starts from random weights under ``config.base``; later stages start from stage 0's
    export under ``config.train`` on the pseudo labels of ``cluster`` (``mcl``), without groups
    (``ungrouped``), or on the same labels permuted over the samples (``random_groups``).
    Raises ValueError where options and data do not fit, before anything is written.
    """
    options = config.base if stage == 0 else config.train
    if options is None:
        raise ValueError("stage 0 is a given encoder (base is null): there is nothing to train")
    layout = Layout.of(config, variant)
    index = SampleIndex.open(layout.index)
    check_ranks("train" if stage else "base", options.global_batch, context.world_size)
    seed, directory = data_seed(config.seed, variant), layout.train(stage)
    peaks = PeakMemory(context.device)
    job = _Stage(config, options, context, layout, stage, seed, index, directory, peaks)
    if collectives.on_main(lambda: _prepare(job, variant, force, write=False))[0].finished:
        log.info("%s is finished: skipped", job.directory)
        return job.directory
    model = build_model(config, layout, stage, options, context)
    artifact, groups = collectives.on_main(lambda: _prepare(job, variant, force, write=True))
    steps = _train(job, model, artifact.identity, *groups.read())
    if context.is_main:
        artifact.finish({"steps": steps, "samples_seen": steps * options.global_batch})
    collectives.barrier()
    return job.directory


def _prepare(job: _Stage, variant: str, force: bool, write: bool) -> tuple[Artifact, StageGroups]:
    """Opens the artifact and writes the grouped index; groups that do not fit leave nothing.

    With ``write=False`` only looks whether the artifact is finished.
    """
    labels, radices, inputs = _labels(job, variant)
    options = {k: v for k, v in to_tree(job.options).items() if k not in _RECORDS}
    config = {
        "stage": job.stage,
        "variant": job.layout.variant,
        "seed": job.seed,
        "model": to_tree(job.config.model),
        "train": options,
    }
    groups = StageGroups(job.directory / "grouped_index")
    opened = partial(
        Artifact.open, job.directory, kind="train", config=config, inputs=inputs, force=force
    )
    artifact = opened(write=False)
    if artifact.finished or not write:
        return artifact, groups
    plan, bad_ids = job.options.plan, job.index.bad_ids()
    build = partial(build_groups, labels, radices, bad_ids, job.options.global_batch, plan.policy)
    grouped = None if groups.written else build()
    artifact = opened(write=True)
    if not groups.written:  # with --force the ones found before may have been moved aside
        groups.write(grouped or build(), bad_ids)
    return artifact, groups


def data_seed(seed: int, variant: str) -> int:
    """The seed of the data order: controls see another one than MCL, so that a difference
    between them is not the order of the batches."""
    number = _VARIANTS.index(variant)
    return seed if number == 0 else int(mix(seed, number) >> np.uint64(33))


def _labels(job: _Stage, variant: str) -> tuple[np.ndarray, tuple[int, ...], dict[str, str]]:
    """Labels [N] (-1: outside every plan), their radices, and the digests of what they are of."""
    inputs = {"index": job.index.digest}
    labels = np.zeros(len(job.index), dtype=np.int64)
    radices: tuple[int, ...] = ()
    if job.stage == 0:
        return labels, radices, inputs
    inputs["base"] = artifacts.read_manifest(job.layout.export(0), "export").digest
    if job.uses_cached_text:
        text = artifacts.read_manifest(job.layout.text_embeddings, "text_embeddings")
        inputs["text_embeddings"] = text.digest
    if variant != "ungrouped":
        directory = job.layout.pseudo_labels(job.stage)
        labels, radices, inputs["pseudo_labels"] = read_pseudo_labels(directory, job.index)
    if variant == "random_groups":
        labels = permute_labels(labels, job.seed, job.stage)
    return labels, radices, inputs


def _train(
    job: _Stage, model: ClipModel, identity: str, grouped: GroupedIndex, known_bad: np.ndarray
) -> int:
    """Trains ``model``; returns the number of steps of the whole training.

    ``identity`` is the digest of all that the weights depend on.
    """
    options, context, how = job.options, job.context, job.options.plan
    plan = EpochPlan(
        grouped, options.global_batch, how.policy, how.order, job.seed, job.stage, epoch=0
    )
    total = total_steps(options.steps, options.epochs, plan.steps_per_epoch)
    engine = _engine(job, model)
    checkpoints = Checkpoints(job.directory / "checkpoints", **_checkpoint_options(job, identity))
    start = checkpoints.resume(engine)
    if start:
        log.info("resumed from %s", path_of(checkpoints.directory, start))
    log.info(
        "stage %d (%s): %d steps from %d, %d per epoch (%d of %d samples), %d groups, "
        "global batch %d over %d rank(s)",
        job.stage, job.layout.variant, total, start, plan.steps_per_epoch, plan.scheduled,
        plan.scheduled + plan.remainder, grouped.num_groups, options.global_batch,
        context.world_size,
    )  # fmt: skip
    if start < total:
        trainer = _trainer(job, engine, checkpoints, plan, start, total)
        loader = _loader(job, grouped, known_bad, model, range(start, total))
        trainer.run(loader, start, total, f"stage {job.stage}")
    return total


def _engine(job: _Stage, model: ClipModel) -> Engine:
    """The engine around model and objective, with the optimizer the options name."""
    options, how = job.options, job.options.engine
    trainee = Trainee(model, InfoNCE(), options.precision).to(job.context.device)
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
    )


def _trainer(
    job: _Stage, engine: Engine, checkpoints: Checkpoints, plan: EpochPlan, start: int, total: int
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


def _checkpoint_options(job: _Stage, identity: str) -> dict[str, Any]:
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
    else:
        model = load_clip(f"local-dir:{layout.export(0)}", augmentation=config.model.augmentation)
    prepare_model(model, **options.model_arguments(), seed=config.seed)
    model.to(context.device)
    if options.engine.compile == "model":
        model.compile_blocks()
    return model


def _loader(
    job: _Stage, grouped: GroupedIndex, known_bad: np.ndarray, model: ClipModel, steps: range
) -> DataLoader[Batch]:
    """This rank's batches of ``steps``, in order."""
    options, data = job.options, job.config.data
    text = TextFeatures(job.layout.text_embeddings, job.index) if job.uses_cached_text else None
    batches = TrainingBatches(
        index=job.index,
        grouped=grouped,
        transform=model.preprocess_train,
        tokenizer=None if text is not None else model.tokenizer,
        text_features=text,
        global_batch=options.global_batch,
        policy=options.plan.policy,
        order=options.plan.order,
        seed=job.seed,
        stage=job.stage,
        rank=job.context.rank,
        world_size=job.context.world_size,
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
