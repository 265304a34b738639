"""Measures the memory and the operations of one rank in a training; refuses what does not fit.

The real step runs on tensors without values: the model forward and backward on one micro-batch, and
the loss on the features of the global batch, with this rank's share of class centers. What an
engine divides among the ranks is a sum (``engines.per_rank``).
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mclclip.config import Config, TrainConfig
from mclclip.data.batches import Batch
from mclclip.engines import TrainingBytes, gradient_cache, per_rank
from mclclip.engines.engine import HALF
from mclclip.models.loading import prepare_model
from mclclip.models.memory import NeedsValues, StepMeter, faked, load_shapes, size_bytes
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.models.options import ModelConfig
from mclclip.objectives.base import Objective, ObjectiveInputs
from mclclip.objectives.contrast import DIGESTS
from mclclip.plan.machine import GIB, Machine
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.train.loop import ModelWithObjective

# Of a process on a GPU: CUDA's context and libraries; NCCL's buffers. Rough, and part of the sum.
_CONTEXT, _NCCL = GIB, GIB // 2
_ROWS = 2  # samples of an encoder whose operations are counted
_ASSUMED_CLASSES = 1000  # values of an attribute, which the index counts: ImageNet's
_META = torch.device("meta")


def measure(config: Config, name: str, options: TrainConfig, machine: Machine) -> dict[str, Any]:
    """Bytes of one rank by part (``parts``, ``sum``), what they follow from, and ``operations``.

    Parts: those of ``engines.per_rank``; the ``objective`` with its optimizer's state; activations
    of a micro-batch; the ``loss`` with the features of the global batch; the ``batch``; and what
    ``cuda`` and NCCL take for themselves.

    Operations: those of a ``sample`` in a step, all of its views; of a rank's ``loss`` in a step,
    where it has class centers; of an ``image`` and a ``text`` that are embedded (None without a
    text tower); and of an image in the ``trunk``, where its output is cached. Raises ValueError
    where the training would refuse its options.
    """
    local, how, gpu = options.global_batch // machine.ranks, options.engine, config.device != "cpu"
    micro, half = min(how.micro_batch or local, local), options.precision in HALF
    model, operations = _prepared(config, name, options)
    setting = _setting(model, config, options, machine)
    # The objective twice: on shapes with this rank's share of the class centers, for the loss of
    # the global batch, and whole on fakes, for the step and the checkpoint.
    with torch.device(_META), StepMeter(device="meta") as share:
        loss = options.objective.build(setting).to(_META)
    with faked(model, gpu_autocast=gpu and half):
        batch = _batch(model, options, local, name == "train" and options.reads_text_embeddings)
        if name == "train" and config.image_rows.enabled:
            operations |= _start_from_rows(model, batch, whole=not config.writes_image_rows)
        objective = options.objective.build(replace(setting, model=model, context=SINGLE))
        trainee = ModelWithObjective(model, objective, options.precision)
        features, activations, operations["sample"] = _measure_step(trainee, batch, local, micro)
        sizes = _sizes(model, options)
        moments = 2 * size_bytes(p for p in objective.parameters() if p.requires_grad)
        outside = [t for part in objective.outside() for t in part.state_dict().values()]
        saved = moments + size_bytes([*objective.parameters(), *objective.buffers(), *outside])
    lasting = share.live + 3 * moments // 2  # and a gradient
    _measure_loss(share, loss, features, batch, options.global_batch, setting)
    operations["loss"] = share.operations if outside else 0
    parts = per_rank(sizes, how, machine.ranks, half=half, caching=micro < local) | {
        "objective": lasting,
        "activations": activations,
        "loss": share.added,
        "batch": size_bytes(batch.tensors()),
    }
    if gpu:
        parts["cuda"] = _CONTEXT + (_NCCL if machine.ranks > 1 else 0)
    return {
        "global_batch": options.global_batch,
        "local_batch": local,
        "micro_batch": micro,
        "trained_weights": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "frozen_weights": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "embed_dim": model.embed_dim,
        "width": model.layout.pooled_dim,  # of a feature before the projection
        "parts": parts,
        "sum": sum(parts.values()),
        "checkpoint": sizes.parameters + sizes.moments + sizes.average + saved,
        "export": sizes.parameters,
        "trained": sizes.trained,
        "operations": operations,
    }


def _prepared(config: Config, name: str, options: TrainConfig) -> tuple[Model, dict[str, Any]]:
    """The model as it is trained, without values, and the operations of its encoders."""
    model = _load(config.model_of(name))
    if options.precision == "float64":
        model.double()
    with faked(copy.deepcopy(model)) as fake:
        operations = _operations(fake)
    prepare_model(model, **options.model_arguments(), seed=config.seed)
    model.to(_META)  # adapters are made in main memory
    if options.engine.micro_batch is not None:
        gradient_cache.check(model)
    return model, operations


def _setting(
    model: Model, config: Config, options: TrainConfig, machine: Machine
) -> ObjectiveInputs:
    """Returns what the objective of one of the machine's ranks is built of; of classes only the
    number."""
    num_classes = max(config.clusters, default=config.cluster.clusters_of(0))
    if options.objective.reads.attribute is not None:
        num_classes = _ASSUMED_CLASSES
    return ObjectiveInputs(
        model=model,
        context=Context(0, machine.ranks, device=_META),
        seed=0,
        precision=options.precision,
        classes=cast(Any, SimpleNamespace(num_classes=num_classes)),
        shapes_only=True,
    )


def check(measured: dict[str, Any], name: str, machine: Machine) -> None:
    """Raises ValueError where a rank needs more than its GPU has."""
    if machine.memory_gib is None or measured["sum"] <= machine.memory_gib * GIB:
        return
    parts, micro = measured["parts"], measured["micro_batch"]
    most = max(parts, key=parts.__getitem__)
    # The largest power of two whose activations, which grow with it, fill at most the room.
    room = machine.memory_gib * GIB - (measured["sum"] - parts["activations"])
    fits = max(min(room * micro / max(parts["activations"], 1), micro / 2), 1)
    raise ValueError(
        f"{name} needs about {measured['sum'] / GIB:.1f} GiB per rank, --gpu-memory-gib is "
        f"{machine.memory_gib:g}; the biggest part is {most}, {parts[most] / GIB:.1f} GiB: use "
        f"more GPUs; or, for activations, {name}.engine.micro_batch={2 ** int(math.log2(fits))} or "
        f"{name}.engine.grad_checkpointing=true; for parameters, gradients and optimizer "
        f"{name}.engine.name=fsdp, {name}.lock or {name}.lora; for loss and batch a lower "
        f"{name}.global_batch; for the objective fewer classes or a shorter queue"
    )


# --- the training ------------------------------------------------------------------------------


def _batch(model: Model, options: TrainConfig, local: int, cached_text: bool) -> Batch:
    """A rank's batch, without values."""
    dtype, dim, context = next(model.parameters()).dtype, model.embed_dim, _context_length(model)
    reads, columns = options.objective.reads, options.objective.reads.num_classes_per_sample

    def values(*shape: int) -> Tensor:
        return torch.empty(local, *shape, dtype=dtype)

    def ids(*shape: int) -> Tensor:
        return torch.zeros(local, *shape, dtype=torch.int64)

    extras = {f"base_{name}": values(dim) for name in reads.base - {"model"}}
    if reads.digests:
        extras |= {name: ids() for name in DIGESTS}
    if reads.edits and cached_text:
        extras["edited_features"] = values(reads.edits.per_caption, dim)
    elif reads.edits:
        extras["edited_text"] = ids(reads.edits.per_caption, context)
        extras["has_edit"] = ids(reads.edits.per_caption).bool()
    return Batch(
        views=[values(*model.image_shape) for _ in range(reads.num_views)],
        group_ids=ids(1),
        classes=ids(columns) if columns else None,
        sample_id=ids(),
        step=0,
        group_size=options.global_batch,
        text=ids(context) if reads.captions and not cached_text else None,
        text_features=values(dim) if cached_text else None,
        extras=extras,
    )


def _allocate_gradients(module: nn.Module) -> list[Tensor]:
    trained = [p for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    return [p.grad for p in trained if p.grad is not None]


def _start_from_rows(model: Model, batch: Batch, whole: bool) -> dict[str, int]:
    """Puts what the frozen part of the image tower makes of the views into their place; returns the
    operations that an image took, and the values that are stored of it, beside embeddings."""
    blocks = model.num_frozen_blocks
    with torch.no_grad(), StepMeter() as frozen:
        batch.views = [
            model.encode_image(view) if whole else model.encode_trunk(view, blocks)
            for view in batch.views
        ]
    model.first_block = blocks + whole
    values = 0 if whole else batch.views[0][0].numel()
    return {"trunk": frozen.operations // len(batch), "row_values": values}


def _measure_step(
    trainee: ModelWithObjective, batch: Batch, local: int, micro: int
) -> tuple[dict[str, Tensor], int, int]:
    """The features of a micro-batch, the bytes of its activations, and operations of a sample."""
    gradients = _allocate_gradients(trainee)  # they are there before a micro-batch runs
    existing = [*trainee.parameters(), *trainee.buffers(), *gradients, *batch.tensors()]
    with StepMeter(existing) as step:
        features: dict[str, Tensor] = trainee(batch.slice(0, micro), dict)
        sums = [value.sum() for value in features.values() if value.requires_grad]
        torch.autograd.backward(torch.stack(sums).sum())
    operations = step.operations
    if micro < local:  # gradient caching runs the forward pass once more before
        with torch.no_grad(), StepMeter() as first:
            trainee(batch.slice(0, micro), dict)
        operations += first.operations
    return features, step.peak, operations // micro


def _measure_loss(
    meter: StepMeter,
    objective: Objective,
    features: dict[str, Tensor],
    batch: Batch,
    rows: int,
    setting: ObjectiveInputs,
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
        if classes is not None and setting.classes is not None:
            num_classes = setting.classes.num_classes
            random = torch.Generator().manual_seed(0)
            classes = torch.randint(num_classes, (rows, classes.shape[1]), generator=random)
        every = replace(
            batch,
            views=[],
            group_ids=of_all_ranks(batch.group_ids),
            classes=classes,
            sample_id=of_all_ranks(batch.sample_id),
            extras={n: of_all_ranks(value) for n, value in batch.extras.items()},
        )
        given = {n: of_all_ranks(value) for n, value in features.items()}
        objective.begin(0, 1, 0.0)
        for part in objective.outside():
            part.begin(0)
        objective(given, every)["loss"].backward()


# --- encoders and sizes --------------------------------------------------------------------------


def operations_of_named(named: ModelConfig) -> dict[str, Any]:
    """Operations of an ``image`` and a ``text`` (``measure``) of a model that is not loaded."""
    with faked(_load(named)) as model:
        return _operations(model)


def _load(named: ModelConfig) -> Model:
    return load_shapes(
        named.name, text=named.text, projector=named.projector, long_context=named.long_context
    )


def _operations(model: Model) -> dict[str, Any]:
    """Forward alone, of a fake (``faked``) whose weights nobody has begun to train."""
    images = torch.empty(_ROWS, *model.image_shape, dtype=next(model.parameters()).dtype)
    with torch.no_grad(), StepMeter() as of_images:
        model.encode_image(images)
    with torch.no_grad(), StepMeter() as of_texts:
        if model.reads_texts:
            model.encode_text(torch.zeros(_ROWS, _context_length(model), dtype=torch.int64))
    of_text = of_texts.operations // _ROWS if model.reads_texts else None
    return {"image": of_images.operations // _ROWS, "text": of_text}


def _context_length(model: Model) -> int:
    return int(getattr(model.tokenizer, "context_length", 77))


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
    except NeedsValues:  # a package's optimizer: two values per weight
        return 2 * size_bytes(gradients)
    state = [value for values in optimizer.state.values() for value in values.values()]
    return size_bytes(value for value in state if isinstance(value, Tensor))
