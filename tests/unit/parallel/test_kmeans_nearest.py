"""The search for the nearest centroids, against scores of all pairs."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mclclip.parallel import nearest
from mclclip.parallel.nearest import NOTHING, Search, pack, unpack

ALGORITHMS = ("spherical", "euclidean")
# Below and above each size at which the search goes another way.
COUNTS = (1, 15, 16, 63, 64, 65, 100, 511, 512, 513, 1000, 2048, 2500)


def unit(num_rows: int, dim: int, seed: int, shift: float = 0.0) -> Tensor:
    rows = torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed)) + shift
    return torch.nn.functional.normalize(rows, dim=1)


def all_scores(rows: Tensor, centroids: Tensor, algorithm: str) -> Tensor:
    """[n, K]: the score of every pair, by the routine that decides."""
    row = torch.arange(len(rows)).repeat_interleave(len(centroids))
    centroid = torch.arange(len(centroids)).repeat(len(rows))
    scores = nearest._dot(rows, centroids, row, centroid).view(len(rows), len(centroids))
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
    rows, centroids = unit(300, 24, 0), unit(num_centroids, 24, 1)
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
    assert torch.equal(unpack(Search(centroids, algorithm).best(rows, 5))[1], wanted)
    assert torch.equal(unpack(Search(centroids, algorithm).best(rows))[1], wanted[:, :1])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(1, 40),
    st.floats(1e-3, 1e3),
    st.sampled_from(ALGORITHMS),
    st.integers(0, 99),
)
def test_any_size_and_scale(
    num_centroids: int, dim: int, scale: float, algorithm: Any, seed: int
) -> None:
    """Also of few dimensions, where many scores are close to the best."""
    generator = torch.Generator().manual_seed(seed)
    rows = scale * torch.randn(20, dim, generator=generator)
    centroids = scale * torch.randn(num_centroids, dim, generator=generator)
    count = min(4, num_centroids)
    wanted = slowly(all_scores(rows, centroids, algorithm), count)
    assert torch.equal(unpack(Search(centroids, algorithm).best(rows, count))[1], wanted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_score_does_not_depend_on_its_neighbours(algorithm: Any) -> None:
    """Parts of the centroids, by parts of the rows, merge to the bits of the whole."""
    rows, centroids = unit(1500, 48, 5), unit(1300, 48, 6)
    whole = Search(centroids, algorithm).best(rows, 4)
    for cuts in ((0, 1, 1300), (0, 700, 710, 1300)):
        parts = [
            torch.cat(
                [Search(centroids[a:b], algorithm, a).best(some, 4) for some in rows[1:].split(9)]
            )
            for a, b in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        merged = torch.cat(parts, dim=1).sort(dim=1, descending=True).values[:, :4]
        assert torch.equal(merged, whole[1:])


def test_the_coarse_product_in_float32_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, centroids = unit(500, 32, 7, 1.0), unit(900, 32, 8, 1.0)
    found = Search(centroids, "spherical").best(rows, 3)
    monkeypatch.setattr(nearest, "_multiplies_bfloat16", lambda device: False)
    search = Search(centroids, "spherical")
    assert search._coarse.dtype == torch.float32
    assert torch.equal(search.best(rows, 3), found)
    monkeypatch.setattr(nearest, "_multiplies_bfloat16", lambda device: True)
    search = Search(centroids, "spherical")
    assert search._coarse.dtype == torch.bfloat16
    assert torch.equal(search.best(rows, 3), found)


def test_the_error_bound_is_never_exceeded() -> None:
    for seed, shift in ((0, 0.0), (1, 2.0), (2, 0.2)):
        rows, centroids = unit(400, 96, seed, shift), unit(600, 96, seed + 10, shift)
        search = Search(centroids, "spherical")
        coarse, error = search._lower(rows)
        shifted = centroids.double() - centroids.mean(dim=0).double()
        truth = rows.double() @ shifted.T
        products = (coarse @ search._coarse.T)[:, : len(centroids)].double()
        allowed = error + 2.0**-8 * products.abs()
        assert ((products - truth).abs() <= allowed).all()
        # And not so wide that it would say nothing.
        assert float(error.max()) < 0.02


def test_the_threshold_keeps_the_best_whatever_the_errors() -> None:
    """Scores crowded where bfloat16 rounds up or down, each off by up to its error."""
    rng = np.random.default_rng(0)
    search = Search(unit(600, 8, 0), "spherical")
    search._coarse = search._coarse.bfloat16()
    for sign in (1.0, -1.0):
        truth = sign * (1.0 + 2.0**-8 + 1e-5 * rng.uniform(-1, 1, size=(2000, 20)))
        error = torch.full((2000, 1), 1e-5)
        off = torch.from_numpy(truth + 1e-5 * rng.uniform(-1, 1, size=truth.shape))
        coarse = off.bfloat16().float()
        threshold = search._threshold(coarse.amax(dim=1, keepdim=True), error)
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


def test_the_way_of_other_devices_scores_alike() -> None:
    rows, centroids = unit(50, 40, 0), unit(200, 40, 1)
    row = torch.arange(50).repeat_interleave(200)
    centroid = torch.arange(200).repeat(50)
    in_blocks = nearest._dot_in_blocks(rows, centroids, row, centroid)
    assert in_blocks.shape == (10_000,)
    torch.testing.assert_close(in_blocks.view(50, 200), rows @ centroids.T)
    # The same pair scores the same wherever it stands.
    some = torch.tensor([9_999, 3, 7])
    again = nearest._dot_in_blocks(rows, centroids, row[some], centroid[some])
    assert torch.equal(again, in_blocks[some])
    assert len(nearest._dot_in_blocks(rows, centroids, row[:0], centroid[:0])) == 0
