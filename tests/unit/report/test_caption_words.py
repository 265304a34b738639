"""The words that tell groups of captions apart."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mclclip.report.caption_words import dominant_words, words_of


def test_words_of_a_caption() -> None:
    assert words_of("A man's two Dogs, in the x-ray -- 12 of them all") == {
        "man's", "two", "dogs", "x-ray", "12", "all",
    }  # fmt: skip
    assert words_of("") == words_of("y" * 1_000) == set()


def test_a_word_that_all_groups_share_is_none_of_any() -> None:
    groups = {0: ["red ball on grass"] * 6, 1: ["blue ball on grass"] * 4, 2: ["", "rare"]}
    found = dominant_words(groups, 5)
    assert [word.text for word in found[0]] == ["red"]
    assert [word.text for word in found[1]] == ["blue"]
    assert found[2] == []  # in fewer than three captions
    red = found[0][0]
    assert (red.inside, red.outside) == (1.0, 0.0)


def test_shares_are_of_captions_that_are_not_empty() -> None:
    groups = {0: ["red"] * 9 + ["", ""], 1: ["blue"] * 9 + ["red", "", ""]}
    (red,) = dominant_words(groups, 5)[0]
    assert red.inside == 1.0 and red.outside == pytest.approx(1 / 10)


def test_groups_drawn_at_random_have_hardly_any_words() -> None:
    random = np.random.default_rng(0)
    every = [" ".join(f"word{n}" for n in random.integers(40, size=6)) for _ in range(600)]
    found = dominant_words({n: every[n * 100 : n * 100 + 100] for n in range(6)}, 6)
    assert sum(map(len, found.values())) <= 2  # of 240 that could be


def test_the_order_is_that_of_the_definition() -> None:
    """Against the weight p log(p / q), written out, with half a caption for none."""
    inside = ["often rare"] * 4 + ["often"] * 5 + ["other"]
    outside = ["often"] * 3 + ["other"] * 17
    found = dominant_words({0: inside, 1: outside}, 5)[0]
    weights = {"often": 0.9 * math.log(0.9 / 0.15), "rare": 0.4 * math.log(0.4 / (0.5 / 20))}
    assert [word.text for word in found] == sorted(weights, key=lambda word: -weights[word])


def test_no_captions_give_no_words() -> None:
    assert dominant_words({0: ["", ""], 1: []}, 3) == {0: [], 1: []}
