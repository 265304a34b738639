"""What one rank holds during a training, by part, and whether its GPU can hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mclclip.config import Config, TrainConfig
from mclclip.data.batches import Batch
from mclclip.engines import gradient_cache
from mclclip.engines.memory import Sizes, per_rank
from mclclip.models import memory
from mclclip.models.clip import ClipModel
from mclclip.models.optimizer import build_optimizer, is_elementwise
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.row_losses import Pairs, row_losses
from mclclip.plan import head
from mclclip.plan.machine import GIB, Machine
from mclclip.train.loop import Trainee, prepare_model

_HALF = ("bf16", "fp16")
# What a rank holds, in the order of the table, as it is called there.
PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "ema": "moving average",
    "head": "class centers",
    "engine": "engine's buffers",
    "activations": "activations",
    "loss": "features, loss",
    "batch": "batch",
    "context": "CUDA, NCCL",
}
# Of a process on a GPU: CUDA's context and libraries; NCCL's buffers. Rough, and part of the sum.
_CONTEXT, _NCCL = GIB, GIB // 2


def measure(config: Config, name: str, options: TrainConfig, machine: Machine) -> dict[str, Any]:
    """Bytes of one rank by part (``parts``, ``sum``), and what they follow from.

    Raises ValueError where the training would refuse its options.
    """
    local = options.global_batch // machine.ranks
    micro = min(options.engine.micro_batch or local, local)
    gpu = config.device != "cpu"
    trained = config.trained_model if name == "train" else None
    model = memory.load_shapes((trained or config.model).name)
    centers = _head(config, options, model.embed_dim, machine)
    with memory.faked(model, gpu_autocast=gpu and options.precision in _HALF):
        prepare_model(model, **options.model_arguments(), seed=config.seed)
        _check_engine(model, name, options, machine)
        cached_text = name == "train" and options.reads_text_embeddings
        trainee = Trainee(model, InfoNCE(), options.precision)
        batch = _batch(model, options, local, cached_text)
        sizes = _sizes(model, options)
        existing = _existing(trainee, batch)
        activations = memory.peak_bytes(_step(trainee, batch.rows(0, micro)), existing)
        parts = per_rank(
            sizes,
            options.engine.name,
            machine.ranks,
            shard_ranks=options.engine.shard_ranks,
            zero_stage=options.engine.zero_stage,
            half=options.precision in _HALF,
            caching=micro < local,
        ) | {
            "activations": activations,
            "head": _head_bytes(centers),
            "loss": centers["parts"]["step"]
            if centers
            else _loss_bytes(trainee, options, model.embed_dim, local, machine.ranks),
            "batch": memory.size_bytes(_tensors(batch)),
            "context": (_CONTEXT + (_NCCL if machine.ranks > 1 else 0)) if gpu else 0,
        }
        return {
            "global_batch": options.global_batch,
            "local_batch": local,
            "micro_batch": micro,
            "micro_batches": -(-local // micro),
            "engine": options.engine.name if machine.ranks > 1 else "one process",
            "counts": _counts(model),
            "embed_dim": model.embed_dim,
            "width": model.pooled_dim,
            "parts": parts,
            "sum": sum(parts.values()),
            "host": _host_bytes(config, parts["batch"]),
            "head": centers,
            "checkpoint": sizes.parameters
            + sizes.moments
            + sizes.average
            + (centers["checkpoint"] if centers else 0),
            "export": sizes.parameters,
            "trained": sizes.trained,
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
        ways = [f"{name}.engine.micro_batch={_fitting(measured, room)}"]
        if not how.grad_checkpointing:
            ways.append(f"{name}.engine.grad_checkpointing=true")
        return f"set {' or '.join(ways)}, or use more GPUs"
    if most == "head":
        return "use more GPUs, which share the class centers, or lower cluster.num_clusters"
    if most in ("loss", "batch", "context"):
        return f"lower {name}.global_batch, or use more GPUs"
    if how.name == "ddp":
        return f"set {name}.engine.name=fsdp or deepspeed, which share them among the ranks"
    if how.name == "deepspeed" and how.zero_stage < 3:
        return f"set {name}.engine.zero_stage=3, or use more GPUs"
    return f"use more GPUs, or train less of the model ({name}.lock, {name}.lora)"


def _fitting(measured: dict[str, Any], room: float) -> int:
    """The largest power of two whose activations fill at most ``room``; they grow with it."""
    per_sample = measured["parts"]["activations"] / measured["micro_batch"]
    fits, largest = 1, min(room / per_sample, measured["micro_batch"] / 2)
    while fits * 2 <= largest:
        fits *= 2
    return fits


# --- the training ------------------------------------------------------------------------------


def _check_engine(model: ClipModel, name: str, options: TrainConfig, machine: Machine) -> None:
    """What the engine would refuse when it is built."""
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


def _batch(model: ClipModel, options: TrainConfig, local: int, cached_text: bool) -> Batch:
    """A rank's batch, without values."""
    size = model.image_size
    height, width = (size, size) if isinstance(size, int) else size
    dtype = torch.float64 if options.precision == "float64" else torch.float32
    context = int(getattr(model.tokenizer, "context_length", 77))
    centers = options.class_centers
    tokens = not cached_text and centers is None
    return Batch(
        image=torch.empty(local, 3, height, width, dtype=dtype),
        labels=torch.zeros(local, centers.labels_per_sample if centers else 1, dtype=torch.int64),
        sample_id=torch.zeros(local, dtype=torch.int64),
        step=0,
        group_size=options.global_batch,
        text=torch.zeros(local, context, dtype=torch.int64) if tokens else None,
        text_features=torch.empty(local, model.embed_dim, dtype=dtype) if cached_text else None,
    )


def _tensors(batch: Batch) -> list[Tensor]:
    return [value for value in vars(batch).values() if isinstance(value, Tensor)]


def _existing(trainee: Trainee, batch: Batch) -> list[Tensor]:
    """All that is there before a micro-batch runs, gradients too, which are allocated here."""
    for parameter in trainee.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    gradients = [p.grad for p in trainee.parameters() if p.grad is not None]
    return [*trainee.parameters(), *trainee.buffers(), *gradients, *_tensors(batch)]


def _step(trainee: Trainee, batch: Batch) -> Callable[[], None]:
    """Forward and backward of one micro-batch."""

    def run() -> None:
        features = trainee(batch, only_features=True)
        sums = [value.sum() for value in features.values() if value.requires_grad]
        torch.autograd.backward(torch.stack(sums).sum())

    return run


def _loss_bytes(
    trainee: Trainee, options: TrainConfig, embed_dim: int, local: int, ranks: int
) -> int:
    """What the objective holds between the features and their gradients, both directions."""
    dtype = torch.float64 if options.precision == "float64" else torch.float32
    tile: Any = trainee.objective.tile

    def run() -> None:
        losses = []
        for _ in range(2):
            rows = torch.empty(local, embed_dim, dtype=dtype, requires_grad=True)
            columns = torch.empty(local * ranks, embed_dim, dtype=dtype, requires_grad=True)
            own, every = (torch.zeros(len(x), dtype=torch.int64) for x in (rows, columns))
            pairs = Pairs(own, own, every, every, first=0)
            losses.append(row_losses(rows * 1.0, columns, pairs, tile)[0].mean())
        torch.autograd.backward(torch.stack(losses).sum())

    # The parts of a gather are there for a moment beside what they are joined to.
    gathered = local * ranks * embed_dim * dtype.itemsize if ranks > 1 else 0
    return memory.peak_bytes(run) + gathered


# --- sizes -------------------------------------------------------------------------------------


def _head(
    config: Config, options: TrainConfig, dim: int, machine: Machine
) -> dict[str, Any] | None:
    """What class centers cost, as many as the largest of the stages has."""
    if options.class_centers is None:
        return None
    stages = range(max(config.num_stages, 1))
    largest = max(config.cluster.clusters_of(stage) for stage in stages)
    return head.measure(options, dim, largest, machine.ranks)


def _head_bytes(centers: dict[str, Any] | None) -> int:
    """What lasts over a step."""
    parts = centers["parts"] if centers else {}
    return sum(size for part, size in parts.items() if part != "step")


def _sizes(model: ClipModel, options: TrainConfig) -> Sizes:
    trained = [p for p in model.parameters() if p.requires_grad]
    blocks = [memory.size_bytes(block.parameters()) for block in model.blocks()]
    whole = memory.size_bytes(model.parameters())
    return Sizes(
        parameters=whole + memory.size_bytes(model.buffers()),
        trained=memory.size_bytes(trained),
        moments=_moments(model, options),
        average=memory.size_bytes(trained) if options.ema_decay else 0,
        outside=whole - sum(blocks),
        largest_block=max(blocks, default=0),
    )


def _moments(model: ClipModel, options: TrainConfig) -> int:
    """Bytes of the optimizer's state, which its first step makes."""
    optimizer = build_optimizer(model, **options.optimizer_arguments())
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    try:
        optimizer.step()
    except memory.NeedsValues:  # ``_notes`` says what is assumed
        return 2 * memory.size_bytes(p for p in model.parameters() if p.requires_grad)
    state = [value for values in optimizer.state.values() for value in values.values()]
    return memory.size_bytes(value for value in state if isinstance(value, Tensor))


def _counts(model: ClipModel) -> dict[str, dict[str, int]]:
    """Parameters by tower: trainable and frozen."""
    counts = {tower: {"trainable": 0, "frozen": 0} for tower in ("image", "text", "logit scale")}
    for name, parameter in model.clip.named_parameters():
        tower = "text"
        if name.startswith(("visual.", "logit_")):
            tower = "image" if name.startswith("visual.") else "logit scale"
        counts[tower]["trainable" if parameter.requires_grad else "frozen"] += parameter.numel()
    return counts


def _notes(
    model: ClipModel, name: str, options: TrainConfig, machine: Machine, sizes: Sizes
) -> list[str]:
    """Where the estimate is coarser than elsewhere."""
    notes = []
    if options.optimizer.startswith("timm:") and sizes.moments == 2 * sizes.trained:
        notes.append(f"{name}.optimizer={options.optimizer}: two values per weight are assumed")
    if options.engine.compile != "off":
        notes.append(f"{name}.engine.compile: activations are those without torch.compile")
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    if machine.ranks > 1 and norms:
        notes.append(f"{name}: batch norms over several ranks keep more than is counted here")
    return notes


def _host_bytes(config: Config, batch_bytes: int) -> int:
    """Main memory of a rank's batches: two per loader worker, and two in pinned memory."""
    workers = config.data.num_workers
    return batch_bytes * (2 * workers + 2 if workers else 1)
