"""Outcomes of items: metrics from them, and the file that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mclclip.eval import outcomes, results
from mclclip.eval.metrics import Ranking
from mclclip.eval.outcomes import Outcomes

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


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    name, data = outcomes.encode(of_each_kind())
    middle = len(data) // 2
    broken = data[:middle] if damage == "cut" else data[:middle] + b"x" + data[middle + 1 :]
    (tmp_path / name).write_bytes(broken)
    with pytest.raises(ValueError, match="bytes have changed: evaluate again"):
        outcomes.read(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no outcomes of items at"):
        outcomes.read(tmp_path / "other.arrow")


def test_values_are_means_over_strata() -> None:
    right = np.array([1, 1, 0, 0] + [1] * 8, dtype=bool)
    assert Outcomes(ITEMS, right).value() == pytest.approx(10 / 12)
    assert Outcomes(ITEMS, right, strata=KINDS).value() == pytest.approx((0.5 + 1) / 2)


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


def test_strata_without_weight_or_without_a_kind_are_left_out() -> None:
    average = Outcomes(ITEMS, np.arange(12) < 4, strata=KINDS)
    assert average.value(np.array([1.0] * 4 + [0.0] * 8)) == 1.0
    truth = np.array([True, False] * 2 + [False] * 8)
    scores = np.arange(12.0)
    both = Outcomes(ITEMS, scores, KINDS, None, truth, "roc_auc")
    assert both.value() == Ranking.of(scores[:4], truth[:4]).area(np.ones(4))


def test_items_without_weight_are_as_if_they_were_not_there() -> None:
    """Draws of a bootstrap leave items out, also those at the top of a ranking."""
    scores, positive = np.arange(9.0), np.arange(9) % 2 == 0
    weights = np.array([1, 2, 1, 0, 3, 1, 1, 0, 0], dtype=float)  # the two highest are left out
    rows = np.repeat(np.arange(9), weights.astype(int))
    whole, alone = Ranking.of(scores, positive), Ranking.of(scores[rows], positive[rows])
    assert whole.area(weights) == pytest.approx(alone.area(np.ones(9)))
    assert whole.precision(weights) == pytest.approx(alone.precision(np.ones(9)))
    with pytest.raises(ValueError, match="NaN"):
        Ranking.of(np.array([1.0, np.nan]), np.array([True, False]))


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
