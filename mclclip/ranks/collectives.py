"""Collectives: functions that all ranks call together.

With one process each returns its input. `UnwrappedParameters` is the interface of parameters whose
gradients the engines do not average over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mclclip.ranks import failures, process_group

T = TypeVar("T")
_LONGEST_PAUSE_S = 0.2
_in_on_main: list[bool] = []  # not empty while this rank does the work of `on_main`
# torch 2.13 renamed reduce_scatter_tensor to reduce_scatter_single, and warns of the old name.
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def world_size() -> int:
    """Returns the number of ranks (1 if no process group is open)."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Returns this process's rank (0 if no process group is open)."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class GatherWithGrad(torch.autograd.Function):
    """An all-gather. Its backward sums the gradients of all ranks for each row and returns the sum
    to the rank that the row came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return sum_to_owner(grad_outputs[0].clone(memory_format=torch.contiguous_format))


def sum_to_owner(x: Tensor) -> Tensor:
    """Sums ``x`` [W*b, ...] over the W ranks and returns this rank's slice [b, ...] of the sum.

    Overwrites ``x``.
    """
    if world_size() == 1:
        return x
    if x.device.type == "cuda":
        local = torch.empty_like(x[: len(x) // world_size()])
        _reduce_scatter(local, x)
        return local
    # gloo has no reduce_scatter for every dtype, so all ranks get the sum and take their slice.
    dist.all_reduce(x)
    return x.chunk(world_size())[rank()]


def gather_with_grad(x: Tensor) -> Tensor:
    """Concatenates the ``x`` [b, ...] of all ranks in rank order to [W*b, ...], with gradient.

    Each rank gets the gradients of its rows, summed over the ranks' losses. So if each loss is a
    mean over the rank's own rows, and DDP averages the gradients of the parameters, the result is
    the gradient of the mean over the global batch. All ranks must pass the same shape.
    """
    if world_size() == 1:
        return x
    gathered: Tensor = GatherWithGrad.apply(x)  # type: ignore[no-untyped-call]
    return gathered


class _SumWithGrad(torch.autograd.Function):
    """An all-reduce. Its backward is one too, since every rank's loss depends on every input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return all_reduce_sum(grad_outputs[0])


def all_reduce_with_grad(x: Tensor) -> Tensor:
    """Returns the sum of ``x`` over the ranks; its gradient is summed over the ranks too."""
    if world_size() == 1:
        return x
    total: Tensor = _SumWithGrad.apply(x)  # type: ignore[no-untyped-call]
    return total


def gather(x: Tensor) -> Tensor:
    """Concatenates ``x`` [b, ...] of all ranks in rank order to [W*b, ...], without gradient."""
    if world_size() == 1:
        return x.detach()
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)


def shift(x: Tensor) -> Tensor:
    """Sends ``x`` to the next rank and returns what the rank before sent, without gradient.

    The ranks form a ring: the first receives from the last. All ranks must pass the same shape.
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
    """Returns the sum of ``x`` over the ranks as a new tensor without gradient."""
    total = x.detach().clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def all_reduce_max(x: Tensor) -> Tensor:
    """Returns the elementwise maximum of ``x`` over the ranks as a new tensor without gradient."""
    largest = x.detach().clone()
    if world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def side_group() -> Any:
    """Opens a new gloo group of all ranks, for a background thread or for CPU tensors.

    Returns None with one process. A thread needs its own group, since collectives of two threads in
    one group could be matched in the wrong order; NCCL does not move CPU tensors. All ranks call
    this at the same point of their main threads.
    """
    if world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=process_group.open_groups.timeout)


def gather_objects(item: T, group: Any = None) -> list[T]:
    """Returns the ``item`` of all ranks in rank order; it must be picklable. ``group``: the default
    one, or one that `side_group` opened."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item, group=group)
    return items


def broadcast_object(item: T) -> T:
    """Returns the ``item`` of rank 0 on all ranks; it must be picklable."""
    if world_size() == 1:
        return item
    items: list[T] = [item]
    dist.broadcast_object_list(items)
    return items[0]


def broadcast(x: Tensor) -> Tensor:
    """Overwrites ``x`` with rank 0's and returns it; all must pass the same shape and dtype."""
    if world_size() > 1:
        dist.broadcast(x, 0)
    return x


def barrier() -> None:
    """Waits for all ranks, at most as long as a collective may take."""
    if world_size() > 1:
        dist.barrier()


def meet() -> None:
    """Waits until all ranks have called it, for hours if need be; raises if a rank dies meanwhile.

    Call it after work that takes the ranks unequal times, such as work of rank 0 alone: the limit
    of other collectives, ``peer_timeout_s``, does not apply.
    """
    if world_size() == 1:
        return
    waiting, pause_s = dist.barrier(process_group.open_groups.meeting, async_op=True), 0.001
    while not waiting.is_completed():  # wait() would not react to signals
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    waiting.wait()


def raise_on_every_rank(work: Callable[[], T], what: str = "") -> T:
    """Runs ``work`` on all ranks and returns its result; if it fails on any rank, all ranks raise.

    So no rank waits in the next collective for a peer that has failed. The failing rank raises its
    own error. The others raise an error with that message after 'rank 2 embed: ', where ``what`` is
    'embed'. It is a ValueError, FileNotFoundError or Lost if the original was one, else a
    RuntimeError. Ranks wait for each other without a limit (`meet`).
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
    """Runs ``work`` on rank 0 only. All ranks get its result (picklable), or its error.

    If ``work`` itself calls this function, that is a plain call on rank 0, since the other ranks
    wait for the end of the outer call.
    """
    if world_size() == 1 or _in_on_main:
        return work()

    def run_alone() -> T:
        _in_on_main.append(True)
        try:
            return work()
        finally:
            _in_on_main.pop()

    result = raise_on_every_rank(lambda: run_alone() if rank() == 0 else None)
    return broadcast_object(result)  # type: ignore[return-value]


class UnwrappedParameters(Protocol):
    """Parameters that the engine does not wrap, such as class centers sharded over the ranks.

    Their gradients are not averaged over the ranks, and they have their own optimizer. They keep
    the gradient that the backward pass of their loss (a ``torch.autograd.Function``) computes: with
    gradient caching, autograd fills ``.grad`` only for parameters of the wrapped module.
    """

    def begin(self, step: int, loss_scale: Tensor | float = 1.0) -> None:
        """Prepares step number ``step``, in which the loss is multiplied by ``loss_scale`` before
        its backward pass."""

    def zero_grad(self) -> None:
        """Drops the gradient."""

    def grad_square(self) -> Tensor:
        """Returns the sum of squares of the gradient over all ranks: float64, 0-dimensional."""

    def step(self, lr: float, factor: Tensor | float = 1.0) -> None:
        """Steps with ``factor`` times the gradient at the learning rate ``lr``."""

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what a resumed training needs, by names that no other part of it uses."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads the tensors that `state_dict` names; ignores all others in ``state``."""
