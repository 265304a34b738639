"""Differences over several seeds, by definitions written out slowly and by simulated races."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from mclclip.eval import outcomes, seeds
from mclclip.eval.outcomes import NotTheSame, Outcomes
from tests.benchmarks import bench_seeds
from tests.matrix import SOAK

Pairs = list[tuple[Outcomes, Outcomes]]


def of_values(values: Sequence[float] | np.ndarray, **more: Any) -> Outcomes:
    return Outcomes([str(n) for n in range(len(values))], np.asarray(values), **more)


def drawn_pairs(rng: np.random.Generator, count: int, items: int = 40, **more: Any) -> Pairs:
    """Right answers of two methods with ``count`` seeds each."""
    hard = rng.normal(0.3, 1.0, items)
    bar = np.array([[0.2], [0.0]])
    made = [(hard + rng.normal(0, 0.5, (2, items)) > bar) * 1.0 for _ in range(count)]
    return [(of_values(own, **more), of_values(other, **more)) for own, other in made]


# --- definitions written out ---------------------------------------------------------------------


def slow_parts(pairs: Pairs) -> tuple[float, float, float]:
    """The parts of the variance of one stratum, loop by loop: of items, of seeds, of the rest."""
    table = [[float(a.values[i] - b.values[i]) for a, b in pairs] for i in range(len(pairs[0][0]))]
    items, seeds = len(table), len(pairs)
    of_item = [sum(row) / seeds for row in table]
    of_seed = [sum(row[s] for row in table) / items for s in range(seeds)]
    mean = sum(of_seed) / seeds
    # Every item once, half an invented item that is won, half one that is lost, one without change.
    weighed = [(value, 1.0) for value in of_item] + [(1.0, 0.5), (-1.0, 0.5), (0.0, 1.0)]
    total = sum(weight for _, weight in weighed)
    middle = sum(weight * value for value, weight in weighed) / total
    spread = sum(weight * (value - middle) ** 2 for value, weight in weighed) / total
    rest = sum(
        (table[i][s] - of_item[i] - of_seed[s] + mean) ** 2
        for i in range(items)
        for s in range(seeds)
    )
    return (
        spread / (items - 1),
        sum((value - mean) ** 2 for value in of_seed) / (seeds - 1) / seeds,
        rest / ((items - 1) * (seeds - 1)) / (items * seeds),
    )


def difference(pairs: Pairs) -> outcomes.Difference:
    """Two methods alone."""
    methods = {"own": [own for own, _ in pairs], "other": [other for _, other in pairs]}
    (found,) = seeds.differences(methods, [("own", "other")])
    return found


@pytest.mark.parametrize("count", [2, 3, 5])
def test_items_and_seeds_have_a_quantile_each(count: int) -> None:
    pairs = drawn_pairs(np.random.default_rng(10 + count), count)
    of_items, of_seeds, rest = slow_parts(pairs)
    mean = float(np.mean([np.mean(a.values - b.values) for a, b in pairs]))
    found = difference(pairs)
    assert found.value == pytest.approx(mean, abs=1e-6) and mean != 0

    def half(alpha: float) -> float:
        parts = stats.t.isf(alpha / 2, 39) ** 2 * of_items
        larger = (count - 1) / stats.chi2.ppf(0.3, count - 1)
        parts += stats.t.isf(alpha / 2, count - 1) ** 2 * max(of_seeds - rest, 0) * larger
        return float(np.sqrt(parts))

    expected = (mean - half(0.05), mean + half(0.05))
    assert (found.low, found.high) == pytest.approx(expected, abs=1e-6)
    assert half(found.p_value) == pytest.approx(abs(mean), abs=1e-6)
    means = np.mean([a.values - b.values for a, b in pairs], axis=0)
    assert (found.wins, found.losses) == (int((means > 0).sum()), int((means < 0).sum()))
    assert found.items == pytest.approx(40 * mean, abs=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_a_perfect_ranking_against_a_collapsed_one_is_a_sign_test(count: int) -> None:
    truth = np.arange(30) < 10
    perfect = of_values(truth * 1.0, truth=truth, statistic="roc_auc")
    collapsed = of_values(np.zeros(30), truth=truth, statistic="roc_auc")
    found = difference([(perfect, collapsed)] * count)
    assert found.value == 1.0 and 0 < found.low < found.high == 1.0
    assert found.p_value == pytest.approx(2 * 0.5**10)  # by the ten positives, which are fewer
    other = difference([(collapsed, perfect)] * count)
    assert (other.value, other.low, other.p_value) == (-1.0, -1.0, found.p_value)
    assert difference([(perfect, perfect)] * 2).p_value == 1.0


@pytest.mark.parametrize(("kind", "count"), [("numbers", 2), ("numbers", 5), ("answers", 3)])
def test_equal_methods_raise_few_false_alarms(kind: str, count: int) -> None:
    """Also where all are compared with one base, and where one differs more by seed than others."""
    races = 2_000 if SOAK else 600
    for spread in (0.0, 0.15):
        shares = bench_seeds.simulate(kind, 135, count, spread, races)
        assert shares["alarms"] <= 6 and shares["wide"] <= (9 if SOAK else 11), (spread, shares)
        if kind == "numbers" and not spread:
            assert shares["found"] >= {2: 20, 5: 33}[count], shares


def test_one_seed_is_the_test_of_compare() -> None:
    pairs = drawn_pairs(np.random.default_rng(0), 1)
    assert difference(pairs) == outcomes.difference(*pairs[0])


def test_what_a_seed_changes_for_both_does_not_count() -> None:
    """A seed that is lucky for both by the same items leaves the difference as it is."""
    pairs = drawn_pairs(np.random.default_rng(1), 1, 60) * 3
    lucky = []
    for number, (a, b) in enumerate(pairs):
        equal = np.flatnonzero(a.values == b.values)[: 5 * number]
        own, other = a.values.copy(), b.values.copy()
        own[equal] = other[equal] = 1.0
        lucky.append((of_values(own), of_values(other)))
    plain, moved = difference(pairs), difference(lucky)
    assert (moved.value, moved.p_value) == pytest.approx((plain.value, plain.p_value), abs=1e-6)


def test_no_difference_at_all_is_no_verdict() -> None:
    found = difference([(of_values([1.0, 0.0, 1.0]), of_values([1.0, 0.0, 1.0]))] * 2)
    assert (found.value, found.p_value, found.wins, found.losses) == (0.0, 1.0, 0, 0)
    assert found.low < 0 < found.high


def test_strata_count_equally() -> None:
    strata = ["a"] * 30 + ["b"] * 10
    pairs = drawn_pairs(np.random.default_rng(3), 3, strata=strata)
    found = difference(pairs)
    means = [
        np.mean([np.mean((a.values - b.values)[rows]) for rows in (slice(30), slice(30, None))])
        for a, b in pairs
    ]
    assert found.value == pytest.approx(np.mean(means), abs=1e-6)


def test_losses_are_won_where_they_are_smaller() -> None:
    rng = np.random.default_rng(4)
    pairs = []
    for _ in range(2):
        loss = rng.normal(2.0, 0.3, 50)
        own, other = loss - 0.01 + rng.normal(0, 0.002, 50), loss
        pairs.append((of_values(own, statistic="mean_loss"),
                      of_values(other, statistic="mean_loss")))  # fmt: skip
    found = difference(pairs)
    assert found.value == pytest.approx(-0.01, abs=0.001)
    assert (found.wins, found.losses, found.items) == (50, 0, None)
    assert found.high < 0, "an interval in nats is not widened by invented items of a whole nat"


def test_rankings_have_an_interval() -> None:
    rng, truth = np.random.default_rng(6), np.arange(60) % 2 == 0
    pairs = [
        tuple(of_values(rng.normal(0, 1, 60) + good * truth, truth=truth, statistic="roc_auc")
              for good in (2.0, 0.5))
        for _ in range(2)
    ]  # fmt: skip
    found = difference(pairs)  # type: ignore[arg-type]
    assert (found.wins, found.losses, found.items) == (None, None, None)
    mean = np.mean([a.value() - b.value() for a, b in pairs])
    assert found.value == pytest.approx(mean) and found.low < found.value < found.high


def test_a_loss_that_hardly_differs_is_no_proof() -> None:
    """One item of 60,000 has another loss, by as little as float32 can hold."""
    losses = np.ones(60_000)
    for first in (np.nextafter(np.float32(1), np.float32(2)), 1.00001):
        other = losses.copy()
        other[0] = first
        pairs = [(of_values(v, statistic="mean_loss") for v in (other, losses)) for _ in range(2)]
        change = difference([(a, b) for a, b in pairs])
        assert 0.2 < change.p_value <= 1 and change.losses == 1 and change.low <= 0 <= change.high


def test_other_items_in_another_seed_are_refused() -> None:
    first = (of_values([1.0, 0.0]), of_values([0.0, 0.0]))
    other = (Outcomes(["x", "y"], np.ones(2)), Outcomes(["x", "y"], np.ones(2)))
    with pytest.raises(NotTheSame, match="differ in their items"):
        difference([first, other])
