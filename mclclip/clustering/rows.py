"""Divides the rows of a large matrix among ranks; sums of rows are equal for any number of ranks.

The matrix is a list of blocks of rows (``cut_blocks``). How it is cut does not depend on W, the
number of ranks. Rank r works on blocks r, r + W, r + 2W, ... On a CPU, one thread does all work on
one block, in one order.

Sums of floats would depend on the order of the rows. So each value is truncated to an int64
multiple of a small unit, since sums of integers are exact in any order. The unit is chosen from the
largest value and the number of rows so that no sum exceeds 62 bits: with 16 million rows it is
2^-38 of the largest value. So any number of ranks and threads gives the same bits.
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
from mclclip.ranks.process_group import SINGLE, Context, num_threads

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
T = TypeVar("T")
R = TypeVar("R")
_ROWS_PER_SUM = 1024  # rows that ``survey`` sums at once; last bits depend on it, so it is fixed


class RankRows:
    """Rows to cluster: gives this rank its rows as float32 on its device, unit length if spherical.

    blocks       all rows, in blocks [n_i, D] of floats; the same on every rank
    algorithm    'spherical' or 'euclidean'
    valid        bool [N]: rows where it is False are never used; None: all are valid
    context      the ranks that share the work
    cache_bytes  this rank's first blocks stay on the device up to this size; None: 1 GiB, or half
                 of a GPU's free memory
    arithmetic   forces how to compute; None in a field lets ``choose_*`` decide

    ``survey`` must run before rows are summed. It sets ``unit``, a power of two (a value x is
    summed as x * ``unit`` truncated to int64), and ``squares``, the sum of |row|^2 over all rows.
    """

    unit: float
    squares: float

    def __init__(
        self,
        blocks: Sequence[Floats],
        algorithm: Algorithm = "spherical",
        *,
        valid: Mask | None = None,
        context: Context = SINGLE,
        cache_bytes: int | None = None,
        arithmetic: Arithmetic = CHOSEN,
    ) -> None:
        self.blocks, self.valid, self.algorithm = blocks, valid, algorithm
        self.context, self.arithmetic = context, arithmetic
        layouts: list[BlockLayout] = (
            blocks.layouts()
            if isinstance(blocks, RowBlocks)
            else [(block.shape, block.dtype) for block in blocks]
        )
        assert all(kind.kind == "f" and len(shape) == 2 for shape, kind in layouts)
        (self.dim,) = {shape[1] for shape, _ in layouts}
        self._dtype = np.result_type(*{kind for _, kind in layouts})
        num_rows = [shape[0] for shape, _ in layouts]
        self.starts: list[int] = [0, *np.cumsum(num_rows).tolist()]
        self.num_rows = self.starts[-1]
        self.num_valid = self.num_rows if valid is None else int(np.count_nonzero(valid))
        assert valid is None or len(valid) == self.num_rows
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
        """Runs a block of code under the settings of torch that the methods here rely on.

        Products of bfloat16 round no partial sums. If ``each`` uses several threads, a torch
        operation uses one, since last bits depend on that number.
        """
        with num_threads(self._threads_per_operation), sums_in_float32(), integers_in_any_order():
            yield

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Returns ``work(item)`` for each item, in order; several threads share the items."""
        if self.num_threads == 1:
            return [work(item) for item in items]
        with ThreadPoolExecutor(self.num_threads, "", torch.set_num_threads, (1,)) as pool:
            return list(pool.map(work, items))

    def merge_blocks(self, numbers: Sequence[int], num_rows: int) -> list[list[int]]:
        """Groups successive block numbers so that a group has at most ``num_rows`` rows, or is one
        block. On a GPU, starting the work on a small block takes longer than doing it."""
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
        """Copies a tensor to the device as float32."""
        # The copy is newly allocated even if it need not be: last bits depend on the alignment.
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
        """The row numbers, in the whole matrix, of a block's valid rows."""
        first, stop = self.starts[number], self.starts[number + 1]
        if self.valid is None:
            return np.arange(first, stop, dtype=np.int64)
        return first + np.flatnonzero(self.valid[first:stop])

    def block(self, number: int) -> Tensor:
        """The prepared valid rows of block ``number``."""
        if number in self._cache:
            return self._cache[number]
        array = self.blocks[number]
        if self.valid is not None:
            array = array[self.valid[self.starts[number] : self.starts[number + 1]]]
        rows = self.prepare(torch.from_numpy(np.array(array)))
        if number in self._cached:
            self._cache[number] = rows
        return rows

    def clear_cache(self) -> None:
        """Frees the blocks on the device; from now on blocks are read again at each use."""
        self._cache.clear()
        self._cached.clear()

    def gather(self, ids: Integers) -> Tensor:
        """The prepared rows [S, D] with these ascending row numbers, on every rank.

        All ranks must call it.
        """
        gathered = torch.zeros((len(ids), self.dim), device=self.context.device)

        def take(part: tuple[int, slice, Integers]) -> None:
            number, target, local = part
            gathered[target] = self.prepare(torch.from_numpy(np.array(self.blocks[number][local])))

        rank, world_size = self.context.rank, self.context.world_size
        self.each(take, [part for part in self._parts(ids) if part[0] % world_size == rank])
        # One rank alone keeps negative zeros, which a sum over ranks turns into zeros.
        return self.total(gathered) + 0.0

    def read(self, ids: Integers) -> Floats:
        """The rows [S, D] with these ascending row numbers as they are stored, on this rank."""
        read_rows: Floats = np.empty((len(ids), self.dim), dtype=self._dtype)
        for number, target, local in self._parts(ids):
            read_rows[target] = self.blocks[number][local]
        return read_rows

    def _parts(self, ids: Integers) -> list[tuple[int, slice, Integers]]:
        """Splits ascending row numbers by block.

        Returns for each block its number, the slice of ``ids`` that lies in it, and the places of
        these rows within the block.
        """
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
        """Draws ``count`` valid rows (all if there are fewer); returns ascending row numbers."""
        valid = None if self.valid is None else np.flatnonzero(self.valid)
        if count >= self.num_valid:
            return np.arange(self.num_rows, dtype=np.int64) if valid is None else valid
        drawn = np.sort(rng.choice(self.num_valid, count, replace=False))
        return drawn if valid is None else valid[drawn]

    # --- over ranks ---

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks, on the device. It is exact for integers, and for floats if at most
        one rank's value is not zero.
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
        """Rank 0's values, on every rank. Needed because unlike machines may compute different last
        bits."""
        return self.total(x if self.context.rank == 0 else torch.zeros_like(x))

    def refuse_not_finite(self, count_here: int) -> None:
        """Raises ValueError on all ranks if any rank has NaN or infinite rows; ``count_here`` is
        how many this rank has."""
        count = int(self.total(torch.tensor(count_here)))
        if count:
            raise ValueError(
                f"{count:,} of {self.num_valid:,} rows hold NaN or infinite values, or are too "
                "long for float32 to hold squared distances: wanted finite embeddings; check the "
                "encoder and run 'mclclip embed --force'"
            )

    def survey(self) -> None:
        """Sets ``unit`` and ``squares`` in one pass over all rows.

        Raises ValueError on all ranks for rows that are not finite.
        """

        def measure_block(number: int) -> tuple[int, float, float]:
            bad, largest, squares = 0, 0.0, 0.0
            for rows in tiles(self.block(number), _ROWS_PER_SUM):
                bad += num_not_finite(rows)
                largest = max(largest, *(abs(float(value)) for value in rows.aminmax()))
                squares += float(rows.double().square_().sum())
            return bad, largest, squares

        seen = self.each(measure_block, self.local_blocks)
        self.refuse_not_finite(sum(bad for bad, _, _ in seen))
        here = torch.tensor(max((largest for _, largest, _ in seen), default=0.0))
        exponent = int(np.frexp(float(self.largest(here)))[1])  # |value| < 2 ** exponent
        exponent = max(exponent, -60)  # float32 has to hold the unit
        # With these units, the sum of M values, and that of M D squares, stays below 2 ** 62.
        bits = self.num_valid.bit_length()
        of_squares = 2.0 ** (62 - bits - self.dim.bit_length() - 2 * exponent)
        squares = int(self.total(torch.tensor(sum(round(s * of_squares) for _, _, s in seen))))
        self.unit, self.squares = 2.0 ** (62 - bits - exponent), squares / of_squares

    def add(self, sums: Tensor, counts: Tensor, labels: Tensor, rows: Tensor) -> None:
        """Adds each row of ``rows`` [n, D], as integers, to the sum of its label.

        ``sums`` int64 [K, D] and ``counts`` int64 [K] are updated; ``labels`` [n] are below K. The
        rows are copied to int64, so pass a tile at a time.
        """
        self._add(sums, counts, labels, (rows * self.unit).long(), 1)

    def move(
        self, sums: Tensor, counts: Tensor, before: Tensor, labels: Tensor, rows: Tensor
    ) -> None:
        """Moves rows [n, D] from the sums of their old labels ``before`` to those of ``labels``.

        Exact, since sums are integers: the result is that of adding the rows at ``labels`` only.
        """
        moved = torch.nonzero(labels != before).flatten()
        fixed = rows.index_select(0, moved).mul_(self.unit).long()
        self._add(sums, counts, labels[moved], fixed, 1)
        self._add(sums, counts, before[moved], fixed.neg_(), -1)

    def _add(self, sums: Tensor, counts: Tensor, labels: Tensor, fixed: Tensor, count: int) -> None:
        """Adds int64 rows ``fixed`` [n, D] to ``sums``, and ``count`` (1 or -1) for each row to
        ``counts``."""
        if self._additions == "index_put":
            sums.index_put_((labels,), fixed, accumulate=True)
        else:
            sums.index_add_(0, labels, fixed)
        counts.add_(torch.bincount(labels, minlength=len(counts)), alpha=count)


def tiles(rows: Tensor, rows_per_tile: int) -> Sequence[Tensor]:
    """Splits rows [n, ...] into views of at most ``rows_per_tile`` rows; no views if n is 0."""
    return torch.split(rows, rows_per_tile) if len(rows) else ()


def num_not_finite(rows: Tensor) -> int:
    """Counts the rows [n, D] that hold a NaN or an infinite value, or are too long.

    A row is too long if (2 |row|)^2 is infinite in float32, since two rows can be that far apart.
    """
    return int((~torch.isfinite(4.0 * rows.square().sum(dim=1))).sum())
