"""Chooses how k-means and the search for nearest centroids compute on a device.

Every choice has a name (a Literal), so that a test can force each of them on any machine. Labels
and centroids are the same for every choice, with one exception: the two routines of ``Scores`` sum
in different orders. Where two centroids are equally near up to float32 rounding, the routines may
disagree about which one is nearer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

Products = Literal["float32", "bfloat16"]
"""The type in which rows and centroids are multiplied to find candidates (see nearest.py)."""

Rounding = Literal["none", "inputs", "output", "partial_sums"]
"""What this product rounds, besides its sums in float32.

A float32 product rounds nothing else (``none``), or its ``inputs``, to as few as 8 significant bits
(TF32 keeps 11). A bfloat16 product rounds its ``output``, each sum once, or also ``partial_sums``,
those of parts of a row.
"""

Scores = Literal["pair_products", "blocks"]
"""How the exact scores of candidates are computed: by a C++ loop that copies no rows
(``pair_products``), or by torch in blocks of pairs (``blocks``)."""

Additions = Literal["index_put", "index_add"]
"""Which function of torch adds rows, as integers, to the sums of their labels. On a CPU
``index_put`` takes 0.6 of the time of ``index_add``; on a GPU it is slow, since it adds the rows of
one label one after the other."""

Tile = Literal["cache", "large"]
"""How much of the matrix [rows, centroids] of products is computed at once: as much as fits into a
CPU's cache, or more."""

Threads = Literal["per_block", "per_operation"]
"""``per_block``: threads work on different blocks of rows, each operation with one thread.
``per_operation``: blocks are handled one after the other, each operation with all threads.
"""

TILES: dict[Tile, tuple[int, int, int]] = {
    "cache": (2048, 2048, 2048),
    "large": (16_384, 65_536, 16_384),
}
"""For each tile: its smallest and its largest number of rows, and its largest number of centroids.
If there are fewer centroids, a tile gets more rows (``choose_tile``)."""

# Numbers of centroids from which on products are bfloat16; below, casting rows costs more than it
# saves. On an H200 an iteration with bfloat16 products takes 1.0, 0.70, 0.43 and 0.33 of the time
# with float32 ones, with 10, 1,000, 20,000 and 65,536 centroids.
BFLOAT16_FROM = {"cpu": 64, "cuda": 1000}


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How k-means computes. A field that is set is obeyed; for None ``choose_*`` below decides by
    the device. Tests set fields to try every way on any machine."""

    products: Products | None = None
    rounding: Rounding | None = None
    scores: Scores | None = None
    additions: Additions | None = None
    tile: Tile | None = None
    threads: Threads | None = None


CHOSEN = Arithmetic()


def choose_products(device: torch.device, num_centroids: int, forced: Arithmetic) -> Products:
    """Returns 'bfloat16' for many centroids on a device that multiplies it fast: a CPU with
    AVX512-BF16 or AMX, or a GPU of compute capability 8.0 or more. Otherwise 'float32'.
    """
    if forced.products:
        return forced.products
    if device.type not in BFLOAT16_FROM or num_centroids < BFLOAT16_FROM[device.type]:
        return "float32"
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    fast = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return "bfloat16" if fast else "float32"


def choose_rounding(device: torch.device, products: Products, forced: Arithmetic) -> Rounding:
    """Returns what a product on this device rounds under torch's current settings."""
    if forced.rounding:
        return forced.rounding
    if products == "float32":
        # torch.get_float32_matmul_precision() may fail once these have been set.
        backends: Any = torch.backends  # some of these names are not in its annotations
        owners = (backends.cuda.matmul, backends.mkldnn.matmul)
        rounds = any(owner.fp32_precision not in ("none", "ieee") for owner in owners)
        return "inputs" if rounds else "none"
    # If a long sum is faster in parts, CUDA splits it, and may round the sum of each part.
    splits = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return "partial_sums" if device.type == "cuda" and splits else "output"


def choose_scores(device: torch.device, forced: Arithmetic) -> Scores:
    """Returns 'pair_products' on a CPU, and 'blocks' on a GPU, where the order in which that loop
    sums is not known."""
    return forced.scores or ("pair_products" if device.type == "cpu" else "blocks")


def choose_additions(device: torch.device, forced: Arithmetic) -> Additions:
    """Returns the faster one for this kind of device."""
    return forced.additions or ("index_put" if device.type == "cpu" else "index_add")


def choose_tile(device: torch.device, num_centroids: int, forced: Arithmetic) -> tuple[int, int]:
    """Returns the numbers of rows and of centroids of a tile.

    A tile fits into the cache of a CPU. On a GPU it is large, because starting the work on a small
    tile takes longer than doing it.
    """
    least, most, columns = TILES[forced.tile or ("cache" if device.type == "cpu" else "large")]
    return min(most, max(least, least * columns // max(num_centroids, 1))), columns


def choose_threads(device: torch.device, forced: Arithmetic) -> Threads:
    """Returns 'per_block' on a CPU, and 'per_operation' on a GPU, to which one thread sends all
    work."""
    return forced.threads or ("per_block" if device.type == "cpu" else "per_operation")


def choose_cache_bytes(device: torch.device, forced: int | None) -> int:
    """Returns how many bytes of rows are kept on the device: 1 GiB of main memory, or half of a
    GPU's free memory."""
    if forced is not None:
        return forced
    return int(torch.cuda.mem_get_info(device)[0]) // 2 if device.type == "cuda" else 1 << 30


@contextmanager
def sums_in_float32() -> Iterator[None]:
    """Runs a block of code in which CUDA's bfloat16 products do not round partial sums.

    If they did, their error bound would be so wide that nearly every pair is a candidate. The
    setting of torch is that of the whole process; it is restored afterwards.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    if before:
        matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        if before:
            matmul.allow_bf16_reduced_precision_reduction = True


@contextmanager
def integers_in_any_order() -> Iterator[None]:
    """Runs a block of code without torch's deterministic algorithms.

    Sums of integers are the same in any order. In deterministic mode, CUDA would add the rows of
    one label one after the other, which is hundreds of times slower if there are few labels.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield  # torch's function to set the mode imports its compiler: 0.4 s
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
