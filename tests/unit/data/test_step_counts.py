"""Bounds on the steps of an epoch hold for every way of grouping the samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.data.coverage import coverage_report
from mclclip.data.epoch_plan import steps_per_epoch
from mclclip.data.groups import GroupedIndex
from mclclip.data.options import Policy

POLICIES = ("drop", "backoff", "mask", "wrap")


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=60), batch=st.integers(1, 9))
def test_any_grouping_lies_within(policy: Policy, labels: list[int], batch: int) -> None:
    grouped = GroupedIndex.build(np.array(labels), (2, 3))
    low, high = steps_per_epoch(len(labels), batch, policy, max_groups=6)
    assert low <= coverage_report(grouped, batch, policy).steps <= high


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("samples", [1, 7, 8, 9, 100])
def test_one_group_is_exact(policy: Policy, samples: int) -> None:
    grouped = GroupedIndex.build(np.zeros(samples, np.int64), ())
    low, high = steps_per_epoch(samples, 8, policy)
    assert low == high == coverage_report(grouped, 8, policy).steps


def test_pooled_leftovers_make_the_number_certain() -> None:
    assert steps_per_epoch(10_968_539, 8192, "backoff", 1000) == (1338, 1338)
