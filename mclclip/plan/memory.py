"""Measures the memory and the operations of one rank in a training; refuses what does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.config import Config, TrainConfig
from mclclip.data.batches import Batch
from mclclip.engines import TrainingBytes, gradient_cache, per_rank
from mclclip.engines.engine import HALF
from mclclip.models import memory
from mclclip.models.loading import prepare_model
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer, is_elementwise
from mclclip.models.options import ModelConfig
from mclclip.objectives import base as objectives
from mclclip.objectives.base import Setting
from mclclip.plan.machine import GIB, Machine
from mclclip.ranks.process_group import SINGLE
from mclclip.train.loop import Trainee

# What a rank holds, in the order of the table, as it is called there.
PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "ema": "moving average",
    "objective": "the objective",
    "engine": "engine's buffers",
    "activations": "activations",
    "loss": "features, loss",
    "batch": "batch",
    "context": "CUDA, NCCL",
}
# Of a process on a GPU: CUDA's context and libraries; NCCL's buffers. Rough, and part of the sum.
_CONTEXT, _NCCL = GIB, GIB // 2
# Samples that are counted together: batch norms that train want more than one.
_ROWS = 2


def measure(config: Config, name: str, options: TrainConfig, machine: Machine) -> dict[str, Any]:
    """Bytes of one rank by part (``parts``, ``sum``), what they follow from, and ``operations``.

    Raises ValueError where the training would refuse its options.
    """
    local, how, gpu = options.global_batch // machine.ranks, options.engine, config.device != "cpu"
    micro = min(how.micro_batch or local, local)
    named = config.model_of(name)
    model = _shapes(named, named.projector)
    if options.precision == "float64":
        model.double()
    with memory.faked(model, gpu_autocast=gpu and options.precision in HALF):
        encoder = encoder_operations(model)
        prepare_model(model, **options.model_arguments(), seed=config.seed)
        _check_engine(model, name, options, machine)
        setting = Setting(model=model, context=SINGLE, seed=0, precision=options.precision)
        trainee = Trainee(model, options.objective.outline(setting), options.precision)
        batch = _batch(model, options, local, name == "train" and options.reads_text_embeddings)
        sizes = _sizes(model, options)
        cost = _cost(config, options, model, machine.ranks, sizes)
        gradients = _allocate_gradients(trainee)  # they are there before a micro-batch runs
        existing = [*trainee.parameters(), *trainee.buffers(), *gradients, *batch.tensors()]
        half, caching = options.precision in HALF, micro < local
        parts = per_rank(sizes, how, machine.ranks, half=half, caching=caching) | {
            "activations": memory.peak_bytes(
                partial(_step, trainee, batch.rows(0, micro)), existing
            ),
            "objective": sum(cost.lasting.values()),
            "loss": cost.step,
            "batch": memory.size_bytes(batch.tensors()),
            "context": (_CONTEXT + (_NCCL if machine.ranks > 1 else 0)) if gpu else 0,
        }
        workers = config.data.num_workers
        return {
            "global_batch": options.global_batch,
            "local_batch": local,
            "micro_batch": micro,
            "micro_batches": -(-local // micro),
            "engine": how.name if machine.ranks > 1 else "one process",
            "counts": _counts(model),
            "embed_dim": model.embed_dim,
            "width": model.layout.pooled_dim,  # of a feature before the projection
            "parts": parts,
            "sum": sum(parts.values()),
            # Two batches per loader worker, and two in pinned memory.
            "host": parts["batch"] * (2 * workers + 2 if workers else 1),
            "objective": dict(cost.details),
            "checkpoint": sizes.parameters + sizes.moments + sizes.average + cost.checkpoint,
            "export": sizes.parameters,
            "trained": sizes.trained,
            "operations": encoder | _training_operations(trainee, batch, twice=micro < local),
            "notes": _notes(model, name, options, machine, sizes),
        }


def check(measured: dict[str, Any], name: str, options: TrainConfig, machine: Machine) -> None:
    """Raises ValueError where a rank needs more than its GPU has."""
    if machine.memory_gib is None or measured["sum"] <= machine.memory_gib * GIB:
        return
    parts = measured["parts"]
    most = max(parts, key=parts.__getitem__)
    room = machine.memory_gib * GIB - (measured["sum"] - parts[most])
    raise ValueError(
        f"{name} needs about {measured['sum'] / GIB:.1f} GiB per rank, --gpu-memory-gib is "
        f"{machine.memory_gib:g}; the biggest part is {PARTS[most]}, {parts[most] / GIB:.1f} GiB: "
        f"{_remedy(most, measured, name, options, room)}"
    )


def _remedy(
    most: str, measured: dict[str, Any], name: str, options: TrainConfig, room: float
) -> str:
    how = options.engine
    if most == "activations":
        # The largest power of two whose activations, which grow with it, fill at most the room.
        per_sample = measured["parts"][most] / measured["micro_batch"]
        largest = max(min(room / per_sample, measured["micro_batch"] / 2), 1)
        ways = [f"{name}.engine.micro_batch={2 ** math.floor(math.log2(largest))}"]
        if not how.grad_checkpointing:
            ways.append(f"{name}.engine.grad_checkpointing=true")
        return f"set {' or '.join(ways)}, or use more GPUs"
    if most == "objective":
        return (
            "use more GPUs, which share class centers among them, or lower cluster.num_clusters or "
            "objective.queue_size"
        )
    if most in ("loss", "batch", "context"):
        return f"lower {name}.global_batch, or use more GPUs"
    if how.name == "ddp":
        return f"set {name}.engine.name=fsdp or deepspeed, which share them among the ranks"
    if how.name == "deepspeed" and how.zero_stage < 3:
        return f"set {name}.engine.zero_stage=3, or use more GPUs"
    return f"use more GPUs, or train less of the model ({name}.lock, {name}.lora)"


# --- the training ------------------------------------------------------------------------------


def _check_engine(model: Model, name: str, options: TrainConfig, machine: Machine) -> None:
    """Refuses what the engine would refuse when it is built."""
    how, ranks = options.engine, machine.ranks
    if how.micro_batch is not None:
        gradient_cache.check(model)
    if ranks == 1:
        return
    if how.name == "fsdp" and how.shard_ranks is not None and ranks % how.shard_ranks:
        raise ValueError(
            f"{name}.engine.shard_ranks={how.shard_ranks} does not divide the {ranks} ranks: give "
            "a divisor, such as the number of GPUs of a node"
        )
    if how.name == "deepspeed" and not is_elementwise(options.optimizer):
        raise ValueError(
            f"{name}.engine.name=deepspeed does not run {name}.optimizer={options.optimizer}, "
            "which looks at whole parameters: take another optimizer, or engine.name=ddp or fsdp"
        )
    if how.name == "deepspeed" and options.precision == "float64":
        raise ValueError(f"{name}.engine.name=deepspeed trains float32, got precision=float64")


def _batch(model: Model, options: TrainConfig, local: int, cached_text: bool) -> Batch:
    """A rank's batch, without values."""
    dtype = next(model.parameters()).dtype
    context = int(getattr(model.tokenizer, "context_length", 77))
    objective = options.objective
    reads, tokens = objective.reads, objective.reads.captions and not cached_text
    columns = reads.num_classes_per_sample
    shape = (local, *model.image_shape)
    stored = [f"base_{name[:-1]}_features" for name in reads.base - {"model"}]
    extras = {name: torch.empty(local, model.embed_dim, dtype=dtype) for name in stored}
    if reads.edits and cached_text:
        shape_of_edits = local, reads.edits.per_caption, model.embed_dim
        extras["edited_features"] = torch.empty(shape_of_edits, dtype=dtype)
    elif reads.edits:
        num = reads.edits.per_caption
        extras["edited_text"] = torch.zeros(local, num, context, dtype=torch.int64)
        extras["has_edit"] = torch.ones(local, num, dtype=torch.bool)
    return Batch(
        views=[torch.empty(shape, dtype=dtype) for _ in range(objective.num_views)],
        labels=torch.zeros(local, 1, dtype=torch.int64),
        classes=torch.zeros(local, columns, dtype=torch.int64) if columns else None,
        sample_id=torch.zeros(local, dtype=torch.int64),
        step=0,
        group_size=options.global_batch,
        text=torch.zeros(local, context, dtype=torch.int64) if tokens else None,
        text_features=torch.empty(local, model.embed_dim, dtype=dtype) if cached_text else None,
        extras=extras,
    )


def _allocate_gradients(module: nn.Module) -> list[Tensor]:
    trained = [p for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    return [p.grad for p in trained if p.grad is not None]


def _step(trainee: Trainee, batch: Batch) -> None:
    """Forward and backward of one micro-batch."""
    features = trainee(batch, dict)
    sums = [value.sum() for value in features.values() if value.requires_grad]
    torch.autograd.backward(torch.stack(sums).sum())


# --- operations --------------------------------------------------------------------------------


def encoder_operations(model: Model) -> dict[str, int | None]:
    """Operations of an ``image``, and of a ``text`` (None without a text tower), forward alone.

    ``model`` is a fake (``memory.faked``) whose weights nobody has begun to train.
    """
    kind = next(model.parameters()).dtype
    images = torch.empty(_ROWS, *model.image_shape, dtype=kind)
    context = int(getattr(model.tokenizer, "context_length", 77)) if model.reads_texts else 0
    tokens = torch.zeros(_ROWS, context, dtype=torch.int64)
    with torch.no_grad():
        image = memory.operations(lambda: model.encode_image(images))
        text = memory.operations(lambda: model.encode_text(tokens)) if context else None
    return {"image": image // _ROWS, "text": None if text is None else text // _ROWS}


def _shapes(named: ModelConfig, projector: Sequence[int] = ()) -> Model:
    """The model on tensors that have shapes but no memory, with a projector of these widths."""
    how: dict[str, Any] = {"text": named.text, "long_context": named.long_context}
    return memory.load_shapes(named.name, projector=projector, **how)


def operations_of_named(named: ModelConfig) -> dict[str, int | None]:
    """``encoder_operations`` of a model that is not loaded."""
    model = _shapes(named)
    with memory.faked(model):
        return encoder_operations(model.eval())


def _training_operations(trainee: Trainee, batch: Batch, *, twice: bool) -> dict[str, Any]:
    """Operations of a sample in a step, all of its views, and what a cache of the trunk would save.

    ``twice``: gradient caching runs the forward pass once more before. The loss itself is left out.
    Beside ``sample``: ``features``, bytes of a sample's features, and of those with a gradient
    (``features_trained``); ``trunk`` (None where no block is frozen, or there are several views):
    its ``blocks``, the ``values`` of its output for one crop, what is left of ``sample`` where that
    output is at hand (``sample_cached``), and ``image``, the trunk's part of an embedding pass.
    """
    model: Any = trainee.model
    batch = batch.rows(0, _ROWS)
    rows = len(batch)

    def count() -> int:
        forward = 0
        if twice:
            with torch.no_grad():
                forward = memory.operations(lambda: trainee(batch, dict))
        return (forward + memory.operations(partial(_step, trainee, batch))) // rows

    features = [f for f in trainee(batch, dict).values() if f.ndim]
    trained = [feature for feature in features if feature.requires_grad]
    sizes = [memory.size_bytes(each) // rows for each in (features, trained)]
    found: dict[str, Any] = dict(zip(("features", "features_trained"), sizes, strict=True))
    found |= {"sample": count(), "trunk": None}
    frozen = model.num_frozen_blocks
    if frozen and len(batch.views) == 1:  # several views of a row would be equal
        images = batch.views[0]
        with torch.no_grad():
            output = model.encode_trunk(images, frozen)
            image = memory.operations(lambda: model.encode_trunk(images, frozen)) // rows
        batch = replace(batch, views=[output])
        encoders = [m for m in trainee.modules() if isinstance(m, Model)]  # copies too
        for encoder in encoders:
            encoder.first_block = frozen
        cached = count()
        for encoder in encoders:
            encoder.first_block = 0
        found["trunk"] = {"blocks": frozen, "of_blocks": model.num_blocks, "image": image}
        found["trunk"] |= {"values": output.numel() // rows, "sample_cached": cached}
    return found


# --- sizes -------------------------------------------------------------------------------------


def _cost(
    config: Config, options: TrainConfig, model: Model, ranks: int, sizes: TrainingBytes
) -> objectives.Cost:
    """Cost of the objective, with as many classes as the largest of the stages has."""
    return options.objective.cost(
        objectives.Sizes(
            local_batch=options.global_batch // ranks,
            num_ranks=ranks,
            dim=model.feature_dim,
            num_classes=max(config.clusters, default=config.cluster.clusters_of(0)),
            dtype=next(model.parameters()).dtype,
            peak_bytes=memory.peak_bytes,
            model_bytes=sizes.parameters,
            num_channels=model.num_channels,
        )
    )


def _sizes(model: Model, options: TrainConfig) -> TrainingBytes:
    trained = [p for p in model.parameters() if p.requires_grad]
    blocks = [memory.size_bytes(block.parameters()) for block in model.blocks()]
    whole = memory.size_bytes(model.parameters())
    return TrainingBytes(
        parameters=whole + memory.size_bytes(model.buffers()),
        trained=memory.size_bytes(trained),
        moments=_moments(model, options),
        average=memory.size_bytes(trained) if options.ema_decay else 0,
        outside=whole - sum(blocks),
        largest_block=max(blocks, default=0),
        start=memory.size_bytes(trained) if options.start_decay else 0,
    )


def _moments(model: Model, options: TrainConfig) -> int:
    """Bytes of the optimizer's state, which its first step makes."""
    optimizer = build_optimizer(model, **options.optimizer_arguments())
    gradients = _allocate_gradients(model)
    try:
        optimizer.step()
    except memory.NeedsValues:  # ``_notes`` says what is assumed
        return 2 * memory.size_bytes(gradients)
    state = [value for values in optimizer.state.values() for value in values.values()]
    return memory.size_bytes(value for value in state if isinstance(value, Tensor))


def _counts(model: Model) -> dict[str, dict[str, int]]:
    """Parameters by tower: trainable and frozen."""
    counts = {tower: {"trainable": 0, "frozen": 0} for tower in ("image", "text", "logit scale")}
    towers = {"visual": "image", "logit_scale": "logit scale", "logit_bias": "logit scale"}
    for name, parameter in model.exported.named_parameters():
        tower = towers.get(name.split(".")[0], "text")
        counts[tower]["trainable" if parameter.requires_grad else "frozen"] += parameter.numel()
    return counts


def _notes(
    model: Model, name: str, options: TrainConfig, machine: Machine, sizes: TrainingBytes
) -> list[str]:
    """Lists where the estimate is coarser than elsewhere."""
    notes = []
    if options.optimizer.startswith("timm:") and sizes.moments == 2 * sizes.trained:
        notes.append(f"{name}.optimizer={options.optimizer}: two values per weight are assumed")
    if options.engine.compile != "off":
        notes.append(f"{name}.engine.compile: activations are those without torch.compile")
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    if machine.ranks > 1 and norms:
        notes.append(f"{name}: batch norms over several ranks keep more than is counted here")
    return notes
