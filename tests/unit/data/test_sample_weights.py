"""Weights of samples: how often epochs draw them, what is written, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from mclclip.data.coverage import coverage_report
from mclclip.data.epoch_plan import EpochPlan
from mclclip.data.groups import GroupedIndex, StageGroups, group_samples
from mclclip.data.labels import WEIGHT_UNIT, SampleWeights, locate_draws
from mclclip.data.options import DataConfig, PlanConfig, Policy, SourceConfig
from mclclip.run.artifacts import INTENT
from mclclip.util.files import write_json

NUM_SAMPLES, RADICES = 600, (3, 2)
RNG = np.random.default_rng(7)
LABELS = RNG.integers(-1, 6, NUM_SAMPLES)
WEIGHTS = RNG.choice(np.array([0, 0.3, 1, 1, 2.5, 6], np.float32), NUM_SAMPLES)
USED = (LABELS >= 0) & (WEIGHTS > 0)


def weights(values: np.ndarray | None = WEIGHTS, per_epoch: int | None = None) -> SampleWeights:
    return SampleWeights(values, np.ones(1), np.zeros(NUM_SAMPLES, np.int32), per_epoch)


def plan_of(grouped: GroupedIndex, policy: Policy, epoch: int = 0, block: int = 1) -> EpochPlan:
    return EpochPlan(grouped, 16, policy, "proportional", 3, 1, epoch, block)


def counts(plan: EpochPlan) -> np.ndarray:
    ids = [plan.batch(step).ids for step in range(plan.steps_per_epoch)]
    return np.bincount(np.concatenate(ids), minlength=NUM_SAMPLES)


def test_an_epoch_in_blocks_draws_the_same_samples_as_often(block: int = 2) -> None:
    """In another order: draws are numbered alike, and blocks of them are shuffled."""
    grouped = group_samples(np.zeros(NUM_SAMPLES, np.int64), (1,), weights=weights(per_epoch=640))
    assert grouped.num_draws == 640  # a virtual epoch scales all weights, and none
    plain = group_samples(LABELS, RADICES, weights=weights(None, 160))
    assert plan_of(plain, "backoff").steps_per_epoch == 160 // 16
    one, other = plan_of(grouped, "drop"), plan_of(grouped, "drop", block=block)
    assert one.remainder == 0 and counts(one).max() > 1
    np.testing.assert_array_equal(counts(one), counts(other))
    assert one.batch(0).ids.tolist() != other.batch(0).ids.tolist()


@pytest.mark.parametrize("num_rows", [1, 65, 1000])
def test_a_group_draws_every_row_as_often_as_its_weight_says(num_rows: int) -> None:
    """Against the definition: pieces of equal weight, one random point in each."""
    rng = np.random.default_rng(num_rows)
    units = np.rint(rng.choice([0.01, 0.5, 1, 3.7], num_rows) * WEIGHT_UNIT).astype(np.int64)
    ends, draws = np.cumsum(units), max(1, int(units.sum() // WEIGHT_UNIT))
    number = np.arange(draws)
    found = np.zeros(num_rows)
    epochs = 40
    for key in range(epochs):
        rows, occurrence = locate_draws(
            ends,
            np.tile([[0, num_rows]], (draws, 1)),
            np.full(draws, draws),
            number,
            np.full(draws, key, np.uint64),
        )
        assert (np.diff(rows) >= 0).all()  # one in each piece, and pieces follow each other
        assert (ends[rows] > number * ends[-1] / draws - 1).all()
        assert ((ends - units)[rows] < (number + 1) * ends[-1] / draws).all()
        assert len({*zip(rows.tolist(), occurrence.tolist(), strict=True)}) == draws
        per_row = np.bincount(rows, minlength=num_rows)
        expected = units * draws / ends[-1]
        assert (np.abs(per_row - expected) < 2).all()
        found += per_row
    # The mean of 40 epochs deviates by at most 5 standard errors of a fraction (1/2) in each.
    assert np.abs(found / epochs - units * draws / ends[-1]).max() < 5 * 0.5 / np.sqrt(epochs)


def test_huge_groups_do_not_overflow() -> None:
    """The last draws of a group of 400 M draws and weights up to the largest."""
    ends = np.cumsum(np.full(1000, 10_000 * WEIGHT_UNIT, np.int64)) + 2**52
    ends[0] = 2**52
    draws = 400_000_000
    number = np.array([0, 1, draws // 2, draws - 1])
    starts = np.tile([[0, 1000]], (4, 1))
    rows, occurrence = locate_draws(
        ends, starts, np.full(4, draws), number, np.arange(4, dtype=np.uint64)
    )
    exact = [(int(n) * int(ends[-1])) // draws for n in number]
    assert rows.tolist() == [int(np.searchsorted(ends, point, side="right")) for point in exact]
    assert (occurrence >= 0).all()


@pytest.mark.parametrize("policy", get_args(Policy))
def test_epochs_draw_by_weight_under_every_policy(policy: Policy) -> None:
    grouped = group_samples(LABELS, RADICES, weights=weights())
    plan, leaves_few = plan_of(grouped, policy), policy in ("backoff", "mask")
    epochs = 8 if leaves_few else 3
    drawn = np.array([counts(plan.of_epoch(epoch)) for epoch in range(epochs)])
    assert not drawn[:, ~USED].any()
    steps = plan.steps_per_epoch
    assert (drawn.sum(1) == 16 * steps).all()
    assert grouped.num_draws == pytest.approx(WEIGHTS[USED].sum(), abs=6)
    if leaves_few:  # fewer than a batch
        error = drawn.mean(0)[USED] - WEIGHTS[USED] * 16 * steps / grouped.num_draws
        assert np.abs(error).max() < 0.7
        assert abs(error.mean()) < 0.01
    report = coverage_report(grouped, 16, policy)
    assert report.num_samples == report.scheduled + report.remainder == grouped.num_draws
    assert f"{USED.sum():,} samples, drawn {grouped.num_draws:,} times" in report.text()


def test_equal_weights_draw_every_sample_once() -> None:
    grouped = group_samples(LABELS, RADICES, weights=weights(np.ones(NUM_SAMPLES)))
    plain = group_samples(LABELS, RADICES)
    drawn, same = plan_of(grouped, "wrap"), plan_of(plain, "wrap")
    for step in range(same.steps_per_epoch):
        batch, wanted = drawn.batch(step), same.batch(step)
        np.testing.assert_array_equal(batch.ids, wanted.ids)
        assert wanted.occurrence is None
        assert batch.occurrence is not None
        assert not batch.occurrence.any()
    assert "weights" not in coverage_report(plain, 16, "wrap").text()


def test_a_group_of_few_draws_is_drawn_from_at_least_once() -> None:
    """400 groups of one sample: no group is lost, so that light ones come too often."""
    light = SampleWeights(np.full(400, 0.25), np.ones(1), np.zeros(400, np.int32), None)
    grouped = group_samples(np.arange(400), (400,), weights=light)
    assert grouped.draws is not None and grouped.draws.tolist() == [1] * 400
    assert light.num_draws == 100  # of one group
    heavy = SampleWeights(np.full(400, 2.25), np.ones(1), np.zeros(400, np.int32), None)
    drawn = group_samples(np.arange(400), (400,), weights=heavy).draws
    assert drawn is not None and set(drawn.tolist()) == {2, 3} and drawn.sum() == 900


@pytest.mark.parametrize("radices", [RADICES, (10**6, 10**6)])
def test_on_disk_the_same(tmp_path: Path, radices: tuple[int, ...]) -> None:
    labels = np.where(LABELS < 0, -1, LABELS * (10**11 if radices[0] > 3 else 1))
    grouped = group_samples(labels, radices, weights=weights())
    groups = StageGroups(tmp_path / "groups")
    groups.write(grouped, np.zeros(0, np.int64))
    opened, _ = groups.read()
    for found in (opened, pickle.loads(pickle.dumps(opened))):
        for name in ("sample_ids", "weight_sums", "draws", "group_starts", "group_labels"):
            np.testing.assert_array_equal(getattr(found, name), getattr(grouped, name))
    np.testing.assert_array_equal(plan_of(grouped, "drop").batch(0).ids,
                                  plan_of(opened, "drop").batch(0).ids)  # fmt: skip


# --- from files and sources --------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., SampleWeights | None]:
    """Opens weights for an index of six samples in two shards of two sources."""
    shards = [SimpleNamespace(source="a"), SimpleNamespace(source="b")]
    index: Any = type("Index", (), {"__len__": lambda self: 6})()
    index.shards, index.shard_of = shards, np.array([0, 0, 0, 0, 1, 1], np.int32)
    index.digest, index.directory = "of this index", tmp_path

    def open_(
        values: object = None, per_epoch: int | None = None, **by_source: float
    ) -> SampleWeights | None:
        path = tmp_path / "w.npy"
        if isinstance(values, bytes):
            path.write_bytes(values)
        elif values is not None:
            np.save(path, np.array(values), allow_pickle=True)
        given = None if values is None else str(path)
        sources = {n: SourceConfig(shards="", weight=w) for n, w in by_source.items()}
        plan = PlanConfig(weights=given, samples_per_epoch=per_epoch)
        return SampleWeights.open(index, DataConfig(sources=sources), plan, "train.plan")

    return open_


def test_weights_of_samples_and_sources_multiply(opened: Callable[..., Any]) -> None:
    assert opened() is None
    assert opened(a=1.0, b=1.0) is None
    all_ids = np.arange(6)
    assert (opened(b=3.0).units(all_ids) / WEIGHT_UNIT).tolist() == [1, 1, 1, 1, 3, 3]
    both = opened([0, 1, 2, 0.5, 1, 1e-9], b=0.5)
    assert both.units(all_ids).tolist() == [
        0,
        WEIGHT_UNIT,
        2 * WEIGHT_UNIT,
        WEIGHT_UNIT // 2,
        WEIGHT_UNIT // 2,
        1,
    ]
    assert opened(per_epoch=100).num_draws == 100
    shards = SimpleNamespace(shards=[SimpleNamespace(source=name) for name in "ab"])
    assert opened(b=3.0).by_source(shards) == {"a": 0.4, "b": 0.6}
    assert opened(b=3.0).num_draws == 10
    digests = {opened(b=3.0).digest, opened(b=2.0).digest, opened(b=3.0, per_epoch=9).digest,
               opened([1] * 6, b=3.0).digest, opened([1] * 5 + [2], b=3.0).digest}  # fmt: skip
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([1, 1], r"shape \(2,\), the index has 6 samples: give one weight"),
        ([1, 1, -1, 1, 1, 1], "sample 2 is -1.0, wanted numbers from 0"),
        ([1, np.nan, 1, 1, 1, 1], "sample 1 is nan"),
        ([0] * 6, "all weights are 0"),
        (["x"] * 6, "holds <U1 of shape"),
        ([object()] * 6, "no .npy file of numbers"),
        (b"text", "no .npy file of numbers"),
        (b"\x93NUMPY\x01\x00\x08\x00{'descr'", "no .npy file of numbers"),  # a header cut short
    ],
)
def test_what_is_no_weights_is_one_line(
    opened: Callable[..., Any], values: object, word: str
) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        opened(values)
    assert "train.plan.weights" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_another_index_or_missing(tmp_path: Path, opened: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"data.sources.NAME.weight: all weights are 0"):
        opened(a=0.0, b=0.0)
    made = {"kind": "blindspots", "config": {}, "inputs": {"index": "of this index"}}
    write_json(tmp_path / INTENT, made)
    assert opened([1, 2, 3, 4, 5, 6]) is not None
    write_json(tmp_path / INTENT, made | {"inputs": {"index": "of another"}})
    with pytest.raises(ValueError, match="other sample keys"):
        opened([1, 2, 3, 4, 5, 6])
    (tmp_path / "w.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"train.plan.weights: there is no file at .*w.npy"):
        nothing: Any = SimpleNamespace(shards=[], directory=tmp_path)
        plan = PlanConfig(weights=str(tmp_path / "w.npy"))
        SampleWeights.open(nothing, DataConfig(), plan, "train.plan")
