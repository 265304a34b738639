"""The collectives on real processes, and how their failures end."""

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

WORLD, ROWS = 3, 12


def whole() -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def own(x: Tensor) -> Tensor:
    return x.chunk(collectives.world_size())[collectives.rank()].clone()


def loss_of(rows: Tensor, everything: Tensor) -> Tensor:
    """A mean over ``rows`` of something that depends on every row, and not linearly."""
    return (rows @ everything.T).logsumexp(dim=1).mean()


def use_all() -> dict[str, Any]:
    """What each collective gives this rank."""
    rank = collectives.rank()
    rows = own(whole()).requires_grad_()
    everything = collectives.gather_with_grad(rows)
    loss = loss_of(rows, everything)
    loss.backward()  # type: ignore[no-untyped-call]
    held = [rows]
    for _ in range(collectives.world_size()):
        held.append(collectives.shift(held[-1].T).T)  # any layout
    number = torch.tensor([rank + 1])
    gathered = collectives.gather(rows)
    return {
        "with grad": everything.detach(),
        "gradient": rows.grad,
        "loss": loss.detach(),
        "held": [x.detach() for x in held],
        "gathered": gathered,
        "have grad": gathered.requires_grad or held[-1].requires_grad,
        "sum": collectives.all_reduce_sum(number),
        "number": number,
        "objects": collectives.gather_objects({"rank": rank}),
        "broadcast": collectives.broadcast_object(f"from {rank}"),
        "main": collectives.on_main(lambda: f"work of {rank}"),
    }


def test_collectives_are_their_definitions(ranks: RankPool) -> None:
    """The gradient, over W, is that of the mean over the global batch."""
    results = ranks(WORLD, use_all)
    for rank, found in enumerate(results):
        assert torch.equal(found["gathered"], whole()) and not found["have grad"]
        assert torch.equal(found["with grad"], whole())
        assert found["sum"].tolist() == [WORLD * (WORLD + 1) // 2]
        assert found["number"].tolist() == [rank + 1]  # the argument is left alone
        assert found["objects"] == [{"rank": other} for other in range(WORLD)]
        assert found["broadcast"] == "from 0" and found["main"] == "work of 0"
        for hop, got in enumerate(found["held"]):
            assert torch.equal(got, whole().chunk(WORLD)[(rank - hop) % WORLD])
    x = whole().requires_grad_()
    loss = loss_of(x, x)
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([found["gradient"] for found in results]) / WORLD
    torch.testing.assert_close(gradient, x.grad, rtol=1e-12, atol=1e-14)
    mean = torch.stack([found["loss"] for found in results]).mean()
    torch.testing.assert_close(mean, loss.detach(), rtol=1e-12, atol=0.0)


def test_one_process_without_a_group() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    assert collectives.gather_with_grad(x) is x
    assert not collectives.gather(x).requires_grad
    assert collectives.all_reduce_sum(x).tolist() == x.tolist()
    assert collectives.gather_objects(3) == [3]


def join_late(store: str) -> tuple[float, float]:
    """(when this rank had joined, when ``init`` let it go on) where the last rank joins last."""
    rank, world_size = collectives.rank(), collectives.world_size()
    process_group.shutdown()
    join, joined = dist.init_process_group, 0.0

    def slowly(*args: Any, **options: Any) -> None:
        nonlocal joined
        join(*args, **options)
        if rank == world_size - 1:
            time.sleep(0.5)
        joined = time.monotonic()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", slowly)
        process_group.join(torch.device("cpu"), rank, world_size, init_method=store)
    return joined, time.monotonic()


def test_no_rank_goes_on_before_all_have_joined(ranks: RankPool, tmp_path: Path) -> None:
    """Who left at once would close connections that its peers are still about to open."""
    times = ranks(WORLD, join_late, f"file://{tmp_path / 'store'}")
    assert max(joined for joined, _ in times) <= min(returned for _, returned in times)


# --- failures ---


def fail_together(bad_rank: int) -> None:
    def work() -> None:
        if collectives.rank() == bad_rank:
            raise ValueError("the data is bad")

    collectives.raise_on_every_rank(work, "reading")


def test_an_error_on_one_rank_is_raised_on_all(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="the data is bad") as caught:
        ranks(WORLD, fail_together, 1)
    notes = "\n".join(caught.value.__notes__)
    for rank in range(WORLD):
        assert f"rank {rank}: ValueError" in notes
    assert "rank 1 reading: the data is bad" in notes


def meet_while_one_dies(folder: Path) -> None:
    if collectives.rank() == 1:
        time.sleep(0.2)
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
