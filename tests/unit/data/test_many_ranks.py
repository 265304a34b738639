"""The batches of 256 ranks, and of other numbers of ranks that go on with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mclclip.data.batches import TrainingBatches
from mclclip.data.epoch_plan import EpochPlan, PlannedBatch
from mclclip.data.groups import group_samples
from mclclip.data.picture_transform import PictureTransform
from mclclip.data.samples import Sample
from tests.matrix import kept

RANKS, SAMPLES, EPOCH = 256, 875, 3
LABELS = np.random.default_rng(0).choice(5, SAMPLES, p=[0.45, 0.35, 0.1, 0.06, 0.04])
LABELS[::50] = -1
GROUPED = group_samples(LABELS, (5,))


class Numbers:
    """Stands for the reader of shards: a sample is its number."""

    def __init__(self) -> None:
        self.index = SimpleNamespace(draw_captions=lambda ids, keys: np.zeros(len(ids), np.int64))
        self.bytes = SimpleNamespace(reader=SimpleNamespace(urls=()))
        self.tokenizer, self.transform = None, PictureTransform()
        self.extras = ()

    def read_many(self, sample_ids: np.ndarray) -> list[int]:
        return [int(i) for i in sample_ids]

    def decode(self, raw: int, number: int, views: list[Any], *_: Any) -> Sample:
        return Sample(raw, [torch.tensor([raw]) for _ in views])


def of_ranks(world_size: int, policy: Any, order: Any) -> list[TrainingBatches]:
    dataset: Any = Numbers()
    plan = EpochPlan(GROUPED, RANKS, policy, order, seed=3, stage=1, epoch=0)
    return [
        TrainingBatches(dataset, plan, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def step_of(ranks: list[TrainingBatches], step: int) -> list[list[int]]:
    """The sample ids of each rank."""
    return [batches[step].sample_id.tolist() for batches in ranks]


def plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal plans answer a step once, for all ranks: they are pure (``test_epoch_plan``)."""
    known: dict[tuple[int, int], PlannedBatch] = {}
    batch = EpochPlan.batch

    def once(self: EpochPlan, step: int) -> PlannedBatch:
        if (self.epoch, step) not in known:
            known[self.epoch, step] = batch(self, step)
        return known[self.epoch, step]

    monkeypatch.setattr(EpochPlan, "batch", once)


@pytest.mark.parametrize(
    ("policy", "order"), kept([("backoff", "proportional"), ("mask", "round_robin")], 0)
)
def test_hundreds_of_ranks_share_every_batch_and_go_on_on_any_number(
    policy: Any, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs: each rank has the same steps; their columns are the plan's batch, without overlap
    and gap; from a step on, other numbers of ranks, which plan anew, have the same global batches.
    """
    ranks = of_ranks(RANKS, policy, order)
    assert {batches.steps_per_epoch for batches in ranks} == {EPOCH}
    plan = EpochPlan(GROUPED, RANKS, policy, order, 3, 1, 0)
    whole = []
    for step in range(EPOCH + 1):
        with monkeypatch.context() as patch:
            plan_once(patch)
            parts = step_of(ranks, step)
        assert {len(part) for part in parts} == {1}
        whole.append([i for part in parts for i in part])
        planned = plan.of_epoch(step // EPOCH).batch(step % EPOCH)
        assert whole[-1] == planned.ids.tolist() and len(set(whole[-1])) == RANKS
    drawn = {i for batch in whole[:EPOCH] for i in batch}
    assert len(drawn) == EPOCH * RANKS and min(LABELS[list(drawn)]) >= 0
    assert set(whole[EPOCH]) != set(whole[0])
    restart = 2
    for world_size in (64, 1):
        others = of_ranks(world_size, policy, order)
        for step in range(restart, EPOCH + 1):
            parts = step_of(others, step)
            assert {len(part) for part in parts} == {RANKS // world_size}
            assert [i for part in parts for i in part] == whole[step]
