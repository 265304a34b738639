"""Measures the memory and the operations of one rank in a training; refuses what does not fit.

The real step runs on tensors without values: the model forward and backward on one micro-batch, and
the loss on the features of the global batch, with one rank's share of the class centers.
``engines.per_rank`` computes what remains on a rank of parameters, gradients and moments.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mclclip.config import Config, TrainConfig
from mclclip.data.batches import Batch
from mclclip.engines import TrainingBytes, gradient_cache, per_rank
from mclclip.engines.engine import HALF, unchanged
from mclclip.models.encoder import Encoder, load_concat
from mclclip.models.encoder_names import resolve_name
from mclclip.models.memory import NeedsValues, StepMeter, faked, load_shapes, on_meta, size_bytes
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer, parameter_groups
from mclclip.models.options import ModelConfig
from mclclip.models.parameters import describe_groups, freeze_objective
from mclclip.models.preparing import prepare_model
from mclclip.objectives.base import Objective, ObjectiveInputs, Teacher
from mclclip.plan.machine import GIB, Machine
from mclclip.ranks.process_group import SINGLE, Context
from mclclip.train.loop import ModelWithObjective
from mclclip.util.options import prefix_errors

# Rough sizes of CUDA's context and libraries, and of NCCL's buffers, in a process on a GPU.
_CONTEXT, _NCCL = GIB, GIB // 2
_ROWS = 2  # rows of the batch on which an encoder's operations are counted
_ASSUMED_CLASSES = 1000  # ImageNet's; only the index knows how many values an attribute has
_META = torch.device("meta")
_measured: dict[str, dict[str, Any]] = {}


def measure(config: Config, name: str, options: TrainConfig, machine: Machine) -> dict[str, Any]:
    """Measures one rank of a training: bytes by part (``parts``, ``sum``), and ``operations``; and
    lists its ``groups`` of parameters (``describe_groups``).

    ``name`` is "base" or "train". Parts are those of ``engines.per_rank``; the ``objective`` with
    its optimizer's state; ``activations`` of a micro-batch; the ``loss`` with the features of the
    global batch; the ``batch``; and ``cuda``, which CUDA and NCCL take for themselves.

    Operations are those of a ``sample`` in a step with all its views, also for each of the
    ``sizes`` of pictures in ``train.image_size``; of a rank's ``loss`` in a step, if it has class
    centers; of an embedded ``image`` and ``text`` (None without a text
    tower); and of an image in the ``trunk``, if its output is stored. Raises ValueError if the
    training would refuse its options.

    Takes a second for a large model; a second call with equal options returns the same result.
    """
    stages = config.num_stages, config.cluster, config.image_rows, config.train.lock
    models = config.model, config.model_of(name)
    read = models, config.device, config.seed, stages, name, options, machine.ranks
    if (key := repr(read)) not in _measured:
        _measured[key] = _measure(config, name, options, machine)
    return copy.deepcopy(_measured[key])


def _measure(config: Config, name: str, options: TrainConfig, machine: Machine) -> dict[str, Any]:
    local, how, gpu = options.global_batch // machine.ranks, options.engine, config.device != "cpu"
    micro, half = min(how.micro_batch or local, local), options.precision in HALF
    encoder = measure_encoder(config.model_of(name))  # before locks and adapters
    operations = {part: encoder[part] for part in ("image", "text")}
    model = _prepare_model(config, name, options)
    inputs = _objective_inputs(model, config, options, machine)
    # The objective is built twice: on shapes with one rank's share of the class centers, for the
    # loss of the global batch; and as a whole on fakes, for the step and the checkpoint.
    with torch.device(_META), StepMeter(device="meta") as share:
        loss = options.objective.build(inputs).to(_META)
    with faked(model, gpu_autocast=gpu and half):
        cached_text = name == "train" and options.reads_text_embeddings
        batch = _batch(model, options, local, cached_text, inputs.teacher)
        if name == "train" and config.image_rows.enabled:
            first = model.num_frozen_blocks + (not config.writes_image_rows)  # + 1: the tower
            operations |= _start_from_rows(model, batch, first)
        teacher = inputs.teacher and partial(inputs.teacher, fake=True)  # type: ignore[call-arg]
        inputs = replace(inputs, model=model, context=SINGLE, teacher=teacher)
        objective = options.objective.build(inputs)
        freeze_objective(objective, options.parameters)
        trainee = ModelWithObjective(model, objective, options.precision)
        groups = describe_groups(trainee, options.lr, options.parameters, options.weight_decay)
        batches = {size: _at_size(batch, size) for size in (None, *options.listed_sizes)}
        steps = {n: _measure_step(trainee, each, local, micro) for n, each in batches.items()}
        features, _, operations["sample"] = steps[None]
        operations["sizes"] = {size: each[2] for size, each in steps.items()}
        if options.image_size and options.image_size[-1].epochs is None:  # its own never comes
            del batches[None], steps[None]
        sizes = _sizes(model, options)
        moments = 2 * size_bytes(p for p in objective.parameters() if p.requires_grad)
        outside = [t for part in objective.outside() for t in part.state_dict().values()]
        saved = moments + size_bytes([*objective.parameters(), *objective.buffers(), *outside])
    lasting = share.live + 3 * moments // 2  # two moments and a gradient
    _measure_loss(share, loss, features, batch, options.global_batch, inputs)
    operations["loss"] = share.operations if outside else 0
    parts = per_rank(sizes, how, machine.ranks, half=half, caching=micro < local) | {
        "objective": lasting,
        "activations": max(activations for _, activations, _ in steps.values()),
        "loss": share.added,
        "batch": max(size_bytes(each.tensors()) for each in batches.values()),
    }
    if gpu:
        parts["cuda"] = _CONTEXT + (_NCCL if machine.ranks > 1 else 0)
    return {
        "global_batch": options.global_batch,
        "local_batch": local,
        "micro_batch": micro,
        "trained_weights": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "frozen_weights": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "groups": groups,
        "embed_dim": model.embed_dim,
        "width": model.layout.pooled_dim,  # that of features before the projection
        "parts": parts,
        "sum": sum(parts.values()),
        "checkpoint": sizes.parameters + sizes.moments + sizes.average + saved,
        "export": sizes.parameters,
        "trained": sizes.trained,
        "operations": operations,
    }


def check_parameters(config: Config, name: str) -> None:
    """Raises ValueError if a pattern of a training's ``parameters`` matches nothing of its model
    and objective, or if nothing is trained. Nothing is checked with models on the hub, whose
    configuration would have to be fetched."""
    options = config.trainings[name]
    models = (config.model_of(name).name, config.model.name, *config.teachers)
    if not options.parameters or any(str(each).startswith("hf-hub:") for each in models):
        return
    with prefix_errors(name):
        model = _prepare_model(config, name, options)
        inputs = _objective_inputs(model, config, options, Machine())
        with torch.device(_META):
            objective = options.objective.build(inputs).to(_META)
        freeze_objective(objective, options.parameters)
        trainee = ModelWithObjective(model, objective)
        describe_groups(trainee, options.lr, options.parameters, options.weight_decay)
        parameter_groups(trainee, options.weight_decay, options.parameters)


def _prepare_model(config: Config, name: str, options: TrainConfig) -> Model:
    """Builds the model of a training without values, prepared as for the training."""
    model = _load(config.model_of(name))
    if options.precision == "float64":
        model.double()
    prepare_model(model, **options.model_arguments(), seed=config.seed)
    model.to(_META)  # `prepare_model` draws adapters in main memory
    if options.engine.micro_batch is not None:
        gradient_cache.check(model)
    return model


def _objective_inputs(
    model: Model, config: Config, options: TrainConfig, machine: Machine
) -> ObjectiveInputs:
    """Returns the inputs of one rank's objective; its classes have a number and nothing else."""
    num_classes = max(config.clusters, default=config.cluster.clusters_of(0))
    if options.objective.reads.attribute is not None:
        num_classes = _ASSUMED_CLASSES
    return ObjectiveInputs(
        model=model,
        context=Context(0, machine.ranks, device=_META),
        seed=0,
        precision=options.precision,
        classes=cast(Any, SimpleNamespace(num_classes=num_classes)),
        teacher=_teachers(config, options),
        shapes_only=True,
    )


def _teachers(config: Config, options: TrainConfig) -> Callable[..., Teacher]:
    """Returns what gives the encoders that an objective reads, without values; those that are
    ``fake`` are loaded within ``faked``. All terms of an objective share one copy of each."""
    teachers: dict[tuple[str | None, bool], Teacher] = {}
    for name in {encoder for encoder, _ in options.objective.reads.encoders}:
        load = partial(_load_encoder, config.model if name is None else name)
        shapes = load()
        values = shapes.embed_dim, 1.0 if shapes.stages[0].reads_texts else None
        teachers[name, False] = Teacher(*values, cache(load))
        teachers[name, True] = Teacher(*values, cache(partial(shapes.to_empty, device="cpu")))
    return lambda name, fake=False: teachers[name, fake]


def check(measured: dict[str, Any], name: str, machine: Machine) -> None:
    """Raises ValueError if a rank needs more memory than its GPU has.

    ``measured`` is what `measure` returned for the training ``name``.
    """
    if machine.memory_gib is None or measured["sum"] <= machine.memory_gib * GIB:
        return
    parts, micro = measured["parts"], measured["micro_batch"]
    most = max(parts, key=parts.__getitem__)
    # A smaller micro-batch, whose activations fit into the room that other parts leave.
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


def _batch(
    model: Model,
    options: TrainConfig,
    local: int,
    cached_text: bool,
    teacher: Callable[[str | None], Teacher] | None = None,
) -> Batch:
    """Builds a rank's batch of ``local`` samples of zeros.

    ``cached_text``: it has stored text features in the place of tokens. ``teacher``: tells the
    widths of other encoders' stored embeddings (None: the batch has none).
    """
    dtype, dim = next(model.parameters()).dtype, model.embed_dim
    context = model.empty_texts(1).shape[1]
    reads, columns = options.objective.reads, options.objective.reads.num_classes_per_sample

    def values(*shape: int) -> Tensor:
        return torch.zeros(local, *shape, dtype=dtype)

    def ids(*shape: int) -> Tensor:
        return torch.zeros(local, *shape, dtype=torch.int64)

    extras: dict[str, Tensor] = {}
    if teacher is not None:
        extras |= {n: values(teacher(encoder).width) for n, (encoder, _) in reads.stored.items()}
    if reads.digests:
        extras |= {name: ids() for name in sorted(reads.digests)}
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
        text=model.empty_texts(local) if reads.captions and not cached_text else None,
        text_features=values(dim) if cached_text else None,
        extras=extras,
    )


def _at_size(batch: Batch, size: int | None) -> Batch:
    """Returns a batch with pictures of another height and width; None: the same."""
    if size is None:
        return batch
    views = [view.new_zeros(*view.shape[:2], size, size) for view in batch.views]
    return replace(batch, views=views)


def _allocate_gradients(module: nn.Module) -> list[Tensor]:
    """Gives every trained parameter a gradient without values, and returns the gradients."""
    trained = [p for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    return [p.grad for p in trained if p.grad is not None]


def _start_from_rows(model: Model, batch: Batch, first: int) -> dict[str, int]:
    """Makes the model start with the block ``first``, and replaces the batch's images by its input:
    outputs of the blocks before it, or of the whole image tower if it has no such block.

    Returns the operations for an image (``trunk``) and the numbers that are stored for it in
    addition to its embedding (``row_values``).
    """
    whole = first > model.num_blocks
    with torch.no_grad(), StepMeter() as frozen:
        batch.views = [
            model.encode_image(view) if whole else model.encode_trunk(view, first)
            for view in batch.views
        ]
    model.first_block = first
    values = 0 if whole else batch.views[0][0].numel()
    return {"trunk": frozen.operations // len(batch), "row_values": values}


def _measure_step(
    trainee: ModelWithObjective, batch: Batch, local: int, micro: int
) -> tuple[dict[str, Tensor], int, int]:
    """Runs a micro-batch forward and backward.

    Returns its features, the bytes of its activations, and the operations of a sample.
    """
    gradients = _allocate_gradients(trainee)  # they exist before a micro-batch runs
    held = [*trainee.parameters(), *trainee.buffers(), *gradients, *batch.tensors()]
    piece = batch.slice(0, micro)
    with StepMeter(held) as step:
        features: dict[str, Tensor] = trainee(piece, lambda features: features)
        sums = [value.sum() for value in features.values() if value.requires_grad]
        torch.autograd.backward(torch.stack(sums).sum())
    operations = step.operations
    if micro < local:  # gradient caching runs the model twice, but not a teacher
        with torch.no_grad(), StepMeter() as again:
            trainee(piece, lambda features: features)
        operations += again.operations
    return features, step.peak, operations // micro


def _measure_loss(
    meter: StepMeter,
    objective: Objective,
    features: dict[str, Tensor],
    batch: Batch,
    rows: int,
    inputs: ObjectiveInputs,
) -> None:
    """Measures the loss of the global batch, forward and backward, on the "meta" device.

    This process stands for one rank: it holds the features of all ``rows``, as after a gather, and
    one rank's share of the class centers. Class numbers have values, in main memory.
    """

    def of_all_ranks(tensor: Tensor) -> Tensor:
        shape = (rows, *tensor.shape[1:]) if tensor.ndim else ()
        each = torch.empty(shape, dtype=tensor.dtype, device=_META)
        return each.requires_grad_(tensor.requires_grad)

    with meter:
        classes = batch.classes
        if classes is not None and inputs.classes is not None:
            num_classes = inputs.classes.num_classes
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
        gathered = {n: of_all_ranks(value) for n, value in features.items()}
        objective.begin(0, 1, 0.0)
        for part in objective.outside():
            part.begin(0)
        objective(gathered, every)["loss"].backward()


def count_operations(
    trainee: ModelWithObjective,
    options: TrainConfig,
    device: torch.device,
    cached_text: bool,
    image_size: int | None = None,
) -> int:
    """Counts the floating-point operations of a sample in a step, by running two samples of zeros.

    It counts the forward and backward passes of all views and texts, by torch's formulas
    (`torch.utils.flop_counter`), and neither the loss nor what `engine.grad_checkpointing` and
    `engine.micro_batch` compute again. The product of an adapter's factors, which a step makes
    once, is shared by the two samples. ``trainee`` lies on ``device``, before it is compiled or
    wrapped; its weights and buffers do not change, and every step seeds dropout anew.
    ``cached_text``: stored text features stand for captions. ``image_size``: of the pictures; None:
    the model's.
    """
    model, checkpointing = trainee.model, options.engine.grad_checkpointing
    batch = _at_size(_batch(model, options, _ROWS, cached_text), image_size).to(device)
    if first := model.first_block:  # stored rows stand for images
        model.first_block = 0
        _start_from_rows(model, batch, first)
    if checkpointing:
        model.set_grad_checkpointing(False)
    with unchanged(trainee, device):
        _, _, operations = _measure_step(trainee, trainee.on_device(batch, device), _ROWS, _ROWS)
    if checkpointing:
        model.set_grad_checkpointing(True)
    trainee.zero_grad(set_to_none=True)
    return operations


# --- encoders and sizes --------------------------------------------------------------------------


def measure_encoder(source: ModelConfig | str) -> dict[str, Any]:
    """Returns the operations of embedding an ``image`` and a ``text`` (None without a text tower)
    with a model, or with a teacher of this name; the ``width`` of its features, and the bytes of
    its weights (``size``)."""
    encoder = _load_encoder(source)
    first: Model = encoder.stages[0]
    facts = {"width": encoder.embed_dim, "size": size_bytes(encoder.parameters())}
    with faked(encoder):
        images = torch.empty(_ROWS, *encoder.image_shape, dtype=next(encoder.parameters()).dtype)
        with StepMeter() as of_images:
            encoder.encode_image(images)
        with StepMeter() as of_texts:
            if first.reads_texts:
                encoder.encode_text(first.empty_texts(_ROWS))
    of_text = of_texts.operations // _ROWS if first.reads_texts else None
    return {"image": of_images.operations // _ROWS, "text": of_text} | facts


measure_teacher = cache(measure_encoder)
"""Measures a teacher by its name, once."""


def _load_encoder(source: ModelConfig | str) -> Encoder:
    """Loads a model, or a teacher of this name, without values."""
    if isinstance(source, ModelConfig):
        return Encoder([_load(source)])
    encoder = resolve_name(source)
    if encoder.concat is None:
        return Encoder([load_shapes(encoder.where)])
    with on_meta():
        return load_concat(encoder.concat, load_weights=False)


def _load(options: ModelConfig) -> Model:
    return load_shapes(options.name, projector=options.projector, **options.tower_arguments)


def _sizes(model: Model, options: TrainConfig) -> TrainingBytes:
    """Returns the bytes of a training's weights, moments and averages, before ranks share them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    blocks = [size_bytes(block.parameters()) for block in model.blocks()]
    whole = size_bytes(model.parameters())
    optimizer = build_optimizer(model, **options.optimizer_arguments())
    gradients = _allocate_gradients(model)
    try:
        optimizer.step()  # allocates its state
        state = [value for values in optimizer.state.values() for value in values.values()]
        moments = size_bytes(value for value in state if isinstance(value, Tensor))
    except NeedsValues:  # some of timm's optimizers: two values per weight are assumed
        moments = 2 * size_bytes(gradients)
    return TrainingBytes(
        parameters=whole + size_bytes(model.buffers()),
        trained=size_bytes(trained),
        moments=moments,
        average=size_bytes(trained) if options.ema_decay else 0,
        outside=whole - sum(blocks),
        largest_block=max(blocks, default=0),
        start=size_bytes(trained) if options.start_decay else 0,
    )
