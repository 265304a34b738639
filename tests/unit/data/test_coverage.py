"""What is said of a plan before training; that it is what a plan does, see test_epoch_plan."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.data import coverage
from mclclip.data.coverage import (
    attribute_coverage,
    check_coverage,
    coverage_report,
)
from mclclip.data.epoch_plan import EpochPlan, steps_per_epoch
from mclclip.data.groups import group_samples
from mclclip.data.labels import SampleWeights
from mclclip.data.options import Policy

GROUPED = group_samples(np.repeat([0, 1, 2, 3], [500, 130, 61, 9]), (2, 2))


@pytest.mark.parametrize("policy", ["drop", "backoff", "mask", "wrap"])
def test_negatives_are_those_of_the_plan(policy: Policy) -> None:
    """Against the batches themselves; groups of one size, as an epoch shuffles their order."""
    for size, batch in ((19, 8), (5, 8), (13, 5)):
        grouped = group_samples(np.repeat(np.arange(9), size), (3, 3))
        report = coverage_report(grouped, batch, policy)
        if not report.steps:
            assert report.negatives == 0.0
            continue
        plan = EpochPlan(grouped, batch, policy, "round_robin", seed=0, stage=2, epoch=0)
        found = []
        for step in range(plan.steps_per_epoch):
            ids, labels = plan.batch(step).ids, plan.batch(step).group_ids
            same = (labels[:, None] == labels) & (ids[:, None] != ids)
            found += [len(set(ids[row])) for row in same]
        assert len(found) == report.steps * batch
        assert report.negatives == pytest.approx(np.mean(found))


def test_beyond_the_bound_drop_stops_and_the_others_warn(caplog) -> None:
    grouped = group_samples(np.arange(100) % 7 % 4, (5, 5))
    with pytest.raises(ValueError, match="25 possible labels are beyond Eq. 4's bound of 10.0"):
        check_coverage(grouped, 10, "drop")
    for policy in ("backoff", "mask", "wrap"):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="mclclip"):
            assert check_coverage(grouped, 10, policy).steps > 0
        assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
        assert "beyond Eq. 4's bound" in caplog.text


def test_within_the_bound_nobody_warns_unless_drop_loses_groups(caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="mclclip"):
        check_coverage(GROUPED, 32, "backoff")
        assert not caplog.records
        check_coverage(GROUPED, 32, "drop")
    assert "never uses 1 group smaller" in caplog.text


# --- bounds on the steps of an epoch hold for every way of grouping the samples ------------------


POLICIES = ("drop", "backoff", "mask", "wrap")


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20)
@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=60), batch=st.integers(1, 9))
def test_any_grouping_lies_within(policy: Policy, labels: list[int], batch: int) -> None:
    grouped = group_samples(np.array(labels), (2, 3))
    low, high = steps_per_epoch(len(labels), batch, policy, max_groups=6)
    assert low <= coverage_report(grouped, batch, policy).steps <= high


def test_one_group_or_pooled_leftovers_make_the_number_certain() -> None:
    for samples in (7, 8, 100):
        grouped = group_samples(np.zeros(samples, np.int64), ())
        for policy in POLICIES:
            low, high = steps_per_epoch(samples, 8, policy)
            assert low == high == coverage_report(grouped, 8, policy).steps
    assert steps_per_epoch(10_968_539, 8192, "backoff", 1000) == (1338, 1338)


# --- attributes ----------------------------------------------------------------------------------


def plan_of(labels: np.ndarray, batch: int, weights: SampleWeights | None = None) -> EpochPlan:
    grouped = group_samples(labels, (int(labels.max()) + 1,), weights=weights)
    return EpochPlan(grouped, batch, "backoff", "round_robin", seed=0, stage=1, epoch=0)


def test_what_an_attribute_leaves_of_a_batch_is_counted_in_the_batches_themselves() -> None:
    """A group has two values of 32: 2.1 nats of a batch of 16, and 0.4 without groups."""
    random = np.random.default_rng(0)
    codes = random.integers(32, size=3_200)
    plan = plan_of(codes // 2, 16)
    counted = attribute_coverage(codes, plan)
    losses = []
    for step in range(plan.steps_per_epoch):
        rows = codes[plan.batch(step).ids]
        losses += [np.log((rows == row).sum()) for row in rows]
    assert counted.nats == pytest.approx(np.mean(losses), abs=0.03)
    same = 1 + random.binomial(15, 1 / 32, 100_000)
    assert counted.nats_ungrouped == pytest.approx(np.log(same).mean(), abs=0.05)
    assert counted.values == pytest.approx(32, rel=0.01)
    assert counted.values_in_group == pytest.approx(2, rel=0.01)
    for batch in (64, 256):
        same = 1 + random.binomial(batch - 1, 1 / 32, 100_000)
        assert counted.larger[batch] == pytest.approx(np.log(same).mean(), abs=0.05)


def test_an_attribute_that_groups_exhaust_or_no_sample_has_leaves_the_whole_batch() -> None:
    counted = attribute_coverage(np.full(400, -1), plan_of(np.zeros(400, int), 16))
    assert (counted.nats, counted.nats_ungrouped) == pytest.approx((np.log(16), np.log(16)))
    assert (counted.values, counted.values_in_group) == pytest.approx((1, 1))
    codes = np.repeat(np.arange(8), 100)
    counted = attribute_coverage(codes, plan_of(codes, 20))
    assert (counted.nats, counted.values_in_group) == (pytest.approx(np.log(20)), 1.0)


def weights_of(values: np.ndarray, per_epoch: int | None = None) -> SampleWeights:
    return SampleWeights(values, np.ones(1), np.zeros(len(values), np.int32), per_epoch)


def test_samples_with_weights_are_drawn_by_them() -> None:
    """The value of half of the samples has a tenth of their weight."""
    codes = np.repeat([0, 1], 2_000)
    plan = plan_of(np.zeros(4_000, int), 100, weights_of(np.where(codes, 9.0, 1.0)))
    counted = attribute_coverage(codes, plan)
    expected = 0.1 * np.log(10) + 0.9 * np.log(90)
    assert counted.nats == pytest.approx(expected, abs=0.05)
    assert counted.nats_ungrouped == pytest.approx(expected, abs=0.05)


def test_larger_batches_are_those_that_an_epoch_has() -> None:
    """Where a sample of weight 1 comes once in an epoch, it does not come twice in a batch."""
    for per_epoch, batches in ((200, []), (512, [256]), (20_000, [256, 1024])):
        weights = weights_of(np.ones(512), per_epoch)
        counted = attribute_coverage(np.arange(512), plan_of(np.zeros(512, int), 64, weights))
        assert [*counted.larger] == batches
        if per_epoch == 512:
            assert counted.nats == counted.nats_ungrouped == 0.0 and counted.larger == {256: 0.0}


def test_of_many_samples_some_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one group, and of some of many groups."""
    monkeypatch.setattr(coverage, "_MOST", 1_500)
    codes = np.random.default_rng(0).integers(8, size=24_000)
    for groups in (codes % 2, np.arange(24_000) // 6):
        counted = attribute_coverage(codes, plan_of(groups, 4))
        assert counted.values == pytest.approx(8, rel=0.1)
        assert len(np.unique(groups)) > 2 or counted.values_in_group == pytest.approx(4, rel=0.02)
