"""Search among rows by faiss, block by block: the nearest rows, and all pairs of near rows.

Rows can be arrays, memory-mapped files, or anything that can be sliced like them (``Rows``); they
are never in memory all at once. faiss computes in float32 and proposes candidates. Their products
are computed again in float64, row by row, so that equal rows get equal numbers.

Pairs of near rows are all found: faiss is asked for those above the threshold less the most that
rounding in float32 can hide (``cosine_margin``). The nearest rows are chosen among a few candidates
more than are wanted (``SPARE``). They depend on blocks, on the number of queries or on the device
only if more rows than these are as near as the last one, up to rounding in float32; then any of
these rows can be the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]

EXTRA = "pip install 'mclclip[search]', or on GPUs 'mclclip[search-gpu]'"

SPARE = 16
"""faiss is asked for so many candidates in addition to the k nearest."""

QUERY_ROWS, BANK_ROWS = 1024, 16_384
"""Sizes of a block of queries, and of a block of the bank, the rows that are searched. If all rows
are near each other, faiss returns all pairs of two blocks, which take 0.4 GB."""

_NEAREST_BANK_ROWS = 65_536  # block of the bank for ``nearest``, which returns few rows per query
_AT_ONCE = 4096  # so many pairs are computed in float64 at once
_EPS = 2.0**-24  # largest relative error of one operation in float32

FEWEST, MOST = 32, 2048
"""To find all rows within a radius on a GPU, faiss is asked for this number of nearest rows first,
and for at most the second number."""

MakeIndex = Callable[[int], Any]
"""Makes an empty faiss index for inner products of rows of a given width. If it is not a
``faiss.IndexFlatIP``, it lies on a GPU and can only ``add``, and ``search`` up to ``MOST`` rows."""


class Rows(Protocol):
    """Rows [N, D] that can be sliced; a slice is an array in memory or a memory-mapped one."""

    def __len__(self) -> int:
        """N."""

    def __getitem__(self, cut: slice, /) -> Floats:
        """The rows of a slice."""


def library(what: str) -> Any:
    """Imports faiss. Raises ValueError if it is missing or broken; ``what`` names in the message
    what needs it, for example 'kNN'."""
    try:
        import faiss

        _ = faiss.IndexFlatIP  # an empty folder, left by a removed build, can be imported too
        return faiss
    except ModuleNotFoundError:
        problem = f"which is not installed: {EXTRA}"
    except (ImportError, AttributeError) as error:
        problem = f"which is broken ({error}): see 'mclclip doctor'"
    raise ValueError(f"{what} needs the package faiss, {problem}")


@cache
def choose_index(faiss: Any) -> MakeIndex:
    """Returns a function that makes indexes on this process's GPU, if torch and faiss see one, or
    else on the CPU."""
    import torch

    # torch is asked first, since faiss's builds for GPUs abort the process if there is no driver.
    if not torch.cuda.is_available() or not faiss.get_num_gpus():
        return cast(MakeIndex, faiss.IndexFlatIP)
    options = faiss.GpuIndexFlatConfig()
    options.device = torch.cuda.current_device()
    options.useFloat16 = False
    # ``cosine_margin`` is for float32, so TF32 must be off. With cuBLAS, faiss switches it off
    # itself; cuVS, with which some builds multiply instead, has no such setting.
    options.use_cuvs = False
    torch.cuda.empty_cache()  # makes room: faiss takes 1.5 GiB, which torch may hold unused
    resources = faiss.StandardGpuResources()
    return lambda dim: faiss.GpuIndexFlatIP(resources, dim, options)


def _filled(make: MakeIndex, rows: NDArray[np.float32]) -> Any:
    index = make(rows.shape[1])
    index.add(rows)
    return index


def cuts(count: int, size: int) -> list[slice]:
    """Cuts [0, count) into slices of at most ``size``, in order."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def cosine_margin(dim: int) -> float:
    """Upper bound of the error of a product of two unit rows in float32, summed in any order.

    The sum rounds at most ``dim`` times, each time by at most 2^-24, since the sum of |x_i y_i| is
    at most 1 (Cauchy). Scaling rows to unit length, and the result, round fewer than 64 times more.
    """
    return (dim + 64) * _EPS


# --- the nearest rows --------------------------------------------------------------------------


def nearest(
    queries: Rows,
    bank: Rows,
    k: int,
    *,
    query_rows: int = QUERY_ROWS,
    bank_rows: int = _NEAREST_BANK_ROWS,
    what: str = "a search of nearest rows",
    make: MakeIndex | None = None,
) -> tuple[NDArray[np.float32], Integers]:
    """Finds, for each query [Q, D], the k rows of ``bank`` [N, D] with the largest product.

    Rows of the bank have unit length. Returns the products, computed in float64 and rounded to
    float32, and the row numbers, both [Q, k], nearest first. Copies of a row tie exactly, and the
    lower row comes first. Of more than ``SPARE`` rows that are as near as the k-th, up to rounding
    in float32, any can be among the k.
    Memory: the result, a block of ``query_rows``, and two blocks of ``bank_rows`` in float32.
    ``what`` names the caller in the error for a missing faiss; ``make`` makes the index of a block
    (None: ``choose_index``). Raises ValueError unless 1 <= k <= N, and if faiss is missing.
    """
    if not 1 <= k <= len(bank):
        raise ValueError(f"k is {k}, wanted 1 to {len(bank)}, the number of rows to search")
    faiss = library(what)
    make = make or choose_index(faiss)
    products = np.full((len(queries), k), -np.inf, np.float32)
    rows = np.full((len(queries), k), len(bank), np.int64)  # N stands for no row
    for block in cuts(len(bank), bank_rows):
        part = np.asarray(bank[block], np.float32)
        wide = min(k + SPARE, len(part))
        index = _filled(make if wide <= MOST else faiss.IndexFlatIP, part)
        for cut in cuts(len(queries), query_rows):
            part_queries = np.asarray(queries[cut], np.float32)
            _, near = index.search(part_queries, wide)
            for place, query, candidates in zip(
                range(cut.start, cut.stop), part_queries.astype(np.float64), near, strict=True
            ):
                best = np.concatenate([products[place], _products(part[candidates], query)])
                near_rows = np.concatenate([rows[place], block.start + candidates])
                order = np.lexsort((near_rows, -best))[:k]
                products[place], rows[place] = best[order], near_rows[order]
    return products, rows


def nearest_to_few(
    queries: Floats, bank: NDArray[np.float32], k: int
) -> tuple[NDArray[np.float32], Integers]:
    """Finds the k nearest rows as ``nearest`` does, without faiss: computes all Q N products in
    float64, so that all ties go to the lower row."""
    products = np.empty((len(queries), k), np.float32)
    rows = np.empty((len(queries), k), np.int64)
    for place, query in enumerate(np.asarray(queries, np.float64)):
        exact = _products(bank, query)
        rows[place] = np.argsort(-exact, kind="stable")[:k]
        products[place] = exact[rows[place]]
    return products, rows


def _products(rows: Floats, query: NDArray[np.float64]) -> NDArray[np.float32]:
    """Products of rows [n, D] with a query, computed in float64, rounded to float32."""
    # Unlike in a matrix product, such a sum does not depend on where its row stands.
    products: NDArray[np.float32] = (rows * query).sum(axis=1).astype(np.float32)
    return products


# --- pairs of near rows ------------------------------------------------------------------------


@dataclass(frozen=True)
class NearPairs:
    """Pairs of near rows: their row numbers [P, 2] and cosines [P]."""

    rows: Integers
    cosines: NDArray[np.float64]


Block = tuple[slice, slice]
"""The rows that are searched, and the rows that are their queries."""


def blocks(
    count: int, *, query_rows: int = QUERY_ROWS, bank_rows: int = BANK_ROWS
) -> Iterator[Block]:
    """Yields blocks that together hold every pair of ``count`` rows once, the lower row as the
    query."""
    for bank in cuts(count, bank_rows):
        for queries in cuts(bank.stop, query_rows):
            yield bank, queries


def num_blocks(count: int, *, query_rows: int = QUERY_ROWS, bank_rows: int = BANK_ROWS) -> int:
    """The number of blocks that ``blocks`` yields."""
    return sum(-(-bank.stop // query_rows) for bank in cuts(count, bank_rows))


def near_pairs(
    rows: Rows,
    above: float,
    over: Iterable[Block] | None = None,
    *,
    what: str = "a search of near rows",
    make: MakeIndex | None = None,
) -> Iterator[NearPairs]:
    """Yields all pairs of ``rows`` [N, D] whose cosine is above ``above``, some at a time.

    Each pair comes once, its lower row first; pairs are in no order. ``above`` is between 0 and 1.
    ``over`` are the blocks to search (None: all ``blocks``). Rows can have any length; a row of
    zeros is near nothing. Memory: two blocks, and faiss's result for them. Every row is compared
    with every other, so time grows with N^2 D. ``make`` makes the index of a block (None:
    ``choose_index``). Raises ValueError if faiss is missing.
    """
    faiss = library(what)
    last: slice | None = None
    for block, cut in blocks(len(rows)) if over is None else over:
        if block != last:
            bank, last = _Bank(np.asarray(rows[block]), faiss, make), block
        part_queries = np.asarray(rows[cut])
        for places, near_cosines in bank.near(part_queries, above, shift=block.start - cut.start):
            yield NearPairs(places + [cut.start, block.start], near_cosines)


def near_rows(
    queries: Rows,
    bank: Rows,
    above: float,
    *,
    what: str = "a search of near rows",
    make: MakeIndex | None = None,
) -> Iterator[NearPairs]:
    """Yields all pairs (row of ``queries`` [Q, D], row of ``bank`` [N, D]) whose cosine is above
    ``above``, some at a time, each once.

    Order, lengths, memory and errors are as for ``near_pairs``. The queries are read once for every
    ``BANK_ROWS`` rows of the bank.
    """
    faiss = library(what)
    for block in cuts(len(bank), BANK_ROWS):
        part = _Bank(np.asarray(bank[block]), faiss, make)
        for cut in cuts(len(queries), QUERY_ROWS):
            for places, near_cosines in part.near(np.asarray(queries[cut]), above):
                yield NearPairs(places + [cut.start, block.start], near_cosines)


class _Bank:
    """A block of the bank, and a faiss index of its rows scaled to unit length."""

    def __init__(self, rows: Floats, faiss: Any, make: MakeIndex | None) -> None:
        self._rows, self._on_cpu = rows, faiss.IndexFlatIP
        self._index = _filled(make or choose_index(faiss), normalize_rows(rows))

    def near(
        self, queries: Floats, above: float, shift: int | None = None
    ) -> Iterator[tuple[Integers, NDArray[np.float64]]]:
        """Yields pairs whose cosine is above ``above``: their places [P, 2] in ``queries`` and in
        the block, and their cosines [P].

        If the queries are rows of the bank too, ``shift`` is the number of the block's first row
        minus that of the first query; then only pairs whose query is the lower row are yielded.
        """
        least = float(np.float32(above - cosine_margin(self._rows.shape[1])))
        for numbers, limits, near in self._proposed(normalize_rows(queries), least):
            for part in cuts(len(near), _AT_ONCE):
                query = np.searchsorted(limits, np.arange(part.start, part.stop), side="right") - 1
                places = np.column_stack([numbers[query], near[part]])
                if shift is not None:
                    places = places[places[:, 0] < places[:, 1] + shift]
                near_cosines = cosines(queries[places[:, 0]], self._rows[places[:, 1]])
                if (close := near_cosines > above).any():
                    yield places[close], near_cosines[close]

    def _proposed(
        self, queries: NDArray[np.float32], least: float
    ) -> Iterator[tuple[Integers, Integers, Integers]]:
        """Yields rows of the block whose product with a query is above ``least``, by float32.

        ``queries`` are unit rows. What is yielded is the numbers of some queries [q], ``limits``
        [q + 1] and rows: rows[limits[n]:limits[n + 1]] belong to the n-th of these queries. faiss
        cannot search within a radius on a GPU. There it is asked for more and more of the nearest
        rows until the last one is outside; queries with more than ``MOST`` rows go to the CPU.
        """
        left, k, count = np.arange(len(queries)), FEWEST, len(self._rows)
        index = self._index
        if not isinstance(index, self._on_cpu):
            while len(left) and k <= MOST:
                products, near = index.search(queries[left], min(k, count))
                inside = products > least
                more = inside[:, -1] & (k < count)
                ends = np.cumsum(inside[~more].sum(axis=1))
                yield left[~more], np.append(0, ends), near[~more][inside[~more]]
                left, k = left[more], 2 * k
            if len(left):
                index = _filled(self._on_cpu, normalize_rows(self._rows))
        if len(left):
            limits, _, near = index.range_search(queries[left], least)
            yield left, limits, near


def cosines(left: Floats, right: Floats) -> NDArray[np.float64]:
    """Cosines [n] of rows [n, D] with rows [n, D], in float64; 0 if a row is zeros."""
    a, b = (np.asarray(rows, np.float64) for rows in (left, right))
    squares = (a * a).sum(axis=1) * (b * b).sum(axis=1)
    cosine: NDArray[np.float64] = (a * b).sum(axis=1) / np.sqrt(np.where(squares > 0, squares, 1.0))
    return cosine


def normalize_rows(rows: Floats) -> NDArray[np.float32]:
    """Copies rows [n, D] as float32 and scales them to unit length; rows of zeros stay zeros."""
    scaled = np.array(rows, np.float32, order="C")
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    scaled /= np.where(norms > 0, norms, 1.0)
    return scaled
