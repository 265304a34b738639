"""The search for the nearest centroids, against scores of all pairs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mclclip.clustering import nearest
from mclclip.clustering.arithmetic import Arithmetic
from mclclip.clustering.nearest import NOTHING, Search, pack, unpack
from tests.matrix import SOAK, fuller_in_soak
from tests.nearest_checks import ROUNDINGS, check_nearest, every_arithmetic

ALGORITHMS: Any = ("spherical", "euclidean")
# Below and above each size at which the search goes another way.
COUNTS = (1, 63, 64, 65, 511, 512, 513, 2500)
EDGES = (1, 64, 81, 513)
# The smallest ones, a few below and above the others, and some between.
NUMBERS = (
    range(1, 601)
    if SOAK
    else [*range(1, 20), *(n + off for n in range(32, 600, 64) for off in (-1, 0, 1, 33))]
)


def unit(num_rows: int, dim: int, seed: int, shift: float = 0.0) -> Tensor:
    rows = torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed)) + shift
    return torch.nn.functional.normalize(rows, dim=1)


def all_scores(
    rows: Tensor, centroids: Tensor, algorithm: str, how: Any = "pair_products"
) -> Tensor:
    """[n, K]: the score of every pair, by the routine that decides."""
    row = torch.arange(len(rows)).repeat_interleave(len(centroids))
    centroid = torch.arange(len(centroids)).repeat(len(rows))
    scores = nearest.score_pairs(rows, centroids, row, centroid, how)
    scores = scores.view(len(rows), len(centroids))
    return scores - nearest.half_squares(centroids) if algorithm == "euclidean" else scores


def slowly(scores: Tensor, count: int) -> Tensor:
    """Labels [n, count]: by score, then by id, sorted plainly."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


# --- packing ---


def test_packed_numbers_are_ordered_by_value_then_by_lower_id() -> None:
    values = [-np.inf, -3.5, -(2.0**-100), -0.0, 2.0**-149, 2.0, 2.0 + 2.0**-22, np.inf]
    ids = [0, 1, 7, 2**31, 2**32 - 1]
    pairs = [(value, number) for value in values for number in ids]
    packed = pack(torch.tensor([value for value, _ in pairs]), torch.tensor([i for _, i in pairs]))
    order = sorted(range(len(pairs)), key=lambda at: (pairs[at][0], -pairs[at][1]))
    assert packed.argsort().tolist() == order
    found, numbers = unpack(packed)
    assert found.tolist() == [value for value, _ in pairs]
    assert numbers.tolist() == [number for _, number in pairs]
    assert packed.min() > NOTHING
    zeros = torch.tensor([0.0, -0.0])
    assert len(pack(zeros, torch.tensor([5, 5])).unique()) == 1


# --- the search ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_centroids", COUNTS)
def test_equal_to_the_best_of_all_pairs(algorithm: Any, num_centroids: int) -> None:
    rows, centroids = unit(100, 24, 0), unit(num_centroids, 24, 1)
    if algorithm == "euclidean":  # of unlike lengths
        centroids = centroids * torch.linspace(0.2, 3.0, num_centroids)[:, None]
    scores = all_scores(rows, centroids, algorithm)
    truth = rows.double() @ centroids.double().T
    if algorithm == "euclidean":
        truth -= centroids.double().square().sum(dim=1) / 2.0
    torch.testing.assert_close(scores.double(), truth, rtol=0.0, atol=1e-5)
    for count in {1, min(3, num_centroids), min(20, num_centroids)}:
        values, ids = unpack(Search(centroids, algorithm).best(rows, count))
        wanted = slowly(scores, count)
        assert torch.equal(ids, wanted)
        assert torch.equal(values, scores.gather(1, wanted))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shift", (0.0, 3.0))
def test_centroids_that_the_coarse_product_cannot_tell_apart(algorithm: Any, shift: float) -> None:
    """Copies 1e-4 apart, far less than bfloat16 sees, and some that are equal."""
    few = unit(40, 64, 2, shift)
    centroids = few.repeat(30, 1)
    noise = torch.randn(centroids.shape, generator=torch.Generator().manual_seed(3))
    centroids += 1e-4 * noise * (torch.arange(len(centroids)) % 3 > 0)[:, None]
    rows = unit(200, 64, 4, shift)
    wanted = slowly(all_scores(rows, centroids, algorithm), 5)
    for known in (False, True):
        search = Search(centroids, algorithm, unit_rows=known)
        assert torch.equal(unpack(search.best(rows, 5))[1], wanted)
        assert torch.equal(unpack(search.best(rows))[1], wanted[:, :1])
        assert torch.equal(search.nearest(rows), wanted[:, 0])


@settings(max_examples=25)
@given(
    st.integers(1, 2000),
    st.integers(1, 40),
    st.floats(1e-3, 1e3),
    st.sampled_from(ALGORITHMS),
    st.sampled_from(every_arithmetic()),
    st.integers(0, 99),
)
def test_any_size_and_scale(
    num_centroids: int, dim: int, scale: float, algorithm: Any, arithmetic: Arithmetic, seed: int
) -> None:
    """Also of few dimensions, where many scores are close to the best."""
    generator = torch.Generator().manual_seed(seed)
    rows = scale * torch.randn(20, dim, generator=generator)
    centroids = scale * torch.randn(num_centroids, dim, generator=generator)
    count = min(4, num_centroids)
    wanted = slowly(all_scores(rows, centroids, algorithm, arithmetic.scores), count)
    search = Search(centroids, algorithm, arithmetic=arithmetic)
    assert torch.equal(unpack(search.best(rows, count))[1], wanted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("arithmetic", ROUNDINGS, ids="-".join)
def test_a_score_does_not_depend_on_its_neighbours(algorithm: Any, arithmetic: Any) -> None:
    """Parts of the centroids, by parts of the rows, merge to the bits of the whole."""
    rows, centroids = unit(200, 48, 5), unit(1300, 48, 6)
    how = Arithmetic(products=arithmetic[0], rounding=arithmetic[1])
    whole = Search(centroids, algorithm, 0, how).best(rows, 4)
    for cuts in ((0, 1, 1300), (0, 700, 710, 1300)):
        parts = [
            torch.cat(
                [
                    Search(centroids[a:b], algorithm, a, how).best(some, 4)
                    for some in rows[1:].split(90)
                ]
            )
            for a, b in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        merged = torch.cat(parts, dim=1).sort(dim=1, descending=True).values[:, :4]
        assert torch.equal(merged, whole[1:])


# --- every arithmetic ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("products", ("float32", "bfloat16"))
@fuller_in_soak
def test_numbers_of_centroids_up_to_600(algorithm: Any, products: Any) -> None:
    how = Arithmetic(products=products)
    data: Any = ("whole_numbers",)
    assert check_nearest("cpu", how, NUMBERS, [12], [3], algorithm, data=data, num_rows=4) == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_arithmetic_where_the_search_goes_another_way(algorithm: Any) -> None:
    for how in every_arithmetic():
        assert check_nearest("cpu", how, EDGES, [20], [3], algorithm, num_rows=2) == 0, how


@pytest.mark.parametrize(
    ("num_rows", "num_centroids", "algorithm"),
    [(65_600, 70, "spherical"), (3, 16_400, "euclidean")],
)
def test_tiles_of_any_size_give_the_same(num_rows: int, num_centroids: int, algorithm: Any) -> None:
    """More rows, or more centroids, than a large tile has."""
    rows, centroids = unit(num_rows, 4, 0), unit(num_centroids, 4, 1)
    found = [
        Search(centroids, algorithm, 0, Arithmetic(tile=tile, products=products)).best(rows, 2)
        for tile, products in (("cache", "float32"), ("large", "float32"), ("large", "bfloat16"))
    ]
    assert all(torch.equal(other, found[0]) for other in found[1:])
    wanted = slowly(all_scores(rows[-3:], centroids, algorithm), 2)
    assert torch.equal(unpack(found[0][-3:])[1], wanted)


def test_a_forced_product_is_made_in_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(rows: Tensor, columns: Tensor) -> Tensor:
        seen.append((rows.dtype, columns.dtype))
        return rows @ columns.T

    monkeypatch.setattr(nearest, "multiply", look)
    for products in ("float32", "bfloat16"):
        Search(unit(9, 8, 0), "spherical", 0, Arithmetic(products=products)).best(unit(2, 8, 1))
    assert seen == [(torch.float32,) * 2, (torch.bfloat16,) * 2]


# --- what products round ---


def keep_bits(x: Tensor, bits: int, nearest_value: bool = True) -> Tensor:
    """float32 with so many significant bits, to the nearest (away from zero) or cut off."""
    left = 24 - bits
    raw = x.contiguous().view(torch.int32) + (1 << left - 1 if nearest_value else 0)
    return (raw >> left << left).view(torch.float32)


def rounded_inputs(bits: int, nearest_value: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """A float32 product as TF32's (11 bits), or as one that goes through bfloat16 (8 bits)."""

    def multiply(rows: Tensor, columns: Tensor) -> Tensor:
        return keep_bits(rows, bits, nearest_value) @ keep_bits(columns, bits, nearest_value).T

    return multiply


def rounded_parts(size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A bfloat16 product whose sums of ``size`` numbers are rounded, and added in bfloat16."""

    def multiply(rows: Tensor, columns: Tensor) -> Tensor:
        total = torch.zeros(len(rows), len(columns), dtype=torch.bfloat16)
        for some, others in zip(rows.split(size, 1), columns.split(size, 1), strict=True):
            part = (some.float() @ others.float().T).bfloat16()
            total = (total.float() + part.float()).bfloat16()
        return total

    return multiply


def plainly(rows: Tensor, columns: Tensor) -> Tensor:
    return rows @ columns.T


PRODUCTS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Tensor]]] = {
    "float32": ("float32", "none", plainly),
    "tf32": ("float32", "inputs", rounded_inputs(11, True)),
    "through bfloat16, cut": ("float32", "inputs", rounded_inputs(8, False)),
    "bfloat16": ("bfloat16", "output", plainly),
    "parts of 8": ("bfloat16", "partial_sums", rounded_parts(8)),
}


def hard_to_tell_apart(algorithm: str) -> list[tuple[Tensor, Tensor]]:
    """Rows and centroids whose scores some rounded product confuses."""
    rows, centroids = unit(60, 64, 0), unit(10, 64, 1).repeat(15, 1)
    if algorithm == "euclidean":  # |c|^2 / 2 decides, beside which products with rows are small
        return [(1e-3 * rows, centroids * torch.linspace(1.0, 1.0005, 150)[:, None])]
    near = centroids + 1e-5 * torch.randn(150, 64, generator=torch.Generator().manual_seed(2))
    # Small whole numbers, which bfloat16 holds. The mean is zero, and the second half of a product
    # nearly cancels the first: the sums of parts are much larger than the sum, and they are many,
    # so that their errors exceed what the cast of rows to bfloat16 could lose.
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(8, 16, (75, 512), generator=generator).float()
    second = torch.randint(-1, 2, (75, 512), generator=generator) - first
    halves = torch.cat([first, second], dim=1)
    half_rows = torch.randint(8, 16, (60, 512), generator=generator).float()
    return [(rows, near), (half_rows.repeat(1, 2), torch.cat([halves, -halves]))]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", PRODUCTS)
def test_no_rounding_of_the_product_changes_a_label(
    monkeypatch: pytest.MonkeyPatch, case: str, algorithm: Any
) -> None:
    products, rounding, multiply = PRODUCTS[case]
    monkeypatch.setattr(nearest, "multiply", multiply)
    how = Arithmetic(products=products, rounding=rounding)  # type: ignore[arg-type]
    assert check_nearest("cpu", how, (64, 100, 600), [40], [3], algorithm) == 0
    for rows, centroids in hard_to_tell_apart(algorithm):
        wanted = slowly(all_scores(rows, centroids, algorithm), 3)
        assert torch.equal(unpack(Search(centroids, algorithm, 0, how).best(rows, 3))[1], wanted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", PRODUCTS)
def test_the_error_bound_is_never_exceeded(
    monkeypatch: pytest.MonkeyPatch, case: str, algorithm: Any
) -> None:
    products, rounding, multiply = PRODUCTS[case]
    how = Arithmetic(products=products, rounding=rounding)  # type: ignore[arg-type]
    for seed, shift in ((0, 0.0), (1, 2.0), (2, 0.2)):
        rows, centroids = unit(200, 96, seed, shift), unit(300, 96, seed + 10, shift)
        search = Search(centroids, algorithm, 0, how)
        coarse, error = search.bound_errors(rows)
        truth = rows.double() @ (centroids.double() - centroids.mean(dim=0).double()).T
        if algorithm == "euclidean":
            truth -= centroids.double().square().sum(dim=1) / 2.0
        found = multiply(coarse, search.coarse)[:, : len(centroids)].double()
        allowed = error + (2.0**-8 * found.abs() if products == "bfloat16" else 0.0)
        assert ((found - truth).abs() <= allowed).all()
        # And not so wide that it would say nothing, but where parts of 8 numbers may be rounded.
        if rounding != "partial_sums":
            assert float(error.max()) < (0.05 if algorithm == "spherical" else 0.1)


def test_the_error_bound_holds_where_bfloat16_loses_most() -> None:
    """Every number of the row lies nearly in the middle of two bfloat16, and all losses add up."""
    signs = torch.randn(64, generator=torch.Generator().manual_seed(0)).sign()
    rows, centroids = signs[None] * (1.0 + 2.0**-8 - 2.0**-20), torch.stack([signs, -signs])
    search = Search(centroids, "spherical", 0, Arithmetic(products="bfloat16"))
    coarse, error = search.bound_errors(rows)
    lost = (coarse.double() @ centroids.double().T - rows.double() @ centroids.double().T).abs()
    assert (lost > 0.24).all() and (lost <= error).all()


def test_the_threshold_keeps_the_best_whatever_the_errors() -> None:
    """Scores crowded where bfloat16 rounds up or down, each off by up to its error."""
    rng = np.random.default_rng(0)
    search = Search(unit(600, 8, 0), "spherical", 0, Arithmetic(products="bfloat16"))
    for sign in (1.0, -1.0):
        truth = sign * (1.0 + 2.0**-8 + 1e-5 * rng.uniform(-1, 1, size=(2000, 20)))
        error = torch.full((2000, 1), 1e-5)
        off = torch.from_numpy(truth + 1e-5 * rng.uniform(-1, 1, size=truth.shape))
        coarse = off.bfloat16().float()
        threshold = search.find_threshold(coarse.amax(dim=1, keepdim=True), error)
        best = torch.from_numpy(truth.argmax(axis=1))[:, None]
        assert (coarse.gather(1, best) >= threshold).all()
        assert (coarse.gather(1, best) < coarse.amax(dim=1, keepdim=True)).any()


def test_where_there_is_nothing_to_find() -> None:
    rows = unit(5, 8, 0)
    assert (Search(torch.zeros(0, 8), "spherical").best(rows, 3) == NOTHING).all()
    assert Search(unit(4, 8, 1), "spherical").best(rows[:0], 2).shape == (0, 2)
    few = Search(unit(2, 8, 1), "spherical").best(rows, 3)
    assert (few[:, 2] == NOTHING).all() and (few[:, :2] > NOTHING).all()
    rows[1, 3], rows[2, 0] = torch.nan, torch.inf
    found = Search(unit(700, 8, 1), "spherical").best(rows)
    assert (found[[0, 3, 4]] > NOTHING).all()
