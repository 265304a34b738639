"""A gather that began early has the bits of one at once, and is under way while towers run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mclclip.data.batches import Batch
from mclclip.models.loading import load_towers
from mclclip.objectives.base import parse
from mclclip.objectives.contrast import Contrast
from mclclip.objectives.info_nce import InfoNCE
from mclclip.ranks import collectives
from mclclip.train.loop import Trainee
from tests import tiny
from tests.distributed.test_collectives import WORLDS, loss_of, own, whole
from tests.distributed.test_engines import batch_of, make_engine, train
from tests.distributed.test_engines import whole as whole_state
from tests.matrix import kept

Ranks = Callable[..., list[Any]]


def gather_twice(early: bool) -> list[Tensor]:
    """Gathered rows, losses and gradients of two sides; the first may begin before the second.

    A weight of both sides and a sum over the ranks stand between.
    """
    weight = torch.full((3,), 1.5, dtype=torch.float64, requires_grad=True)
    rows = own(whole()).requires_grad_()
    first = rows * weight
    if early:
        collectives.begin_gather(first)
    between = collectives.all_reduce_with_grad((rows * weight).sin().sum())
    second = (rows * weight).cos()
    every = [collectives.gather_with_grad(side) for side in (first, second, first)]
    loss = loss_of(first, every[1]) + loss_of(second, every[0]) + every[2].square().mean() + between
    assert every[0].requires_grad
    loss.backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None and weight.grad is not None
    return [*(side.detach() for side in every), loss.detach(), rows.grad, weight.grad]


@pytest.mark.parametrize("world_size", WORLDS)
def test_an_early_gather_equals_one_at_once(ranks: Ranks, world_size: int) -> None:
    """Bit for bit; a second gather of the same rows is one of its own."""
    at_once, early = (ranks(world_size, gather_twice, early) for early in (False, True))
    for rank in range(world_size):
        assert all(map(torch.equal, at_once[rank], early[rank]))


def gather_without_grad() -> tuple[Tensor, bool, bool]:
    """Rows that began early and have no gradient; whether they have; whether any is under way."""
    rows = own(whole())
    collectives.begin_gather(rows)
    found = collectives.gather_with_grad(rows)
    return found, found.requires_grad, collectives._begun is not None


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_without_gradient(ranks: Ranks, world_size: int) -> None:
    """Those of a frozen tower."""
    for found, has_grad, under_way in ranks(world_size, gather_without_grad):
        assert torch.equal(found, whole())
        assert not has_grad
        assert not under_way


# --- training ----------------------------------------------------------------------------------


def trained(name: str, precision: str, early: bool, options: dict[str, Any]) -> str:
    """A digest of losses and weights after four steps under an engine."""
    with patch.object(Contrast, "gathers_images", early):
        engine = make_engine(name, precision, **options)
        losses = train(engine, range(4))
        state = whole_state(engine.state_dict())
    digest = hashlib.sha256(str([loss.hex() for loss in losses]).encode())
    for key in sorted(state):
        digest.update(key.encode() + state[key].tobytes())
    return digest.hexdigest()


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("ddp", "fp32", {"clip_grad_norm": 0.5}),
    ("fsdp", "fp32", {}),
    ("ddp", "bf16", {}),
    ("ddp", "fp32", {"micro_batch": 3}),
]


@pytest.mark.parametrize(("name", "precision", "options"), kept(CASES, 0), ids=str)
@pytest.mark.parametrize("world_size", kept([2, 3], 0))
def test_training_has_the_same_bits(
    ranks: Ranks, world_size: int, name: str, precision: str, options: dict[str, Any]
) -> None:
    at_once, early = (
        ranks(world_size, trained, name, precision, each, options) for each in (False, True)
    )
    assert early == at_once


class Log:
    """What happened in a step, in order: towers, and collectives from start to end."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The collective itself; its beginning is noted, and its end if that is waited for."""

        def call(*args: Any, async_op: bool = False, **options: Any) -> Any:
            self.events.append(f"{name} begins" if async_op else name)
            work = function(*args, async_op=async_op, **options)
            return SimpleNamespace(wait=lambda: self._end(work, name)) if async_op else work

        return call

    def _end(self, work: Any, name: str) -> None:
        work.wait()
        self.events.append(f"{name} ends")

    def tower(self, tower: nn.Module, name: str) -> None:
        """Notes the tower's passes."""
        tower.register_forward_pre_hook(lambda *_: self.events.append(f"{name} forward"))
        tower.register_full_backward_hook(lambda *_: self.events.append(f"{name} backward"))


def events_of_a_step(cached_text: bool) -> list[str]:
    """The events of a step's two passes without an engine."""
    model = load_towers(tiny.MODEL, seed=1).train()
    batch, log = batch_of(0), Log()
    if cached_text:
        batch.text, batch.text_features = None, torch.ones(len(batch), model.feature_dim)
    log.tower(model.clip.visual.transformer, "image")
    log.tower(model.clip.transformer, "text")
    with (
        patch.object(dist, "all_gather", log.watched(dist.all_gather, "gather")),
        patch.object(dist, "all_reduce", log.watched(dist.all_reduce, "sum")),
    ):
        trainee = Trainee(model, InfoNCE())
        trainee(batch, only_features=True)
        assert log.events == ["image forward", *(["text forward"] if not cached_text else [])]
        log.events.clear()
        trainee(batch)["loss"].backward()
    return log.events


def test_the_text_tower_runs_while_messages_are_under_way(ranks: Ranks) -> None:
    """In both passes, in the same order on all ranks; ``sum`` is that of rows without negatives."""
    forward = ["image forward", "gather begins", "text forward", "gather ends", *["gather"] * 3]
    for events in ranks(2, events_of_a_step, False):
        assert events[: len(forward)] == forward
        backward = events[len(forward) :]
        assert backward[0] == "sum"
        assert sorted(backward[1:3]) == ["sum", "sum begins"]  # texts, images
        assert backward[3:] == ["text backward", "sum ends", "image backward"]


def test_nothing_begins_early_where_nothing_runs_after_it(ranks: Ranks) -> None:
    """With stored captions, and in one process."""
    for world_size, cached in ((2, True), (1, False)):
        for events in ranks(world_size, events_of_a_step, cached):
            assert not any(event.endswith(("begins", "ends")) for event in events)
            assert events[-1] == "image backward"
            assert events.count("gather") == (4 if world_size > 1 else 0)


class TwoViews(nn.Module):
    """A model of images alone: one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 6, dtype=torch.float64)

    def forward(self, image: Tensor | None = None, **others: Any) -> dict[str, Tensor]:
        if image is None:
            return {}
        return {"image_features": nn.functional.normalize(self.layer(image.flatten(1)), dim=1)}


def loss_of_two_views(early: bool) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients, over the ranks, of two views of the images."""
    torch.manual_seed(0)
    setting: Any = SimpleNamespace(dtype=torch.float64)
    model: Any = TwoViews()
    with patch.object(Contrast, "gathers_images", early):
        trainee = Trainee(model, parse({"kind": "nt_xent"}).build(setting))
        given = batch_of(0, torch.float64)
        views = [given.views[0], given.views[0].flip(3)]
        batch = Batch(**{**vars(given), "views": views, "text": None})
        loss = trainee(batch)["loss"]
    loss.backward()
    world = collectives.world_size()
    gradients = [collectives.all_reduce_sum(p.grad) / world for p in model.parameters()]
    return collectives.all_reduce_sum(loss) / world, gradients


def test_views(ranks: Ranks) -> None:
    """The first view's features are sent while the second runs: the same bits, N ranks as one."""
    loss, gradients = loss_of_two_views(False)
    for world_size in (2, 4):
        at_once, early = (ranks(world_size, loss_of_two_views, each) for each in (False, True))
        for one, other in zip(at_once, early, strict=True):
            assert torch.equal(one[0], other[0])
            assert all(map(torch.equal, one[1], other[1]))
            torch.testing.assert_close(other[0], loss, rtol=1e-12, atol=0.0)
            for got, wanted in zip(other[1], gradients, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-14)
