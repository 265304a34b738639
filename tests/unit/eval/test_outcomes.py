"""Outcomes of items: metrics from them, the file that holds them, and two encoders compared."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from mclclip.eval import outcomes, results, units
from mclclip.eval.metrics import Ranking
from mclclip.eval.outcomes import Outcomes
from tests.matrix import SOAK, in_soak, kept

RNG = np.random.default_rng(3)
ITEMS = [f"{number}.png" for number in range(12)]
KINDS = ["a"] * 4 + ["b"] * 8


def of_each_kind() -> dict[str, Outcomes]:
    """Outcomes with and without strata and units, of shares and of rankings."""
    right, scores, truth = RNG.random(12) > 0.4, RNG.normal(size=12), np.arange(12) % 3 == 0
    images = [f"image {number // 2}" for number in range(12)]
    return {
        "pooled": Outcomes(ITEMS, right),
        "average": Outcomes(ITEMS, right, strata=KINDS),
        "R@1": Outcomes(ITEMS, right, units=images),
        "shares": Outcomes(ITEMS, RNG.random(12), strata=KINDS, units=images),
        "auc": Outcomes(ITEMS, scores, truth=truth, statistic="roc_auc"),
        "map": Outcomes(ITEMS, scores, KINDS, images, truth, "precision_11_point"),
    }


def same(a: Outcomes, b: Outcomes) -> bool:
    texts = [(a.items, b.items), (a.strata, b.strata), (a.units, b.units)]
    truth = np.array_equal(*(np.array(x.truth, dtype=object) for x in (a, b)))
    equal = all(x == y for x, y in texts) and a.statistic == b.statistic and truth
    return equal and np.array_equal(a.values, b.values)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    written = of_each_kind()
    name, data = outcomes.encode(written)
    (tmp_path / name).write_bytes(data)
    found = outcomes.read(tmp_path / name)
    assert list(found) == list(written)
    assert all(same(found[metric], written[metric]) for metric in written)
    assert outcomes.encode(found) == (name, data)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    name, data = outcomes.encode(of_each_kind())
    middle = len(data) // 2
    (tmp_path / name).write_bytes(data[:middle] + b"x" + data[middle + 1 :])
    with pytest.raises(ValueError, match="bytes have changed: evaluate again"):
        outcomes.read(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no outcomes of items at"):
        outcomes.read(tmp_path / "other.arrow")


@pytest.mark.parametrize("metric", list(of_each_kind()))
def test_a_weight_of_two_is_an_item_twice(metric: str) -> None:
    found = of_each_kind()[metric]
    times = RNG.integers(1, 4, size=12)
    rows = np.repeat(np.arange(12), times)
    repeated: dict[str, Any] = {
        name: None if getattr(found, name) is None else [getattr(found, name)[r] for r in rows]
        for name in ("items", "strata", "units")
    }
    truth = None if found.truth is None else found.truth[rows]
    longer = Outcomes(**repeated, values=found.values[rows], truth=truth, statistic=found.statistic)
    assert found.value(times.astype(float)) == pytest.approx(longer.value(), abs=1e-12)


def test_strata_without_weight_or_without_a_kind_are_left_out_of_the_mean() -> None:
    right = np.array([1, 1, 0, 0] + [1] * 8, dtype=bool)
    assert Outcomes(ITEMS, right).value() == pytest.approx(10 / 12)
    assert Outcomes(ITEMS, right, strata=KINDS).value() == pytest.approx((0.5 + 1) / 2)
    average = Outcomes(ITEMS, np.arange(12) < 4, strata=KINDS)
    assert average.value(np.array([1.0] * 4 + [0.0] * 8)) == 1.0
    truth = np.array([True, False] * 2 + [False] * 8)
    scores = np.arange(12.0)
    both = Outcomes(ITEMS, scores, KINDS, None, truth, "roc_auc")
    assert both.value() == Ranking(scores[:4], truth[:4]).area(np.ones(4))


def test_items_without_weight_are_as_if_they_were_not_there() -> None:
    """Draws of a bootstrap leave items out, also those at the top of a ranking."""
    scores, positive = np.arange(9.0), np.arange(9) % 2 == 0
    weights = np.array([1, 2, 1, 0, 3, 1, 1, 0, 0], dtype=float)  # the two highest are left out
    rows = np.repeat(np.arange(9), weights.astype(int))
    whole, alone = Ranking(scores, positive), Ranking(scores[rows], positive[rows])
    assert whole.area(weights) == pytest.approx(alone.area(np.ones(9)))
    assert whole.precision(weights) == pytest.approx(alone.precision(np.ones(9)))


def test_captions_of_one_image_count_as_less_than_as_many_images() -> None:
    captions = [f"image {number // 5}" for number in range(150)]
    for right in (np.repeat(RNG.random(30) > 0.5, 5), np.ones(150, dtype=bool)):
        found = Outcomes(captions, right, units=captions)
        together = results.figure("R@1", found, {})
        alone = results.figure("R@1", Outcomes(captions[::5], right[::5]), {})
        assert together.value == pytest.approx(alone.value)
        assert (together.ci_low, together.ci_high) == pytest.approx((alone.ci_low, alone.ci_high))


def test_rows_name_their_outcomes_and_old_files_go(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    found = of_each_kind()
    figures = [results.figure(name, found[name], {"name": "x"}) for name in ("pooled", "average")]
    for model in ("stage_0", "stage_1"):
        rows = results.record(path, figures, model, "pairs")
        assert results.read(path)[-2:] == rows
    names = {row.protocol["outcomes"] for row in results.read(path)}
    assert {file.name for file in (tmp_path / "outcomes").iterdir()} == names and len(names) == 1
    others = [results.figure("pooled", Outcomes(ITEMS, np.zeros(12)), {})]
    for model in ("stage_0", "stage_1"):
        rows = results.record(path, others, model, "pairs")
    (kept,) = (tmp_path / "outcomes").iterdir()
    assert kept.name == rows[0].protocol["outcomes"] not in names
    assert outcomes.read(kept)["pooled"].value() == 0.0


# --- two encoders on the same items -------------------------------------------------------------


def items(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def pair(a: NDArray[Any], b: NDArray[Any], **settings: Any) -> outcomes.Difference:
    both = (Outcomes(items(len(a)), values, **settings) for values in (a, b))
    return outcomes.difference(*both)


def test_wins_and_losses_are_counted() -> None:
    a, b = np.array([1, 1, 1, 0, 0, 1]), np.array([0, 0, 1, 0, 1, 1])
    found = pair(a, b)
    assert (found.wins, found.losses, found.units, found.items) == (2, 1, 6, 1.0)
    assert found.value == pytest.approx(1 / 6) and found.test == "McNemar, exact"
    assert found.p_value == stats.binomtest(2, 3).pvalue
    for wins, losses in [(0, 0), (0, 1), (3, 3), (9, 2), (0, 2000), (40_000, 41_000)]:
        exact = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
        assert outcomes.mcnemar(wins, losses) == pytest.approx(exact, rel=1e-9)


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


@pytest.mark.parametrize("statistic", ["mean", "mean_loss"])
def test_what_rounding_leaves_is_no_difference(statistic: str) -> None:
    """Each of 100 images has a caption in six languages; the encoders are right on other three of
    them, so that their sums are equal."""

    def right(languages: str) -> Outcomes:
        parts = {
            name: Outcomes(
                [f"{n}" for n in range(100)],
                np.full(100, float(name in languages)),
                statistic=statistic,
            )
            for name in "abcdef"
        }
        joined = outcomes.join_outcomes(parts)
        return replace(joined, statistic=statistic)

    change = outcomes.difference(right("abc"), right("def"))
    assert (change.value, change.wins, change.losses, change.p_value) == (0.0, 0, 0, 1.0)


@pytest.mark.parametrize("scale", [1e-14, 1e5])
def test_a_permutation_test_does_not_depend_on_the_unit(scale: float) -> None:
    values = np.array([0.3, 0.1, -0.05, 0.2, -0.25, -0.1, 0.02])
    assert outcomes.permutation(scale * values) == outcomes.permutation(values) > 0.5


def test_a_permutation_of_few_units_against_all_exchanges() -> None:
    values = np.array([0.3, 0.1, -0.05, 0.2, 0.15, -0.1, 0.02])
    sums = [abs(np.dot(signs, values)) for signs in product((1, -1), repeat=len(values))]
    exact = np.mean([s >= abs(values.sum()) - 1e-12 for s in sums])
    assert outcomes.permutation(values) == pytest.approx(exact, abs=0.02)


def test_differences_beyond_all_draws_stay_so_among_many_comparisons() -> None:
    """Draws alone give no p-value below 1 / (1 + their number), 1e-4 and 1e-3 here."""
    rng = np.random.default_rng(2)
    exact = [2.0 ** (1 - count) for count in (20, 30)]  # each of so many units is better
    for count, least in zip((20, 30), exact, strict=True):
        assert least <= outcomes.permutation(rng.uniform(0.9, 1.1, count)) < 100 * least
    truth = np.arange(300) % 2 == 0
    scores = truth * [[4.0], [0.0]] + rng.normal(size=(2, 300))
    found = pair(*scores, truth=truth, statistic="roc_auc")
    assert found.p_value < 1e-12 and outcomes.holm([found.p_value] * 500)[0] < 1e-9
    few, ranks = np.arange(33) < 3, np.arange(33.0)  # no certainty from three positives
    found = pair(-ranks, ranks + 12 * few, truth=few, statistic="roc_auc")
    assert found.p_value >= 1 / (1 + outcomes.NUM_RANKING_DRAWS)
    assert outcomes.permutation(np.ones(5_000)) > 0


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
    monkeypatch.setattr(outcomes, "NUM_RANKING_DRAWS", 400)
    rng = np.random.default_rng(1)
    truth = np.arange(60) % 2 == 0
    scores = truth + rng.normal(size=60)
    settings: dict[str, Any] = {"truth": truth, "statistic": "roc_auc"}
    found = Outcomes(items(60), scores, **settings)
    low, high = outcomes.ranking_interval(found)
    assert low < found.value() < high and 0.05 < high - low < 0.4
    assert (low, high) == outcomes.ranking_interval(found)  # seeded
    repeated = {"truth": np.repeat(truth, 4), "units": [str(n // 4) for n in range(240)]}
    whole = Outcomes(items(240), np.repeat(scores, 4), **(settings | repeated))
    assert outcomes.ranking_interval(whole) == pytest.approx((low, high), abs=1e-6)
    perfect = outcomes.ranking_interval(Outcomes(items(60), truth, **settings))
    assert 0.85 < perfect[0] < perfect[1] == 1.0


@pytest.mark.parametrize("statistic", ["roc_auc", "precision_11_point"])
@in_soak
def test_intervals_of_rankings_cover(statistic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 draws of 200 items; the true value is that of many items."""
    monkeypatch.setattr(outcomes, "NUM_RANKING_DRAWS", 200)
    rng, covered = np.random.default_rng(4), 0

    def draw(count: int) -> Outcomes:
        truth = rng.random(count) < 0.3
        scores = truth + rng.normal(size=count)
        return Outcomes(items(count), scores, truth=truth, statistic=statistic)

    true = draw(400_000).value()
    for _ in range(200):
        low, high = outcomes.ranking_interval(draw(200))
        covered += low <= true <= high
    assert covered / 200 >= 0.9


def test_holm_by_hand() -> None:
    assert outcomes.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert outcomes.holm([0.5, 0.9]) == [1.0, 1.0] and outcomes.holm([]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": ["x", "y", "z"]}, "differ in their items"),
        ({"strata": ["s"] * 3}, "differ in their strata"),
        ({"items": ["0", "1"], "values": [1, 1]}, "3 and 2 items"),
        ({"truth": [True] * 3, "statistic": "roc_auc"}, "differ in their statistic"),
    ],
)
def test_other_items_are_refused(changes: dict[str, Any], message: str) -> None:
    one: dict[str, Any] = {"items": items(3), "values": [1, 0, 1]}
    other = {k: np.array(v) if k == "truth" else v for k, v in (one | changes).items()}
    with pytest.raises(outcomes.NotTheSame, match=message):
        outcomes.difference(Outcomes(**one), Outcomes(**other))


CASES = [*product((135, 1000), (0.05, 0.2, 0.4), (0.0, 0.5), (1, 9))]


@pytest.mark.parametrize(("count", "discordant", "gain", "strata"), kept(CASES, 0))
def test_intervals_cover_and_alarms_are_rare(
    count: int, discordant: float, gain: float, strata: int
) -> None:
    """Draws of encoders whose true difference is known."""
    rng, draws = np.random.default_rng(count), 1000 if SOAK else 150
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


def test_a_new_unit_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean has the interval of a mean, below 0 too; as a share it is refused."""
    cosines = np.array([-0.6, 0.2, 0.1])
    with pytest.raises(AssertionError, match="shares"):
        Outcomes(ITEMS[:3], cosines)
    cosine = units.Statistic(units.Unit("cosine", "cosine", best=1.0))
    monkeypatch.setitem(units.STATISTICS, "mean_cosine", cosine)
    found = results.figure("cosine", Outcomes(ITEMS[:3], cosines, statistic="mean_cosine"), {})
    assert found.value == pytest.approx(-0.1) and found.protocol["unit"] == "cosine"
    assert found.ci_low < -0.5 and 0 < found.ci_high
