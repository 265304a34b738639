"""Rows of a large matrix over ranks: fixed blocks, and sums that no number of ranks can change.

The data is a list of row blocks (``cut_blocks``), cut without regard to the number of ranks; rank r
works on the blocks r, r + W, r + 2W, ... Within a block everything is done by one thread in one
order, sums in float64. So that the order of the blocks does not matter either, a block's sum is
rounded to a 63-bit fixed-point number, whose unit follows from the largest value and the number of
rows (the rounding stays below that of a float64 sum): adding integers is exact, so any number of
ranks and threads gives the same bits, and memory is one array of sums per thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mclclip.parallel.process_group import Context, num_threads

Floats = npt.NDArray[np.floating[Any]]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Algorithm = Literal["spherical", "euclidean"]
Reduce = Callable[[Tensor], Tensor]
T = TypeVar("T")
R = TypeVar("R")

ROWS_PER_BLOCK = 4096
SAME_ROW = 1e-12  # squared distance, as a share of |row|^2, that float32's rounding may make


def cut_blocks(arrays: Sequence[Floats], rows_per_block: int = ROWS_PER_BLOCK) -> list[Floats]:
    """Views of at most ``rows_per_block`` rows, in order, never across two arrays."""
    return [
        array[first : first + rows_per_block]
        for array in arrays
        for first in range(0, len(array), rows_per_block)
    ]


class NpyBlocks(Sequence[Floats]):
    """The blocks of .npy files of rows [n, D], memory-mapped when they are read.

    Not before: every mapping holds a file handle, and there may be more shards than handles.
    """

    def __init__(self, paths: Sequence[Path], rows_per_block: int = ROWS_PER_BLOCK) -> None:
        self.num_rows = [len(_map(path)) for path in paths]
        self._cuts = [
            (path, slice(first, first + rows_per_block))
            for path, num_rows in zip(paths, self.num_rows, strict=True)
            for first in range(0, num_rows, rows_per_block)
        ]

    def __len__(self) -> int:
        return len(self._cuts)

    @overload
    def __getitem__(self, number: int) -> Floats: ...
    @overload
    def __getitem__(self, number: slice) -> list[Floats]: ...
    def __getitem__(self, number: int | slice) -> Floats | list[Floats]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        path, rows = self._cuts[number]
        return _map(path)[rows]


def _map(path: Path) -> Floats:
    rows: Floats = np.load(path, mmap_mode="r", allow_pickle=False)
    return rows


@dataclass(frozen=True)
class Survey:
    """What one look at all rows tells: a sum x of rows is kept as round(x * unit) in int64, and
    ``squares`` is the sum of all |row|^2.
    """

    unit: float
    squares: float


class Rows:
    """The valid rows of this rank's blocks as float32 on the device, unit length if spherical.

    ``blocks`` [n_i, D] and ``valid`` [N] are the whole data, alike on all ranks. ``reduce`` sums a
    tensor over the ranks of ``context``. As many own blocks as ``cache_bytes`` holds stay prepared
    on the device (None: 1 GiB, or half of what a GPU has free). Raises ValueError for blocks that
    are not float rows of one width.
    """

    def __init__(
        self,
        blocks: Sequence[Floats],
        valid: Mask | None,
        algorithm: Algorithm,
        context: Context,
        reduce: Reduce,
        cache_bytes: int | None,
    ) -> None:
        if algorithm not in ("spherical", "euclidean"):
            raise ValueError(f"algorithm is {algorithm!r}: wanted 'spherical' or 'euclidean'")
        self.blocks, self.valid, self.algorithm = blocks, valid, algorithm
        self.context, self._reduce = context, reduce
        layouts = [(block.shape, block.dtype) for block in blocks]
        self.dim = _width(layouts)
        num_rows = [shape[0] for shape, _ in layouts]
        self.starts: list[int] = [0, *np.cumsum(num_rows).tolist()]
        self.num_rows = self.starts[-1]
        self.num_valid = self.num_rows if valid is None else int(np.count_nonzero(valid))
        if valid is not None and len(valid) != self.num_rows:
            raise ValueError(f"valid has {len(valid):,} rows, the blocks have {self.num_rows:,}")
        self.own = list(range(context.rank, len(blocks), context.world_size))
        self.num_threads = torch.get_num_threads() if context.device.type == "cpu" else 1
        if cache_bytes is None:
            cache_bytes = _room(context.device)
        bytes_so_far = np.cumsum([num_rows[number] * self.dim * 4 for number in self.own])
        self._cached = set(self.own[: int(np.searchsorted(bytes_so_far, cache_bytes, "right"))])
        self._cache: dict[int, Tensor] = {}

    # --- threads ---

    def one_thread_per_operation(self) -> AbstractContextManager[None]:
        """On a CPU: operations run on one thread each, as their last bits depend on it; ``each``
        then uses the threads side by side.
        """
        return num_threads(1 if self.context.device.type == "cpu" else None)

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """``work`` of each item, in order, items shared out to the threads."""
        if self.num_threads == 1:
            return [work(item) for item in items]
        with ThreadPoolExecutor(self.num_threads, initializer=_one_thread) as pool:
            return list(pool.map(work, items))

    def runs(self) -> list[list[int]]:
        """This rank's blocks dealt out to its threads."""
        dealt = [self.own[first :: self.num_threads] for first in range(self.num_threads)]
        return [run for run in dealt if run]

    # --- rows ---

    def to_device(self, x: Tensor) -> Tensor:
        """A fresh float32 copy: its alignment, on which last bits depend, is torch's own."""
        copy = torch.empty(x.shape, dtype=torch.float32, device=self.context.device)
        return copy.copy_(x.detach())

    def prepare(self, x: Tensor) -> Tensor:
        """Any rows [n, D] as float32 on the device, unit length if spherical (norms in fp32)."""
        rows = self.to_device(x)
        if self.algorithm == "spherical":
            rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-12)
        return rows

    def ids(self, number: int) -> Integers:
        """Row numbers of the valid rows of a block."""
        first, stop = self.starts[number], self.starts[number + 1]
        if self.valid is None:
            return np.arange(first, stop, dtype=np.int64)
        return first + np.flatnonzero(self.valid[first:stop])

    def block(self, number: int) -> Tensor:
        """The valid rows of a block, prepared."""
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
        found = torch.zeros((len(ids), self.dim), device=self.context.device)
        bounds = np.searchsorted(ids, self.starts)

        def take(number: int) -> None:
            first, stop = bounds[number], bounds[number + 1]
            if first < stop:
                local = ids[first:stop] - self.starts[number]
                taken = np.array(self.blocks[number][local])
                found[first:stop] = self.prepare(torch.from_numpy(taken))

        self.each(take, self.own)
        return self.total(found) + 0.0  # no negative zeros, which a sum over ranks would lose

    def draw(self, wanted: int, rng: np.random.Generator) -> Integers:
        """Ascending numbers of ``wanted`` valid rows (of all where there are no more)."""
        valid = None if self.valid is None else np.flatnonzero(self.valid)
        if wanted >= self.num_valid:
            return np.arange(self.num_rows, dtype=np.int64) if valid is None else valid
        drawn = np.sort(rng.choice(self.num_valid, wanted, replace=False))
        return drawn if valid is None else valid[drawn]

    # --- over ranks ---

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks, on the device (exact for integers and for what one rank has)."""
        return self._reduce(x.to(self.context.device))

    def of_first_rank(self, x: Tensor) -> Tensor:
        """Rank 0's values on every rank: unlike machines must not disagree in a last bit."""
        return self.total(x if self.context.rank == 0 else torch.zeros_like(x))

    def by_rank(self, x: Tensor) -> Tensor:
        """[...] on each rank -> [W, ...] in rank order, on the CPU."""
        slots = torch.zeros((self.context.world_size, *x.shape), dtype=x.dtype, device=x.device)
        slots[self.context.rank] = x
        return self.total(slots).cpu()

    def refuse_not_finite(self, here: int) -> None:
        """Raises ValueError on all ranks where any rank counted NaN or infinite rows."""
        count = int(self.total(torch.tensor(here)))
        if count:
            raise ValueError(
                f"{count:,} of {self.num_valid:,} rows hold NaN or infinite values: wanted finite "
                "embeddings; check the encoder and run 'mclclip embed' again"
            )

    def survey(self) -> Survey:
        """One pass over the data: refuses NaN and infinite rows, finds the unit of fixed point."""

        def look(number: int) -> tuple[int, float, float]:
            block = self.block(number)
            largest = float(block.abs().max()) if len(block) else 0.0
            return num_not_finite(block), largest, float(block.double().square().sum())

        seen = self.each(look, self.own)
        self.refuse_not_finite(sum(bad for bad, _, _ in seen))
        here = torch.tensor(max((largest for _, largest, _ in seen), default=0.0))
        exponent = int(np.frexp(float(self.by_rank(here).max()))[1])  # |value| < 2 ** exponent
        # M values below 2 ** exponent add up to less than 2 ** 62; M times D squares likewise.
        bits = self.num_valid.bit_length()
        of_squares = 2.0 ** (62 - bits - self.dim.bit_length() - 2 * exponent)
        squares = int(self.total(torch.tensor(sum(round(s * of_squares) for _, _, s in seen))))
        return Survey(2.0 ** (62 - bits - exponent), squares / of_squares)


def num_not_finite(rows: Tensor) -> int:
    """How many rows [n, D] hold a NaN or an infinite value."""
    return int((~torch.isfinite(rows).all(dim=1)).sum())


def add_rows(rows: Tensor, place: Tensor, num_places: int) -> Tensor:
    """float64 [P, D]: the sum of the rows [n, D] of each place [n], added in row order."""
    sums = torch.zeros((num_places, rows.shape[1]), dtype=torch.float64, device=rows.device)
    if rows.device.type == "cpu":
        return sums.index_add_(0, place, rows.double())
    # On a GPU index_add_ adds in any order; accumulating index_put_ sorts first.
    return sums.index_put_((place,), rows.double(), accumulate=True)


def squared_distance(centroids: Tensor, rows: Tensor) -> Tensor:
    """float64 [n] on the CPU: of rows [n, D] to centroids [n, D] or [D]; zero for the same row.

    From differences, not from products, whose rounding would set equal rows apart.
    """
    squared = (rows - centroids).square().sum(dim=1)
    same = squared <= SAME_ROW * rows.square().sum(dim=1)
    return squared.masked_fill(same, 0.0).double().cpu()


def squared_distances(centroids: Tensor, part: tuple[Tensor, Tensor]) -> Tensor:
    """float64 [n, C] on the CPU: of rows [n, D] to all centroids [C, D]; zero for the same row.

    ``part``: the rows and their squared lengths [n, 1].
    """
    rows, lengths = part
    squares = lengths + centroids.square().sum(dim=1)
    from_products = squares - 2.0 * (rows @ centroids.T)
    distances = from_products.double().cpu()
    near = torch.nonzero(from_products <= 1e-4 * squares)  # where products lost their digits
    row, centroid = near[:, 0], near[:, 1]
    distances[row.cpu(), centroid.cpu()] = squared_distance(centroids[centroid], rows[row])
    return distances


def _one_thread() -> None:
    torch.set_num_threads(1)


def _room(device: torch.device) -> int:
    """Bytes for prepared rows: 1 GiB of main memory, or half of what a GPU has free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return 1 << 30


def _width(layouts: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> int:
    """D, after a check that the shapes and types are those of float rows [n, D]."""
    widths = {shape[1:] for shape, _ in layouts}
    if len(widths) != 1 or len(min(widths)) != 1 or any(kind.kind != "f" for _, kind in layouts):
        found = sorted({f"{kind} {('n', *shape[1:])}" for shape, kind in layouts})
        raise ValueError(
            f"got blocks of {', '.join(found) or 'nothing'}: wanted float rows (n, D) of one width"
        )
    return int(min(widths)[0])
