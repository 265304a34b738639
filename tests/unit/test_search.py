"""Search among rows: beside scikit-learn, and beside all products in float64."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from mclclip.util import search

BLOCKS = [(7, 11), (64, 3), (1000, 1000)]  # queries, bank: none divides 100


def unit_rows(count: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def crowded(count: int, dim: int = 24, seed: int = 0) -> np.ndarray:
    """Rows around few directions, of other lengths, some of them copies, one of zeros; float16."""
    rng = np.random.default_rng(seed)
    rows = unit_rows(5, dim, seed)[rng.integers(0, 5, count)] + 0.06 * rng.normal(size=(count, dim))
    rows[count // 2] = rows[3]
    rows[count // 3] = 0.0
    return (rows * rng.uniform(0.5, 2.0, size=(count, 1))).astype(np.float16)


def all_pairs(rows: np.ndarray, above: float) -> dict[tuple[int, int], float]:
    """Slow: the whole matrix of cosines in float64."""
    wide = rows.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    wide = wide / np.where(norms > 0, norms, 1)
    matrix = wide @ wide.T
    lower, higher = np.nonzero(np.triu(matrix > above, k=1))
    return {(i, j): matrix[i, j] for i, j in zip(lower.tolist(), higher.tolist(), strict=True)}


def found_pairs(rows: Any, above: float, **blocks: int) -> list[tuple[tuple[int, int], float]]:
    return [
        ((int(i), int(j)), float(cosine))
        for part in search.near_pairs(rows, above, search.blocks(len(rows), **blocks))
        for (i, j), cosine in zip(part.rows, part.cosines, strict=True)
    ]


# --- the nearest rows ---


@pytest.mark.parametrize("k", [1, 40])
def test_neighbours_are_those_of_scikit_learn(k: int) -> None:
    train, queries = unit_rows(40), unit_rows(7, seed=1)
    reference = KNeighborsClassifier(k, metric="cosine", algorithm="brute")
    distance, wanted = reference.fit(train, np.zeros(40)).kneighbors(queries)
    similarity, rows = search.nearest(queries, train, k)
    assert np.array_equal(rows, wanted)
    assert np.allclose(similarity, 1 - distance, atol=1e-6)


@pytest.mark.parametrize(("copies", "bank_rows"), [(3, 65_536), (40, 33), (600, 333)])
def test_any_number_of_equal_rows_ties_exactly(copies: int, bank_rows: int) -> None:
    """More of them than k and what faiss is asked for beside: then any k of them, in order."""
    different, queries = unit_rows(7, 24), unit_rows(30, 24, seed=1)
    train = np.tile(different, (copies, 1))  # row n and row n + 7 are equal
    similarity, rows = search.nearest(queries, train, 5, bank_rows=bank_rows)
    exact = (queries.astype(np.float64) @ different.astype(np.float64).T).astype(np.float32)
    place = np.arange(len(train))
    for query in range(30):
        wanted = np.lexsort((place, -np.tile(exact[query], copies)))[:5]
        assert np.array_equal(similarity[query], exact[query, wanted % 7])
        assert np.array_equal(rows[query] % 7, wanted % 7)
        assert len(set(rows[query])) == 5
        if copies <= 3:
            assert rows[query].tolist() == wanted.tolist()
        else:  # all of them are copies of one row
            assert (np.diff(rows[query]) > 0).all()


@pytest.mark.parametrize("spread", [1.0, 1e-7])
def test_candidates_are_in_the_order_of_float64(spread: float) -> None:
    """Around one direction at 1e-7 faiss's own order is noise, and any near row is a candidate."""
    rng = np.random.default_rng(0)
    train = (unit_rows(1, 48) + spread * rng.normal(size=(300, 48))).astype(np.float32)
    queries = np.concatenate([unit_rows(1, 48), unit_rows(5, 48, seed=1)])  # one among them
    exact = (train.astype(np.float64) @ queries.astype(np.float64).T).T.astype(np.float32)
    similarity, rows = search.nearest(queries, train, 9, query_rows=4, bank_rows=77)
    for query in range(6):
        wanted = np.lexsort((np.arange(300), -exact[query]))[:9]
        assert np.array_equal(similarity[query], exact[query, rows[query]])
        order = np.lexsort((rows[query], -similarity[query]))
        assert np.array_equal(order, np.arange(9))
        assert (exact[query, wanted] - similarity[query] <= 2 * search.cosine_margin(48)).all()
        if spread == 1.0:
            assert rows[query].tolist() == wanted.tolist()


def test_a_share_of_the_queries_has_the_neighbours_of_the_whole() -> None:
    """faiss multiplies few queries otherwise than many, which must not show; nor must blocks."""
    train, queries = unit_rows(2000, 48), unit_rows(90, 48, seed=1)
    whole, rows = search.nearest(queries, train, 9)
    for share in (slice(0, 0), slice(0, 1), slice(1, 15), slice(15, 90)):
        near, found = search.nearest(queries[share], train, 9, query_rows=13, bank_rows=301)
        assert np.array_equal(found, rows[share]) and np.array_equal(near, whole[share])


# --- pairs of near rows ---


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("above", [0.5, 0.99])
def test_pairs_are_those_of_all_products_in_float64(blocks: tuple[int, int], above: float) -> None:
    rows = crowded(100)
    wanted = all_pairs(rows, above)
    pairs = found_pairs(rows, above, query_rows=blocks[0], bank_rows=blocks[1])
    assert len(pairs) == len(wanted) == len({pair for pair, _ in pairs}) > 0
    for pair, cosine in pairs:
        assert cosine == pytest.approx(wanted[pair], abs=1e-12)


def test_pairs_about_the_threshold_are_decided_in_float64() -> None:
    """Cosines a float32 product cannot tell from the threshold, on both sides of it."""
    angle = np.arccos(0.95)
    turned = [angle + n * 1e-9 for n in range(-20, 21)]
    rows = np.zeros((42, 600))
    rows[0, 0] = 1.0
    rows[1:, 0], rows[1:, 1] = np.cos(turned), np.sin(turned)
    wanted = {pair for pair in all_pairs(rows, 0.95) if pair[0] == 0}
    assert 15 <= len(wanted) <= 25
    pairs = found_pairs(rows, 0.95, query_rows=5, bank_rows=9)
    assert {pair for pair, _ in pairs if pair[0] == 0} == wanted


def test_blocks_hold_each_pair_once_and_are_as_many_as_announced() -> None:
    for query_rows, bank_rows in BLOCKS:
        sizes = {"query_rows": query_rows, "bank_rows": bank_rows}
        cuts = list(search.blocks(100, **sizes))
        assert len(cuts) == search.num_blocks(100, **sizes)
        held = np.zeros((100, 100), int)
        for bank, queries in cuts:
            held[queries, bank] += 1
        assert (held[np.triu_indices(100, k=1)] == 1).all()


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_that_of_the_blocks() -> None:
    """2,500 rows of 256 are 2.4 MiB in float32; blocks of 64 and 200 of them 264 KiB."""
    rows = unit_rows(2500, 256).astype(np.float16)
    blocks = {"query_rows": 64, "bank_rows": 200}
    assert peak_bytes(lambda: found_pairs(rows, 0.9, **blocks)) < 2**20
    assert peak_bytes(lambda: search.nearest(rows[:20], rows, 3, **blocks)) < 2**20


def test_many_near_rows_take_no_more_than_their_pairs() -> None:
    """All rows are copies: 180,000 pairs, whose rows in float64 would be 175 MiB."""
    rows = np.ones((600, 64), np.float16)
    counts: list[int] = []
    pairs = search.near_pairs(rows, 0.9)
    assert peak_bytes(lambda: counts.extend(len(part.rows) for part in pairs)) < 16 * 2**20
    assert sum(counts) == 600 * 599 // 2


# --- bad input ---


def test_without_faiss_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search.library("this test") is faiss
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
    message = r"^kNN needs the package faiss.*pip install 'mclclip\[search\]'.*\[search-gpu\]'$"
    for work in (
        lambda: search.nearest(unit_rows(2), unit_rows(4), 1, what="kNN"),
        lambda: next(search.near_pairs(unit_rows(4), 0.5, what="kNN")),
    ):
        with pytest.raises(ValueError, match=message):
            work()


# --- on a GPU ---


class StandIn:
    """What faiss has on a GPU: at most 2,048 nearest rows, no radius, and products that are as far
    off as float32 allows."""

    def __init__(self, dim: int) -> None:
        self.error, self.asked = 0.9 * search.cosine_margin(dim), []

    def add(self, rows: np.ndarray) -> None:
        self.rows = rows.astype(np.float64)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        assert queries.dtype == np.float32 and 1 <= k <= min(2048, len(self.rows))
        self.asked.append((len(queries), k))
        products = queries.astype(np.float64) @ self.rows.T
        rng = np.random.default_rng(len(self.asked))
        products += rng.choice([-self.error, self.error], size=products.shape)
        near = np.argsort(-products, axis=1)[:, :k]
        return np.take_along_axis(products, near, axis=1).astype(np.float32), near


def in_order(parts: Iterator[search.NearPairs]) -> tuple[np.ndarray, np.ndarray]:
    found = list(parts)
    rows = np.concatenate([np.zeros((0, 2), np.int64), *(part.rows for part in found)])
    own = np.concatenate([np.zeros(0), *(part.cosines for part in found)])
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    return rows[order], own[order]


def same_bits(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> None:
    for left, right in zip(one, other, strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("count", [1, 300])
def test_nearest_rows_on_a_gpu_are_those_of_the_cpu(count: int) -> None:
    """Copies too; any k, any blocks."""
    rng = np.random.default_rng(count)
    bank = (unit_rows(1, 48) + rng.normal(size=(count, 48))).astype(np.float32)
    bank /= np.linalg.norm(bank, axis=1, keepdims=True)
    bank[count // 2 : count // 2 + 10] = bank[0]
    queries = np.concatenate([bank[:3], unit_rows(5, 48, seed=1)])
    for k in sorted({1, min(5, count), count}):
        wanted = search.nearest(queries, bank, k, make=faiss.IndexFlatIP)
        same_bits(search.nearest(queries, bank, k, make=StandIn), wanted)
        same_bits(
            search.nearest(queries, bank, k, make=StandIn, query_rows=3, bank_rows=77), wanted
        )
        same_bits(search.nearest_to_few(queries, bank, k), wanted)


def test_more_nearest_rows_than_a_gpu_finds_are_the_cpu_s() -> None:
    bank, queries = unit_rows(2100), unit_rows(2, seed=1)
    for k in (2032, 2033, 2100):  # with those beside k: 2,048, and more
        wanted = search.nearest(queries, bank, k, make=faiss.IndexFlatIP)
        same_bits(search.nearest(queries, bank, k, make=StandIn), wanted)


@pytest.mark.parametrize(
    ("count", "above", "most"), [(1, 0.9, 2048), (400, 0.3, 64), (400, 0.3, 2048), (400, 0.999, 64)]
)
def test_pairs_on_a_gpu_are_those_of_the_cpu(
    count: int, above: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MOST", most)
    rows, others = crowded(max(count, 4))[:count], crowded(70, seed=1)
    blocks = list(search.blocks(count, query_rows=64, bank_rows=300))
    wanted = in_order(search.near_pairs(rows, above, make=faiss.IndexFlatIP))
    same_bits(in_order(search.near_pairs(rows, above, make=StandIn)), wanted)
    same_bits(in_order(search.near_pairs(rows, above, blocks, make=StandIn)), wanted)
    monkeypatch.setattr(search, "choose_index", lambda _: StandIn)
    same_bits(in_order(search.near_pairs(rows, above)), wanted)
    wanted = in_order(search.near_rows(others, rows, above, make=faiss.IndexFlatIP))
    same_bits(in_order(search.near_rows(others, rows, above)), wanted)


def test_more_near_rows_than_a_gpu_finds_are_searched_on_the_cpu() -> None:
    """One query has 40 rows near it, another 1,600, a third 2,500: 32, 64, ... 2,048 are asked for,
    and then the CPU."""
    directions, made = np.eye(3, 8, dtype=np.float32), []
    bank = np.repeat(directions, [40, 1600, 2500], axis=0)
    bank += 0.01 * np.random.default_rng(0).normal(size=bank.shape).astype(np.float32)

    def make(dim: int) -> StandIn:
        made.append(StandIn(dim))
        return made[-1]

    wanted = in_order(search.near_rows(directions, bank, 0.9, make=faiss.IndexFlatIP))
    assert np.bincount(wanted[0][:, 0]).tolist() == [40, 1600, 2500]
    same_bits(in_order(search.near_rows(directions, bank, 0.9, make=make)), wanted)
    (index,) = made
    asked = [(3, 32), (3, 64), (2, 128), (2, 256), (2, 512), (2, 1024), (2, 2048)]
    assert index.asked == asked


def test_a_gpu_is_chosen_where_torch_and_faiss_see_one(monkeypatch: pytest.MonkeyPatch) -> None:
    built = ModuleType("faiss")
    built.IndexFlatIP = faiss.IndexFlatIP
    built.GpuIndexFlatConfig = SimpleNamespace
    built.StandardGpuResources = lambda: "resources"
    built.GpuIndexFlatIP = lambda *arguments: arguments

    def chosen(torch_sees: bool, faiss_sees: int | None) -> Any:
        def count() -> int:
            assert faiss_sees is not None, "without a driver this aborts the process"
            return faiss_sees

        built.get_num_gpus = count
        monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        return search.choose_index.__wrapped__(built)

    assert chosen(False, None) is faiss.IndexFlatIP
    assert chosen(True, 0) is faiss.IndexFlatIP
    resources, dim, options = chosen(True, 4)(16)
    assert (resources, dim) == ("resources", 16)
    assert vars(options) == {"device": 3, "useFloat16": False, "use_cuvs": False}
