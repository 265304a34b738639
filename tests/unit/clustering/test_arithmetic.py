"""What is chosen for a device, and that k-means gives the same whatever is chosen."""

import itertools
from typing import Any, get_args

import numpy as np
import pytest
import torch

from mclclip.clustering import arithmetic
from mclclip.clustering.arithmetic import CHOSEN, Arithmetic
from mclclip.data.arrays import cut_blocks
from mclclip.ranks.process_group import num_threads
from tests.matrix import SOAK
from tests.nearest_checks import assign, fit, fit_two_level
from tests.unit.clustering.test_kmeans import ALGORITHMS, noise

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")


@pytest.mark.parametrize(
    ("capabilities", "wanted"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "bfloat16"),
        ({"avx512_bf16": False, "amx_bf16": True}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_products_by_processor_and_number_of_centroids(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], wanted: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert arithmetic.choose_products(CPU, 64, CHOSEN) == wanted
    assert arithmetic.choose_products(CPU, 63, CHOSEN) == "float32"
    assert arithmetic.choose_products(META, 10**6, CHOSEN) == "float32"
    for products, device in itertools.product(get_args(arithmetic.Products), (CPU, CUDA)):
        assert arithmetic.choose_products(device, 2, Arithmetic(products=products)) == products


@pytest.mark.parametrize(("capability", "wanted"), [((7, 5), "float32"), ((8, 0), "bfloat16")])
def test_products_by_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], wanted: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert arithmetic.choose_products(CUDA, 1000, CHOSEN) == wanted
    assert arithmetic.choose_products(CUDA, 999, CHOSEN) == "float32"


def test_what_is_not_forced_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arithmetic.choose_scores(CPU, CHOSEN) == "pair_products"
    assert arithmetic.choose_scores(CUDA, CHOSEN) == "blocks"
    assert arithmetic.choose_additions(CPU, CHOSEN) == "index_put"
    assert arithmetic.choose_additions(CUDA, CHOSEN) == "index_add"
    assert arithmetic.choose_tile(CPU, 10, CHOSEN) == (2048, 2048)
    for num_centroids, rows in ((0, 65_536), (4096, 65_536), (8192, 32_768), (10**6, 16_384)):
        assert arithmetic.choose_tile(CUDA, num_centroids, CHOSEN) == (rows, 16_384)
    assert arithmetic.choose_threads(CPU, CHOSEN) == "per_block"
    assert arithmetic.choose_threads(CUDA, CHOSEN) == "per_operation"
    assert arithmetic.choose_cache_bytes(CPU, None) == 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    assert arithmetic.choose_cache_bytes(CUDA, None) == 300
    for device in (CPU, CUDA):
        for scores, threads in zip(
            get_args(arithmetic.Scores), get_args(arithmetic.Threads), strict=True
        ):
            forced = Arithmetic(scores=scores, threads=threads)
            assert arithmetic.choose_scores(device, forced) == scores
            assert arithmetic.choose_threads(device, forced) == threads
        for additions in get_args(arithmetic.Additions):
            forced = Arithmetic(additions=additions)
            assert arithmetic.choose_additions(device, forced) == additions
        for tile in get_args(arithmetic.Tile):
            forced = Arithmetic(tile=tile)
            least, _, columns = arithmetic.TILES[tile]
            assert arithmetic.choose_tile(device, 10**6, forced) == (least, columns)
        assert arithmetic.choose_cache_bytes(device, 7) == 7


# --- what products round ---


def test_cuda_may_round_partial_sums_of_bfloat16_as_torch_is_set() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        for allowed, wanted in ((True, "partial_sums"), (False, "output")):
            matmul.allow_bf16_reduced_precision_reduction = allowed
            assert arithmetic.choose_rounding(CUDA, "bfloat16", CHOSEN) == wanted
            assert arithmetic.choose_rounding(CPU, "bfloat16", CHOSEN) == "output"
            with arithmetic.sums_in_float32():
                assert arithmetic.choose_rounding(CUDA, "bfloat16", CHOSEN) == "output"
            assert matmul.allow_bf16_reduced_precision_reduction is allowed
        matmul.allow_bf16_reduced_precision_reduction = True
        with pytest.raises(ZeroDivisionError), arithmetic.sums_in_float32():
            _ = 1 / 0
        assert matmul.allow_bf16_reduced_precision_reduction is True
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize("number", range(3))
def test_float32_may_round_its_inputs_as_torch_is_set(number: int) -> None:
    """After its newer names ``torch.get_float32_matmul_precision()`` may raise a RuntimeError."""
    for precision, wanted in (("high", "inputs"), ("highest", "none")):  # by its older name
        torch.set_float32_matmul_precision(precision)
        assert arithmetic.choose_rounding(CPU, "float32", CHOSEN) == wanted
    backends = torch.backends
    owners: list[Any] = [backends, backends.cuda.matmul, backends.mkldnn.matmul]
    before = [owner.fp32_precision for owner in owners]
    try:
        for owner in owners:
            owner.fp32_precision = "none"
        assert arithmetic.choose_rounding(CUDA, "float32", CHOSEN) == "none"
        owners[number].fp32_precision = "tf32"
        assert arithmetic.choose_rounding(CUDA, "float32", CHOSEN) == "inputs"
    finally:
        for owner, precision in zip(owners, before, strict=True):
            owner.fp32_precision = precision


# --- the same k-means ---


WAYS = [
    Arithmetic(products=products, scores=scores, additions=additions, tile=tile, threads=threads)
    for products, scores, additions, tile, threads in itertools.product(
        *map(get_args, (arithmetic.Products, arithmetic.Scores, arithmetic.Additions)),
        *map(get_args, (arithmetic.Tile, arithmetic.Threads)),
    )
]
FEW = [WAYS[0], WAYS[-1], *(WAYS[2**bit] for bit in range(5))]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_k_means_is_the_same_bit_for_bit(algorithm: Any) -> None:
    """One choice changed at a time, and all of them; with one thread and two, and more rows in a
    block than a small tile has."""
    blocks = cut_blocks([noise(1300, 6)], 1200)
    results = []
    for how in WAYS if SOAK else FEW:
        with num_threads(2 if how.tile == "large" else 1):
            options: dict[str, Any] = {"algorithm": algorithm, "arithmetic": how}
            found = fit(blocks, 70, init="random", max_iterations=1, **options)
            near = assign(blocks, found.centroids, labels_per_sample=2, **options)
            results.append((how, found, near))
    (_, wanted, labels), *others = results
    for how, found, near in others:
        assert torch.equal(found.centroids, wanted.centroids), how
        assert found.history == wanted.history, how
        assert torch.equal(near.labels, labels.labels), how
        torch.testing.assert_close(near.distances, labels.distances, atol=1e-5, rtol=1e-5)


def two_levels(rows: np.ndarray, num_clusters: int, how: Arithmetic, **options: Any) -> Any:
    blocks = cut_blocks([rows])
    found = fit_two_level(blocks, num_clusters, max_iterations=2, arithmetic=how, **options)
    return found.centroids, assign(blocks, found.centroids, arithmetic=how).labels


def test_two_levels_with_the_numbers_of_the_table_6_sweep() -> None:
    """A second level of a hundred clusters; a first level of as many is a k-means as above."""
    rows = noise(300, 5)
    float32, bfloat16 = (
        two_levels(rows, 200, Arithmetic(products=products), num_splits=2)
        for products in get_args(arithmetic.Products)
    )
    assert torch.equal(float32[0], bfloat16[0]) and torch.equal(float32[1], bfloat16[1])
