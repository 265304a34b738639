"""Exact search among rows by faiss, block by block: the nearest rows, and all pairs of near rows.

Rows may be arrays, memory-mapped or not, or whatever is cut like them; they are never held whole.
faiss works in float32 and proposes, and what it proposes is computed again in float64, row by row,
so that equal rows get equal numbers. The bound on the rounding of a product in float32 says which
other rows might have been meant; where there are any, all of a block are computed in float64. So
neither blocks nor the number of queries change a result, nor does a GPU on which faiss proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]

EXTRA = "pip install 'mclclip[search]', or on GPUs 'mclclip[search-gpu]'"

SPARE = 16
"""Candidates beyond k that faiss is asked for."""

QUERY_ROWS, BANK_ROWS = 1024, 16_384
"""Rows of a block of queries and of the rows they are compared with. Where every row is near every
other, faiss returns all pairs of two blocks, which take 0.4 GB."""

_NEAREST_BANK_ROWS = 65_536  # of ``nearest``, which finds a few rows per query whatever they are
_AT_ONCE = 4096  # rows that are computed in float64 at once
_EPS = 2.0**-24  # largest relative error of one operation in float32

FEWEST, MOST = 32, 2048
"""Nearest rows that a GPU is asked for first where all within a radius are wanted, and the most
that faiss finds there."""

MakeIndex = Callable[[int], Any]
"""Makes an empty index of faiss's for inner products of rows of a width. One that is no
``faiss.IndexFlatIP`` is a GPU's: it has ``add``, and ``search`` for at most ``MOST`` rows."""


class Rows(Protocol):
    """Rows [N, D] that can be cut; a cut is an array in memory, or mapped."""

    def __len__(self) -> int:
        """N."""

    def __getitem__(self, cut: slice, /) -> Floats:
        """The rows of a slice."""


def library(what: str) -> Any:
    """The faiss package, imported only when it is used.

    Raises ValueError, one line that says that ``what`` needs it, where it is missing or broken.
    """
    try:
        import faiss

        _ = faiss.IndexFlatIP  # a folder without files, as a removed build leaves, is imported too
    except ModuleNotFoundError:
        raise ValueError(
            f"{what} needs the package faiss, which is not installed: {EXTRA}"
        ) from None
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{what} needs the package faiss, which is broken ({error}): see 'mclclip doctor'"
        ) from None
    return faiss


@cache
def choose_index(faiss: Any) -> MakeIndex:
    """Returns the maker of indexes: on this process's GPU if torch and faiss see one, else on the
    CPU."""
    import torch

    # torch is asked first: without a driver, faiss's builds for GPUs abort the process.
    if not torch.cuda.is_available() or not faiss.get_num_gpus():
        return cast(MakeIndex, faiss.IndexFlatIP)
    options = faiss.GpuIndexFlatConfig()
    options.device = torch.cuda.current_device()
    options.useFloat16 = False
    # The margin is that of float32, so TF32 must be off. faiss forbids its own handle of cuBLAS to
    # round, whatever torch allows; cuVS, with which some builds multiply instead, has no such
    # setting.
    options.use_cuvs = False
    torch.cuda.empty_cache()  # faiss takes 1.5 GiB, which torch may hold without using it
    resources = faiss.StandardGpuResources()
    return lambda dim: faiss.GpuIndexFlatIP(resources, dim, options)


def _filled(make: MakeIndex, rows: NDArray[np.float32]) -> Any:
    index = make(rows.shape[1])
    index.add(rows)
    return index


def cuts(count: int, size: int) -> list[slice]:
    """Slices of at most ``size`` rows, in order."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def cosine_margin(dim: int) -> float:
    """Bound on the error of a product of unit rows in float32, in any order of its sum.

    The sum makes at most dim roundings of the sum of |x_i y_i|, which is at most 1 (Cauchy).
    Bringing rows to unit length in float32 and rounding the result make fewer than 64 more.
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
    """The k nearest of unit rows ``bank`` [N, D] to each of ``queries`` [Q, D], by their product.

    Returns products, rounded to float32, and rows [Q, k], nearest first, ties by the lower row:
    copies of a row tie exactly, however many there are. Beside the result, memory holds a block
    of ``query_rows`` and one of ``bank_rows`` in float32, and faiss another of these. ``what``
    names the caller in the error for a missing faiss. ``make`` builds the index of a block (None:
    ``choose_index``). Raises ValueError unless 1 <= k <= N, and where faiss is not installed.
    """
    if not 1 <= k <= len(bank):
        raise ValueError(f"k is {k}, wanted 1 to {len(bank)}, the number of rows to search")
    faiss = library(what)
    make = make or choose_index(faiss)
    products = np.full((len(queries), k), -np.inf, np.float32)
    rows = np.full((len(queries), k), len(bank), np.int64)  # no row yet
    for block in cuts(len(bank), bank_rows):
        part = _Part(np.asarray(bank[block], np.float32), block.start, k)
        wide = min(k + SPARE, len(part.different))
        index = _filled(make if wide <= MOST else faiss.IndexFlatIP, part.different)
        for cut in cuts(len(queries), query_rows):
            part_queries = np.asarray(queries[cut], np.float32)
            proposed, near = index.search(part_queries, wide)
            for number, query in enumerate(part_queries):
                best, near_rows = part.nearest(query, proposed[number], near[number], k)
                place = cut.start + number
                best = np.concatenate([products[place], best])
                near_rows = np.concatenate([rows[place], near_rows])
                order = np.lexsort((near_rows, -best))[:k]
                products[place], rows[place] = best[order], near_rows[order]
    return products, rows


def nearest_to_few(
    queries: Floats, bank: NDArray[np.float32], k: int
) -> tuple[NDArray[np.float32], Integers]:
    """The result of ``nearest``, without faiss: all Q N products are computed in float64."""
    every = np.arange(len(bank))
    products = np.empty((len(queries), k), np.float32)
    rows = np.empty((len(queries), k), np.int64)
    for place, query in enumerate(np.asarray(queries, np.float64)):
        exact = _products(bank, every, query)
        rows[place] = np.lexsort((every, -exact))[:k]
        products[place] = exact[rows[place]]
    return products, rows


class _Part:
    """A block of the bank: its distinct rows, and for each the numbers of its first k copies."""

    def __init__(self, rows: NDArray[np.float32], start: int, k: int) -> None:
        groups: dict[bytes, list[int]] = {}
        for row, values in enumerate(rows):
            groups.setdefault(blake2b(values.tobytes(), digest_size=16).digest(), []).append(row)
        self.members = [start + np.array(copies[:k], np.int64) for copies in groups.values()]
        self.different = rows[[copies[0] for copies in groups.values()]]

    def nearest(
        self, query: NDArray[np.float32], proposed: NDArray[np.float32], near: Integers, k: int
    ) -> tuple[NDArray[np.float32], Integers]:
        """At most k nearest rows to a query, nearest first, from the rows that faiss proposed."""
        products, rows = self._in_order(query, near, k)
        if len(near) < len(self.different):
            scale = max(1.0, float(np.linalg.norm(query)))
            unseen = float(proposed[-1]) + cosine_margin(len(query)) * scale
            if len(rows) < k or products[-1] <= unseen:
                return self._in_order(query, np.arange(len(self.different)), k)
        return products, rows

    def _in_order(
        self, query: NDArray[np.float32], places: Integers, k: int
    ) -> tuple[NDArray[np.float32], Integers]:
        exact = _products(self.different, places, query.astype(np.float64))
        exact = np.repeat(exact, [len(self.members[place]) for place in places])
        rows = np.concatenate([self.members[place] for place in places])
        order = np.lexsort((rows, -exact))[:k]
        return exact[order], rows[order]


def _products(rows: Floats, places: Integers, query: NDArray[np.float64]) -> NDArray[np.float32]:
    """Products of chosen rows with a query, in float64, each by itself, rounded to float32."""
    products = np.empty(len(places), np.float32)
    for cut in cuts(len(places), _AT_ONCE):
        # A sum along rows does not depend on where a row stands; a product of matrices may.
        products[cut] = (rows[places[cut]] * query).sum(axis=1)
    return products


# --- pairs of near rows ------------------------------------------------------------------------


@dataclass(frozen=True)
class NearPairs:
    """Pairs of rows, the lower one first, with their cosines: rows [P, 2], cosines [P]."""

    rows: Integers
    cosines: NDArray[np.float64]


Block = tuple[slice, slice]
"""Rows that are searched, and the queries that are compared with them."""


def blocks(
    count: int, *, query_rows: int = QUERY_ROWS, bank_rows: int = BANK_ROWS
) -> Iterator[Block]:
    """Blocks of as many rows in which each pair of them is once, the lower row as the query."""
    for bank in cuts(count, bank_rows):
        for queries in cuts(bank.stop, query_rows):
            yield bank, queries


def num_blocks(count: int, *, query_rows: int = QUERY_ROWS, bank_rows: int = BANK_ROWS) -> int:
    """Number of ``blocks``."""
    return sum(-(-bank.stop // query_rows) for bank in cuts(count, bank_rows))


def near_pairs(
    rows: Rows,
    above: float,
    over: Iterable[Block] | None = None,
    *,
    what: str = "a search of near rows",
    make: MakeIndex | None = None,
) -> Iterator[NearPairs]:
    """Yields pairs of ``rows`` [N, D] whose cosine is above ``above``, some at a time, each once.
    The verbs have checked that it lies between 0 and 1.

    ``over``: the blocks that are searched (None: all ``blocks``). The order of the pairs says
    nothing. Rows need not have unit length; a row of zeros is near nothing. Memory holds the two
    blocks, and what faiss found among them. Every row is compared with every other: time grows with
    N^2 D. ``make`` builds the index of a block (None: ``choose_index``). Raises ValueError where
    faiss is not installed.
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
    """Yields pairs of a row of ``queries`` [Q, D] and one of ``bank`` [N, D], in this order, whose
    cosine is above ``above``, some at a time, each once.

    All else is as for ``near_pairs``: order, lengths, memory and errors. The queries are read once
    for every ``BANK_ROWS`` rows of the bank.
    """
    faiss = library(what)
    for block in cuts(len(bank), BANK_ROWS):
        part = _Bank(np.asarray(bank[block]), faiss, make)
        for cut in cuts(len(queries), QUERY_ROWS):
            for places, near_cosines in part.near(np.asarray(queries[cut]), above):
                yield NearPairs(places + [cut.start, block.start], near_cosines)


class _Bank:
    """A block of rows that queries are compared with, and an index of them at length 1."""

    def __init__(self, rows: Floats, faiss: Any, make: MakeIndex | None) -> None:
        self._rows, self._on_cpu = rows, faiss.IndexFlatIP
        self._index = _filled(make or choose_index(faiss), unit(rows))

    def near(
        self, queries: Floats, above: float, shift: int | None = None
    ) -> Iterator[tuple[Integers, NDArray[np.float64]]]:
        """Yields pairs whose cosine is above ``above``: their places [P, 2] in ``queries`` and in
        the block, and the cosines [P]. With ``shift``, the distance from the first query to the
        block's first row, pairs come once, the lower row first."""
        least = float(np.float32(above - cosine_margin(self._rows.shape[1])))
        for numbers, limits, near in self._proposed(unit(queries), least):
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
        """Yields numbers [q] of some of the unit rows ``queries``, limits [q + 1], and rows of the
        block: those within ``limits[n]`` and ``limits[n + 1]`` have a product above ``least`` with
        the n-th of these queries.

        A GPU finds no rows within a radius, so it is asked for more and more of the nearest ones
        until the last is outside; queries that have more than ``MOST`` inside are the CPU's.
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
                index = _filled(self._on_cpu, unit(self._rows))
        if len(left):
            limits, _, near = index.range_search(queries[left], least)
            yield left, limits, near


def cosines(left: Floats, right: Floats) -> NDArray[np.float64]:
    """Cosines [n] of rows [n, D], in float64, each from its two rows alone; 0 for rows of zeros."""
    a, b = (np.asarray(rows, np.float64) for rows in (left, right))
    squares = (a * a).sum(axis=1) * (b * b).sum(axis=1)
    cosine: NDArray[np.float64] = (a * b).sum(axis=1) / np.sqrt(np.where(squares > 0, squares, 1.0))
    return cosine


def unit(rows: Floats) -> NDArray[np.float32]:
    """float32 rows of length 1, in memory; rows of zeros stay zeros."""
    wide = np.array(rows, np.float32, order="C")
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    wide /= np.where(norms > 0, norms, 1.0)
    return wide
