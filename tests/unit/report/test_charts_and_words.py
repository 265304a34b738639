"""Charts: coordinates that can be read off, names that are escaped; words that part captions."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from mclclip.report import charts
from mclclip.report.clusters import dominant_words, words_of


def polyline(svg: str) -> list[tuple[float, float]]:
    """The points of the only line."""
    (points,) = re.findall(r'points="([^"]*)"', svg)
    return [tuple(map(float, point.split(","))) for point in points.split()]  # type: ignore[misc]


def test_a_line_goes_through_its_points() -> None:
    svg = charts.lines("t", "step", [("stage", [(0, 1), (50, 3), (100, 2), (200, math.nan)])])
    (x0, y0), (x1, y1), (x2, y2) = polyline(svg)
    assert x0 < x1 < x2 and x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y1 < y2 < y0  # y grows downwards
    assert (y0 - y2) == pytest.approx((y0 - y1) / 2, abs=0.11)
    assert 0 <= x0 and x2 <= charts.WIDTH and 0 <= y1 and y0 <= charts.HEIGHT
    assert "stroke:var(--stage)" in svg


def test_one_point_is_a_dot_and_nothing_to_draw_is_nothing() -> None:
    assert charts.lines("t", "x", [("stage", [(1, math.inf)])]) == ""
    assert charts.sizes("t", "x", [], "stage") == ""
    first, second = polyline(charts.lines("t", "x", [("stage", [(3, 0.0)])]))
    assert first == second


def test_names_are_escaped() -> None:
    hostile = "<b>\x1b\"'"
    svgs = [
        charts.lines(hostile, hostile, [("stage", [(0, 1), (1, 2)])]),
        charts.sizes(hostile, hostile, [3, 2], "stage"),
    ]
    for svg in svgs:
        assert "<b>" not in svg and "\x1b" not in svg and "&lt;b&gt;\\x1b" in svg


def test_strips_and_balances_are_in_percent() -> None:
    assert 'cx="40.0%"' in charts.strip((40.0, 30.0, 50.0), "base", ends=(0.0, 100.0))
    loss = charts.strip((4.61, 4.6, 4.64), "base", ends=(4.6, 4.7), digits=3)
    assert 'cx="10.0%"' in loss and 'x1="0.0%" x2="40.0%"' in loss
    assert 'aria-label="4.610, from 4.600 to 4.640"' in loss
    bars = charts.balance(3, 1, 4)
    assert 'x="37.5%" width="12.5%"' in bars and 'x="50%" width="37.5%"' in bars


def test_an_axis_ends_at_round_numbers_that_are_named() -> None:
    ends = charts.round_ends(1.1, 9.3, (0.0, 100.0))
    assert ends == (0.0, 10.0)
    texts = re.findall(r">([^<]+)</text>", charts.strip_axis(ends))
    assert (texts[0], texts[-1]) == ("0", "10") and len(texts) >= 3
    assert charts.round_ends(93.0, 101.0, (0.0, 100.0))[1] == 100.0
    assert charts.round_ends(3.0, 3.0)[0] < 3.0 < charts.round_ends(3.0, 3.0)[1]
    counts = re.findall(r">([^<]+)</text>", charts.strip_axis((-1, 1), whole=True))
    assert counts == ["-1", "0", "1"]


def test_numbers_are_short() -> None:
    values = (0.0, 0.25, 5e-5, 7.5e-4, 12_000, 2e6)
    assert [*map(charts.number, values)] == ["0", "0.25", "5e-5", "7.5e-4", "12k", "2M"]


def test_labels_of_axes_from_0_fit_and_differ_at_every_scale() -> None:
    tops = [number * 10.0**power for number in np.arange(1, 10, 0.1) for power in range(-8, 9)]
    axes = [charts.Scale(*charts.round_ends(0.0, top), 0, 100).ticks() for top in tops]
    assert max(len(charts.number(tick)) for ticks in axes for tick in ticks) <= 6
    assert all(len({*map(charts.number, ticks)}) == len(ticks) for ticks in axes)


def test_of_many_sizes_some_are_drawn_largest_first() -> None:
    def heights(sizes: list[int]) -> list[float]:
        (outline,) = re.findall(r'<path [^>]*d="([^"]*)"', charts.sizes("t", "x", sizes, "stage"))
        bars = re.findall(r",([\d.]+)V([\d.]+)H", outline)
        return [float(bottom) - float(top) for bottom, top in bars]

    few, many = heights([1, 3, 2]), heights([*range(10_000)])
    assert few == pytest.approx([3 * few[2], 2 * few[2], few[2]], abs=0.2)
    assert len(many) == 200 and many[0] == few[0] and many[-1] == 0.0
    assert many == sorted(many, reverse=True)


def test_ticks_are_few_and_within() -> None:
    for low, high in ((0.0, 1.0), (0.137, 0.139), (3.0, 41_000.0), (-2, 5)):
        ticks = charts.Scale(low, high, 0, 100).ticks()
        assert 2 <= len(ticks) <= 6 and low - 1e-9 <= ticks[0] and ticks[-1] <= high + 1e-9
    assert charts.Scale(0.0, 2.0, 0, 100, whole=True).ticks() == [0.0, 1.0, 2.0]


# --- words of captions ---


def test_words_of_a_caption() -> None:
    assert words_of("A man's two Dogs, in the x-ray -- 12 of them all") == {
        "man's", "two", "dogs", "x-ray", "12", "all",
    }  # fmt: skip
    assert words_of("") == words_of("y" * 1_000) == set()


def test_a_word_that_all_groups_share_is_none_of_any() -> None:
    groups = {0: ["red ball on grass"] * 60, 1: ["blue ball on grass"] * 40, 2: ["", "rare"]}
    found = dominant_words(groups, 5)
    assert [word for word, *_ in found[0]] == ["red"]
    assert [word for word, *_ in found[1]] == ["blue"]
    assert found[2] == []  # one caption says little
    assert found[0][0] == ("red", 1.0, 0.0)


def test_shares_are_of_captions_that_are_not_empty() -> None:
    groups = {0: ["red"] * 90 + ["", ""], 1: ["blue"] * 90 + ["red"] * 10 + [""]}
    assert dominant_words(groups, 5)[0] == [("red", 1.0, pytest.approx(1 / 10))]
    assert dominant_words({0: ["", ""], 1: []}, 3) == {0: [], 1: []}


def test_groups_drawn_at_random_have_hardly_any_words() -> None:
    random = np.random.default_rng(0)
    every = [" ".join(f"word{n}" for n in random.integers(40, size=6)) for _ in range(600)]
    found = dominant_words({n: every[n * 100 : n * 100 + 100] for n in range(6)}, 6)
    assert sum(map(len, found.values())) <= 2  # of 240 that could be


def test_the_order_is_that_of_the_definition() -> None:
    """Against log odds with a prior of ten captions, in standard errors, written out."""
    inside = ["often rare"] * 40 + ["often"] * 50 + ["other"] * 10
    outside = ["often"] * 30 + ["other"] * 170
    found = dominant_words({0: inside, 1: outside}, 5)[0]

    def errors(word: str) -> float:
        share = (sum(word in text for text in inside + outside) + 0.5) / 301
        odds, variance = [], 0.0
        for captions in (inside, outside):
            number = sum(word in text for text in captions)
            having, lacking = number + 10 * share, len(captions) - number + 10 * (1 - share)
            odds.append(math.log(having / lacking))
            variance += 1 / having + 1 / lacking
        return (odds[0] - odds[1]) / math.sqrt(variance)

    assert [word for word, *_ in found] == ["often", "rare"]
    assert errors("often") > errors("rare") > 3 > errors("other")
