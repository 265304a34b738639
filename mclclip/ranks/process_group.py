"""Opens and leaves the process group; chooses this process's device, threads and seeds."""

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
    """This process's rank, the number of ranks, its rank on this machine, and its device."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes shared files and prints for the user."""
        return self.rank == 0


SINGLE = Context()
STARTED = time.monotonic()  # when this process began
TIMEOUT = datetime.timedelta(days=1)
_SILENT_S = 3.0  # a rank that waits longer than this for the others to start says so


@dataclass
class _Groups:
    """The process groups besides the default one.

    meeting  the group in which `collectives.meet` waits, without a limit
    timeout  how long a collective in the other groups may take
    limited  the groups with that timeout; None stands for the default group
    """

    meeting: dist.ProcessGroup | None = None
    timeout: datetime.timedelta = TIMEOUT
    limited: list[Any] = field(default_factory=lambda: [None])


open_groups = _Groups()


def under_torchrun() -> bool:
    """Returns True if torchrun, or a launcher that sets its variables, started this process.

    A rank of several counts without MASTER_ADDR too, since alone it would do the work of all.
    """
    size = os.environ.get("WORLD_SIZE", "")
    return "RANK" in os.environ and size != "" and ("MASTER_ADDR" in os.environ or size != "1")


def pick_device(name: str, local_rank: int = 0, *, deterministic: bool = False) -> torch.device:
    """Returns the device ``name``: 'cpu', 'cuda', or 'auto', which is a GPU if torch sees one.

    For a GPU also switches cuDNN's TF32 off, and with ``deterministic`` makes the same operations
    give the same bits. Raises ValueError if torch sees no GPU, or none for ``local_rank``.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device(name)
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
        # On by default with it: spends time on memory that is overwritten anyway.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return torch.device("cuda", local_rank)


def choose_memory(device: torch.device) -> Memory:
    """Chooses from which main memory to copy to ``device``: 'pinned' (page-locked) for a GPU."""
    return "pinned" if device.type == "cuda" else "pageable"


def choose_no_autocast(device: torch.device) -> torch.autocast:
    """Returns a context in which tensors keep their dtypes, even within an autocast."""
    return torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False)


def choose_flash_attention(device: torch.device, length: int, deterministic: bool) -> bool:
    """Chooses whether attention among ``length`` patches may use FlashAttention's kernels.

    Deterministic training on a GPU has these and torch's memory-efficient ones (cuDNN's are not
    deterministic). The latter take 0.58 of the time at 50 patches of 64 columns a head, and 1.13 of
    it at 257 (one H100, bf16, forward and backward).
    """
    return device.type != "cuda" or not deterministic or length > 128


# Dense products in half precision, by the makers' data sheets: TFLOP/s by a part of a GPU's name.
# The first that fits counts.
_PEAK_TFLOPS = {
    "B200": 2250.0, "GH200": 989.0, "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0,
    "A100": 312.0, "A800": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0, "A40": 150.0,
    "A10G": 70.0, "A10": 125.0, "RTX 6000 Ada": 364.0, "RTX A6000": 155.0, "RTX 4090": 165.0,
    "RTX 3090": 71.0, "V100": 125.0, "T4": 65.0,
}  # fmt: skip


def choose_peak_tflops(device: torch.device) -> float | None:
    """Chooses the highest rate of dense products in half precision, in TFLOP/s, that the device's
    data sheet names; None for a CPU and for an unknown GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that torch.compile is to leave alone; it breaks the graph there.

    torch.compiler.disable does the same, but imports torch._dynamo at once, which takes seconds;
    this does so at the first call.
    """
    return _disable_dynamo(function)  # type: ignore[no-any-return, unused-ignore]


@not_compiled
def to_device(tensor: Tensor, device: torch.device, memory: Memory | None = None) -> Tensor:
    """Copies ``tensor`` from main memory to ``device``; ``memory``: by default `choose_memory`.

    From pinned memory the copy to a GPU runs while the host goes on; torch keeps the pinned copy
    until the transfer is over. From other memory the host would wait until the GPU has done all
    that was queued before.
    """
    if (memory or choose_memory(device)) == "pinned":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def start_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Starts to copy ``tensor`` to main memory. The function that it returns waits for the copy and
    returns it; it does not wait for what a GPU was given to do since. The copy is the caller's."""
    copied = tensor.to("cpu", non_blocking=True)  # of a GPU's to pinned memory
    if choose_memory(tensor.device) == "pageable":
        return lambda: copied
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        event.synchronize()
        return copied.clone()  # gives the pinned memory back

    return wait


def init(
    device: str = "auto", *, deterministic: bool = False, limit_s: float | None = None
) -> Context:
    """Joins torchrun's process group and returns this process's Context once all ranks have joined.

    Without torchrun there is one process and no group. A group that another library has opened is
    used as it is, whatever the environment says.

    ``limit_s`` limits the wait for the other ranks and every collective (None: a day). Raises the
    errors of `pick_device` and `join`, and ValueError if RANK, WORLD_SIZE and the other variables
    of torchrun do not fit together, or srun started several tasks without torchrun.
    """
    if under_torchrun():
        die_with_parent()
    if dist.is_available() and dist.is_initialized():
        here = torch.cuda.current_device() if torch.cuda.is_available() else 0
        local_rank = number_of("LOCAL_RANK", here)
        where = pick_device(device, local_rank, deterministic=deterministic)
        if open_groups.meeting is None:
            _open_meeting()
        return Context(dist.get_rank(), dist.get_world_size(), local_rank, where)
    if not under_torchrun():
        tasks = number_of("SLURM_STEP_NUM_TASKS", 1)
        if tasks > 1 and "SLURM_PTY_PORT" not in os.environ:  # that is a shell of task 0 alone
            raise ValueError(
                f"srun started {tasks} tasks, and each would run alone: use 'sbatch "
                "slurm/mclclip.sbatch', or one torchrun for each node ('srun --ntasks-per-node=1 "
                "torchrun ...'); tasks that are to run alone unset SLURM_STEP_NUM_TASKS"
            )
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
    """Reads (rank, number of ranks, local rank) from the environment. Raises ValueError if the
    variables are missing or do not fit together."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    values = {name: os.environ.get(name, "") for name in names}
    values["LOCAL_RANK"] = values["LOCAL_RANK"] or "0"
    numbers = {name: values[name] for name in names if name != "MASTER_ADDR"}
    wrong = [name for name, value in numbers.items() if not value.isdecimal()]
    if not values["MASTER_ADDR"]:
        wrong = ["MASTER_ADDR"]
    elif not wrong and int(values["RANK"]) >= int(values["WORLD_SIZE"]):
        wrong = ["RANK"]
    if wrong:
        listed = ", ".join(f"{name}={value or '(not set)'}" for name, value in values.items())
        raise ValueError(
            f"{wrong[0]} of the environment does not fit ({listed}): start ranks with torchrun, "
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
    """Opens the default process group and returns once all ranks have opened it.

    ``timeout`` limits this wait, after which Lost is raised, and every collective but
    `collectives.meet`. ``options`` are those of torch's init_process_group. The group stays open
    until the interpreter ends, since a second one could not be opened at the same address.

    A thread opens it: torch ignores signals while it waits for its peers' addresses, so only
    SIGKILL could end a rank that waits for a dead one.
    """
    # Objects and barriers go over gloo, where a waiting rank sees a peer's death at once.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    open_groups.timeout, open_groups.limited = timeout, [None]
    options |= {"rank": rank, "world_size": world_size, "timeout": timeout}
    joined: Future[None] = Future()

    def open_group() -> None:
        try:
            dist.init_process_group(backend, **options)
            _open_meeting()
            # This rank may be connected before a peer is. If it left now, the peer would fail with
            # "connection closed by peer", which does not name the cause.
            dist.barrier()
            joined.set_result(None)
        except BaseException as error:
            joined.set_exception(error)

    threading.Thread(target=open_group, name="join", daemon=True).start()
    atexit.register(shutdown)
    _wait_for_ranks(joined, rank, world_size, timeout.total_seconds())


def _wait_for_ranks(joined: Future[None], rank: int, world_size: int, limit_s: float) -> None:
    """Waits until this rank has ``joined``. Warns if the other ranks are late, and raises Lost if
    they have not come after ``limit_s`` seconds."""
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
    """Opens the group in which ranks wait without a limit. All ranks call it together."""
    open_groups.meeting = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))


@contextmanager
def without_limit() -> Iterator[None]:
    """Raises the limit of collectives to a day in the block, in the default group and in meshes."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    _set_timeouts(TIMEOUT, open_groups.limited)
    try:
        yield
    finally:
        _set_timeouts(open_groups.timeout, open_groups.limited)


def _set_timeouts(timeout: datetime.timedelta, groups: Sequence[Any]) -> None:
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def make_mesh(context: Context, *shape: int) -> DeviceMesh:
    """Makes a device mesh of all ranks; its collectives have the timeout of the default group.

    ``shape``: the number of shards, or of copies and of the shards of each.
    """
    names = ("copies", "shards")[-len(shape) :]
    mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=names)
    groups = mesh.get_all_groups() if context.world_size > 1 else []
    _set_timeouts(open_groups.timeout, groups)
    open_groups.limited += groups
    return mesh


def shutdown() -> None:
    """Closes the process group if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        open_groups.meeting = None


def leave(code: int, close_group: bool = True) -> NoReturn:
    """Flushes the output and ends this process with ``code``, without the interpreter's shutdown.

    In that shutdown a gloo process that ran autograd may die of SIGABRT ("terminate called without
    an active exception"), and a finished run would look failed. ``close_group``: False if a peer
    may be dead, since closing the group waits for all peers.
    """
    if close_group and code == 0:
        shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def seed_everything(*words: int) -> None:
    """Seeds the global random generators of torch, numpy and Python with the integers ``words``.

    Only the model draws from them (dropout, initial weights); the order of the data does not.
    """
    state = np.random.SeedSequence([word & 0xFFFFFFFF for word in words]).generate_state(1)
    torch.manual_seed(int(state[0]))
    np.random.seed(int(state[0]))
    random.seed(int(state[0]))


@contextmanager
def keep_generators() -> Iterator[None]:
    """Afterwards the global random generators of the CPU have the states that they had before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def start_loader_worker(worker: int) -> None:
    """Prepares a DataLoader's worker (as its ``worker_init_fn``), which gets one torch thread."""
    start_worker()
    torch.set_num_threads(1)


def count_cores() -> int:
    """Returns the cores that this process may use, divided by the ranks on its machine."""
    return len(os.sched_getaffinity(0)) // max(number_of("LOCAL_WORLD_SIZE", 1), 1)


def choose_num_threads(cores: int) -> int:
    """Chooses the number of torch's threads for a process with this many ``cores``: one less.

    The last core is for the workers that read pictures. OpenMP's threads spin while they wait for
    each other, so one thread without a core slows a step to a tenth of its speed.
    """
    return max(cores - 1, 1)


def _leave_a_core() -> None:
    """Sets torch's number of threads, unless the user has set OMP_NUM_THREADS or fewer threads."""
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return
    torch.set_num_threads(min(torch.get_num_threads(), choose_num_threads(count_cores())))


_leave_a_core()  # at the import, so that it holds for verbs and for other programs alike


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Runs the block with ``count`` torch threads (None: unchanged)."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
