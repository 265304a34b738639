"""Planted blind spots among images: found all, and nothing else; caps and ties."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from mclclip.curate import near
from mclclip.util import search
from mclclip.verbs.blindspots import BlindSpots, find
from tests.unit.curate.made import unit

N, DIM = 230, 64
OPTIONS: dict[str, Any] = {"above": 0.95, "below": 0.6, "per_image": 5, "max_pairs": 100}
BLOCKS = [(1024, 16_384), (17, 41), (64, 7)]


def turned(row: np.ndarray, cosine: float, rng: np.random.Generator) -> np.ndarray:
    """A unit row at this cosine to a unit row."""
    across = rng.normal(size=row.shape)
    across -= (across @ row) * row
    return cosine * row + np.sqrt(1 - cosine**2) * unit(across)


def planted(seed: int = 0) -> tuple[np.ndarray, np.ndarray, set[tuple[int, int]], int]:
    """Rows of both encoders in float16; the blind spots; the number of pairs that both confuse.

    Beside the blind spots there are pairs that are near misses: told apart by both, told apart by
    the first alone, confused by both, and neither confused nor told apart by the second.
    """
    rng = np.random.default_rng(seed)
    first, second = unit(rng.normal(size=(2, N, DIM)))
    ids = rng.permutation(N).reshape(-1, 2)
    kinds = {"spot": (0.97, 0.3), "just": (0.96, 0.58), "apart": (0.94, 0.3), "own": (0.2, 0.97)}
    kinds |= {"same": (0.97, 0.98), "between": (0.97, 0.62)}
    spots = set()
    for place, (left, right) in enumerate(ids[:90].tolist()):
        kind = [*kinds][place % len(kinds)]
        for rows, cosine in zip((first, second), kinds[kind], strict=True):
            rows[right] = turned(rows[left], cosine, rng)
        if kind in ("spot", "just"):
            spots.add((min(left, right), max(left, right)))
    return first.astype(np.float16), second.astype(np.float16), spots, 15


def found_in(
    first: np.ndarray, second: np.ndarray, blocks: tuple[int, int] = BLOCKS[0], **options: Any
) -> BlindSpots:
    above = (OPTIONS | options)["above"]
    with pytest.MonkeyPatch.context() as patched:
        for function in (search.blocks, search.num_blocks):
            sizes = {"query_rows": blocks[0], "bank_rows": blocks[1]}
            patched.setattr(function, "__kwdefaults__", sizes)
        pairs = near.near_pairs(first, np.ones(len(first), bool), above, what="a search")
        return find(pairs, second, **OPTIONS | options)


def as_set(rows: np.ndarray) -> set[tuple[int, int]]:
    return {(int(i), int(j)) for i, j in rows}


@pytest.mark.parametrize("seed", [0, 1])
def test_all_planted_blind_spots_are_found_and_nothing_else(seed: int) -> None:
    first, second, wanted, duplicates = planted(seed)
    found = found_in(first, second)
    kept = as_set(found.spots.rows)
    assert len(kept & wanted) / len(wanted) == 1.0  # recall
    assert len(kept & wanted) / len(kept) == 1.0  # precision
    assert len(kept) == len(found.spots.rows) == found.spots.num_pairs == 30
    assert len(found.duplicates.rows) == found.duplicates.num_pairs == duplicates
    assert found.confused == 60 and found.lowest == found.spots.cosines[:, 1].min()
    assert not any(found.spots.left_out.values())


def test_cosines_and_their_order_are_those_of_float64_whatever_the_blocks() -> None:
    first, second, _, _ = planted()
    whole = found_in(first, second)
    wide = [unit(rows.astype(np.float64)) for rows in (first, second)]
    for (i, j), own in zip(whole.spots.rows, whole.spots.cosines, strict=True):
        assert own == pytest.approx([rows[i] @ rows[j] for rows in wide], abs=1e-12)
    difference = whole.spots.cosines[:, 0] - whole.spots.cosines[:, 1]
    assert (np.diff(difference) <= 0).all() and np.ptp(difference) > 0.2
    for blocks in BLOCKS[1:]:
        other = found_in(first, second, blocks)
        assert np.array_equal(other.spots.rows, whole.spots.rows)
        assert np.array_equal(other.spots.cosines, whole.spots.cosines)


def crowd(count: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """One image for the first encoder, ``count`` directions for the second: all pairs are spots."""
    rng = np.random.default_rng(3)
    return np.ones((count, 4)) + 0.01 * rng.normal(size=(count, 4)), np.eye(count)


def test_caps_keep_the_largest_differences_and_count_what_is_left_out() -> None:
    first, second = crowd()
    every = found_in(first, second, per_image=11)
    assert every.spots.num_pairs == len(every.spots.rows) == 66
    assert not any(every.spots.left_out.values())
    kept: list[tuple[int, int]] = []
    uses: Counter[int] = Counter()
    for i, j in map(tuple, every.spots.rows.tolist()):  # by definition
        if uses[i] < 3 and uses[j] < 3:
            uses.update((i, j))
            kept.append((i, j))
    some = found_in(first, second, per_image=3)
    assert list(map(tuple, some.spots.rows.tolist())) == kept
    assert some.spots.left_out == {"per_image": 66 - len(kept), "total": 0, "pool": 0}
    few = found_in(first, second, per_image=3, max_pairs=4)
    assert list(map(tuple, few.spots.rows.tolist())) == kept[:4]
    assert few.spots.num_pairs == 66 == 4 + sum(few.spots.left_out.values())
    assert few.spots.left_out["total"] > 0
    assert few.counts.tolist() == [11] * 12  # whether they are kept or not


def test_what_the_pool_holds_does_not_depend_on_blocks() -> None:
    first, second = crowd()
    every = found_in(first, second, per_image=11)
    held = found_in(first, second, (5, 7), per_image=11, max_pairs=5, pool=9)
    assert np.array_equal(held.spots.rows, every.spots.rows[:5])
    assert held.spots.left_out == {"per_image": 0, "total": 4, "pool": 57}


def test_equal_differences_come_by_the_lower_rows() -> None:
    found = found_in(np.ones((5, 3)), np.eye(5), (2, 3))
    assert found.spots.rows.tolist() == sorted(found.spots.rows.tolist())
    assert found.spots.num_pairs == 10
