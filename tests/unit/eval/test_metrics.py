"""Metric maths against definitions written out slowly and hand-made matrices."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.eval import metrics


def slow_ranks(similarity: np.ndarray, positive: np.ndarray) -> list[tuple[int, int]]:
    ranks = []
    for row, answers in zip(similarity, positive, strict=True):
        best = max(value for value, right in zip(row, answers, strict=True) if right)
        wrong = [value for value, right in zip(row, answers, strict=True) if not right]
        greater, equal = sum(v > best for v in wrong), sum(v == best for v in wrong)
        ranks.append((1 + greater + equal, 1 + greater))
    return ranks


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10_000), st.data())
def test_wilson_interval_contains_the_share_and_stays_inside(
    count: int, data: st.DataObject
) -> None:
    hits = data.draw(st.integers(0, count))
    low, high = metrics.wilson_interval(hits, count)
    assert 0 <= low <= hits / count <= high <= 1
    assert low < high
    mirrored = metrics.wilson_interval(count - hits, count)
    assert (low, high) == pytest.approx((1 - mirrored[1], 1 - mirrored[0]))


def test_stratified_interval_of_equal_strata_is_the_pooled_one() -> None:
    shares, counts = np.array([0.2, 0.4, 0.9]), np.array([15, 15, 15])
    pooled = metrics.wilson_interval(22.5, 45)
    assert metrics.stratified_interval(shares, counts) == pytest.approx(pooled)
    even, uneven = (
        metrics.stratified_interval(np.array([0.5, 0.5]), np.array(sizes))
        for sizes in ([50, 50], [98, 2])
    )
    assert uneven[1] - uneven[0] > even[1] - even[0]  # by the small stratum


def test_items_of_a_unit_count_together_in_strata_too() -> None:
    residuals = np.array([0.1, -0.1, 0.1, -0.1, 0.2, -0.2])
    assert metrics.design_effect(residuals, np.arange(6)) == 1.0
    assert metrics.design_effect(residuals, np.array([0, 0, 1, 1, 2, 2])) == 1.0  # they cancel out
    together = np.array([0.1, 0.1, -0.1, -0.1, 0.2, -0.2])
    unit = np.array([0, 0, 1, 1, 2, 3])
    assert metrics.design_effect(together, unit) == pytest.approx((0.04 + 0.04 + 0.08) / 0.12)
    assert metrics.design_effect(np.zeros(6), unit) == 1.5
    even = metrics.stratified_interval(np.array([0.5, 0.5]), np.array([50, 50]), 2.0)
    assert even == pytest.approx(metrics.wilson_interval(25, 50))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 10_000))
def test_ranks_with_ties_equals_the_definition(queries: int, candidates: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    similarity = rng.integers(0, 4, (queries, candidates)).astype(np.float32)
    positive = rng.random((queries, candidates)) < 0.3
    positive[np.arange(queries), rng.integers(0, candidates, queries)] = True
    strict, optimistic = metrics.ranks_with_ties(similarity, positive)
    assert list(zip(strict, optimistic, strict=True)) == slow_ranks(similarity, positive)


def test_chance_is_the_share_over_all_orders_of_the_candidates() -> None:
    right, orders = np.array([1, 1, 2, 3]), [*permutations(range(5))]
    for k in (1, 2, 4, 5, 9):
        shares = [
            np.mean([any(place < k for place in order[:number]) for order in orders])
            for number in right  # the first ``number`` candidates are right
        ]
        assert metrics.chance_at(k, 5, right) == pytest.approx(np.mean(shares))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4))
def test_a_margin_above_zero_is_a_larger_similarity(values: list[float]) -> None:
    """In float32 too, where a difference might be rounded to zero: it is not."""
    similarity = np.array(values, dtype=np.float32).reshape(1, 2, 2)
    (a, b), (c, d) = similarity[0]
    margins = metrics.match_margins(similarity, np.eye(2, dtype=bool))
    assert (margins > 0).tolist() == [[a > b, d > c]]


def test_margins_of_several_right_and_several_wrong_candidates() -> None:
    similarity = np.array([[[0.9, 0.8, 0.5, 0.1], [0.9, 0.8, 0.5, 0.1], [0.7, 0.7, 0.7, 0.7]]])
    right = np.array([[True, True, False, False], [True, False, True, False], [True] * 4])
    margins = metrics.match_margins(similarity, right)
    assert margins[0] == pytest.approx([0.3, -0.3, np.inf])  # lowest right minus highest wrong one
    wrong = np.array([[False, False, False, True]] * 3)
    assert metrics.match_margins(similarity, right & ~wrong, wrong)[0] == pytest.approx(
        [0.7, 0.4, 0.0]
    )


def test_equal_features_tie_exactly_wherever_they_are() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(64, 3, 515)).astype(np.float32)
    rows[:, 2] = rows[:, 0]
    similarity = metrics.item_similarities(rows[:, :1], rows)
    assert similarity.dtype == np.float32
    assert np.array_equal(similarity[:, :, 0], similarity[:, :, 2])
    slow = np.array([[np.dot(a[0].astype(float), c.astype(float)) for c in a] for a in rows])
    assert similarity[:, 0] == pytest.approx(slow, rel=1e-6)
