"""The pool of processes itself, and the collectives on it."""

import os
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mclclip.ranks import collectives, process_group
from tests.distributed.conftest import RankPool
from tests.matrix import in_soak

WORLDS = (1, 3)
ROWS = 12


def whole() -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def own(x: Tensor) -> Tensor:
    return x.chunk(collectives.world_size())[collectives.rank()].clone()


def loss_of(rows: Tensor, everything: Tensor) -> Tensor:
    """A mean over ``rows`` of something that depends on every row, and not linearly."""
    return (rows @ everything.T).logsumexp(dim=1).mean()


def gather_and_differentiate() -> tuple[Tensor, Tensor, Tensor]:
    """(gathered rows, gradient of the own rows, this rank's loss)."""
    rows = own(whole()).requires_grad_()
    everything = collectives.gather_with_grad(rows)
    loss = loss_of(rows, everything)
    loss.backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    return everything.detach(), rows.grad, loss.detach()


def gather_all() -> dict[str, Any]:
    rank = collectives.rank()
    rows = own(whole()).requires_grad_()
    gathered = collectives.gather(rows)
    number = torch.tensor([rank + 1])
    return {
        "gathered": gathered,
        "gathered_has_grad": gathered.requires_grad,
        "sum": collectives.all_reduce_sum(number),
        "number": number,
        "objects": collectives.gather_objects({"rank": rank}),
        "broadcast": collectives.broadcast_object(f"from {rank}"),
        "main": collectives.on_main(lambda: f"work of {rank}"),
    }


def join_late(store: str, late: int) -> tuple[float, float]:
    """(when this rank had joined, when ``init`` let it go on) where rank ``late`` joins last."""
    rank, world_size = collectives.rank(), collectives.world_size()
    process_group.shutdown()
    join, joined = dist.init_process_group, 0.0

    def slowly(*args: Any, **options: Any) -> None:
        nonlocal joined
        join(*args, **options)
        if rank == late:
            time.sleep(0.5)
        joined = time.monotonic()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", slowly)
        process_group.join(torch.device("cpu"), rank, world_size, init_method=store)
    return joined, time.monotonic()


@pytest.mark.parametrize("late", [0, 2])
def test_no_rank_goes_on_before_all_have_joined(ranks: RankPool, tmp_path: Path, late: int) -> None:
    """Who left at once would close connections that its peers are still about to open."""
    times = ranks(3, join_late, f"file://{tmp_path / 'store'}", late)
    assert max(joined for joined, _ in times) <= min(returned for _, returned in times)


@pytest.mark.parametrize("world_size", WORLDS)
def test_gather_with_grad_equals_one_process(ranks: RankPool, world_size: int) -> None:
    """Rows in rank order; the gradient, over W, is that of the mean over the global batch."""
    x = whole().requires_grad_()
    loss = loss_of(x, x)
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    found = ranks(world_size, gather_and_differentiate)
    for everything, _, _ in found:
        assert torch.equal(everything, x.detach())
    gradient = torch.cat([grad for _, grad, _ in found]) / world_size
    torch.testing.assert_close(gradient, x.grad, rtol=1e-12, atol=1e-14)
    mean = torch.stack([loss for _, _, loss in found]).mean()
    torch.testing.assert_close(mean, loss.detach(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("world_size", WORLDS)
def test_collectives(ranks: RankPool, world_size: int) -> None:
    for rank, found in enumerate(ranks(world_size, gather_all)):
        assert torch.equal(found["gathered"], whole())
        assert not found["gathered_has_grad"]
        assert found["sum"].tolist() == [world_size * (world_size + 1) // 2]
        assert found["number"].tolist() == [rank + 1]  # the argument is left alone
        assert found["objects"] == [{"rank": other} for other in range(world_size)]
        assert found["broadcast"] == "from 0"
        assert found["main"] == "work of 0"


def test_one_process_without_a_group() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    assert collectives.gather_with_grad(x) is x
    assert not collectives.gather(x).requires_grad
    assert collectives.all_reduce_sum(x).tolist() == x.tolist()
    assert collectives.gather_objects(3) == [3]


# --- failures ---


def fail_together(bad_rank: int) -> None:
    def work() -> None:
        if collectives.rank() == bad_rank:
            raise ValueError("the data is bad")

    collectives.raise_on_every_rank(work, "reading")


def fail_alone(bad_rank: int) -> None:
    if collectives.rank() == bad_rank:
        raise KeyError("only here")
    collectives.barrier()


def hang_or_die(bad_rank: int, die: bool) -> None:
    if collectives.rank() == bad_rank:
        if die:
            os._exit(3)
        time.sleep(600)
    if die:
        collectives.barrier()


def test_an_error_on_one_rank_is_raised_on_all(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="the data is bad") as caught:
        ranks(3, fail_together, 1)
    notes = "\n".join(caught.value.__notes__)
    for rank in range(3):
        assert f"rank {rank}: ValueError" in notes
    assert "rank 1 reading: the data is bad" in notes


def test_the_pool_outlives_failures(ranks: RankPool) -> None:
    with pytest.raises(KeyError, match="only here") as caught:
        ranks(2, fail_alone, 1)
    assert "rank 1: KeyError" in "\n".join(caught.value.__notes__)
    assert [len(found) for found in ranks(2, gather_all)] == [7, 7]


@in_soak
def test_a_hanging_or_dead_rank_does_not_hang_the_tests() -> None:
    pool = RankPool()
    try:
        with pytest.raises(TimeoutError, match=r"ranks .*1\] had not ended"):
            pool(2, hang_or_die, 1, False, timeout_s=10.0)
        with pytest.raises(Exception, match="terminated abruptly"):  # new processes, so it ran
            pool(2, hang_or_die, 0, True)
    finally:
        pool.kill()


def shift_around() -> tuple[list[Tensor], bool]:
    """What this rank holds after each hop of the ring, and whether it has a gradient."""
    held = [own(whole()).requires_grad_()]
    for _ in range(collectives.world_size()):
        held.append(collectives.shift(held[-1].T).T)  # any layout
    return [x.detach() for x in held], held[-1].requires_grad


@pytest.mark.parametrize("world_size", WORLDS)
def test_shift_is_a_hop_around_the_ring(ranks: RankPool, world_size: int) -> None:
    parts = whole().chunk(world_size)
    for rank, (held, has_grad) in enumerate(ranks(world_size, shift_around)):
        assert not has_grad
        for hop, got in enumerate(held):
            assert torch.equal(got, parts[(rank - hop) % world_size])


def meet_while_one_dies(folder: Path) -> None:
    if collectives.rank() == 1:
        time.sleep(1)
        os._exit(1)
    try:
        collectives.meet()
    except RuntimeError:
        (folder / "noticed").touch()


def test_a_rank_that_waits_for_the_work_of_another_hears_of_its_death(tmp_path: Path) -> None:
    pool = RankPool()
    with pytest.raises(BrokenExecutor):
        pool(2, meet_while_one_dies, tmp_path)
    pool.kill()
    assert (tmp_path / "noticed").exists()
