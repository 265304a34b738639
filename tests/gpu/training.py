"""Training steps at one rank: every engine, precision and way of running a step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mclclip.checkpoint import CheckpointConfig
from mclclip.checkpoint.checkpoints import Checkpoints
from mclclip.data.batches import Batch
from mclclip.engines import gradient_cache
from mclclip.engines.engine import Engine, FsdpEngine
from mclclip.models.loading import load_towers
from mclclip.models.lora import add_lora
from mclclip.models.model import Model
from mclclip.models.optimizer import build_optimizer
from mclclip.objectives.class_centers import ShardedClassCenters, normal_rows
from mclclip.objectives.info_nce import InfoNCE
from mclclip.objectives.mlcd import ClassCenterLoss
from mclclip.ranks import collectives, process_group
from mclclip.ranks.collectives import GatherWithGrad
from mclclip.ranks.process_group import Context
from mclclip.ranks.step_boundary import StepBoundary
from mclclip.train.loop import ModelWithObjective
from tests import tiny
from tests.gpu import Skip
from tests.gpu.checks import Where, check, close, make_repeatable, same_bits

CPU = torch.device("cpu")
BATCH, STEPS, LR = 24, 5, 1e-3
ENGINES = ("plain", "ddp", "fsdp", "zero 1", "zero 2", "zero 3")
# What the losses of five steps may be off in all, relative, and the weights' change after them.
TOLERANCES = {"fp32": (1e-5, 2e-3), "bf16": (2e-2, 0.5), "fp16": (5e-3, 0.2)}


def batch_of(step: int, device: torch.device, image_size: int = 32, context: int = 20) -> Batch:
    """Pictures and captions of a step: the same on every device."""
    generator = torch.Generator().manual_seed(step)
    return Batch(
        views=[torch.randn(BATCH, 3, image_size, image_size, generator=generator)],
        text=torch.randint(1, 400, (BATCH, context), generator=generator),
        group_ids=torch.arange(BATCH)[:, None] % 2,
        sample_id=torch.arange(BATCH),
        step=step,
        group_size=BATCH // 2,
    ).to(device)


@contextlib.contextmanager
def one_rank(where: Where) -> Iterator[None]:
    """A process group of one: NCCL for the GPU's tensors, gloo for the CPU's."""
    store = where.folder.resolve() / "store"
    device = process_group.pick_device(where.device.type)
    process_group.join(device, 0, 1, init_method=f"file://{store}")
    try:
        yield
    finally:
        process_group.shutdown()
        store.unlink(missing_ok=True)


def tiny_clip(device: torch.device, **options: Any) -> Model:
    return load_towers(tiny.MODEL, seed=1, **options).to(device).train()


def make_engine(
    name: str,
    device: torch.device,
    precision: str = "fp32",
    *,
    model: Model | None = None,
    objective: Any = None,
    optimizer: str = "adamw",
    scale: float | None = None,
    **options: Any,
) -> Engine:
    """An engine of one rank around a tiny ViT; all but ``plain`` want a process group. ``scale`` is
    the first loss scale under fp16.

    A configuration takes the plain engine wherever there is one rank, so the others are made here
    as they are for several: DDP is what the plain one becomes for a context of two ranks.
    """
    model = model or tiny_clip(device)
    trainee = ModelWithObjective(model, objective or InfoNCE(), precision).to(device)
    make = partial(build_optimizer, name=optimizer, weight_decay=0.1, lr=LR)
    options |= {"precision": precision}
    if name in ("plain", "ddp"):
        ranks = Context(0, 1 if name == "plain" else 2, 0, device)
        engine = Engine(trainee, make, ranks, **options)
    elif name == "fsdp":
        blocks = model.blocks()
        engine = FsdpEngine(trainee, make, Context(device=device), blocks=blocks, **options)
    elif find_spec("deepspeed") is None:
        raise Skip("deepspeed is not installed")
    else:
        from mclclip.engines.zero import DeepspeedEngine

        options["zero_stage"] = int(name.removeprefix("zero "))
        engine = DeepspeedEngine(trainee, make, Context(device=device), **options)
    if scale is not None and engine.scaler.is_enabled():
        engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": scale})
    return engine


def train(engine: Engine, steps: range = range(STEPS), **sizes: int) -> Tensor:
    """The losses of the steps."""
    losses = []
    for step in steps:
        batch = batch_of(step, engine.context.device, **sizes)
        process_group.seed_everything(step)
        losses.append(engine.update(batch, lr=LR)["loss"])
    return torch.stack(losses).double().cpu()


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """A state's tensors on the CPU."""
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in full.items()}


def change(engine: Engine, before: dict[str, Tensor]) -> Tensor:
    """How the trained weights have moved, all in one; but for the attention's biases (that of the
    keys has no gradient but rounding, of which AdamW makes steps).
    """
    after = whole(engine.state_dict())
    return torch.cat(
        [
            (after[name] - value).flatten()
            for name, value in before.items()
            if name.startswith("model.") and "in_proj_bias" not in name
        ]
    )


def trained(
    where: Where,
    name: str,
    device: torch.device,
    precision: str = "fp32",
    *,
    steps: int = STEPS,
    model: Model | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Losses of the first steps, and how the weights have moved, by ``make_engine``."""
    model = model or tiny_clip(device)
    size, context = model.image_size, model.clip.context_length
    assert isinstance(size, int)
    with one_rank(where) if name != "plain" else contextlib.nullcontext():
        engine = make_engine(name, device, precision, model=model, **options)
        before, scale = whole(engine.state_dict()), engine.scaler.get_scale()
        losses = train(engine, range(steps), image_size=size, context=context)
        moved = change(engine, before)
        assert engine.scaler.get_scale() == scale, "a step was left out"
        del engine
    return losses, moved


# --- engines and precisions ---


def _engine(where: Where, name: str, precision: str) -> str:
    """Losses and weights after five steps against the plain engine in fp32 on the CPU."""
    wanted, moved = trained(where, "plain", CPU)
    # A scale at which no step overflows.
    losses, changed = trained(where, name, where.device, precision, scale=1024.0)
    of_losses, of_change = TOLERANCES[precision]
    error = close("losses", losses, wanted, of_losses)
    off = close("change of the weights", changed, moved, of_change)
    return f"losses off by {error:.1g}, weights' change by {off:.1g}"


for _name in ENGINES:
    for _precision in ("fp32", "bf16", "fp16"):
        check(f"engine {_name}, {_precision}", _name, _precision, limit_s=150.0)(_engine)


@check("scaler: a step that overflows is left out")
def overflow(where: Where) -> str:
    """The weights stay, the scale is halved, training goes on; on plain, DDP and FSDP alike."""
    for name in ("plain", "ddp", "fsdp"):
        with one_rank(where):
            options = {"clip_grad_norm": 1.0, "scale": 2.0**60}
            engine = make_engine(name, where.device, "fp16", **options)
            before = whole(engine.state_dict())
            engine.update(batch_of(0, where.device), lr=LR)
            assert not change(engine, before).any(), f"{name}: the weights have moved"
            assert engine.scaler.get_scale() == 2.0**59, f"{name}: {engine.scaler.get_scale()}"
            state = engine.scaler.state_dict() | {"scale": 256.0}
            engine.scaler.load_state_dict(state)
            engine.update(batch_of(1, where.device), lr=LR)
            moved = change(engine, before)
            assert moved.any() and torch.isfinite(moved).all(), f"{name}: did not go on"
            del engine
    return ""


@check("scaler: class centers under fp16")
def scaled_head(where: Where) -> str:
    """The gradient of the class centers, which no scaler sees, is out of the loss scale."""
    found = []
    for device, precision, scale in ((CPU, "fp32", 1.0), (where.device, "fp16", 512.0)):
        centers = ShardedClassCenters(
            60, 8, normal_rows(8, 1, deviation=1.0), context=Context(device=device)
        )
        model = tiny_clip(device)
        model.lock("all", True, True, text=False, logit_scale=False)
        loss = ClassCenterLoss(centers, "mlcd", scale=16.0)
        options = {"outside": [centers], "clip_grad_norm": 0.5, "scale": scale}
        engine = make_engine("plain", device, precision, model=model, objective=loss, **options)
        for step in range(3):
            batch = batch_of(step, device)
            batch.classes = (batch.sample_id[:, None] * 7 + torch.arange(3, device=device)) % 60
            engine.update(batch, lr=LR)
        found.append(centers.rows - normal_rows(8, 1, deviation=1.0)(0, 60).to(device))
    return f"off by {close('class centers', found[1], found[0], 0.05):.1g}"


# --- ways of running a step ---


@check("gradient caching equals the whole batch")
def caching(where: Where) -> str:
    """With dropped patches and with LoRA's dropout, whose masks the second pass draws again."""
    worst = 0.0
    for name in ("plain", "ddp", "fsdp"):
        for precision, tolerance in (("fp32", 2e-3), ("bf16", 0.3)):
            whole_batch, cached = (
                trained(where, name, where.device, precision, steps=2, micro_batch=size)[1]
                for size in (None, 7)
            )
            worst = max(worst, close(f"{name}, {precision}", cached, whole_batch, tolerance))
    for options in ({"patch_dropout": 0.5}, {"lora": True}):
        _same_masks(where, **options)
    return f"off by {worst:.1g}"


def _same_masks(where: Where, lora: bool = False, patch_dropout: float = 0.0) -> None:
    """Micro-batches of one size draw the masks of the whole batch's first pass, twice."""
    gradients = []
    for attempt in (0, 1):
        model = load_towers(tiny.MODEL, seed=1)
        model.drop_patches(patch_dropout)
        if lora:
            model.lock(2, True, True, text=True, logit_scale=True)
            add_lora(model, rank=2, alpha=4.0, dropout=0.5)
            for name, parameter in model.named_parameters():
                if name.endswith("lora_b"):  # zero at first: the masks would change nothing
                    torch.nn.init.constant_(parameter, 0.05)
        model.to(where.device).train()
        engine = make_engine("plain", where.device, model=model, micro_batch=BATCH // 2)
        process_group.seed_everything(7 + attempt)
        drawn: list[Tensor] = []
        engine.zero_grad()
        handle = _record(model, drawn)
        gradient_cache.backward(engine, batch_of(0, where.device), BATCH // 2)
        handle()
        assert len(drawn) == 4, f"{len(drawn)} forwards of two micro-batches"
        for first, second in zip(drawn[:2], drawn[2:], strict=True):
            same_bits(f"features in the second pass, LoRA {lora}", second, first)
        gradients.append(drawn[0])
    assert not torch.equal(*gradients), "another seed drew the same masks"


def _record(model: Model, into: list[Tensor]) -> Callable[[], None]:
    """Keeps the image features of every forward of the model."""

    def keep(module: Any, inputs: Any, output: dict[str, Tensor]) -> None:
        if "image_features" in output:  # texts may have a forward pass of their own
            into.append(output["image_features"].detach().clone())

    return model.register_forward_hook(keep).remove


@check("compile=step, bf16", "step", "bf16", limit_s=240.0)
@check("compile=model, bf16", "model", "bf16", limit_s=240.0)
@check("compile=model, fp32", "model", "fp32", limit_s=240.0)
def compiled(where: Where, what: str, precision: str) -> str:
    """Losses of the compiled model against those of the plain one in fp32 on the CPU."""
    if not where.on_gpu and "MCLCLIP_SLOW" not in os.environ:
        raise Skip("compiles for a minute on a CPU: set MCLCLIP_SLOW=1")
    wanted, _ = trained(where, "plain", CPU)
    model = tiny_clip(where.device)
    if what == "model":
        model.compile_blocks()
    engine = make_engine("plain", where.device, precision, model=model)
    if what == "step":
        engine.module.compile()
    tolerance = TOLERANCES[precision][0]
    return f"losses off by {close('losses', train(engine), wanted, tolerance):.1g}"


@check("gradient checkpointing, LoRA, a moving average, clipping, a ResNet")
def options_of_a_step(where: Where) -> str:
    """Each against the same on the CPU."""
    worst = 0.0

    def checkpointing(model: Model) -> dict[str, Any]:
        model.set_grad_checkpointing(True)
        return {}

    def lora(model: Model) -> dict[str, Any]:
        model.lock(2, True, True, text=False, logit_scale=True)
        add_lora(model, rank=4, alpha=8.0)
        return {"ema_decay": 0.9}

    cases: dict[str, Callable[[Model], dict[str, Any]]] = {
        "checkpointing": checkpointing,
        "LoRA": lora,
        "clipping": lambda model: {"clip_grad_norm": 0.1, "ema_decay": 0.9},
        "ResNet": lambda model: {},
    }
    for name, prepare in cases.items():
        moved = []
        for device in (CPU, where.device):
            architecture: Any = tiny.MODEL
            if name == "ResNet":
                architecture = str(tiny.ROOT / "tests" / "configs" / "tiny_resnet.json")
            model = load_towers(architecture, seed=1)
            options = prepare(model) | {"model": model.to(device).train()}
            moved.append(trained(where, "plain", device, steps=3, **options)[1])
        worst = max(worst, close(name, moved[1], moved[0], 1e-2))
    return f"off by {worst:.1g}"


@check("optimizers: AdamW (fused), LARS, Lion")
def optimizers(where: Where) -> str:
    worst = 0.0
    for name in ("adamw", "lars"):
        wanted, moved = (
            trained(where, "plain", device, steps=3, optimizer=name)[1]
            for device in (CPU, where.device)
        )
        worst = max(worst, close(name, moved, wanted, 1e-2))
    # Lion moves by signs: not compared.
    losses, _ = trained(where, "plain", where.device, steps=2, optimizer="lion")
    assert torch.isfinite(losses).all()
    return f"off by {worst:.1g}"


# --- state ---


@check("state: from every engine into every engine", limit_s=150.0)
def states(where: Where) -> str:
    """Names, values and the next step, bit for bit or within rounding (ZeRO sums otherwise)."""
    make_repeatable()
    names = [n for n in ENGINES if not n.startswith("zero") or find_spec("deepspeed")]
    given: dict[str, Tensor] | None = None
    with one_rank(where):
        for name in names:
            engine = make_engine(name, where.device, "fp16", ema_decay=0.9)
            if given is None:
                train(engine, range(2))
                given = whole(engine.state_dict())
            state = engine.state_dict()
            assert set(state) == set(given), f"{name}: other names"
            for key, value in state.items():
                local = value.to_local() if isinstance(value, DTensor) else value
                local.copy_(given[key])
            engine.load_state_dict(state)
            for key, value in whole(engine.state_dict()).items():
                same_bits(f"{name}: {key}", value, given[key].to(value.dtype))
            del engine
            print(name, flush=True)  # in the log of a check that does not end
    return f"{len(names)} engines"


@check("checkpoint: saved, loaded, trained on, bit for bit")
def resumed(where: Where) -> str:
    """Steps 0 to 5 at once, and 0 to 2, a checkpoint, another process's worth of engine, 3 to 5."""
    make_repeatable()
    precisions = ("fp32", "bf16", "fp16") if where.on_gpu else ("fp16",)
    for name in ("plain", "ddp", "fsdp"):
        for precision in precisions:
            _resume(where, name, precision, asynchronous=False)
    _resume(where, "ddp", "fp16", asynchronous=True)
    return f"plain, DDP and FSDP in {', '.join(precisions)}; written in the background too"


def _resume(where: Where, name: str, precision: str, asynchronous: bool) -> None:
    title = f"{name}, {precision}{', asynchronous' if asynchronous else ''}"
    directory = where.folder / title.replace(", ", "_")
    with one_rank(where):
        engine = make_engine(name, where.device, precision, ema_decay=0.9)
        train(engine, range(6))
        wanted = whole(engine.state_dict())
        del engine
        engine = make_engine(name, where.device, precision, ema_decay=0.9)
        train(engine, range(3))
        checkpoints = Checkpoints(directory, CheckpointConfig(keep=1, asynchronous=asynchronous))
        checkpoints.save(3, engine)
        train(engine, range(3, 5))  # must not change what is being written
        checkpoints.wait()
        del engine
        engine = make_engine(name, where.device, precision, ema_decay=0.9)
        assert Checkpoints(directory, CheckpointConfig(keep=1)).resume(engine) == 3
        train(engine, range(3, 6))
        for key, value in whole(engine.state_dict()).items():
            same_bits(f"{title}: {key}", value, wanted[key])
        del engine


# --- the process group ---


@check("process group: tensors on the device, objects on the CPU")
def groups(where: Where) -> str:
    """What the collectives and the side group ask of torch's group of two backends."""
    with one_rank(where):
        backend = dist.get_backend_config()
        if where.on_gpu:
            assert "nccl" in backend and "gloo" in backend, backend
        dist.barrier()
        found: list[Any] = [None]
        dist.all_gather_object(found, {"a": 1})
        dist.broadcast_object_list(found, src=0)
        assert found == [{"a": 1}]
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16):
            x = torch.arange(6, device=where.device).to(dtype)
            parts = [torch.empty_like(x)]
            dist.all_gather(parts, x)
            same_bits(f"gather of {dtype}", parts[0], x)
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
            dist.all_reduce(x)
        x = torch.randn(4, 3, device=where.device, requires_grad=True)
        gathered: Tensor = GatherWithGrad.apply(x)  # type: ignore[no-untyped-call]
        gathered.square().sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        same_bits("gradient of a gather", x.grad, 2 * x)
        if where.on_gpu:
            own = torch.empty_like(x)
            dist.reduce_scatter_tensor(own, x.detach().clone())
            same_bits("reduce-scatter", own, x)
        group = dist.new_group(backend="gloo")
        dist.all_gather_object(found, 3, group=group)
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        assert work is not None
        work.wait()
        assert collectives.gather_objects(5, collectives.side_group()) == [5]
        boundary = StepBoundary(Context(device=where.device), where.folder, poll_s=0.0)
        assert boundary.decide().leave is None
    return str(backend)
