"""Differences of two encoders, against definitions and over simulated encoders."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from mclclip.eval import paired
from mclclip.eval.outcomes import Outcomes
from tests.matrix import in_soak, kept


def items(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def pair(a: NDArray[Any], b: NDArray[Any], **settings: Any) -> paired.Difference:
    both = (Outcomes(items(len(a)), values, **settings) for values in (a, b))
    return paired.difference(*both)


def test_wins_and_losses_are_counted() -> None:
    a, b = np.array([1, 1, 1, 0, 0, 1]), np.array([0, 0, 1, 0, 1, 1])
    found = pair(a, b)
    assert (found.wins, found.losses, found.units, found.items) == (2, 1, 6, 1.0)
    assert found.value == pytest.approx(1 / 6) and found.test == "McNemar, exact"
    assert found.p_value == stats.binomtest(2, 3).pvalue


def test_the_other_way_round_is_the_same_with_another_sign() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 60)) > 0.5
    one, other = (
        pair(a, b, strata=["x"] * 20 + ["y"] * 40),
        pair(b, a, strata=["x"] * 20 + ["y"] * 40),
    )
    assert one.value == -other.value and one.p_value == pytest.approx(other.p_value, abs=0.02)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=0.02)


def test_equal_encoders_differ_by_chance_alone_but_not_by_nothing() -> None:
    right = np.arange(135) % 2
    found = pair(right, right)
    assert found.p_value == 1.0 and found.value == 0.0
    assert found.low < 0 < found.high and found.high - found.low < 0.05


def test_a_permutation_of_few_units_against_all_exchanges() -> None:
    values = np.array([0.3, 0.1, -0.05, 0.2, 0.15, -0.1, 0.02])
    sums = [abs(np.dot(signs, values)) for signs in product((1, -1), repeat=len(values))]
    exact = np.mean([s >= abs(values.sum()) - 1e-12 for s in sums])
    assert paired.permutation(values) == pytest.approx(exact, abs=0.02)


def test_units_are_exchanged_whole() -> None:
    """Five captions of each of 20 images: half of the images are better, half of them worse."""
    rng = np.random.default_rng(5)
    better = np.repeat(rng.permutation(20) < 13, 5)
    captions = [f"image {number // 5}" for number in range(100)]
    apart, whole = pair(better, ~better), pair(better, ~better, units=captions)
    assert (whole.wins, whole.losses, whole.units) == (13, 7, 20)
    assert apart.p_value < 0.01 < 0.2 < whole.p_value
    assert whole.high - whole.low > 1.5 * (apart.high - apart.low)
    assert apart.value == pytest.approx(whole.value)


def test_strata_of_unequal_size_weigh_the_same() -> None:
    a = np.array([1, 1, 1, 1] + [0] * 40)
    b = np.array([0, 0, 0, 0] + [0] * 38 + [1, 1])
    found = pair(a, b, strata=["few"] * 4 + ["many"] * 40)
    assert found.value == pytest.approx((1 - 2 / 40) / 2) and found.test == "permutation"


def test_units_in_several_strata_stay_whole() -> None:
    """An answer per attribute of each of 30 images."""
    rng = np.random.default_rng(7)
    a, b = rng.random((2, 60)) > 0.4
    names = ["shape"] * 30 + ["colour"] * 30
    found = pair(a, b, strata=names, units=items(30) * 2)
    assert found.units == 30 and found.low <= found.value <= found.high


def test_rankings_are_compared_by_bootstrap() -> None:
    rng = np.random.default_rng(1)
    truth = np.arange(120) % 2 == 0
    good, poor = truth + rng.normal(size=(2, 120)) * [[0.4], [3.0]]
    settings: dict[str, Any] = {"truth": truth, "statistic": "roc_auc"}
    found = pair(good, poor, **settings)
    assert found.p_value < 0.01 and 0 < found.low < found.value < found.high
    assert (found.wins, found.items, found.test) == (None, None, "bootstrap")
    assert pair(good, good, **settings).p_value == 1.0


def test_an_interval_of_one_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "NUM_RANKING_DRAWS", 400)
    rng = np.random.default_rng(1)
    truth = np.arange(60) % 2 == 0
    scores = truth + rng.normal(size=60)
    settings: dict[str, Any] = {"truth": truth, "statistic": "roc_auc"}
    found = Outcomes(items(60), scores, **settings)
    low, high = paired.ranking_interval(found)
    assert low < found.value() < high and 0.05 < high - low < 0.4
    assert (low, high) == paired.ranking_interval(found)  # seeded
    repeated = {"truth": np.repeat(truth, 4), "units": [str(n // 4) for n in range(240)]}
    whole = Outcomes(items(240), np.repeat(scores, 4), **(settings | repeated))
    assert paired.ranking_interval(whole) == pytest.approx((low, high), abs=1e-6)
    perfect = paired.ranking_interval(Outcomes(items(60), truth, **settings))
    assert 0.85 < perfect[0] < perfect[1] == 1.0


@pytest.mark.parametrize("statistic", ["roc_auc", "precision_11_point"])
@in_soak
def test_intervals_of_rankings_cover(statistic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 draws of 200 items; the true value is that of many items."""
    monkeypatch.setattr(paired, "NUM_RANKING_DRAWS", 200)
    rng, covered = np.random.default_rng(4), 0

    def draw(count: int) -> Outcomes:
        truth = rng.random(count) < 0.3
        scores = truth + rng.normal(size=count)
        return Outcomes(items(count), scores, truth=truth, statistic=statistic)

    true = draw(400_000).value()
    for _ in range(200):
        low, high = paired.ranking_interval(draw(200))
        covered += low <= true <= high
    assert covered / 200 >= 0.9


def test_holm_by_hand() -> None:
    assert paired.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert paired.holm([0.5, 0.9]) == [1.0, 1.0] and paired.holm([]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": ["x", "y", "z"]}, "their items differ, such as '0' and 'x' in row 0"),
        ({"strata": ["s"] * 3}, "their strata differ, such as None and 's' in row 0"),
        ({"items": ["0", "1"], "values": [1, 1]}, "one has 3 items, the other 2"),
        ({"truth": [True] * 3, "statistic": "roc_auc"}, "by mean, the other by roc_auc"),
    ],
)
def test_other_items_are_refused(changes: dict[str, Any], message: str) -> None:
    one: dict[str, Any] = {"items": items(3), "values": [1, 0, 1]}
    other = {k: np.array(v) if k == "truth" else v for k, v in (one | changes).items()}
    with pytest.raises(paired.NotTheSame, match=message):
        paired.difference(Outcomes(**one), Outcomes(**other))


CASES = [*product((135, 1000), (0.05, 0.2, 0.4), (0.0, 0.5), (1, 9))]


@pytest.mark.parametrize(("count", "discordant", "gain", "strata"), kept(CASES, 0))
def test_intervals_cover_and_alarms_are_rare(
    count: int, discordant: float, gain: float, strata: int
) -> None:
    """1,000 draws of encoders whose true difference is known."""
    rng, draws = np.random.default_rng(count), 1000
    true = discordant * gain
    kinds = [str(number * strata // count) for number in range(count)]
    covered = alarms = 0
    for _ in range(draws):
        chance = rng.random(count)
        win, differ = chance < (discordant + true) / 2, chance < discordant
        a = np.where(differ, win, rng.random(count) < 0.3)
        b = np.where(differ, ~win, a)
        found = pair(a, b, strata=kinds if strata > 1 else None)
        covered += found.low <= true <= found.high
        alarms += found.p_value < 0.05
    assert covered / draws >= 0.925
    if not gain:
        assert alarms / draws <= 0.07
