"""DeepSpeed's ZeRO: optimizer state (1), gradients (2) and parameters (3) sharded over the ranks.

The module keeps its fp32 weights and its own autocast, so that results are those of DDP. State has
the same names and shapes as under the other engines, so that any engine resumes from any other.
DeepSpeed's own checkpoints are not used, because they need the same number of ranks.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mclclip.engines import BUCKET
from mclclip.engines.engine import Engine, MakeOptimizer
from mclclip.ranks import collectives
from mclclip.ranks.process_group import Context

KEPT_WHOLE = 100_000  # ZeRO-3 keeps parameters up to this many elements gathered

Piece = tuple[int, Tensor]
"""This rank's part of a flattened tensor: the number of its first element, and a view of it."""
_joined: Any = None


class DeepspeedEngine(Engine):
    """ZeRO around the module; other arguments as for Engine.

    zero_stage   1: shards optimizer state; 2: gradients too; 3: parameters too

    At stages 2 and 3 gradient caching reduces at every micro-batch, since no rank keeps whole
    gradients. A step whose gradients are not finite is skipped under every precision, and its
    norm is infinite. Parameters must be fp32 (ZeRO would update fp32 copies) and the optimizer
    elementwise: ZeRO gives it flat slices that begin and end inside of parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        context: Context,
        *,
        zero_stage: int = 2,
        **options: Any,
    ) -> None:
        self.zero_stage = zero_stage
        super().__init__(module, make_optimizer, context, **options)

    def _set_up(self, make_optimizer: MakeOptimizer) -> tuple[Any, Any]:
        deepspeed = _join(self.context)
        self._inner = make_optimizer(self.module)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # the loss is a mean already: divided by nothing
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.clip_grad_norm or 0.0,  # its default is to clip
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": self.zero_stage,
                "reduce_bucket_size": BUCKET,
                "stage3_param_persistence_threshold": KEPT_WHOLE,
                # If True, it replaces torch's linear in the whole process by one that rounds
                # differently; embeddings made later in this process would then differ.
                "memory_efficient_linear": False,
            },
            "timers": {"throughput": {"enabled": False}},  # it would wait for the GPU at each step
        }
        engine, optimizer, _, _ = deepspeed.initialize(
            model=self.module, optimizer=self._inner, config=config, dist_init_required=False
        )
        if self.outside:
            self._count_outside(optimizer)
        weakref.finalize(self, _release, engine, self.module).atexit = False
        return optimizer, engine

    def _optimized(self) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        return self._inner, self._flats()

    def _count_outside(self, optimizer: Any) -> None:
        """Adds the gradients of parameters outside to the norm by which ZeRO clips."""
        name = "_get_norm_groups" if self.zero_stage == 3 else "scaled_global_norm"
        inner = getattr(optimizer, name)

        def with_outside(*arguments: Any, **options: Any) -> Any:
            norms = inner(*arguments, **options)
            scale = self.scaler.get_scale()  # ZeRO's gradients are still multiplied by it
            if self.zero_stage == 3:  # one group more
                whole = self.with_outside(torch.zeros_like(norms[0])) * scale
                return [*norms, whole]
            return self.with_outside(norms / scale) * scale

        setattr(optimizer, name, with_outside)

    @property
    def leaves_out(self) -> bool:
        """True: ZeRO skips steps whose gradients are not finite under every precision."""
        return True

    def reducing(self, last: bool) -> AbstractContextManager[Any]:
        """Tells ZeRO whether more backward passes follow before the step."""
        self.wrapped.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def zero_grad(self) -> None:
        """Drops all gradients, and sets the loss scale until the step."""
        super().zero_grad()
        if self.zero_stage == 3:
            # Otherwise a parameter without gradient in the first micro-batch, such as the logit
            # scale under gradient caching, would add to its gradient of the previous step.
            self.optimizer.grad_partitions_flat_buffer.zero_()
        if self.scaler.is_enabled():
            self.optimizer.override_loss_scale(self.scaler.get_scale())

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of ``loss`` (this rank's mean), times the loss scale of fp16."""
        self.wrapped.backward(loss)

    def step(self) -> Tensor:
        """One optimizer step with the reduced gradients; returns their norm before clipping.

        ZeRO divides by the loss scale, and skips the step where gradients overflow.
        """
        self.wrapped.step()
        if self.scaler.is_enabled():
            self._move_scale(self.optimizer.overflow)
        return torch.as_tensor(self.wrapped.get_global_grad_norm(), device=self.context.device)

    def local_parameters(self) -> dict[str, Tensor]:
        """This rank's part of each trained parameter by name: at stage 3 a flat, padded shard."""
        if self.zero_stage < 3:
            return super().local_parameters()
        return {name: p.ds_tensor for name, p in self._trained().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """See Engine; full tensors on every rank, in main memory if they had to be gathered."""
        tensors: dict[str, Any] = self.module.state_dict(keep_vars=True)
        state = {}
        for name, tensor in tensors.items():
            if _is_shared(tensor):
                state[f"model.{name}"] = _whole(_piece_of(tensor.ds_tensor, tensor), tensor)
            else:
                state[f"model.{name}"] = tensor.detach()
        fresh = not self._inner.state
        if fresh:
            self._first_moments()
        for name, parameter in self._trained().items():
            for moment, value in self._moments().items():
                flat = _is_flat(value)
                whole = _whole(self._moment(parameter, moment), parameter) if flat else value
                state[f"optimizer.{name}.{moment}"] = torch.as_tensor(whole)
        if fresh:
            self._inner.state.clear()  # the step of ``_first_moments`` was counted
            self.optimizer._hp_optimizer_states_linked = False
        return state | self._extra_state()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads a state with the names of ``state_dict`` (a collective)."""
        if not self._inner.state:
            self._first_moments()
        tensors: dict[str, Any] = self.module.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            value = state[f"model.{name}"]
            if _is_shared(tensor):
                _fill(_piece_of(tensor.ds_tensor, tensor), value)
            if tensor.numel() == value.numel():  # empty where only the shard is here
                tensor.copy_(value)
        self.optimizer.refresh_fp32_params()
        for name, parameter in self._trained().items():
            for moment, value in self._moments().items():
                loaded = state[f"optimizer.{name}.{moment}"]
                if _is_flat(value):
                    _fill(self._moment(parameter, moment), loaded)
                    continue
                for flat in self._inner.state.values():  # one number, such as the step
                    if isinstance(flat[moment], Tensor):
                        flat[moment].copy_(loaded)
                    else:
                        flat[moment] = type(flat[moment])(loaded.item())
        self._load_extra_state(state)

    # --- the optimizer's state -----------------------------------------------------------------

    def _trained(self) -> dict[str, Any]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def _moments(self) -> dict[str, Any]:
        """The optimizer's state of one flat tensor, by name; all flat tensors have these names."""
        return next((s for s in self._inner.state.values() if s), {})

    def _first_moments(self) -> None:
        """Creates the optimizer's state by a step at learning rate zero with zero gradients."""
        rates = [group["lr"] for group in self._inner.param_groups]
        for group in self._inner.param_groups:
            group["lr"] = 0.0
        for number, flat in enumerate(self._flats()):
            flat.grad = torch.zeros_like(flat)
            self.optimizer._optimizer_step(number)
            flat.grad = None
        for group, rate in zip(self._inner.param_groups, rates, strict=True):
            group["lr"] = rate

    def _flats(self) -> list[Tensor]:
        if self.zero_stage == 3:
            return list(self.optimizer.fp32_partitioned_groups_flat)
        return list(self.optimizer.single_partition_of_fp32_groups)

    def _moment(self, parameter: Any, moment: str) -> Piece:
        """This rank's piece of a moment of ``parameter``, which may be empty."""
        if self.zero_stage == 3:
            from deepspeed.utils import safe_get_local_optimizer_state

            return _piece_of(safe_get_local_optimizer_state(parameter, moment), parameter)
        mapping = parameter._hp_mapping  # None where the parameter lies on other ranks
        if mapping is None:
            return 0, torch.empty(0, device=parameter.device)
        flat = self._flats()[mapping.param_group_index]
        start, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
        values = self._inner.state[flat][moment][start : start + numel]
        return mapping.lp_fragment_address.start, values

    # --- the rest of the state -----------------------------------------------------------------

    def _extra_state(self) -> dict[str, Tensor]:
        state = super()._extra_state()
        if self.zero_stage == 3 and self.average:
            trained = self._trained()
            for name, shard in self.average.items():
                state[f"ema.{name}"] = _whole(_piece_of(shard, trained[name]), trained[name])
        return state

    def _load_extra_state(self, state: dict[str, Tensor]) -> None:
        if self.zero_stage == 3 and self.average:
            trained = self._trained()
            for name, shard in self.average.items():
                _fill(_piece_of(shard, trained[name]), state[f"ema.{name}"])
                state = state | {f"ema.{name}": shard}
        super()._load_extra_state(state)

    def _move_scale(self, overflow: bool) -> None:
        """Updates the loss scale after a step, by the rules of GradScaler."""
        state = self.scaler.state_dict()
        state["_growth_tracker"] = 0 if overflow else state["_growth_tracker"] + 1
        if overflow:
            state["scale"] *= state["backoff_factor"]
        elif state["_growth_tracker"] == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            state["_growth_tracker"] = 0
        self.scaler.load_state_dict(state)


def _join(context: Context) -> Any:
    """DeepSpeed, imported and brought into the process group that is open."""
    global _joined
    # DeepSpeed picks its device while it is imported, and reads LOCAL_RANK.
    os.environ.setdefault("DS_ACCELERATOR", context.device.type)
    os.environ.setdefault("LOCAL_RANK", str(context.local_rank))
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    used = get_accelerator().device_name()
    if used != context.device.type:
        raise ValueError(
            f"engine.name=deepspeed works on {used} here, but device is {context.device.type}: "
            f"set the environment variable DS_ACCELERATOR={context.device.type}"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # On CPUs it would spend minutes on compiling a C++ extension that torch's gloo makes needless.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if dist.group.WORLD is not _joined:  # it remembers groups that have been closed since
        deepspeed.comm.comm.cdb = None
        groups._WORLD_GROUP = None
        _joined = dist.group.WORLD
    return deepspeed


def _release(engine: Any, module: nn.Module) -> None:
    """Frees an engine's memory, which its hooks keep alive by reference cycles.

    After ZeRO-3 the module's parameters are empty. Does nothing if the process group is closed.
    """
    if not dist.is_initialized():
        return
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    optimizer = engine.optimizer
    engine.destroy()
    while module in FWD_MODULE_STACK:  # ZeRO-3 puts its module there for good
        FWD_MODULE_STACK.remove(module)
    shared = [parameter for parameter in module.parameters() if _is_shared(parameter)]
    for parameter in shared:
        parameter.data = parameter.data.new_empty(0)
        vars(parameter).clear()
    if shared:
        optimizer.state.clear()
        vars(optimizer).clear()


# --- pieces of the tensors that ZeRO flattens and divides --------------------------------------


def _is_shared(tensor: Tensor) -> bool:
    """Returns True if ZeRO-3 has sharded this parameter over the ranks."""
    return hasattr(tensor, "ds_tensor")


def _is_flat(value: Any) -> bool:
    """Returns True if a part of the optimizer's state has a value for every element."""
    return isinstance(value, Tensor) and value.ndim > 0


def _piece_of(shard: Tensor, parameter: Any) -> Piece:
    """This rank's shard of ZeRO-3, without its padding."""
    start = len(shard) * collectives.rank()
    return start, shard.detach()[: max(0, parameter.ds_numel - start)]


def _whole(piece: Piece, parameter: Any) -> Tensor:
    """All ranks' pieces as one tensor, shaped as ``parameter``, in main memory; a collective."""
    start, values = piece
    shape = parameter.ds_shape if _is_shared(parameter) else parameter.shape
    flat = values.new_zeros(shape.numel())
    flat[start : start + len(values)] = values
    return collectives.all_reduce_sum(flat).view(shape).cpu()


def _fill(piece: Piece, whole: Tensor) -> None:
    """Copies this piece's elements of ``whole`` into its values."""
    start, values = piece
    values.copy_(whole.reshape(-1)[start : start + len(values)])
