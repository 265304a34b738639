"""Keyed hashing and shuffling without state."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mclclip.util.randomness import mix, mix_tensors, permute

stable = settings(max_examples=30, deadline=None, derandomize=True, database=None)
words = st.integers(min_value=-(2**63), max_value=2**63 - 1)


@stable
@given(size=st.integers(0, 3000), key=words)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    image = permute(np.arange(size), size, key)
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(size))
    for small in range(12):
        image = permute(np.arange(small), small, mix(key, small))
        assert sorted(image.tolist()) == list(range(small))


@stable
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), seed=words)
def test_one_call_serves_shuffles_of_unequal_sizes(sizes: list[int], seed: int) -> None:
    keys = mix(seed, np.arange(len(sizes)))
    position = np.concatenate([np.arange(size) for size in sizes])
    together = permute(position, np.repeat(sizes, sizes), np.repeat(keys, sizes))
    apart = [permute(np.arange(n), n, key) for n, key in zip(sizes, keys, strict=True)]
    assert np.array_equal(together, np.concatenate(apart))


@stable
@given(size=st.integers(1, 2**62), key=words, data=st.data())
def test_huge_sizes_stay_inside_and_distinct(size: int, key: int, data: st.DataObject) -> None:
    position = data.draw(st.lists(st.integers(0, size - 1), max_size=50, unique=True))
    image = permute(np.array(position, dtype=np.int64), size, key)
    assert len(set(image.tolist())) == len(position)
    assert all(0 <= value < size for value in image.tolist())


def _chi_square(counts: np.ndarray) -> float:
    """Distance from the uniform distribution, in standard deviations of its expectation."""
    expected, freedom = counts.mean(), counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [2, 5])
def test_every_order_of_a_small_set_is_equally_likely(size: int) -> None:
    trials = 12_000
    keys = mix(np.arange(trials))[:, None]
    images = permute(np.broadcast_to(np.arange(size), (trials, size)), size, keys)
    codes = images @ (size ** np.arange(size))
    counts = [
        int((codes == np.dot(order, size ** np.arange(size))).sum())
        for order in itertools.permutations(range(size))
    ]
    assert _chi_square(np.array(counts)) < 4


@pytest.mark.parametrize("size", [6, 50])
def test_every_position_goes_everywhere_equally_often(size: int) -> None:
    trials = 12_000
    keys = mix(7, np.arange(trials))[:, None]
    images = permute(np.broadcast_to(np.arange(size), (trials, size)), size, keys)
    assert _chi_square(np.stack([np.bincount(c, minlength=size) for c in images.T])) < 4
    pairs = np.bincount(images[:, 0] * size + images[:, -1], minlength=size**2)
    assert _chi_square(pairs.reshape(size, size)[~np.eye(size, dtype=bool)]) < 4


def test_mix_depends_on_every_word_their_order_and_their_number() -> None:
    values = [mix(), mix(0), mix(1), mix(-1), mix(0, 0), mix(0, 1), mix(1, 0), mix(0, 0, 0)]
    assert len(set(map(int, values))) == len(values)


@stable
@given(first=words, rest=st.lists(words, min_size=1, max_size=8))
def test_mix_of_arrays_is_mix_of_their_elements(first: int, rest: list[int]) -> None:
    together = mix(first, np.array(rest, dtype=np.int64), 5)
    assert together.dtype == np.uint64
    assert together.tolist() == [int(mix(first, word, 5)) for word in rest]
    assert isinstance(mix(first, np.int64(5)), np.uint64)


def test_one_changed_bit_changes_half_of_the_bits() -> None:
    base = np.arange(2000)
    flips = [
        np.bitwise_count(mix(3, base) ^ mix(3, base ^ (1 << bit))).mean() for bit in range(0, 62, 6)
    ]
    assert all(abs(float(flip) - 32) < 0.6 for flip in flips)


def test_values_are_fixed_for_ever() -> None:
    """A changed value would change every batch of a run that is resumed after an upgrade."""
    assert int(mix(1)) == 9678869581437336704
    assert int(mix(1, 0)) == 2089179613166920684
    assert permute(np.arange(10), 10, 2).tolist() == [4, 3, 6, 5, 0, 7, 9, 2, 8, 1]


@stable
@given(seed=words, rows=st.lists(words, min_size=1, max_size=8), columns=st.integers(1, 5))
def test_tensors_are_mixed_into_the_same_bits(seed: int, rows: list[int], columns: int) -> None:
    wanted = mix(seed, np.array(rows)[:, None], np.arange(columns))
    found = mix_tensors(seed, torch.tensor(rows)[:, None], torch.arange(columns))
    assert np.array_equal(found.numpy().view(np.uint64), wanted)
