"""The few collectives the project needs; each is the identity where there is one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mclclip.ranks import lost
from mclclip.ranks.process_group import TIMEOUT

T = TypeVar("T")
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


class _GatherWithGrad(torch.autograd.Function):
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
    return x if world_size() == 1 else _sum_to_owner(x, async_op=False)[0]


def _sum_to_owner(x: Tensor, async_op: bool) -> tuple[Tensor, Any]:
    """This rank's slice of the sum, and the work to wait for before it is read, if ``async_op``."""
    if x.device.type == "cuda":
        own = torch.empty_like(x[: len(x) // world_size()])
        return own, _reduce_scatter(own, x, async_op=async_op)
    # all_reduce, then take the own slice: gloo has no reduce_scatter for every dtype.
    work = dist.all_reduce(x, async_op=async_op)
    return x.chunk(world_size())[rank()], work


def gather_with_grad(x: Tensor) -> Tensor:
    """[b, ...] on each rank -> [W*b, ...] in rank order; gradients flow back to the owner.

    The backward sums over ranks: with each rank's loss a mean over its own rows and DDP averaging
    parameter gradients, the result is the gradient of the mean over the global batch. All ranks
    must pass the same shape. A gather that ``begin_gather`` has begun is waited for.
    """
    global _begun
    if world_size() == 1:
        return x
    if _begun is not None and _begun.x is x:
        begun, _begun = _begun, None
        return begun.end()
    gathered: Tensor = _GatherWithGrad.apply(x)  # type: ignore[no-untyped-call]
    return gathered


def begin_gather(x: Tensor) -> None:
    """Begins ``gather_with_grad`` of ``x``, which the next call for the same tensor ends.

    What is computed between the two overlaps with the messages, in the backward pass too: the
    gradients' sum begins where the forward pass waited, and is waited for where it began. Values,
    gradients and the order of collectives on all ranks are those of a gather at once. One gather is
    under way at a time.
    """
    global _begun
    if _begun is not None:  # an error came before its end
        _begun.work.wait()
    _begun = _Begun(x) if world_size() > 1 else None


class _Begun:
    """A gather of ``x`` under way; in the backward pass, a sum of its gradients under way."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.parts: list[Tensor]
        self.work: Any
        self.summing: tuple[Tensor, Any]
        # Without values: it ties the end to the beginning in autograd's graph.
        self.token: Tensor = _Begin.apply(x, self)  # type: ignore[no-untyped-call]

    def end(self) -> Tensor:
        """The gathered rows of all ranks, with gradient."""
        gathered: Tensor = _End.apply(self.token, self)  # type: ignore[no-untyped-call]
        # The graph holds this object, which must not hold the graph.
        del self.x, self.token
        return gathered


class _Begin(torch.autograd.Function):
    """Begins the all-gather; its backward waits for the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begun: _Begun) -> Tensor:
        ctx.begun = begun
        begun.parts = [torch.empty_like(x) for _ in range(world_size())]
        begun.work = dist.all_gather(begun.parts, x.detach().contiguous(), async_op=True)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        own, work = ctx.begun.summing
        work.wait()
        del ctx.begun.summing
        return own, None


class _End(torch.autograd.Function):
    """Waits for the all-gather; its backward begins the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, begun: _Begun) -> Tensor:
        ctx.begun = begun
        begun.work.wait()
        gathered = torch.cat(begun.parts)
        del begun.work, begun.parts
        return gathered

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        summed = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        ctx.begun.summing = _sum_to_owner(summed, async_op=True)
        return summed.new_empty(0), None


_begun: _Begun | None = None  # the gather that is under way


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
    world, own = world_size(), rank()
    if world == 1:
        return x.detach()
    sent = x.detach().contiguous()
    received = torch.empty_like(sent)
    hops = [
        dist.P2POp(dist.isend, sent, (own + 1) % world),
        dist.P2POp(dist.irecv, received, (own - 1) % world),
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
    return dist.new_group(backend="gloo", timeout=TIMEOUT) if world_size() > 1 else None


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


def together(work: Callable[[], T], what: str = "") -> T:
    """Runs ``work`` on this rank; if it failed on any rank, raises on all of them.

    The failing rank raises its own error. The others raise an error with its message: ValueError,
    FileNotFoundError or Lost if it was one, else RuntimeError. So no rank waits for a peer that has
    left.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as caught:
        error = lost.named(caught)
    failures = gather_objects(None if error is None else (_kind(error), str(error)))
    if error is not None:
        raise error
    for number, failure in enumerate(failures):
        if failure is not None:
            raise failure[0](f"rank {number}{' ' + what if what else ''}: {failure[1]}")
    return result  # type: ignore[return-value]


def _kind(error: Exception) -> type[Exception]:
    """The kind of error that the other ranks raise."""
    if isinstance(error, lost.Lost):
        return lost.Lost
    known = type(error) in (ValueError, FileNotFoundError)
    return type(error) if known else RuntimeError


def on_main(work: Callable[[], T]) -> T:
    """Runs ``work`` on rank 0 only; every rank gets its (picklable) result or its error."""
    if world_size() == 1:
        return work()
    result = together(lambda: work() if rank() == 0 else None)
    return broadcast_object(result)  # type: ignore[return-value]
