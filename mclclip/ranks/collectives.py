"""Collectives, each of which is the identity for one process, and the interface of parameters that
engines do not reduce (``UnwrappedParameters``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mclclip.ranks import failures, process_group
from mclclip.ranks.process_group import limit

T = TypeVar("T")
_LONGEST_PAUSE_S = 0.2
_alone: list[bool] = []  # holds an entry while this rank does the work of ``on_main``
# torch 2.13 renamed reduce_scatter_tensor to reduce_scatter_single, and warns of the old name.
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def world_size() -> int:
    """Number of processes (1 where no process group is open)."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank (0 where no process group is open)."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class GatherWithGrad(torch.autograd.Function):
    """All-gather whose backward sums every rank's gradient back to the owner of the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return sum_to_owner(grad_outputs[0].clone(memory_format=torch.contiguous_format))


def sum_to_owner(x: Tensor) -> Tensor:
    """Sums ``x`` [W*b, ...] over the W ranks and returns this rank's slice [b, ...].

    Overwrites ``x``.
    """
    if world_size() == 1:
        return x
    if x.device.type == "cuda":
        local = torch.empty_like(x[: len(x) // world_size()])
        _reduce_scatter(local, x)
        return local
    # all_reduce, then take the local slice: gloo has no reduce_scatter for every dtype.
    dist.all_reduce(x)
    return x.chunk(world_size())[rank()]


def gather_with_grad(x: Tensor) -> Tensor:
    """[b, ...] on each rank -> [W*b, ...] in rank order; gradients flow back to the owner.

    The backward sums over ranks: with each rank's loss a mean over its own rows and DDP averaging
    parameter gradients, the result is the gradient of the mean over the global batch. All ranks
    must pass the same shape.
    """
    if world_size() == 1:
        return x
    gathered: Tensor = GatherWithGrad.apply(x)  # type: ignore[no-untyped-call]
    return gathered


class _SumWithGrad(torch.autograd.Function):
    """All-reduce whose backward is an all-reduce: every rank's loss depends on every input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return all_reduce_sum(grad_outputs[0])


def all_reduce_with_grad(x: Tensor) -> Tensor:
    """Sum of ``x`` over the ranks; the gradient is summed over the ranks too."""
    if world_size() == 1:
        return x
    total: Tensor = _SumWithGrad.apply(x)  # type: ignore[no-untyped-call]
    return total


def gather(x: Tensor) -> Tensor:
    """[b, ...] on each rank -> [W*b, ...] in rank order, without gradient."""
    if world_size() == 1:
        return x.detach()
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)


def shift(x: Tensor) -> Tensor:
    """Sends ``x`` to the next rank; returns the tensor of the rank before, without gradient.

    The ranks form a ring: the first one receives from the last. All ranks must pass the same
    shape.
    """
    world, here = world_size(), rank()
    if world == 1:
        return x.detach()
    sent = x.detach().contiguous()
    received = torch.empty_like(sent)
    hops = [
        dist.P2POp(dist.isend, sent, (here + 1) % world),
        dist.P2POp(dist.irecv, received, (here - 1) % world),
    ]
    for work in dist.batch_isend_irecv(hops):
        work.wait()
    return received


def all_reduce_sum(x: Tensor) -> Tensor:
    """Sum of ``x`` over the ranks, a new tensor without gradient."""
    total = x.detach().clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def all_reduce_max(x: Tensor) -> Tensor:
    """The largest ``x`` over the ranks, element by element; a new tensor without gradient."""
    largest = x.detach().clone()
    if world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def side_group() -> Any:
    """A new gloo group of all ranks, for a background thread or CPU tensors (None: one process).

    Collectives of two threads on one group could be matched in the wrong order, and NCCL does not
    move CPU tensors. All ranks must call this at the same point of their main threads.
    """
    return dist.new_group(backend="gloo", timeout=limit()) if world_size() > 1 else None


def gather_objects(item: T, group: Any = None) -> list[T]:
    """Every rank's picklable ``item``, in rank order (``group``: from ``side_group``)."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item, group=group)
    return items


def broadcast_object(item: T) -> T:
    """The first rank's picklable object on every rank."""
    if world_size() == 1:
        return item
    box: list[Any] = [item]
    dist.broadcast_object_list(box)
    result: T = box[0]
    return result


def broadcast(x: Tensor) -> Tensor:
    """The first rank's ``x`` on every rank, in place; all must pass the same shape and dtype."""
    if world_size() > 1:
        dist.broadcast(x, 0)
    return x


def barrier() -> None:
    """Waits for all ranks."""
    if world_size() > 1:
        dist.barrier()


def meet() -> None:
    """Waits until all ranks have come here, for hours if need be: ``peer_timeout_s``, the limit of
    collectives, does not apply. Raises if a rank has died meanwhile.

    Use it after work that takes the ranks unequal times, such as work of the first rank alone.
    """
    if world_size() == 1:
        return
    waiting, pause_s = dist.barrier(process_group.meeting(), async_op=True), 0.001
    while not waiting.is_completed():  # wait() would not react to signals meanwhile
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    waiting.wait()


def raise_on_every_rank(work: Callable[[], T], what: str = "") -> T:
    """Runs ``work`` on this rank; if it failed on any rank, raises on all of them.

    The failing rank raises its own error. The others raise an error with its message: ValueError,
    FileNotFoundError or Lost if it was one, else RuntimeError. So no rank waits for a peer that has
    left, and all wait without a limit for one that works (``meet``).
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as caught:
        error = failures.as_lost(caught)
    kind = failures.Lost if isinstance(error, failures.Lost) else type(error)
    kind = kind if kind in (ValueError, FileNotFoundError, failures.Lost) else RuntimeError
    meet()
    reports = gather_objects(None if error is None else (kind, str(error)))
    if error is not None:
        raise error
    for number, report in enumerate(reports):
        if report is not None:
            raise report[0](f"rank {number}{' ' + what if what else ''}: {report[1]}")
    return result  # type: ignore[return-value]


def on_main(work: Callable[[], T]) -> T:
    """Runs ``work`` on rank 0 only; every rank gets its (picklable) result or its error.

    Within such work it is a plain call, since the other ranks wait for the end of the whole.
    """
    if world_size() == 1 or _alone:
        return work()

    def alone() -> T:
        _alone.append(True)
        try:
            return work()
        finally:
            _alone.pop()

    result = raise_on_every_rank(lambda: alone() if rank() == 0 else None)
    return broadcast_object(result)  # type: ignore[return-value]


class UnwrappedParameters(Protocol):
    """Parameters that are trained together with a module that an engine wraps, but not wrapped.

    Their gradients are not averaged over the ranks, and they have their own optimizer. Sharded
    class centers are an example. They compute their gradient themselves, in the backward pass of
    the loss (``torch.autograd.Function``): gradient caching fills no ``.grad`` but the module's.
    """

    def begin(self, step: int, loss_scale: Tensor | float = 1.0) -> None:
        """Prepares a step whose loss is multiplied by ``loss_scale`` before the backward pass."""

    def zero_grad(self) -> None:
        """Drops the gradient."""

    def grad_square(self) -> Tensor:
        """The sum of squares of the gradient over all ranks, float64, 0-dimensional."""

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        """One optimizer step along ``factor`` times the gradient at the learning rate ``lr``."""

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that a resumed training needs; no other part uses their names."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads the entries that ``state_dict`` names; ignores all others in ``state``."""
