"""The rows of a large matrix over ranks, with sums that are equal for any number of ranks.

The data is a list of row blocks (``cut_blocks``), cut without regard to the number of ranks; rank r
works on the blocks r, r + W, r + 2W, ... On a CPU one thread computes all that concerns one block,
in one order. Sums over rows must not depend on the order of the rows, so every value is truncated
to a fixed-point number in int64. Its unit follows from the largest value and the number of rows, so
that any sum fits into 62 bits: with 16 million rows it is 2^-38 of the largest value. Adding
integers is exact, so any number of ranks and threads gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mclclip.clustering.arithmetic import (
    CHOSEN,
    Arithmetic,
    choose_additions,
    choose_cache_bytes,
    choose_threads,
    integers_in_any_order,
    sums_in_float32,
)
from mclclip.clustering.options import Algorithm
from mclclip.data.arrays import BlockLayout, Floats
from mclclip.data.row_store import RowBlocks
from mclclip.ranks.collectives import all_reduce_max, all_reduce_sum, gather
from mclclip.ranks.process_group import Context, num_threads

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
T = TypeVar("T")
R = TypeVar("R")
_ROWS_PER_SUM = 1024  # rows that ``survey`` sums at once; last bits depend on it, so it is fixed


class RankRows:
    """The valid rows of this rank's blocks as float32 on the device, unit length if spherical.

    ``blocks`` [n_i, D] and ``valid`` [N] are the whole data, alike on all ranks of ``context``. As
    many own blocks as ``cache_bytes`` holds stay prepared on the device (None: 1 GiB, or half of
    what a GPU has free). What ``arithmetic`` leaves open is chosen for the device. Raises
    ValueError for blocks that are not float rows of one width.

    ``unit`` and ``squares`` are known after ``survey``. The unit is a power of two: values are
    summed as x * ``unit`` truncated to int64. ``squares`` is the sum of all |row|^2.
    """

    unit: float
    squares: float

    def __init__(
        self,
        blocks: Sequence[Floats],
        valid: Mask | None,
        algorithm: Algorithm,
        context: Context,
        cache_bytes: int | None,
        arithmetic: Arithmetic = CHOSEN,
    ) -> None:
        self.blocks, self.valid, self.algorithm = blocks, valid, algorithm
        self.context, self.arithmetic = context, arithmetic
        layouts: list[BlockLayout] = (
            blocks.layouts()
            if isinstance(blocks, RowBlocks)
            else [(block.shape, block.dtype) for block in blocks]
        )
        self.dim = _width(layouts)
        self._dtype = np.result_type(*{kind for _, kind in layouts})
        num_rows = [shape[0] for shape, _ in layouts]
        self.starts: list[int] = [0, *np.cumsum(num_rows).tolist()]
        self.num_rows = self.starts[-1]
        self.num_valid = self.num_rows if valid is None else int(np.count_nonzero(valid))
        if valid is not None and len(valid) != self.num_rows:
            raise ValueError(f"valid has {len(valid):,} rows, the blocks have {self.num_rows:,}")
        self.local_blocks = list(range(context.rank, len(blocks), context.world_size))
        per_block = choose_threads(context.device, arithmetic) == "per_block"
        self._additions = choose_additions(context.device, arithmetic)
        self.num_threads = torch.get_num_threads() if per_block else 1
        self._threads_per_operation = 1 if per_block else None
        room = choose_cache_bytes(context.device, cache_bytes)
        bytes_so_far = np.cumsum([num_rows[number] * self.dim * 4 for number in self.local_blocks])
        self._cached = set(self.local_blocks[: int(np.searchsorted(bytes_so_far, room, "right"))])
        self._cache: dict[int, Tensor] = {}

    # --- threads ---

    @contextmanager
    def torch_settings(self) -> Iterator[None]:
        """Runs a block in which bfloat16 products round no partial sums and, if ``each`` uses
        threads, an operation has one thread (last bits depend on that number).
        """
        with num_threads(self._threads_per_operation), sums_in_float32(), integers_in_any_order():
            yield

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """The results of ``work`` for each item, in order; threads share out the items."""
        if self.num_threads == 1:
            return [work(item) for item in items]
        with ThreadPoolExecutor(self.num_threads, "", torch.set_num_threads, (1,)) as pool:
            return list(pool.map(work, items))

    def runs(self) -> list[list[int]]:
        """The numbers of this rank's blocks, as one list for each of its threads."""
        dealt = [self.local_blocks[first :: self.num_threads] for first in range(self.num_threads)]
        return [run for run in dealt if run]

    def merge_blocks(self, numbers: Sequence[int], num_rows: int) -> list[list[int]]:
        """The numbers of blocks, those next to each other that hold up to ``num_rows`` rows in one
        list: on a GPU small blocks take longer to start than to compute."""
        groups: list[list[int]] = []
        room = 0
        for number in numbers:
            here = self.starts[number + 1] - self.starts[number]
            if not groups or here > room:
                groups.append([])
                room = num_rows
            groups[-1].append(number)
            room -= here
        return groups

    # --- rows ---

    def to_device(self, x: Tensor) -> Tensor:
        """A new float32 copy on the device."""
        # Always newly allocated: last bits depend on the alignment, which is then torch's own.
        copy = torch.empty(x.shape, dtype=torch.float32, device=self.context.device)
        return copy.copy_(x.detach())

    def prepare(self, x: Tensor) -> Tensor:
        """Rows [n, D] as float32 on the device, scaled to unit length if spherical."""
        rows = self.to_device(x)
        if self.algorithm == "spherical":
            lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-12)
            # A length that overflows float32 would silently turn the row into zeros.
            rows /= lengths.masked_fill_(torch.isinf(lengths), torch.nan)
        return rows

    def ids(self, number: int) -> Integers:
        """Row numbers of the valid rows of a block."""
        first, stop = self.starts[number], self.starts[number + 1]
        if self.valid is None:
            return np.arange(first, stop, dtype=np.int64)
        return first + np.flatnonzero(self.valid[first:stop])

    def block(self, number: int) -> Tensor:
        """Rows of block ``number`` that may be clustered: float32, on the device, unit length if
        spherical."""
        if number in self._cache:
            return self._cache[number]
        array = self.blocks[number]
        if self.valid is not None:
            array = array[self.valid[self.starts[number] : self.starts[number + 1]]]
        rows = self.prepare(torch.from_numpy(np.array(array)))
        if number in self._cached:
            self._cache[number] = rows
        return rows

    def gather(self, ids: Integers) -> Tensor:
        """The prepared rows [S, D] with these ascending row numbers, on every rank."""
        gathered = torch.zeros((len(ids), self.dim), device=self.context.device)

        def take(part: tuple[int, slice, Integers]) -> None:
            number, target, local = part
            gathered[target] = self.prepare(torch.from_numpy(np.array(self.blocks[number][local])))

        rank, world_size = self.context.rank, self.context.world_size
        self.each(take, [part for part in self._parts(ids) if part[0] % world_size == rank])
        return self.total(gathered) + 0.0  # no negative zeros, which a sum over ranks would lose

    def read(self, ids: Integers) -> Floats:
        """The rows [S, D] with these ascending numbers as stored; not a collective."""
        read_rows: Floats = np.empty((len(ids), self.dim), dtype=self._dtype)
        for number, target, local in self._parts(ids):
            read_rows[target] = self.blocks[number][local]
        return read_rows

    def _parts(self, ids: Integers) -> list[tuple[int, slice, Integers]]:
        """Ascending ids by block: its number, the slice of the ids in it, their rows within it."""
        if not len(ids):
            return []
        first, last = np.searchsorted(self.starts, ids[[0, -1]], "right") - 1
        bounds = np.searchsorted(ids, self.starts[first : last + 2])
        return [
            (number, slice(start, stop), ids[start:stop] - self.starts[number])
            for number, start, stop in zip(
                range(first, last + 1), bounds[:-1], bounds[1:], strict=True
            )
            if start < stop
        ]

    def draw(self, count: int, rng: np.random.Generator) -> Integers:
        """Ascending numbers of ``count`` valid rows, drawn at random (all, if there are fewer)."""
        valid = None if self.valid is None else np.flatnonzero(self.valid)
        if count >= self.num_valid:
            return np.arange(self.num_rows, dtype=np.int64) if valid is None else valid
        drawn = np.sort(rng.choice(self.num_valid, count, replace=False))
        return drawn if valid is None else valid[drawn]

    # --- over ranks ---

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks, on the device. Exact for integers, and where only one rank's value
        is not zero.
        """
        x = x.to(self.context.device)
        return x if self.context.world_size == 1 else all_reduce_sum(x)

    def largest(self, x: Tensor) -> Tensor:
        """The largest value over ranks, elementwise, on the device."""
        x = x.to(self.context.device)
        return x if self.context.world_size == 1 else all_reduce_max(x)

    def of_all(self, x: Tensor) -> Tensor:
        """[n, ...] on each rank -> [W, n, ...] in rank order, on the device."""
        x = x.to(self.context.device)
        every = x if self.context.world_size == 1 else gather(x)
        return every.view(self.context.world_size, *x.shape)

    def of_first_rank(self, x: Tensor) -> Tensor:
        """Rank 0's values on every rank (different machines may compute different last bits)."""
        return self.total(x if self.context.rank == 0 else torch.zeros_like(x))

    def refuse_not_finite(self, here: int) -> None:
        """Raises ValueError on all ranks if any found NaN or infinite rows (this one: ``here``)."""
        count = int(self.total(torch.tensor(here)))
        if count:
            raise ValueError(
                f"{count:,} of {self.num_valid:,} rows hold NaN or infinite values, or are too "
                "long for float32 to hold squared distances: wanted finite embeddings; check the "
                "encoder and run 'mclclip embed --force'"
            )

    def survey(self) -> None:
        """Measures ``unit`` and ``squares`` in one pass over all rows.

        Raises ValueError on all ranks for rows that are not finite.
        """

        def measured(number: int) -> tuple[int, float, float]:
            bad, largest, squares = 0, 0.0, 0.0
            for rows in tiles(self.block(number), _ROWS_PER_SUM):
                bad += num_not_finite(rows)
                largest = max(largest, *(abs(float(value)) for value in rows.aminmax()))
                squares += float(rows.double().square_().sum())
            return bad, largest, squares

        seen = self.each(measured, self.local_blocks)
        self.refuse_not_finite(sum(bad for bad, _, _ in seen))
        here = torch.tensor(max((largest for _, largest, _ in seen), default=0.0))
        exponent = int(np.frexp(float(self.largest(here)))[1])  # |value| < 2 ** exponent
        exponent = max(exponent, -60)  # float32 has to hold the unit
        # M values below 2 ** exponent add up to less than 2 ** 62; M times D squares likewise.
        bits = self.num_valid.bit_length()
        of_squares = 2.0 ** (62 - bits - self.dim.bit_length() - 2 * exponent)
        squares = int(self.total(torch.tensor(sum(round(s * of_squares) for _, _, s in seen))))
        self.unit, self.squares = 2.0 ** (62 - bits - exponent), squares / of_squares

    def add(self, sums: Tensor, counts: Tensor, labels: Tensor, rows: Tensor) -> None:
        """Adds rows [n, D] in fixed point to int64 ``sums`` [K, D] at their labels [n], and counts
        them in ``counts`` [K]. It makes an int64 copy of the rows, so give it a tile at a time.
        """
        self._add(sums, counts, labels, (rows * self.unit).long(), 1)

    def move(
        self, sums: Tensor, counts: Tensor, before: Tensor, labels: Tensor, rows: Tensor
    ) -> None:
        """Takes rows [n, D] that ``add`` added at the labels ``before`` [n] to other ``labels``.

        Integers come off exactly: the sums are those of rows that were added at ``labels`` alone.
        """
        moved = torch.nonzero(labels != before).flatten()
        fixed = rows.index_select(0, moved).mul_(self.unit).long()
        self._add(sums, counts, labels[moved], fixed, 1)
        self._add(sums, counts, before[moved], fixed.neg_(), -1)

    def _add(self, sums: Tensor, counts: Tensor, labels: Tensor, fixed: Tensor, count: int) -> None:
        """Adds int64 rows [n, D] to ``sums``, and ``count`` for each of them to ``counts``."""
        if self._additions == "index_put":
            sums.index_put_((labels,), fixed, accumulate=True)
        else:
            sums.index_add_(0, labels, fixed)
        counts.add_(torch.bincount(labels, minlength=len(counts)), alpha=count)


def tiles(rows: Tensor, rows_per_tile: int) -> Sequence[Tensor]:
    """Rows [n, ...] in views of at most so many rows; none where there are no rows."""
    return torch.split(rows, rows_per_tile) if len(rows) else ()


def num_not_finite(rows: Tensor) -> int:
    """Counts rows of [n, D] that hold a NaN or an infinite value, or are too long.

    (2 |row|)^2 has to be finite in float32, since two rows may have that squared distance.
    """
    return int((~torch.isfinite(4.0 * rows.square().sum(dim=1))).sum())


def _width(layouts: Sequence[BlockLayout]) -> int:
    """Returns D. Raises ValueError unless the shapes and types are those of float rows [n, D]."""
    widths = {shape[1:] for shape, _ in layouts}
    if len(widths) != 1 or len(min(widths)) != 1 or any(kind.kind != "f" for _, kind in layouts):
        kinds = sorted({f"{kind} {('n', *shape[1:])}" for shape, kind in layouts})
        raise ValueError(
            f"got blocks of {', '.join(kinds) or 'nothing'}: wanted float rows (n, D) of one width"
        )
    return int(min(widths)[0])
