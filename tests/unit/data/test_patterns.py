"""The demo's pictures: independent attributes, captions at their rates, pairs that are minimal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sklearn.metrics import adjusted_mutual_info_score

from mclclip.data import patterns
from mclclip.data.patterns import ATTRIBUTES, MENTION_RATES


@pytest.fixture(scope="module")
def drawn() -> list[patterns.Pattern]:
    return list(patterns.patterns(800, seed=3))


def test_a_picture_depends_on_seed_and_number_alone(drawn: list[patterns.Pattern]) -> None:
    again = list(patterns.patterns(5, seed=3))
    other = next(patterns.patterns(1, seed=4))
    for first, second in zip(drawn, again, strict=False):
        assert first.caption == second.caption
        np.testing.assert_array_equal(first.image, second.image)
        assert (first.image.shape, first.image.dtype) == ((32, 32, 3), np.uint8)
    assert not np.array_equal(other.image, drawn[0].image)


def test_attributes_are_uniform_and_independent(drawn: list[patterns.Pattern]) -> None:
    labels = {name: [p.values[name] for p in drawn] for name in ATTRIBUTES}
    for name, values in ATTRIBUTES.items():
        shares = [labels[name].count(value) / len(drawn) for value in values]
        assert max(shares) < 1.35 / len(values) and min(shares) > 0.65 / len(values), name
    for one, two in itertools.combinations(ATTRIBUTES, 2):
        assert abs(adjusted_mutual_info_score(labels[one], labels[two])) < 0.02


def test_captions_name_attributes_at_their_rates(drawn: list[patterns.Pattern]) -> None:
    for name, rate in MENTION_RATES.items():
        named = sum(p.values[name] in p.caption.split() for p in drawn) / len(drawn)
        assert abs(named - rate) < 0.05, name


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_pairs_differ_in_one_attribute_only(attribute: str) -> None:
    for one, two in patterns.minimal_pairs(attribute, 12, seed=1):
        differing = [name for name in ATTRIBUTES if one.values[name] != two.values[name]]
        assert differing == [attribute]
        # They differ by more than the same picture under another noise would.
        assert np.abs(one.image.astype(int) - two.image.astype(int)).max() > 30
        # The statements name everything, so that they differ in the attribute's word alone.
        words = zip(one.caption.split(), two.caption.split(), strict=True)
        assert [pair for pair in words if pair[0] != pair[1]] == [
            (one.values[attribute], two.values[attribute])
        ]
