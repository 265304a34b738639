"""Measures the memory and the operations of one rank in a training; refuses what does not fit.

The real step runs on tensors without values: the model forward and backward on one micro-batch, and
the loss on the features of the global batch, with this rank's share of class centers. What an
engine divides among the ranks is a sum (``engines.per_rank``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.config import Config, TrainConfig
from mclclip.data.batches import Batch
from mclclip.engines import TrainingBytes, gradient_cache, per_rank
from mclclip.engines.engine import HALF
from mclclip.models.loading import prepare_model
from mclclip.models.memory import NeedsValues, StepMeter, faked, load_shapes, size_bytes
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.models.options import ModelConfig
from mclclip.objectives.base import ObjectiveInputs
from mclclip.objectives.contrast import DIGESTS
from mclclip.plan.machine import GIB, Machine
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.train.loop import ModelWithObjective

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
_ROWS = 2  # samples of an encoder whose operations are counted
_ASSUMED_CLASSES = 1000  # values of an attribute, which the index counts: ImageNet's
_META = torch.device("meta")


@dataclass
class _Classes:
    """Classes of which only the number is known yet."""

    num_classes: int

    def centroids(self) -> NoReturn:
        """Nobody reads them where only shapes are asked for."""
        raise RuntimeError("a plan has no centroids")


def measure(config: Config, name: str, options: TrainConfig, machine: Machine) -> dict[str, Any]:
    """Bytes of one rank by part (``parts``, ``sum``), what they follow from, and ``operations``.

    Operations: those of a ``sample`` in a step, all of its views; of a rank's ``loss`` in a step,
    where it has class centers; of an ``image`` and a ``text`` that are embedded (None without a
    text tower); and of an image in the ``trunk``, where its output is cached.

    Raises ValueError where the training would refuse its options.
    """
    local, how, gpu = options.global_batch // machine.ranks, options.engine, config.device != "cpu"
    micro, half = min(how.micro_batch or local, local), options.precision in HALF
    model, encoder = _prepared(config, name, options)
    num_classes, setting = _setting(model, config, options, machine)
    with torch.device(_META), StepMeter(device="meta") as share:
        objective = options.objective.build(setting).to(_META)
        loss = ModelWithObjective(model, objective, options.precision)
    with faked(model, gpu_autocast=gpu and half):
        setting = replace(setting, model=model, context=SINGLE)
        trainee = ModelWithObjective(model, options.objective.build(setting), options.precision)
        batch = _batch(model, options, local, name == "train" and options.reads_text_embeddings)
        if name == "train" and config.trunk_cache.enabled:
            trunk = _start_from_trunk(trainee, batch)
            encoder["trunk"] = trunk.operations // local
            encoder["trunk_values"] = batch.views[0][0].numel()
        features, activations, encoder["sample"] = _measure_step(trainee, batch, local, micro)
        sizes, objective = _sizes(model, options), trainee.objective
        moments = 2 * size_bytes(p for p in objective.parameters() if p.requires_grad)
        outside = [t for part in objective.outside() for t in part.state_dict().values()]
        saved = moments + size_bytes([*objective.parameters(), *objective.buffers(), *outside])
        notes, counts = _notes(model, name, options, machine, sizes), _counts(model)
    lasting = share.live + 3 * moments // 2  # and a gradient
    _measure_loss(share, loss, features, batch, options.global_batch, num_classes)
    parts = per_rank(sizes, how, machine.ranks, half=half, caching=micro < local) | {
        "objective": lasting,
        "activations": activations,
        "loss": share.added,
        "batch": size_bytes(batch.tensors()),
        "context": (_CONTEXT + (_NCCL if machine.ranks > 1 else 0)) if gpu else 0,
    }
    encoder["loss"] = share.operations if outside else 0
    workers = config.data.num_workers
    return {
        "global_batch": options.global_batch,
        "local_batch": local,
        "micro_batch": micro,
        "micro_batches": -(-local // micro),
        "engine": how.name if machine.ranks > 1 else "one process",
        "counts": counts,
        "embed_dim": model.embed_dim,
        "width": model.layout.pooled_dim,  # of a feature before the projection
        "parts": parts,
        "sum": sum(parts.values()),
        # Two batches per loader worker, and two in pinned memory.
        "host": parts["batch"] * (2 * workers + 2 if workers else 1),
        "checkpoint": sizes.parameters + sizes.moments + sizes.average + saved,
        "export": sizes.parameters,
        "trained": sizes.trained,
        "operations": encoder,
        "notes": notes,
    }


def _prepared(config: Config, name: str, options: TrainConfig) -> tuple[Model, dict[str, Any]]:
    """The model as it is trained, without values, and the operations of its encoders."""
    named = config.model_of(name)
    model = load_model(named, named.projector)
    if options.precision == "float64":
        model.double()
    with faked(copy.deepcopy(model)) as fake:
        operations = encoder_operations(fake)
    prepare_model(model, **options.model_arguments(), seed=config.seed)
    model.to(_META)  # adapters are made in main memory
    if options.engine.micro_batch is not None:
        gradient_cache.check(model)
    return model, operations


def _setting(
    model: Model, config: Config, options: TrainConfig, machine: Machine
) -> tuple[int, ObjectiveInputs]:
    """The number of classes, and what the objective of one of the machine's ranks is built of."""
    num_classes = max(config.clusters, default=config.cluster.clusters_of(0))
    if options.objective.reads.attribute is not None:
        num_classes = _ASSUMED_CLASSES
    return num_classes, ObjectiveInputs(
        model=model,
        context=Context(0, machine.ranks, device=_META),
        seed=0,
        precision=options.precision,
        classes=_Classes(num_classes),
        shapes_only=True,
    )


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


def _batch(model: Model, options: TrainConfig, local: int, cached_text: bool) -> Batch:
    """A rank's batch, without values."""
    dtype = next(model.parameters()).dtype
    context = _context_length(model)
    objective = options.objective
    reads, tokens = objective.reads, objective.reads.captions and not cached_text
    columns = reads.num_classes_per_sample
    shape = (local, *model.image_shape)
    stored = [f"base_{name[:-1]}_features" for name in reads.base - {"model"}]
    extras = {name: torch.empty(local, model.embed_dim, dtype=dtype) for name in stored}
    if reads.digests:
        extras |= {name: torch.zeros(local, dtype=torch.int64) for name in DIGESTS}
    if reads.edits and cached_text:
        shape_of_edits = local, reads.edits.per_caption, model.embed_dim
        extras["edited_features"] = torch.empty(shape_of_edits, dtype=dtype)
    elif reads.edits:
        num = reads.edits.per_caption
        extras["edited_text"] = torch.zeros(local, num, context, dtype=torch.int64)
        extras["has_edit"] = torch.ones(local, num, dtype=torch.bool)
    return Batch(
        views=[torch.empty(shape, dtype=dtype) for _ in range(reads.views)],
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


def _start_from_trunk(trainee: ModelWithObjective, batch: Batch) -> StepMeter:
    """Puts the trunk's output into the place of the views, and returns what making it took."""
    model: Any = trainee.model
    blocks = model.num_frozen_blocks
    with torch.no_grad(), StepMeter() as trunk:
        batch.views = [model.encode_trunk(view, blocks) for view in batch.views]
    for encoder in trainee.modules():  # copies of the model too
        if isinstance(encoder, Model):
            encoder.first_block = blocks
    return trunk


def _measure_step(
    trainee: ModelWithObjective, batch: Batch, local: int, micro: int
) -> tuple[dict[str, Tensor], int, int]:
    """The features of a micro-batch, the bytes of its activations, and operations of a sample."""
    gradients = _allocate_gradients(trainee)  # they are there before a micro-batch runs
    existing = [*trainee.parameters(), *trainee.buffers(), *gradients, *batch.tensors()]
    with StepMeter(existing) as step:
        features = _step(trainee, batch.rows(0, micro))
    operations = step.operations
    if micro < local:  # gradient caching runs the forward pass once more before
        with torch.no_grad(), StepMeter() as first:
            trainee(batch.rows(0, micro), dict)
        operations += first.operations
    return features, step.peak, operations // micro


def _step(trainee: ModelWithObjective, batch: Batch) -> dict[str, Tensor]:
    """Forward and backward of the model on one micro-batch; returns the features."""
    features: dict[str, Tensor] = trainee(batch, dict)
    sums = [value.sum() for value in features.values() if value.requires_grad]
    torch.autograd.backward(torch.stack(sums).sum())
    return features


def _measure_loss(
    meter: StepMeter,
    trainee: ModelWithObjective,
    features: dict[str, Tensor],
    batch: Batch,
    rows: int,
    num_classes: int,
) -> None:
    """Measures the loss of the global batch, forward and backward, on the "meta" device.

    One process stands for a rank: it holds the features of all ``rows``, as after a gather, and of
    the classes those that lie on this rank; classes are in main memory, as in a training.
    """

    def of_all_ranks(tensor: Tensor) -> Tensor:
        shape = (rows, *tensor.shape[1:]) if tensor.ndim else ()
        each = torch.empty(shape, dtype=tensor.dtype, device=_META)
        return each.requires_grad_(tensor.requires_grad)

    with meter:
        classes = batch.classes
        if classes is not None:
            random = torch.Generator().manual_seed(0)
            classes = torch.randint(num_classes, (rows, classes.shape[1]), generator=random)
        marks = {n: of_all_ranks(value) for n, value in batch.extras.items()}
        every = Batch(
            views=[],
            labels=of_all_ranks(batch.labels),
            classes=classes,
            sample_id=of_all_ranks(batch.sample_id),
            step=0,
            group_size=rows,
            extras=marks,
        )
        given = {n: of_all_ranks(value) for n, value in features.items()}
        trainee.objective.begin(0, 1, 0.0)
        for part in trainee.objective.outside():
            part.begin(0)
        trainee.loss(given, every)["loss"].backward()  # type: ignore[no-untyped-call]


# --- encoders and sizes --------------------------------------------------------------------------


def load_model(named: ModelConfig, projector: Sequence[int] = ()) -> Model:
    """The model on tensors that have shapes but no memory, with a projector of these widths."""
    how: dict[str, Any] = {"text": named.text, "long_context": named.long_context}
    return load_shapes(named.name, projector=projector, **how)


def encoder_operations(model: Model) -> dict[str, Any]:
    """Operations of an ``image``, and of a ``text`` (None without a text tower), forward alone.

    ``model`` is a fake (``faked``) whose weights nobody has begun to train.
    """
    images = torch.empty(_ROWS, *model.image_shape, dtype=next(model.parameters()).dtype)
    with torch.no_grad(), StepMeter() as of_images:
        model.encode_image(images)
    if not model.reads_texts:
        return {"image": of_images.operations // _ROWS, "text": None}
    with torch.no_grad(), StepMeter() as of_texts:
        model.encode_text(torch.zeros(_ROWS, _context_length(model), dtype=torch.int64))
    return {"image": of_images.operations // _ROWS, "text": of_texts.operations // _ROWS}


def _context_length(model: Model) -> int:
    return int(getattr(model.tokenizer, "context_length", 77))


def operations_of_named(named: ModelConfig) -> dict[str, Any]:
    """``encoder_operations`` of a model that is not loaded."""
    with faked(load_model(named).eval()) as model:
        return encoder_operations(model)


def _sizes(model: Model, options: TrainConfig) -> TrainingBytes:
    trained = [p for p in model.parameters() if p.requires_grad]
    blocks = [size_bytes(block.parameters()) for block in model.blocks()]
    whole = size_bytes(model.parameters())
    return TrainingBytes(
        parameters=whole + size_bytes(model.buffers()),
        trained=size_bytes(trained),
        moments=_moments(model, options),
        average=size_bytes(trained) if options.ema_decay else 0,
        outside=whole - sum(blocks),
        largest_block=max(blocks, default=0),
        start=size_bytes(trained) if options.start_decay else 0,
    )


def _moments(model: Model, options: TrainConfig) -> int:
    """Bytes of the optimizer's state, which its first step makes."""
    optimizer = build_optimizer(model, **options.optimizer_arguments())
    gradients = _allocate_gradients(model)
    try:
        optimizer.step()
    except NeedsValues:  # ``_notes`` says what is assumed
        return 2 * size_bytes(gradients)
    state = [value for values in optimizer.state.values() for value in values.values()]
    return size_bytes(value for value in state if isinstance(value, Tensor))


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
