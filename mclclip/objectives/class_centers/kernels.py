"""Fused kernels in Triton for the negatives of the class centers: no score is ever in memory.

Of scores s = scaled @ centers.T [B, n], the row sums of exp(s - shift), and the gradients of both
sides given the log of those sums. As in FlashAttention (Dao et al., 2022), a program keeps a block
of the result in registers, goes over all blocks of the other side, and computes the scores of each
tile from scratch. What is added up has one owner and one order: there are no atomics, and the same
input gives the same bits.

A program's tile is ``own`` x ``other``: blocks of rows and of columns, or the other way round. The
pairs that do not count are listed by tile (``_left_out``): most tiles have none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl

Pairs = tuple[Tensor, Tensor]

_tile_scores: Any = None  # this and tl are set by _kernels: a kernel finds them by their names

_TILES_PER_PROGRAM = 32  # of a row block's sums: more programs than row blocks keep a GPU busy
_LARGEST_SHARE = 2.0**14  # in fp16, whose range is short: a share may be as small as 1 / n


@dataclass(frozen=True)
class _Blocks:
    """A tile is ``own`` x ``other`` and read ``dim`` at a time; a result is ``own`` x ``out``."""

    own: int
    other: int
    dim: int
    out: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """Options for Triton."""
        return {"num_warps": 8, "num_stages": self.num_stages, "enable_fp_fusion": True}


# Powers of two: large, but, for D a multiple of 16, neither do they spill registers on sm_80 and
# sm_90, nor take more than the 99 KiB of shared memory that every GPU since sm_80 has.
_HALF_SUMS = _Blocks(own=128, other=128, dim=64, out=0, num_stages=3)
_HALF_PULL = _Blocks(own=64, other=128, dim=64, out=256, num_stages=3)
_FULL = _Blocks(own=32, other=64, dim=32, out=64, num_stages=2)


@dataclass(frozen=True)
class Kernels:
    """Choice of the functions below, with inputs rounded to ``half`` (None: float32)."""

    half: torch.dtype | None = None


def kernels_of(name: str, device: torch.device, precision: str) -> Kernels | None:
    """Returns the kernels that ``objective.kernel`` names; None for ``plain``.

    Raises ValueError where Triton's kernels cannot run: without a GPU of compute capability 8 and
    Triton, or in float64.
    """
    if name == "plain":
        return None
    if precision == "float64" or not available(device):
        raise ValueError(
            f"objective.kernel=triton needs a GPU of compute capability 8 or more, Triton, and "
            f"precision fp32, bf16 or fp16: got {device.type} and {precision}; set kernel=plain"
        )
    return Kernels({"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision))


def available(device: torch.device) -> bool:
    """Whether the functions below run on tensors of this device.

    That is CUDA of compute capability 8 or more with Triton installed, or Triton's interpreter
    (TRITON_INTERPRET=1) on any device; its products of bfloat16 are wrong (Triton 3.9).
    """
    if util.find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def negative_sums(
    scaled: Tensor,
    centers: Tensor,
    collisions: Pairs,
    shift: float,
    half: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Row sums of exp(scores - shift), and the largest score.

    Args:
        scaled: [B, D] features times the scale, float32.
        centers: [n, D] unit class centers, float32 or already ``half``.
        collisions: (rows int64 [c], columns int64 [c]), pairs that do not count; in any order.
        shift: subtracted from every score before its exp.
        half: bfloat16 or float16: products are of inputs rounded to it, and added in float32.

    Returns:
        Sums [B], float32, and the largest score of a pair that counts [], float32; 0 and -inf
        where there is none. Raises ValueError for features of another type than float32.
    """
    rows, columns = _rounded(scaled, half), _rounded(centers, half)
    size = len(rows), len(columns)
    if not size[1]:
        return scaled.new_zeros(size[0]), scaled.new_full((), float("-inf"))
    blocks = _HALF_SUMS if half else _FULL
    parts = _ceil_div(size[1], blocks.other * _TILES_PER_PROGRAM)
    sums, largest = scaled.new_empty(2, parts, size[0])
    launch = _kernels()[0][_ceil_div(size[0], blocks.own), parts]
    launch(
        *(rows, columns, *_left_out(collisions, size, blocks), sums, largest),
        *(*size, rows.shape[1], float(shift)),
        ROWS=blocks.own,
        COLUMNS=blocks.other,
        DIM=blocks.dim,
        TILES=_TILES_PER_PROGRAM,
        **blocks.options,
    )
    return sums.sum(dim=0), largest.amax()


def pull(
    features: Tensor,
    scaled: Tensor,
    centers: Tensor,
    log_n: Tensor,
    weights: Tensor,
    collisions: Pairs,
    grad: Tensor,
    half: torch.dtype | None = None,
) -> Tensor:
    """Pulls rows and class centers by their shares, ``weights * exp(scores - log_n)``.

    Args:
        features: [B, D] float32.
        scaled, centers, collisions, half: as of ``negative_sums``; shares are rounded too.
        log_n: [B] log of the row sums of exp(scores) over all ranks; inf: no share.
        weights: [B] float32.
        grad: [B, D] float32 and contiguous: shares @ centers are added to it.

    Returns:
        shares.T @ features [n, D], float32. Raises ValueError for features or a gradient of
        another type than float32, and for a gradient that is not contiguous.
    """
    if grad.dtype != torch.float32 or not grad.is_contiguous():
        raise ValueError(f"grad is {grad.dtype}, strides {grad.stride()}: want contiguous float32")
    rows, columns, values = (_rounded(x, half) for x in (scaled, centers, features))
    of_centers = torch.zeros(centers.shape, dtype=grad.dtype, device=grad.device)
    if not len(columns):
        return of_centers
    heaviest = weights.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    room = _LARGEST_SHARE if half == torch.float16 else 1.0
    terms = log_n.contiguous(), weights / heaviest * room, heaviest / room
    row, column = collisions
    _pull_side((rows, columns, columns), terms, (row, column), grad, own_are_rows=True)
    _pull_side((columns, rows, values), terms, (column, row), of_centers, own_are_rows=False)
    return of_centers


def _pull_side(
    sides: tuple[Tensor, Tensor, Tensor],
    terms: tuple[Tensor, Tensor, Tensor],
    pairs: Pairs,
    out: Tensor,
    *,
    own_are_rows: bool,
) -> None:
    """Adds the pull to ``out``. ``sides``: own, other, what the other pulls with."""
    blocks = _FULL if sides[0].dtype == torch.float32 else _HALF_PULL
    size = len(sides[0]), len(sides[1])
    launch = _kernels()[1][_ceil_div(size[0], blocks.own), _ceil_div(out.shape[1], blocks.out)]
    launch(
        *(*sides, *terms, *_left_out(pairs, size, blocks), out, *size, out.shape[1]),
        OWN_ARE_ROWS=own_are_rows,
        OWN=blocks.own,
        OTHER=blocks.other,
        DIM=blocks.dim,
        OUT=blocks.out,
        **blocks.options,
    )


def _rounded(x: Tensor, half: torch.dtype | None) -> Tensor:
    wanted = half or torch.float32
    if x.dtype not in (torch.float32, wanted):
        raise ValueError(f"the kernels got {x.dtype}: wanted float32; sum without them")
    return x.to(wanted).contiguous()


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def _left_out(
    pairs: Pairs, size: tuple[int, int], blocks: _Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    """(starts, own, other): tile t leaves out the pairs from starts[t] to starts[t + 1]."""
    own, other = pairs
    per_block = _ceil_div(size[1], blocks.other)
    number, order = (own // blocks.own * per_block + other // blocks.other).sort()
    tiles = torch.arange(_ceil_div(size[0], blocks.own) * per_block + 1, device=own.device)
    return torch.searchsorted(number, tiles, out_int32=True), own[order], other[order]


@cache
def _kernels() -> tuple[Any, Any]:
    """(_sum_rows, _pull_blocks), to be launched. Triton is loaded when they are first wanted."""
    global tl, _tile_scores
    triton, tl = import_module("triton"), import_module("triton.language")
    _tile_scores = triton.jit(_scores_of_tile)
    return triton.jit(_sum_rows), triton.jit(_pull_blocks)


# Below are kernels: capitals are sizes of blocks, known when they are compiled.


def _scores_of_tile(
    own: tl.tensor,
    other: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    tile: tl.tensor,
    starts: tl.tensor,
    pairs_own: tl.tensor,
    pairs_other: tl.tensor,
    num_own: tl.tensor,
    num_other: tl.tensor,
    dim: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    """[i, j]: own @ other.T in fp32; -inf for what is left out and for j beyond the last."""
    in_own = (i < num_own)[:, None]
    in_other = (j < num_other)[None, :]
    own_at = own + i.to(tl.int64)[:, None] * dim
    other_at = other + j.to(tl.int64)[None, :] * dim
    scores = tl.zeros((i.shape[0], j.shape[0]), dtype=tl.float32)
    for first in range(0, dim, DIM):
        d = first + tl.arange(0, DIM)
        a = tl.load(own_at + d[None, :], mask=in_own & (d < dim)[None, :], other=0.0)
        b = tl.load(other_at + d[:, None], mask=in_other & (d < dim)[:, None], other=0.0)
        scores = tl.dot(a, b, scores, input_precision="ieee")  # of float32: not rounded to tf32
    scores = tl.where(in_other, scores, float("-inf"))
    for pair in range(tl.load(starts + tile), tl.load(starts + tile + 1)):
        here = (i == tl.load(pairs_own + pair))[:, None] & (j == tl.load(pairs_other + pair))
        scores = tl.where(here, float("-inf"), scores)
    return scores


def _sum_rows(
    rows: tl.tensor,
    columns: tl.tensor,
    starts: tl.tensor,
    pairs_row: tl.tensor,
    pairs_column: tl.tensor,
    sums: tl.tensor,
    largest: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    dim: tl.tensor,
    shift: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIM: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """A row block's sums and largest scores over TILES column blocks: [part, B] each."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    i = block * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    most = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    num_tiles = tl.cdiv(num_columns, COLUMNS)
    for tile in range(part * TILES, min(part * TILES + TILES, num_tiles)):
        j = tile * COLUMNS + tl.arange(0, COLUMNS)
        number = block * num_tiles + tile
        scores = _tile_scores(
            rows, columns, i, j, number, starts, pairs_row, pairs_column,
            num_rows, num_columns, dim, DIM,
        )  # fmt: skip
        most = tl.maximum(most, tl.max(scores, axis=1))
        total += tl.sum(tl.exp(scores - shift), axis=1)
    at = part.to(tl.int64) * num_rows + i
    tl.store(sums + at, total, mask=i < num_rows)
    tl.store(largest + at, most, mask=i < num_rows)


def _pull_blocks(
    own: tl.tensor,
    other: tl.tensor,
    values: tl.tensor,
    log_n: tl.tensor,
    weights: tl.tensor,
    unit: tl.tensor,
    starts: tl.tensor,
    pairs_own: tl.tensor,
    pairs_other: tl.tensor,
    out: tl.tensor,
    num_own: tl.tensor,
    num_other: tl.tensor,
    dim: tl.tensor,
    OWN_ARE_ROWS: tl.constexpr,
    OWN: tl.constexpr,
    OTHER: tl.constexpr,
    DIM: tl.constexpr,
    OUT: tl.constexpr,
) -> None:
    """Adds unit * shares @ values to OWN rows and OUT columns of ``out``, over all of the other."""
    block = tl.program_id(0)
    i = block * OWN + tl.arange(0, OWN)
    d = tl.program_id(1) * OUT + tl.arange(0, OUT)
    total = tl.zeros((OWN, OUT), dtype=tl.float32)
    num_tiles = tl.cdiv(num_other, OTHER)
    for tile in range(0, num_tiles):
        j = tile * OTHER + tl.arange(0, OTHER)
        scores = _tile_scores(
            own, other, i, j, block * num_tiles + tile, starts, pairs_own, pairs_other,
            num_own, num_other, dim, DIM,
        )  # fmt: skip
        if OWN_ARE_ROWS:
            log_sum = tl.load(log_n + i, mask=i < num_own, other=float("inf"))[:, None]
            weight = tl.load(weights + i, mask=i < num_own, other=0.0)[:, None]
        else:
            log_sum = tl.load(log_n + j, mask=j < num_other, other=float("inf"))[None, :]
            weight = tl.load(weights + j, mask=j < num_other, other=0.0)[None, :]
        shares = tl.exp(scores - log_sum) * weight
        inside = (j < num_other)[:, None] & (d < dim)[None, :]
        at = j.to(tl.int64)[:, None] * dim + d[None, :]
        value = tl.load(values + at, mask=inside, other=0.0)
        total = tl.dot(shares.to(value.dtype), value, total, input_precision="ieee")
    inside = (i < num_own)[:, None] & (d < dim)[None, :]
    at = out + i.to(tl.int64)[:, None] * dim + d[None, :]
    tl.store(at, tl.load(at, mask=inside) + total * tl.load(unit), mask=inside)
