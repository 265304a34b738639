"""The engine interface with its DDP implementation, from which the others derive; and FSDP2.

The training loop hands over a module and calls ``update``; it does not know which engine runs it.
Engines differ in how they wrap the module, reduce gradients, and name their state.

The module maps a batch to ``{"loss": ..., parts}``; for gradient caching it also returns features
and pulls gradients back through them (``gradient_cache``). It sets its own autocast, so
that precision does not depend on the engine. Batch norms are taken over the global batch, so that
N ranks equal one: torch.nn.SyncBatchNorm does the same on GPUs only, ours on every backend.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mclclip.engines import gradient_cache
from mclclip.ranks import collectives
from mclclip.ranks.collectives import UnwrappedParameters
from mclclip.ranks.process_group import Context, make_mesh
from mclclip.util.options import with_prefix

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # formats of ``precision``
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@contextmanager
def unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores a module's buffers, and the state of random generators, after the block."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


class Engine:
    """Data-parallel training of ``module``: DDP over ranks, the plain module for one.

    make_optimizer  called with the module once it is wrapped: some engines replace its parameters
    precision       ``fp16`` scales the loss; the module itself does everything else
    clip_grad_norm  largest norm of the gradient (None: no clipping)
    micro_batch     samples per rank and forward; bigger batches are computed by gradient caching
    ema_decay       keeps ``average``, a moving average of this rank's part of each trained
                    parameter: average <- decay * average + (1 - decay) * parameter (None: none)
    outside         parameters that the engine trains but does not wrap (``ranks.collectives``)

    Groups of the optimizer may carry ``lr_scale``, a factor of the learning rate, and
    ``start_decay``, the decay towards the weights that they begin with.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        context: Context,
        *,
        precision: str = "fp32",
        clip_grad_norm: float | None = None,
        micro_batch: int | None = None,
        ema_decay: float | None = None,
        outside: Sequence[UnwrappedParameters] = (),
    ) -> None:
        self.module, self.context, self.outside = module, context, tuple(outside)
        self.clip_grad_norm, self.micro_batch = clip_grad_norm, micro_batch
        if micro_batch is not None:
            gradient_cache.check(module)
        if context.world_size > 1:
            synchronize_batch_norms(module)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=precision == "fp16")
        self.optimizer, self.wrapped = self._set_up(make_optimizer)
        self._order_is_fixed = False
        self._hold_near_start()
        self.average: dict[str, Tensor] = {}
        if ema_decay:
            self._averaged = list(self.local_parameters().values())
            self._move_average = get_ema_multi_avg_fn(ema_decay)  # type: ignore[no-untyped-call]
            self.average = {n: p.detach().clone() for n, p in self.local_parameters().items()}

    # --- what engines differ in ----------------------------------------------------------------

    def _set_up(self, make_optimizer: MakeOptimizer) -> tuple[Any, Any]:
        """Returns the optimizer, and the module wrapped so that a call is a forward pass."""
        optimizer = make_optimizer(self.module)
        if self.context.world_size == 1:
            return optimizer, self.module
        # Of depthwise convolutions in channels-last: DDP copies their small gradients.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view", UserWarning)
        on_gpu = self.context.device.type == "cuda"
        return optimizer, DistributedDataParallel(
            self.module, device_ids=[self.context.local_rank] if on_gpu else None
        )

    def _optimized(self) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        """The optimizer that takes the steps, and the tensors that it moves."""
        return self.optimizer, [p for g in self.optimizer.param_groups for p in g["params"]]

    def reducing(self, last: bool) -> AbstractContextManager[Any]:
        """Context of one of a step's backward passes; only the last reduces over the ranks."""
        if isinstance(self.wrapped, DistributedDataParallel) and not last:
            return self.wrapped.no_sync()
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of ``loss`` (this rank's mean), times the loss scale of fp16."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> Tensor:
        """One optimizer step with the reduced gradients; returns their norm before clipping.

        Under fp16 a step whose gradients are not finite is skipped and the scale is lowered.
        """
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = self.with_outside(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if self.clip_grad_norm is not None and gradients:
            local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
            torch._foreach_mul_(local, self.clip_factor(norm))  # a few kernels for all of them
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm

    @property
    def leaves_out(self) -> bool:
        """True if a step whose gradients are not finite is skipped."""
        return self.scaler.is_enabled()

    def local_parameters(self) -> dict[str, Tensor]:
        """This rank's part of each trained parameter by name: all of it, or its shard."""
        return {n: p.detach() for n, p in self.module.named_parameters() if p.requires_grad}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a resumed training needs, by names that all engines share (a collective).

        ``model.NAME``, ``optimizer.NAME.MOMENT``, ``ema.NAME``, ``scaler.NAME``, and the entries
        of parameters outside. A value is the same tensor on all ranks, or a DTensor.
        """
        state = {f"model.{name}": value for name, value in self.module.state_dict().items()}
        fresh = not self.optimizer.state
        moments = get_optimizer_state_dict(self.module, self.optimizer, options=_FLAT)
        for name, value in moments.items():
            if name.startswith("state."):
                state[f"optimizer.{name.removeprefix('state.')}"] = value
        groups = self.optimizer.param_groups
        counts = [group["step"] for group in groups if group.get("step") is not None]
        if counts:  # timm's LAMB and Adan count in their groups
            state["optimizer_step"] = torch.tensor(float(counts[0]), dtype=torch.float64)
        if fresh:  # torch created the moments by a step at learning rate zero, and counted it
            self.optimizer.state.clear()
            for group in groups:
                group.pop("step", None)
        return state | self._extra_state()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads a state with the names of ``state_dict`` (a collective)."""
        self.module.load_state_dict(with_prefix(state, "model."))
        moments = get_optimizer_state_dict(self.module, self.optimizer, options=_FLAT)
        loaded = {
            f"state.{name}": value for name, value in with_prefix(state, "optimizer.").items()
        }
        values: Any = moments | loaded
        set_optimizer_state_dict(
            self.module, self.optimizer, optim_state_dict=values, options=_FLAT
        )
        for group in self.optimizer.param_groups:
            if (count := group.get("step")) is not None:
                saved = state["optimizer_step"]
                group["step"] = saved.to(count) if isinstance(count, Tensor) else int(saved)
        self._load_extra_state(state)

    # --- what they share -----------------------------------------------------------------------

    def _hold_near_start(self) -> None:
        """Makes groups with ``start_decay`` d decay towards their present weights, before every
        step that is taken: w <- w - lr d (w - start), this rank's part of each.

        Source: L2-SP (Li, Grandvalet and Davoine, 2018), decoupled from the gradient as AdamW's
        weight decay is, under every optimizer. A resumed training begins with the same weights.
        """
        optimizer, tensors = self._optimized()
        if not any(group.get("start_decay") for group in optimizer.param_groups):
            return
        starts = {id(each): _local(each).clone() for each in tensors}

        @torch.no_grad()
        def pull(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # Fused optimizers are given the steps that fp16 skips, with this mark.
            skipped = getattr(optimizer, "found_inf", None)
            for group in optimizer.param_groups:
                share = group["lr"] * group["start_decay"]
                share = share if skipped is None else share * (1.0 - skipped)
                for each in group["params"]:
                    _local(each).lerp_(starts[id(each)], share)

        optimizer.register_step_pre_hook(pull)

    def fix_reduction_order(self, batch: Any) -> None:
        """Fixes the order of DDP's sums, once, before the first step of this process.

        DDP rebuilds its buckets after the first backward pass, which changes the order in which
        gradients of three or more ranks are summed. After two backward passes of a zero loss the
        order no longer changes, so a resumed run repeats an uninterrupted one bit for bit. Buffers
        and the state of random generators (dropout draws from them) are restored.
        """
        if self._order_is_fixed or not isinstance(self.wrapped, DistributedDataParallel):
            return
        self._order_is_fixed = True
        if self.micro_batch is not None:
            batch = batch.slice(0, self.micro_batch)
        for part in self.outside:
            part.begin(batch.step)
        with unchanged(self.module, self.context.device):
            for _ in range(2):
                loss: Tensor = self.wrapped(batch)["loss"]
                (loss * 0.0).backward()  # type: ignore[no-untyped-call]
                self.zero_grad()

    def measure(self, batch: Any) -> dict[str, Tensor]:
        """Returns the module's dictionary for ``batch``, without a gradient. Neither parameters,
        buffers nor random generators change."""
        for part in self.outside:
            part.begin(batch.step)
        with torch.no_grad(), unchanged(self.module, self.context.device):
            if self.micro_batch is None or len(batch) <= self.micro_batch:
                measured: dict[str, Tensor] = self.wrapped(batch)
                return measured
            features, *_ = gradient_cache.all_features(self, batch, self.micro_batch)
            module: Any = self.module
            measured = module.forward(batch, features=features)
            return measured

    def update(self, batch: Any, lr: float) -> dict[str, Tensor]:
        """Computes the gradient of the global batch's loss and takes one optimizer step at ``lr``.

        ``batch`` is this rank's, on the device. Returns the module's dictionary, detached, with
        ``grad_norm`` (before clipping) added, and ``loss_scale`` under fp16.
        """
        self.fix_reduction_order(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.zero_grad()
        cached = self.micro_batch is not None and len(batch) > self.micro_batch
        for part in self.outside:
            part.zero_grad()
            # Gradient caching does not scale the loss of the features, only the pulled-back one.
            part.begin(batch.step, 1.0 if cached else self.loss_scale())
        if cached:
            assert self.micro_batch is not None
            parts = gradient_cache.backward(self, batch, self.micro_batch)
        else:
            parts = self.wrapped(batch)  # `train.loop.ModelWithObjective.forward`
            self.backward(parts["loss"])
        norm = self.step()
        if self.outside and (not self.leaves_out or bool(torch.isfinite(norm))):
            for part in self.outside:
                part.step(lr, self.clip_factor(norm))
        if self.average:
            with torch.no_grad():
                self._move_average(list(self.average.values()), self._averaged, torch.tensor(0))
        if self.scaler.is_enabled():
            parts["loss_scale"] = torch.as_tensor(self.loss_scale())
        return {name: value.detach() for name, value in parts.items()} | {"grad_norm": norm}

    def loss_scale(self) -> Tensor | float:
        """The factor of the loss; under fp16 on the device, which reading it would wait for."""
        if not self.scaler.is_enabled():
            return 1.0
        return self.scaler.scale(torch.ones((), device=self.context.device))

    def with_outside(self, norm: Tensor) -> Tensor:
        """The norm of the gradient with that of parameters outside; ``norm`` is the module's."""
        if not self.outside:
            return norm
        square = norm.double().square()
        for part in self.outside:
            square = square + part.grad_square()
        return square.sqrt().to(norm.dtype)

    def clip_factor(self, norm: Tensor) -> Tensor | float:
        """The factor that clips a gradient of this total norm (1 without clipping)."""
        if self.clip_grad_norm is None:
            return 1.0
        return (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    def _extra_state(self) -> dict[str, Tensor]:
        """The state of parameters outside, of the moving average and of the loss scale."""
        state: dict[str, Tensor] = {}
        for part in self.outside:
            state |= part.state_dict()
        state |= {f"ema.{name}": value for name, value in self.average.items()}
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            state["scaler.scale"] = torch.tensor(scaler["scale"], dtype=torch.float64)
            state["scaler.growth_tracker"] = torch.tensor(scaler["_growth_tracker"])
        return state

    def _load_extra_state(self, state: dict[str, Tensor]) -> None:
        for part in self.outside:
            part.load_state_dict(state)
        for name, tensor in self.average.items():
            tensor.copy_(state[f"ema.{name}"])
        if self.scaler.is_enabled():
            values = self.scaler.state_dict()
            values["scale"] = float(state["scaler.scale"])
            values["_growth_tracker"] = int(state["scaler.growth_tracker"])
            self.scaler.load_state_dict(values)


def _local(tensor: Tensor) -> Tensor:
    """This rank's values, without a graph."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


# --- FSDP2 -------------------------------------------------------------------------------------


class FsdpEngine(Engine):
    """``fully_shard`` on each of ``blocks`` and on the rest; other arguments as for Engine.

    shard_ranks   ranks that share one copy; there are world_size / shard_ranks copies (None: one)

    Under bf16 and fp16 the blocks are gathered in that format and their gradients reduced in fp32.
    The rest is gathered in fp32: rounding a logarithmic logit scale of 4.6 to bf16 would change the
    scale by up to 1 %.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        context: Context,
        *,
        blocks: Sequence[nn.Module],
        shard_ranks: int | None = None,
        precision: str = "fp32",
        **options: Any,
    ) -> None:
        self._blocks = list(blocks)
        world = context.world_size
        if shard_ranks is None or shard_ranks == world:
            self._mesh = make_mesh(context, world)
        else:
            self._mesh = make_mesh(context, world // shard_ranks, shard_ranks)  # copies, shards
        half = HALF.get(precision)
        self._policy = MixedPrecisionPolicy(half, reduce_dtype=torch.float32 if half else None)
        super().__init__(module, make_optimizer, context, precision=precision, **options)

    def _set_up(self, make_optimizer: MakeOptimizer) -> tuple[Any, Any]:
        for block in self._blocks:
            fully_shard(block, mesh=self._mesh, mp_policy=self._policy)
        fully_shard(self.module, mesh=self._mesh)
        for block in self._blocks:
            # A block that no forward pass runs, such as one of an unused text tower, must have been
            # gathered once, or a backward pass that does not reduce fails in it.
            block.unshard()  # type: ignore[operator]
            block.reshard()  # type: ignore[operator]
        return make_optimizer(self.module), self.module

    @contextmanager
    def reducing(self, last: bool) -> Iterator[None]:
        """Only the last backward pass reduces; until then each rank keeps whole gradients."""
        root: Any = self.module
        root.set_requires_gradient_sync(last)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)


# --- batch norms -------------------------------------------------------------------------------


class _GlobalStatistics(_BatchNorm):
    """A batch norm whose training statistics are those of the global batch.

    All ranks must pass the same shape. On one rank and in eval mode (frozen norms are in it) it is
    torch's batch norm.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[b, C, ...] -> the same shape, normalised over all ranks' b and all further axes."""
        if not self.training or collectives.world_size() == 1:
            return super().forward(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        axes = (0, *range(2, x.ndim))
        channel = (slice(None), *[None] * (x.ndim - 2))
        count = x.numel() // x.shape[1] * collectives.world_size()
        mean = collectives.all_reduce_with_grad(x.sum(dim=axes)) / count
        centred = x - mean[channel]
        # Two passes: E[x^2] - E[x]^2 would cancel in fp32.
        squares = centred.square().sum(dim=axes)
        variance = collectives.all_reduce_with_grad(squares) / count
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = self.momentum
            if share is None:  # only then is the number read, for which a device is waited for
                share = 1.0 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), share)
            unbiased = variance.detach() * count / (count - 1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        scale = torch.rsqrt(variance + self.eps)
        if self.affine:
            output = centred * (scale * self.weight)[channel] + self.bias[channel]
        else:
            output = centred * scale[channel]
        result: Tensor = output.to(input.dtype)
        if hasattr(self, "act"):  # timm's BatchNormAct2d: DropBlock and an activation after it
            activated: Any = self
            result = activated.act(activated.drop(result))
        return result


@functools.cache
def _global_class(kind: Any) -> type[Any]:
    return type(f"Global{kind.__name__}", (_GlobalStatistics, kind), {})


def synchronize_batch_norms(module: nn.Module) -> None:
    """Turns every batch norm inside ``module`` into one over the global batch, in place.

    Parameters and buffers stay the same objects, so optimizers and names are not disturbed.
    Raises ValueError for a batch norm of an unknown kind that is in training mode.
    """
    for child in module.modules():
        kind: Any = type(child)
        if not isinstance(child, _BatchNorm) or isinstance(child, _GlobalStatistics):
            continue
        of_timm = kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm.")
        if of_timm or kind in (nn.BatchNorm1d, nn.BatchNorm2d):
            child.__class__ = _global_class(kind)
        elif child.training:
            raise ValueError(
                f"the model has a {kind.__module__}.{kind.__name__}, whose statistics cannot be "
                "taken over several ranks: train it on one rank, or lock it"
            )
