"""Near-duplicates and CLIP scores, against definitions written out by loops."""

from __future__ import annotations

import numpy as np
import pytest

from mclclip.curate import inputs, near
from mclclip.curate.near import Components, Groups, Subset
from mclclip.util import search
from mclclip.verbs.filter import top_share
from tests.unit.curate.made import cosine

RNG = np.random.default_rng(5)


def planted(count: int = 150, dim: int = 24) -> np.ndarray:
    """Random rows of other lengths in float16, a third of which copy an earlier one (cosine about
    0.99, or exactly)."""
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(count, dim))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    ids = rng.permutation(count)[: 2 * (count // 3)].reshape(-1, 2)
    for number, (first, copy) in enumerate(np.sort(ids, axis=1).tolist()):
        noise = 0.0 if number % 4 == 0 else 0.02
        rows[copy] = rows[first] + noise * rng.normal(size=dim)
    return (rows * rng.uniform(0.5, 2, size=(count, 1))).astype(np.float16)


def pairs_in(rows: np.ndarray, usable: np.ndarray, above: float, labels: np.ndarray | None) -> dict:
    """The near pairs by the numbers of their samples, with their cosines."""
    return {
        (int(i), int(j)): value
        for part in near.near_pairs(rows, usable, above, labels, what="a search")
        for (i, j), value in zip(part.rows, part.cosines, strict=True)
    }


def slow_components(count: int, pairs: list[tuple[int, int]]) -> list[int]:
    """The lowest sample of each one's component, by a search from every sample."""
    near: dict[int, set[int]] = {i: set() for i in range(count)}
    for i, j in pairs:
        near[i].add(j)
        near[j].add(i)
    lowest = [-1] * count
    for start in range(count):
        waiting = [start] if lowest[start] < 0 else []
        while waiting:
            found = waiting.pop()
            if lowest[found] < 0:
                lowest[found] = start
                waiting.extend(near[found])
    return lowest


# --- scores ---


@pytest.mark.parametrize("rows_at_once", [7, 4096])
def test_scores_are_the_largest_cosine_of_a_sample_s_captions(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near, "ROWS_AT_ONCE", rows_at_once)
    captions = np.array([1, 0, 3, 1, 0, 0, 9, 2, 1])
    images = RNG.normal(size=(len(captions), 12)).astype(np.float16)
    texts = RNG.normal(size=(captions.sum(), 12)).astype(np.float16)
    found = inputs.clip_scores(images, texts, captions)
    assert found.dtype == np.float32
    first = 0
    for sample, count in enumerate(captions.tolist()):
        own = [cosine(images[sample], texts[first + number]) for number in range(count)]
        first += count
        assert np.isnan(found[sample]) if not own else found[sample] == np.float32(max(own))


def test_the_top_share_takes_ties_by_the_lower_row() -> None:
    scores = np.array([0.5, np.nan, 0.9, 0.5, 0.5, 0.1], np.float32)
    for share, wanted in ((0.01, [2]), (0.4, [0, 2]), (0.6, [0, 2, 3]), (1.0, [0, 2, 3, 4, 5])):
        assert np.flatnonzero(top_share(scores, share)).tolist() == wanted
    assert not top_share(np.full(3, np.nan), 0.5).any()


# --- pairs ---


@pytest.mark.parametrize("held_rows", [1, 40, None])
def test_pairs_are_those_of_a_loop(held_rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within clusters, of which some are read together, and (None) of all with all."""
    rows = planted()
    usable = RNG.random(len(rows)) > 0.1
    labels = None
    if held_rows is not None:
        labels = RNG.integers(-1, 9, len(rows))
        monkeypatch.setattr(near, "HELD_BYTES", held_rows * rows[:1].nbytes)
    wanted = {
        (i, j): cosine(rows[i], rows[j])
        for i in range(len(rows))
        for j in range(i + 1, len(rows))
        if (labels is None or labels[i] == labels[j] >= 0) and usable[i] and usable[j]
        and cosine(rows[i], rows[j]) > 0.9
    }  # fmt: skip
    assert wanted and pairs_in(rows, usable, 0.9, labels) == pytest.approx(wanted)


def test_groups_are_read_together_up_to_a_bound() -> None:
    labels = np.array([4, 0, 0, 2, 2, 2, 2, -1, 4, 1, 2, 0])
    groups = Groups(labels, np.ones(12, bool))
    assert groups.ids.tolist() == [1, 2, 11, 3, 4, 5, 6, 10, 0, 8]  # 1 is alone, 7 in none
    assert groups.batches(3) == [(0, 1), (1, 2), (2, 3)]
    assert groups.batches(8) == [(0, 2), (2, 3)]
    assert groups.batches(100) == [(0, 3)]
    nothing = Groups(np.arange(5), np.ones(5, bool))
    assert len(nothing.ids) == 0 and nothing.batches(10) == []


@pytest.mark.parametrize(("rows_at_once", "dim"), [(7, 3), (4096, 24)])
def test_equal_rows_are_paired_with_the_first_of_them(
    rows_at_once: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near, "ROWS_AT_ONCE", rows_at_once)
    rows = RNG.normal(size=(9, dim)).astype(np.float16)[RNG.integers(0, 9, 80)]
    rows[::11] = 0
    rows[40] = rows[39] * np.float16(1.001)  # near, and not equal
    usable = RNG.random(80) > 0.2
    pieces = near.equal_pairs(rows, usable, 0.9, what="a search")
    found = np.concatenate([part.rows for part in pieces]).tolist()
    firsts: dict[bytes, int] = {}
    wanted = []
    for row in np.flatnonzero(usable & rows.any(axis=1)).tolist():
        first = firsts.setdefault(rows[row].tobytes(), row)
        if first != row:
            wanted.append([first, row])
    assert found == wanted and len(wanted) > 20


# --- components ---


@pytest.mark.parametrize("at_once", [3, 1000])
def test_components_are_those_of_a_search_from_every_sample(at_once: int) -> None:
    for count, num_pairs in ((1, 0), (40, 15), (200, 150), (200, 600)):
        pairs = RNG.integers(0, count, (num_pairs, 2))
        components = Components(count)
        for start in range(0, num_pairs, at_once):
            components.add(pairs[start : start + at_once])
        wanted = slow_components(count, [(i, j) for i, j in pairs.tolist()])
        assert components.lowest().tolist() == wanted


def crowded(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows along circles, so that chains are long, and equal ones; scores with ties and gaps."""
    angles = RNG.uniform(0, 6, count)
    rows = np.zeros((count, 8))
    first = 2 * RNG.integers(0, 4, count)
    rows[np.arange(count), first] = np.cos(angles)
    rows[np.arange(count), first + 1] = np.sin(angles)
    rows[RNG.permutation(count)[:40]] = rows[RNG.integers(0, count, 40)]
    scores = RNG.integers(0, 9, count) / 10
    return rows.astype(np.float16), np.where(RNG.random(count) > 0.2, scores, np.nan)


def slow_copies(
    rows: np.ndarray, left: np.ndarray, scores: np.ndarray, above: float
) -> dict[int, int]:
    """The best sample first: each is kept unless it is near one that is, the best of which it is a
    copy of."""
    kept: list[int] = []
    found = {}
    own = np.nan_to_num(scores, nan=-1)
    for sample in sorted(np.flatnonzero(left).tolist(), key=lambda i: (-own[i], i)):
        near = [other for other in kept if cosine(rows[sample], rows[other]) > above]
        if near:
            found[sample] = near[0]
        else:
            kept.append(sample)
    return found


def test_of_copies_the_best_is_kept_and_what_is_near_it_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(near, "ROUNDS", 100)
    for above in (0.999, 0.99, 0.95):
        rows, scores = crowded(150)
        left = RNG.random(150) > 0.1
        of, counts = near.copies_among(rows, left, scores, above, what="a search")
        wanted = slow_copies(rows, left, scores, above)
        assert {i: int(of[i]) for i in range(150) if of[i] != i} == wanted
        assert counts["by_chain"] == 0 and counts["largest_group"] > 3


def test_after_the_last_round_chains_are_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    angles = 0.1 * np.arange(12)  # each is near the next, the cosine of 0.1 is 0.995
    rows = np.column_stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
    for rounds, kept, by_chain in ((1, [0], 10), (2, [0, 2], 8), (10, [0, 2, 4, 6, 8, 10], 0)):
        monkeypatch.setattr(near, "ROUNDS", rounds)
        of, counts = near.copies_among(rows, np.ones(12, bool), None, 0.99, what="a search")
        assert np.unique(of).tolist() == kept
        assert counts["by_chain"] == by_chain and counts["largest_group"] == 12


# --- copies of other images ---


@pytest.mark.parametrize("blocks", [(1024, 16_384), (7, 11)])
def test_the_nearest_other_row_is_that_of_a_loop(
    blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in zip(("QUERY_ROWS", "BANK_ROWS"), blocks, strict=True):
        monkeypatch.setattr(search, name, size)
    rows = planted()
    others = np.concatenate([rows[40:60], RNG.normal(size=(30, 24)).astype(np.float16), rows[:50]])
    ids = np.arange(0, len(rows), 2)
    nearest, cosines, found = near.nearest_other(Subset(rows, ids), others, 0.8, what="a search")
    matched = np.zeros(len(others), bool)
    for place, sample in enumerate(ids.tolist()):
        values = [cosine(rows[sample], other) for other in others]
        close = [number for number, value in enumerate(values) if value > 0.8]
        matched[close] = True
        if not close:
            assert nearest[place] == -1 and np.isneginf(cosines[place])
            continue
        assert cosines[place] == pytest.approx(max(values))
        assert values[nearest[place]] == pytest.approx(max(values))
        same = [number for number in close if (others[number] == others[nearest[place]]).all()]
        assert nearest[place] == min(same)  # ties by the lower one
    assert np.array_equal(found, matched) and 0 < matched.sum() < len(others)
