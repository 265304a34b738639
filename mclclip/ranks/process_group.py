"""Opening and leaving the process group; this process's rank, device, copies to it, and seeds."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mclclip.ranks.failures import Lost, number_of
from mclclip.ranks.workers import die_with_parent, start_worker

log = logging.getLogger("mclclip")

Memory = Literal["pinned", "pageable"]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """Place of this process: its rank, the number of ranks, and its device."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes shared files and talks to the user."""
        return self.rank == 0


SINGLE = Context()
STARTED = time.monotonic()  # of this process
TIMEOUT = datetime.timedelta(days=1)
_SILENT_S = 3.0  # ranks that start together come within so many seconds of each other


@dataclass
class _Groups:
    """The group over which ranks wait for the work of some of them; how long collectives may take,
    and in which groups (None: the default)."""

    meeting: dist.ProcessGroup | None = None
    limit: datetime.timedelta = TIMEOUT
    limited: list[Any] = field(default_factory=lambda: [None])


_groups = _Groups()


def under_torchrun() -> bool:
    """True where torchrun (or anything that sets its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def pick_device(name: str, local_rank: int = 0, *, deterministic: bool = False) -> torch.device:
    """The device named ``auto``, ``cpu`` or ``cuda``; ``auto`` is a GPU if torch sees one.

    On a GPU it also sets how this process computes: cuDNN's TF32 is off, and with
    ``deterministic`` the same operations give the same bits. Raises ValueError where the name is
    unknown, torch sees no GPU, or this machine has no GPU for ``local_rank``.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device=cuda, but torch sees no GPU here: set device=cpu or auto")
        if local_rank >= (count := torch.cuda.device_count()):
            raise ValueError(
                f"this is process {local_rank} (counted from 0) of this machine, but torch sees "
                f"{count} GPU(s) here: start one process for each GPU, or set device=cpu"
            )
        torch.cuda.set_device(local_rank)
        # TF32, on by default, rounds the inputs of convolutions.
        torch.backends.cudnn.allow_tf32 = False
        if deterministic:
            # Otherwise the backward passes of attention and some convolutions add in any order.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            # On by default here; it would spend time on memory that is overwritten anyway.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        return torch.device("cuda", local_rank)
    if name != "cpu":
        raise ValueError(f"device={name!r} is not known: use auto, cpu or cuda")
    return torch.device("cpu")


def choose_memory(device: torch.device) -> Memory:
    """The kind of main memory that copies to this device begin in; ``pinned`` is page-locked."""
    return "pinned" if device.type == "cuda" else "pageable"


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: torch.compile leaves the function as it is, with a break in the graph.

    It does the same as torch.compiler.disable, but imports torch._dynamo, which takes seconds, at
    the first call instead of at once.
    """
    return _disable_dynamo(function)  # type: ignore[no-any-return, unused-ignore]


@not_compiled
def to_device(tensor: Tensor, device: torch.device, memory: Memory | None = None) -> Tensor:
    """``tensor``, of main memory, on ``device`` (memory None: the device's own choice).

    A copy to a GPU runs beside the host only where it is asked for (``non_blocking``) and begins in
    page-locked memory; otherwise the host waits until the GPU has done all that was queued before
    it. torch keeps the page-locked copy until the transfer is over.
    """
    if (memory or choose_memory(device)) == "pinned":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def init(
    device: str = "auto", *, deterministic: bool = False, limit_s: float | None = None
) -> Context:
    """Joins torchrun's process group and returns this process's Context once all ranks have joined;
    without torchrun there is one process and no group. A group that another library has opened is
    joined as it is, whatever the environment says.

    ``limit_s`` limits the wait for the other ranks, and every collective (None: a day). Errors are
    those of ``pick_device`` and ``join``, and ValueError for variables that name no place among
    ranks.
    """
    if under_torchrun():
        die_with_parent()
    if dist.is_available() and dist.is_initialized():
        here = torch.cuda.current_device() if torch.cuda.is_available() else 0
        local_rank = number_of("LOCAL_RANK", here)
        where = pick_device(device, local_rank, deterministic=deterministic)
        if _groups.meeting is None:
            _open_meeting()
        return Context(dist.get_rank(), dist.get_world_size(), local_rank, where)
    if not under_torchrun():
        if any(name.startswith("ACCELERATE_") for name in os.environ):
            log.warning(
                "accelerate started this process without a rank: it runs as one rank of one; "
                "'torchrun --nproc-per-node N -m mclclip ...' starts N"
            )
        return Context(device=pick_device(device, deterministic=deterministic))
    rank, world_size, local_rank = _read_place()
    where = pick_device(device, local_rank, deterministic=deterministic)
    timeout = TIMEOUT if limit_s is None else datetime.timedelta(seconds=limit_s)
    join(where, rank, world_size, timeout)
    return Context(rank, world_size, local_rank, where)


def _read_place() -> tuple[int, int, int]:
    """Rank, number of ranks and local rank of the environment; raises ValueError for wrong ones."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    values = {name: os.environ.get(name, "") for name in names}
    values["LOCAL_RANK"] = values["LOCAL_RANK"] or "0"
    numbers = {name: values[name] for name in names if name != "MASTER_ADDR"}
    wrong = [name for name, value in numbers.items() if not value.isdecimal()]
    if not wrong and int(values["RANK"]) >= int(values["WORLD_SIZE"]):
        wrong = ["RANK"]
    if wrong:
        said = ", ".join(f"{name}={value or '(not set)'}" for name, value in values.items())
        raise ValueError(
            f"{wrong[0]} of the environment does not fit ({said}): start ranks with torchrun, "
            "which sets them all, or unset RANK and WORLD_SIZE to run as one process"
        )
    return int(values["RANK"]), int(values["WORLD_SIZE"]), int(values["LOCAL_RANK"])


def join(
    device: torch.device,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta = TIMEOUT,
    **options: Any,
) -> None:
    """Opens the default group; returns once all ranks have opened it. It is closed where the
    interpreter ends, not before: a second one could not be opened at the same address.

    ``timeout`` is that of every collective; waits for the work of one rank have none
    (``collectives.meet``). Raises Lost where the other ranks have not come after it. Further
    options are torch's. Runs in a thread: torch does not react to signals while it waits for the
    addresses of its peers, so a rank that waits for a killed one could only be ended by SIGKILL.
    """
    # Objects and barriers go over gloo: a rank that waits there sees a peer's death at once.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    _groups.limit, _groups.limited = timeout, [None]
    options |= {"rank": rank, "world_size": world_size, "timeout": timeout}
    joined: Future[None] = Future()

    def open_group() -> None:
        try:
            dist.init_process_group(backend, **options)
            _open_meeting()
            # A peer may not be connected yet when this rank is. If this rank left now, the peer
            # would fail to join with "connection closed by peer", which says nothing of the cause.
            dist.barrier()
            joined.set_result(None)
        except BaseException as error:
            joined.set_exception(error)

    threading.Thread(target=open_group, name="join", daemon=True).start()
    atexit.register(shutdown)  # see `leave`
    _wait_for_ranks(joined, rank, world_size, timeout.total_seconds())


def _wait_for_ranks(joined: Future[None], rank: int, world_size: int, limit_s: float) -> None:
    """Returns once this rank has joined; says what it waits for where the others do not come."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    waiting = f"rank {rank} waits at {where} for the other {world_size - 1} of {world_size} ranks"
    cause = (
        f"RANK={rank} and WORLD_SIZE={world_size} are set in the environment: start the others, or "
        "unset both to run as one process"
    )
    with suppress(TimeoutError):
        joined.result(min(_SILENT_S, limit_s))
        return
    log.warning("%s for up to %g s (peer_timeout_s); %s", waiting, limit_s, cause)
    try:
        joined.result(max(limit_s - _SILENT_S, 0))
    except TimeoutError:
        raise Lost(f"{waiting}, which did not come within {limit_s:g} s; {cause}") from None


def _open_meeting() -> None:
    """Opens the group of `meeting`. All ranks call it together."""
    _groups.meeting = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))


def meeting() -> dist.ProcessGroup | None:
    """The group whose waits have no limit, but end where the connection to a rank is lost."""
    return _groups.meeting


def limit() -> datetime.timedelta:
    """How long a collective may take, for groups that are opened beside the default one."""
    return _groups.limit


@contextmanager
def without_limit() -> Iterator[None]:
    """In the block collectives have no limit (a day), in the default group and in meshes."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    _set_timeouts(TIMEOUT, _groups.limited)
    try:
        yield
    finally:
        _set_timeouts(_groups.limit, _groups.limited)


def _set_timeouts(timeout: datetime.timedelta, groups: Sequence[Any]) -> None:
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def make_mesh(context: Context, *shape: int) -> DeviceMesh:
    """A device mesh of all ranks, whose groups have the limit of the default one."""
    mesh = init_device_mesh(context.device.type, shape)
    groups = mesh.get_all_groups() if context.world_size > 1 else []
    _set_timeouts(_groups.limit, groups)
    _groups.limited += groups
    return mesh


def shutdown() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        _groups.meeting = None


def leave(code: int, close_group: bool = True) -> NoReturn:
    """Flushes the output and ends this process with ``code``, without the interpreter's shutdown.

    A gloo process that ran autograd may die in that shutdown with SIGABRT ("terminate called
    without an active exception"), and a finished run must not look failed. ``close_group``: pass
    False where a peer may be gone, since closing the group waits for it.
    """
    if close_group and code == 0:
        shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def seed_everything(*words: int) -> None:
    """Seeds the global generators of torch, numpy and Python from the integers ``words``.

    Only model randomness (dropout, initial weights) draws from them; data order never does.
    """
    state = np.random.SeedSequence([word & 0xFFFFFFFF for word in words]).generate_state(1)
    torch.manual_seed(int(state[0]))
    np.random.seed(int(state[0]))
    random.seed(int(state[0]))


def start_loader_worker(worker: int) -> None:
    """``worker_init_fn`` of every DataLoader: ``start_worker``, and one thread for torch."""
    start_worker()
    torch.set_num_threads(1)


def count_cores() -> int:
    """Processor cores of this process: those of its machine, dealt among the ranks there."""
    return len(os.sched_getaffinity(0)) // max(number_of("LOCAL_WORLD_SIZE", 1), 1)


def choose_num_threads(cores: int) -> int:
    """Intra-op threads of a process that may use so many cores.

    One core is left to what reads pictures: OpenMP's threads spin while they wait for each other,
    and a thread of them without a core slows a step to a tenth.
    """
    return max(cores - 1, 1)


def _leave_a_core() -> None:
    """Applies ``choose_num_threads`` to this process, unless its user has chosen fewer threads."""
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return
    torch.set_num_threads(min(torch.get_num_threads(), choose_num_threads(count_cores())))


_leave_a_core()  # whoever imports mclclip computes so: a verb, a program, a worker before it starts


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Runs a block with ``count`` intra-op threads (None: unchanged)."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
